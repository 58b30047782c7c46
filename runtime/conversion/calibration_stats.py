"""Calibration statistics accumulated from windows of text: inputs at one tap, and inputs of each expert by its routed tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import numpy as np

from ...kernels.blas import one_thread
from ...kernels.reference_moe import Routed
from ...quant.stats import Stats
from ..families import EXPERT_ROLES, base_role, expert_of, expert_role
from ..layer import LayerWeights

SMALL = 1 << 30  # multiplications of a product that one thread makes
LEAST_VISITS = 64  # of an expert, for statistics of its own; `Stats.damped` allows for few tokens


class StatsAccumulator:
    """Sums over the tokens seen at one tap."""

    def __init__(self, width: int) -> None:
        self._products = np.zeros((width, width), np.float32)
        self._tokens = 0

    def add(self, inputs: np.ndarray) -> None:
        """float32 [T, K]."""
        # Beside our own threads, which have just been busy, those of BLAS take longer to share a small product than one takes to make it.
        with one_thread() if inputs.size * inputs.shape[1] < SMALL else nullcontext():
            self._products += inputs.T @ inputs
        self._tokens += len(inputs)

    def stats(self) -> Stats:
        hessian = self._products / np.float32(self._tokens)
        return Stats(self._tokens, hessian, hessian.diagonal().copy())


class ExpertStats(Mapping):
    """Statistics by role of a layer with experts. Those of an expert are made when they are asked for, from the inputs of its visits; one
    that had fewer than LEAST_VISITS has those of all visits of the layer, `usual` by kind of role, of which an expert has `kinds`. `shared`
    are those of other roles, which may have the same."""

    def __init__(self, experts: int, kinds: Sequence[str]) -> None:
        self.experts, self.kinds = experts, kinds
        self.shared: dict[str, Stats] = {}
        self.usual: Mapping[str, Stats] = {}
        self._seen: list[tuple[np.ndarray, Routed]] = []
        self._last: dict[str, tuple[int, Stats]] = {}

    def add(self, inputs: np.ndarray, routed: Routed) -> None:
        """A window: what went into the experts, float32 [T, D], and who went where."""
        self._seen.append((inputs, Routed(routed.offsets.copy(), routed.tokens.copy(), routed.hidden.copy())))

    @property
    def scarce(self) -> int:
        return int(np.count_nonzero(sum(np.diff(routed.offsets) for _, routed in self._seen) < LEAST_VISITS))

    def __getitem__(self, role: str) -> Stats:
        expert = expert_of(role)
        if expert is None:
            return self.shared[role]
        if not expert < self.experts:
            raise KeyError(role)
        tap = "mlp_hidden" if base_role(role) == "down" else "mlp_in"
        if self._last.get(tap, (-1, None))[0] != expert:
            self._last[tap] = expert, self._of_expert(expert, tap) or self.usual[base_role(role)]
        return self._last[tap][1]

    def _of_expert(self, expert: int, tap: str) -> Stats | None:
        gathered, count = None, 0
        for inputs, routed in self._seen:
            begin, end = routed.offsets[expert : expert + 2]
            rows = routed.hidden[begin:end] if tap == "mlp_hidden" else inputs[routed.tokens[begin:end]]
            if begin < end:
                gathered = gathered or StatsAccumulator(rows.shape[1])
                gathered.add(rows)
                count += len(rows)
        return gathered.stats() if count >= LEAST_VISITS else None

    def __iter__(self) -> Iterator[str]:
        yield from self.shared
        for expert in range(self.experts):
            yield from (expert_role(expert, kind) for kind in self.kinds)

    def __len__(self) -> int:
        return len(self.shared) + len(self.kinds) * self.experts


def expert_stats(weights: LayerWeights) -> ExpertStats | None:
    """None for a layer without experts."""
    if not weights.experts:
        return None
    return ExpertStats(len(weights.experts), EXPERT_ROLES if weights.experts[0].gate is not None else EXPERT_ROLES[1:])
