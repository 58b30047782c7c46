"""What calibration text shows of every tensor's inputs, layer by layer: one layer's weights in memory, and all tokens' activations.

The text runs in windows through the same blocks and kernels as an answer, tapped where a matrix reads. Statistics are those of the
unquantized model: feeding quantized layers forward changed the KL divergence by less than its error and would tie the order of work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from .. import UsageError
from ..kernels.reference import normalise
from ..offload.checkpoint import TensorStore
from ..offload.memory import anonymous
from ..offload.pages import PagePool
from ..quant.kv import codec
from ..quant.stats import Stats
from ..quant.weight import Norm
from .cache import AttnSpec, CacheShape, KVCache
from .config import ModelConfig, read_config
from .events import Progress
from .families import LayerWeights
from .model import Model, attention_specs, dims
from .policy.keep import Keep
from .prepare import LOGIT_ROWS, EngineOptions, worker_count
from .text import Tokenizer

TOKENS, LEAST, WINDOW = 16384, 512, 512
SHORTEST = 64  # of a last window
READS = {"block_in": ("q", "k", "v"), "attn_out": ("o",), "mlp_in": ("gate", "up"), "mlp_hidden": ("down",)}  # tap -> roles
NORMS = {"block_in": "input_norm", "mlp_in": "post_norm"}  # a tap before a norm


@dataclass(frozen=True)
class LayerStats:
    """Statistics by role of layer `key` or, last of all, "outer": the head, or the embedding where it is the head too.

    Roles that read the same inputs share one Stats.
    """

    key: int | str
    roles: Mapping[str, Stats]


def built_in_text() -> str:
    """The sample that serves where no text is given: prose, talk, code, numbers and a few languages."""
    return (files(__package__) / "calibration.txt").read_text(encoding="utf-8")


def calibration_ids(folder: Path, config: ModelConfig, text: str, tokens: int = TOKENS) -> list[int]:
    """The first `tokens` tokens of a text. Raises UsageError for fewer than LEAST: what they would show is chance."""
    ids = Tokenizer.load(folder, config).encode(text)[:tokens]
    if len(ids) < LEAST:
        raise UsageError(f"the calibration text has {len(ids)} tokens, at least {LEAST} are needed and {TOKENS} do well",
                         "a longer --calib FILE, or none for the built-in sample")
    return ids


def calibrate(folder: Path, ids: Sequence[int], threads: int | None = None) -> Iterator[Progress | LayerStats]:
    """Run `ids` through the unquantized model of `folder`; yields Progress, and LayerStats per layer and for the head."""
    from ..kernels import warm
    from ..kernels.cpu.ops import CpuOps
    from ..kernels.threads import ThreadPool

    if warm.is_cold((warm.RAW,)):
        for done, total in warm.warm((warm.RAW,)):
            yield Progress("compiling kernels (first run only)", done, total, "kernels")
    config = read_config(folder)
    cut = windows(ids, min(WINDOW, config.context_length))
    width = len(cut[0])
    ops = CpuOps(ThreadPool(worker_count(EngineOptions(threads=threads))), dims(config, width, width, LOGIT_ROWS))
    try:
        with TensorStore.open(folder) as store:
            model = Model(config, store, ["cpu"] * config.num_hidden_layers, {"cpu": ops}, width)
            yield from Calibration(model, ops, cut).run()
    finally:
        ops.close()


def windows(ids: Sequence[int], width: int) -> list[np.ndarray]:
    """Token ids in windows that share nothing; a last one that is short is dropped."""
    cut = [np.array(ids[start : start + width], np.int64) for start in range(0, len(ids), width)]
    return [window for window in cut if len(window) >= min(SHORTEST, width)]


class Gathered:
    """Sums over the tokens of one tap."""

    def __init__(self, width: int) -> None:
        self._products = np.zeros((width, width), np.float32)
        self._tops = np.zeros(width, np.float64)
        self._tokens = self._windows = 0

    def add(self, inputs: np.ndarray) -> None:
        """float32 [T, K], one window."""
        self._products += inputs.T @ inputs
        self._tops += np.abs(inputs).max(0)
        self._tokens, self._windows = self._tokens + len(inputs), self._windows + 1

    def stats(self) -> Stats:
        hessian = self._products / np.float32(self._tokens)
        return Stats(self._tokens, hessian, hessian.diagonal().copy(), (self._tops / self._windows).astype(np.float32))


class Calibration:
    """One pass. `states` float32 [tokens, D] is every token's residual stream at the layer that the pass has reached."""

    def __init__(self, model: Model, ops: object, cut: list[np.ndarray]) -> None:
        self.model, self.ops, self.cut = model, ops, cut
        self.states = model.read_states(cut)

    def run(self) -> Iterator[Progress | LayerStats]:
        config = self.model.config
        done, total = 0, len(self.states) * config.num_hidden_layers
        for layer, spec in enumerate(attention_specs(config)):
            weights, cache = self.model.read_layer(layer), one_layer_cache(self.ops, spec, len(self.cut[0]))
            gathered: dict[str, Gathered] = {}
            begin = 0
            for window in self.cut:
                end = begin + len(window)
                self.states[begin:end] = self._block(layer, weights, cache, self.states[begin:end], gathered)
                done, begin = done + len(window), end
                yield Progress("calibrating", done, total, "tokens")
            del weights, cache
            found = {name: each.stats() for name, each in gathered.items()}
            yield LayerStats(layer, {role: found[name] for name, roles in READS.items() for role in roles})
        yield LayerStats("outer", self._head())

    def _block(self, layer: int, weights: LayerWeights, cache: KVCache, states: np.ndarray, gathered: dict[str, Gathered]) -> np.ndarray:
        """A window through a layer, from an empty cache."""

        def tap(name: str, layer: int, value: np.ndarray) -> None:
            if name in READS:
                inputs = normalised(value, getattr(weights, NORMS[name])) if name in NORMS else value
                gathered.setdefault(name, Gathered(inputs.shape[1])).add(inputs)

        model = self.model
        cache.clear()
        step = cache.begin(len(states))
        x = self.ops.from_host(states)
        return model.block(self.ops, weights, x, cache.layer(0), step.positions, model.ropes[layer], model.config, layer, tap)

    def _head(self) -> dict[str, Stats]:
        norm, gathered = self.model.read_norm(), Gathered(self.states.shape[1])
        begin = 0
        for window in self.cut:
            gathered.add(normalised(self.states[begin : begin + len(window)], norm))
            begin += len(window)
        stats = gathered.stats()
        return {"head": stats} if "head" in self.model.tensors["outer"] else {"embed": looked_up_too(stats)}


def looked_up_too(stats: Stats) -> Stats:
    """Statistics of a head whose rows are the embedding as well: there every column counts alike, and as much as the head's average.

    On the reference model this took a quarter of the head's damage away where the head's own Hessian took a fifth.
    """
    power = stats.hessian.diagonal().mean()
    hessian = stats.hessian + power * np.eye(len(stats.hessian), dtype=np.float32)
    return replace(stats, hessian=hessian, mean_square=stats.mean_square + power)


def normalised(states: np.ndarray, norm: Norm) -> np.ndarray:
    """float32 [T, K]."""
    return normalise(states, norm.kind, norm.weight, norm.bias, norm.eps).astype(np.float32)


def one_layer_cache(ops: object, spec: AttnSpec, tokens: int) -> KVCache:
    """An exact cache of one layer that holds a window."""
    kept = codec("32bit")
    layout, shape = kept.layout(spec.kv_heads, spec.head_dim), CacheShape(tokens, sink=0, window=tokens, chunk=tokens)
    pool = PagePool(1, shape.pages, layout.layer_page_nbytes)
    pages = ops.kv_layer(layout, anonymous(shape.slots * layout.layer_page_nbytes), pool.extent(0), spec.scale, spec.window, spec.softcap)
    return KVCache([pages], kept, Keep(), shape, layout)
