"""LoRA adapters beside a model as it runs: y = W x + B (s * A x), whatever W is stored as and wherever it lies.

Nothing of the model is touched, so adapters go with low-bit weights, GGUF files and weights that come from the disk, where merging would
have to open what is rounded and round it anew. What it costs is two thin products for each matrix. Of several adapters the matrices lie
behind one another, A's rows and B's columns, which is their sum. How much of each a text has, s, is chosen as it is read (`choosing.py`)
and multiplied between the two. Lengths of rows are `adapter_lengths.py`'s; what an adapter changes otherwise (embeddings, a head, experts)
is merged: `merge.py`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import UsageError
from ..offload.checkpoint import CheckpointError
from ..offload.header import is_gguf, shown
from ..quant.weight import Linear, Lora, Weight, from_f32, to_f32
from . import families
from .adapter import DAMAGED, HEAD, MLX, PEFT, STATED, TABLE, Adapter, Delta
from .adapter_places import places
from .parted_rows import TURNED_OVER

if TYPE_CHECKING:
    from .config import ModelConfig
    from .tensors import ModelTensor

# Roles of a layer whose products are stages of their own. Experts are multiplied by a kernel that picks them, `kv_b` is taken apart.
BESIDE = frozenset(("q", "k", "v", "o", "attn_gate", "gate", "up", "down", "q_a", "q_b", "kv_a", "state_in", "state_gate", "state_rate",
                    "state_beta", "state_out"))
MERGES = "effllm export MODEL -o DIR --lora ADAPTER merges it into the original checkpoint"
RANK_MULTIPLE = 4  # what kernels take at a time of the numbers between; more are zeros
LARGEST = float(np.finfo(np.float32).max)  # as a scale
NARROW = ("bf16", "f16")  # as which a matrix is kept where that loses nothing


@dataclass(frozen=True)
class Adapted:
    """What adapters add, by layer and role; empty for a run without any. `names`: what each is called; `scales`: how much of each a text
    has that nothing else is said of. `ranks`: of the numbers between two matrices, how many are of each adapter. `lengths`: those that rows
    of a matrix get, float32 [N], by the number of the adapter; `gains` what follows from them, as a `Lora` has it."""

    names: tuple[str, ...] = ()
    weights: Mapping[tuple[int | str, str], tuple[Weight, Weight]] = field(default_factory=dict)
    scales: tuple[float, ...] = ()
    ranks: Mapping[tuple[int | str, str], tuple[int, ...]] = field(default_factory=dict)
    lengths: Mapping[tuple[int | str, str], Mapping[int, np.ndarray]] = field(default_factory=dict)
    gains: Mapping[tuple[int | str, str], np.ndarray] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The most numbers between the two matrices of one weight."""
        return max((a.shape[0] for a, _ in self.weights.values()), default=0)

    @property
    def nbytes(self) -> int:
        return sum(each.parts["data"].nbytes for pair in self.weights.values() for each in pair) + 4 * self._gained

    @property
    def products(self) -> int:
        """Of a token with what they add."""
        return sum(prod(each.shape) for pair in self.weights.values() for each in pair) + self._gained

    @property
    def _gained(self) -> int:
        return sum(len(self.names) * self.weights[key][1].shape[0] for key in self.lengths)

    @property
    def digest(self) -> str:
        """A hash of what is added to a text that nothing is said of; empty for nothing."""
        return self.digest_of(self.scales)

    def digest_of(self, scales: tuple[float, ...]) -> str:
        """A hash of what is added with so much of each; empty for nothing. All of them as they are have that of what they are."""
        if not any(scales) or not self.weights:
            return ""
        if all(each == 1 for each in scales):
            return self._content
        said = [float(each) for each in scales], [self.ranks[key] for key in self._keys]
        return hashlib.sha256(f"{self._content} {said}".encode()).hexdigest()[:32]

    @property
    def _keys(self) -> list[tuple[int | str, str]]:
        return sorted(self.weights, key=lambda key: (str(key[0]), key[1]))

    @cached_property
    def _content(self) -> str:
        made = hashlib.sha256()
        for layer, role in self._keys:
            made.update(f"{layer} {role}".encode())
            for each in self.weights[layer, role]:
                made.update(f"{each.spec.scheme} {each.shape}".encode() + each.parts["data"].tobytes())
            if (layer, role) in self.gains:
                made.update(b"gains" + self.gains[layer, role].tobytes())
        return made.hexdigest()[:32]

    def beside(self, layer: int | str, role: str, put: Callable[[np.ndarray, str], object]) -> Lora | None:
        """What goes beside a matrix, on the backend of `put`; None for nothing."""
        pair = self.weights.get((layer, role))
        if pair is None:
            return None
        own = (Linear(Weight(each.spec, each.shape, {"data": put(each.parts["data"].T, each.spec.scheme).T})) for each in pair)
        if (layer, role) not in self.lengths:
            return Lora(*own, self.ranks[layer, role])
        return Lora(*own, self.ranks[layer, role], put(self.gains[layer, role], "f32"))


NOTHING = Adapted()


def adapted(asked: Sequence[str], config: ModelConfig, tensors: Mapping[int | str, Mapping[str, ModelTensor]]) -> Adapted:
    """The adapters of `--lora ADAPTER` or `ADAPTER:SCALE`, folders or GGUF files, for a model with these tensors. Raises UsageError,
    CheckpointError for one that is none, that was made for another model, or that adds what only merging can."""
    found: dict[tuple[int | str, str], tuple[Weight, Weight]] = {}
    ranks: dict[tuple[int | str, str], list[int]] = {}
    lengths: dict[tuple[int | str, str], dict[int, np.ndarray]] = {}
    names, scales = [], []
    for number, each in enumerate(asked):
        path, scale = _parsed(each)
        names.append(_other_than(names, path.resolve().name))
        scales.append(scale)
        for key, pair, own_lengths in _read(path, config, tensors):
            found[key] = pair if key not in found else _sum(found[key], pair)
            ranks.setdefault(key, [0] * len(asked))[number] += pair[0].shape[0]
            if own_lengths is not None:
                lengths.setdefault(key, {})[number] = own_lengths
    for key in lengths:  # what B is multiplied by is no number of 16 bits
        found[key] = found[key][0], kept(found[key][1].to_f32(), ())
    return Adapted(tuple(names), found, tuple(scales), {key: tuple(each) for key, each in ranks.items()}, lengths)


def _other_than(names: Sequence[str], name: str) -> str:
    """A name that none of them has: `sql`, `sql-2`."""
    numbers = (name, *(f"{name}-{number}" for number in range(2, len(names) + 2)))
    return next(each for each in numbers if each not in names)


def _sum(first: tuple[Weight, Weight], second: tuple[Weight, Weight]) -> tuple[Weight, Weight]:
    """A's rows and B's columns behind one another."""
    return tuple(kept(np.concatenate([own.to_f32() for own in pair], axis)) for axis, pair in enumerate(zip(first, second, strict=True)))


def _parsed(asked: str) -> tuple[Path, float]:
    """The folder or file, and how much of it: ADAPTER:0.5 is half. Raises UsageError for one that is not there."""
    path, scale = Path(os.path.expanduser(asked)), 1.0
    before, colon, share = asked.rpartition(":")
    if colon and not path.exists():
        with suppress(ValueError):
            path, scale = Path(os.path.expanduser(before)), float(share)
    if not abs(scale) <= LARGEST:
        raise UsageError(f"--lora {asked}: {share} is no scale", f"--lora {before}, or {before}:0.5 for half of it")
    if not path.exists():
        raise UsageError(f"--lora: {path} is not there", f"a folder with {STATED} and {PEFT} or {MLX}, or a GGUF file")
    return path, scale


def _read(path: Path, config: ModelConfig, tensors: Mapping[int | str, Mapping[str, ModelTensor]],
          ) -> Iterator[tuple[tuple[int | str, str], tuple[Weight, Weight], np.ndarray | None]]:
    """What one adds, a role after the other, and the lengths that it gives rows: of all of them there is never more than what is kept."""
    known, changes = places(config, tensors, is_gguf(path)), False
    for name, delta in _deltas(path, config, {name: shape for name, (shape, _) in known.items()}):
        changes = True
        for place in known[name][1] if name in known else [None]:
            if place is None or place.key[1] not in BESIDE:
                raise CheckpointError(f"{path} changes {shown(name)}, beside which nothing is added as a model runs", MERGES)
            with np.errstate(over="ignore"):
                b = np.float32(delta.scale) * place.of_role(delta.b)
            if not np.isfinite(b).all():
                raise CheckpointError(f"{path}: infinity comes of its scale for {shown(name)}", DAMAGED)
            lengths = None if delta.lengths is None else delta.lengths[place.rows]
            if lengths is not None and len(lengths) != place.height:
                raise CheckpointError(f"{path} gives lengths (DoRA) to rows of {shown(name)}, only a part of a matrix here", MERGES)
            more = -len(delta.a) % RANK_MULTIPLE
            yield place.key, (kept(np.pad(place.into_role(delta.a), ((0, more), (0, 0)))), kept(np.pad(b, ((0, 0), (0, more))))), lengths
    if not changes:
        raise CheckpointError(f"{path} changes no weight", "look at what it holds: its training may not have been saved")


def _deltas(path: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Delta]]:
    if is_gguf(path):
        from .gguf.adapter import gguf_deltas

        yield from gguf_deltas(path, config, shapes)
        return
    own = Adapter.open(path, config.family in TURNED_OVER)
    with own.store:
        yield from own.deltas(shapes | _outer(config))
        if whole := own.brought:
            raise CheckpointError(f"{path} brings {shown(whole[0])} whole, which is not added beside a model", MERGES)


def _outer(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """What surrounds the layers, by the names that adapters have for it, so that one which changes it is told what stands for that."""
    shape = config.vocab_size, config.hidden_size
    rules = families.get(config.family).outer_tensors(config).values()
    own = {name: rule.shape for rule in rules for name in (rule.name, *rule.also) if len(rule.shape) == 2}
    return {f"{HEAD}.weight": shape, f"model.{TABLE}.weight": shape} | own


def kept(values: np.ndarray, narrow: Sequence[str] = NARROW) -> Weight:
    """A matrix by columns, in two bytes a number where one of `narrow` says the same, else in four."""
    values = np.asarray(values, np.float32)
    with np.errstate(over="ignore"):
        scheme = next((each for each in narrow if np.array_equal(to_f32(from_f32(values, each), each), values)), "f32")
    stored = Weight.raw(scheme, values.shape[::-1], from_f32(np.ascontiguousarray(values.T), scheme))
    return Weight(stored.spec, values.shape, {"data": stored.parts["data"].T})
