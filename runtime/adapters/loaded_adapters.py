"""LoRA adapters applied at run time: y = W x + B (s * A x), whatever the format and tier of W.

The base weights are not modified, so adapters work with quantized weights, GGUF files and weights streamed from disk, where merging
would have to dequantize and round again. The cost is two thin products per adapted matrix, only for adapters a text uses. The scale s is
chosen per text (`adapter_selection.py`) and applied between the two. DoRA magnitudes are in `dora.py`; other changes (embeddings, a
head, experts) require merging: `merge.py`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ...offload.checkpoint import CheckpointError
from ...offload.safetensors_header import is_gguf, shown
from ...quant.lora_layout import LoraMatrix, LoraPair
from ...quant.weight import Lora
from .. import families
from ..stores.tensor_views import TRANSPOSED_FAMILIES
from .adapter import DAMAGED, HEAD, MLX, PEFT, STATED, TABLE, Adapter, Delta
from .adapter_targets import target_rows

if TYPE_CHECKING:
    from ..block_ops import BlockOps
    from ..config import ModelConfig
    from ..tensors import ModelTensor

# Roles of a layer whose products are stages of their own. Experts are multiplied by a kernel that picks them, `kv_b` is taken apart.
BESIDE = frozenset(("q", "k", "v", "o", "attn_gate", "gate", "up", "down", "q_a", "q_b", "kv_a", "state_in", "state_gate", "state_rate",
                    "state_beta", "state_r", "state_k", "state_v", "state_out"))
MERGES = "effllm export MODEL -o DIR --lora ADAPTER merges it into the original checkpoint"
RANK_MULTIPLE = 4  # what kernels take at a time of the numbers between; more are zeros
LARGEST = float(np.finfo(np.float32).max)  # as a scale
Key = tuple["int | str", str]  # layer and role


@dataclass(frozen=True)
class LoadedAdapters:
    """What adapters add, by layer and role, one behind the other in the order of their numbers; empty for a run without any. `names`: what
    each is called; `scales`: how much of each a text has that nothing else is said of. `lengths`: those that rows of a matrix get, float32
    [N], by the number of the adapter, NaN for a row that gets none; `gains` what follows from them, as a `Lora` has it."""

    names: tuple[str, ...] = ()
    weights: Mapping[Key, tuple[LoraPair, ...]] = field(default_factory=dict)
    scales: tuple[float, ...] = ()
    lengths: Mapping[Key, Mapping[int, np.ndarray]] = field(default_factory=dict)
    gains: Mapping[Key, np.ndarray] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Largest total rank beside one weight."""
        return max((sum(each.into.shape[0] for each in added) for added in self.weights.values()), default=0)

    @property
    def nbytes(self) -> int:
        return self.nbytes_of([1.0] * len(self.names))

    def nbytes_of(self, scales: Sequence[float]) -> int:
        """Adapter bytes that a token with these scales reads."""
        return sum(each.nbytes for each in self._read(scales)) + 4 * self._gained(scales)

    def products_of(self, scales: Sequence[float]) -> int:
        """Multiplications per token with these scales."""
        return sum(prod(each.shape) for each in self._read(scales)) + self._gained(scales)

    def _read(self, scales: Sequence[float]) -> Iterator[LoraMatrix]:
        for added in self.weights.values():
            for own in added:
                if scales[own.adapter]:
                    yield from (own.into, own.out)

    def _gained(self, scales: Sequence[float]) -> int:
        return sum(map(bool, scales)) * sum(self.weights[key][0].out.shape[0] for key in self.lengths)

    def _ranks(self, key: Key) -> list[int]:
        """Of the numbers between, how many are of each adapter."""
        found = dict.fromkeys(range(len(self.names)), 0) | {own.adapter: own.into.shape[0] for own in self.weights[key]}
        return list(found.values())

    @property
    def digest(self) -> str:
        """A hash of what is added to a text that nothing is said of; empty for nothing."""
        return self.digest_of(self.scales)

    def digest_of(self, scales: tuple[float, ...]) -> str:
        """Hash of the adapters at these scales, empty for none; at the default scales it equals that of `digest`."""
        if not any(scales) or not self.weights:
            return ""
        if all(each == 1 for each in scales):
            return self._content
        said = [float(each) for each in scales], [self._ranks(key) for key in self._keys]
        return hashlib.sha256(f"{self._content} {said}".encode()).hexdigest()[:32]

    @property
    def _keys(self) -> list[Key]:
        return sorted(self.weights, key=lambda key: (str(key[0]), key[1]))

    @cached_property
    def _content(self) -> str:
        made = hashlib.sha256()
        for layer, role in self._keys:
            made.update(f"{layer} {role}".encode())
            for own in self.weights[layer, role]:
                for each in (own.into, own.out):
                    made.update(f"{each.scheme} {each.shape}".encode() + each.stored.tobytes())
            if (layer, role) in self.gains:
                made.update(b"gains" + self.gains[layer, role].tobytes())
        return made.hexdigest()[:32]

    def beside(self, layer: int | str, role: str, ops: BlockOps) -> Lora | None:
        """The LoRA pairs beside a matrix, on a backend; None where there are none."""
        added = self.weights.get((layer, role))
        if added is None:
            return None
        pairs = added if ops.name == "cpu" else tuple(LoraPair(own.adapter, own.into.put(ops.put), own.out.put(ops.put)) for own in added)
        return Lora(pairs, ops.put(self.gains[layer, role], "f32") if (layer, role) in self.lengths else None)


NO_ADAPTERS = LoadedAdapters()


def load_adapters(asked: Sequence[str], config: ModelConfig, tensors: Mapping[int | str, Mapping[str, ModelTensor]]) -> LoadedAdapters:
    """The adapters of `--lora ADAPTER` or `ADAPTER:SCALE`, folders or GGUF files, for a model with these tensors. Raises UsageError,
    CheckpointError for one that is none, that was made for another model, or that adds what only merging can."""
    found: dict[Key, dict[int, LoraPair]] = {}
    lengths: dict[Key, dict[int, np.ndarray]] = {}
    names, scales = [], []
    for number, each in enumerate(asked):
        path, scale = _parsed(each)
        names.append(_other_than(names, path.resolve().name))
        scales.append(scale)
        for key, a, b, own_lengths in _read(path, config, tensors):
            if (before := found.setdefault(key, {}).get(number)) is not None:  # another part of the matrix
                a, b = np.concatenate([before.into.to_f32(), a]), np.concatenate([before.out.to_f32(), b], 1)
            found[key][number] = LoraPair(number, LoraMatrix.into(a), LoraMatrix.out(b))
            if own_lengths is not None:
                known = lengths.setdefault(key, {}).get(number, own_lengths)
                lengths[key][number] = np.where(np.isnan(known), own_lengths, known)
    for key, numbers in lengths.items():  # what B is multiplied by is no number of 16 bits
        for number in numbers:
            found[key][number] = replace(found[key][number], out=LoraMatrix.out(found[key][number].out.to_f32(), ()))
    return LoadedAdapters(tuple(names), {key: tuple(own.values()) for key, own in found.items()}, tuple(scales), lengths)


def _other_than(names: Sequence[str], name: str) -> str:
    """A name that none of them has: `sql`, `sql-2`."""
    numbers = (name, *(f"{name}-{number}" for number in range(2, len(names) + 2)))
    return next(each for each in numbers if each not in names)


def _parsed(asked: str) -> tuple[Path, float]:
    """The folder or file, and how much of it: ADAPTER:0.5 is half. Raises UsageError for one that is not there."""
    path, scale = Path(os.path.expanduser(asked)), 1.0
    before, colon, share = asked.rpartition(":")
    if colon and not os.path.exists(path):  # the other `exists` raises for a name that is too long
        with suppress(ValueError):
            path, scale = Path(os.path.expanduser(before)), float(share)
    if not abs(scale) <= LARGEST:
        raise UsageError(f"--lora {asked}: {share} is not a scale", f"--lora {before}, or {before}:0.5 for half of it")
    if not os.path.exists(path):
        raise UsageError(f"--lora: {path} does not exist", f"a folder with {STATED} and {PEFT} or {MLX}, or a GGUF file")
    return path, scale


def _read(path: Path, config: ModelConfig, tensors: Mapping[int | str, Mapping[str, ModelTensor]],
          ) -> Iterator[tuple[Key, np.ndarray, np.ndarray, np.ndarray | None]]:
    """What one adds, a role after the other, A [r, K] and B [N, r], and the lengths that it gives rows: of all of them there is never more
    than what is kept."""
    known, changes = target_rows(config, tensors, is_gguf(path)), False
    for name, delta in _deltas(path, config, {name: shape for name, (shape, _) in known.items()}):
        changes = True
        for place in known[name][1] if name in known else [None]:
            if place is None or place.key[1] not in BESIDE:
                raise CheckpointError(f"{path} changes {shown(name)}, which adapters cannot change at run time", MERGES)
            with np.errstate(over="ignore"):
                b = np.float32(delta.scale) * place.of_role(delta.b)
            if not np.isfinite(b).all():
                raise CheckpointError(f"{path}: its scale overflows for {shown(name)}", DAMAGED)
            lengths = None if delta.lengths is None else place.lengths_of_role(delta.lengths)
            more = -len(delta.a) % RANK_MULTIPLE
            yield place.key, np.pad(place.into_role(delta.a), ((0, more), (0, 0))), np.pad(b, ((0, 0), (0, more))), lengths
    if not changes:
        raise CheckpointError(f"{path} changes no weight", "inspect it: its training may not have been saved")


def _deltas(path: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Delta]]:
    if is_gguf(path):
        from ..gguf.adapter import gguf_deltas

        yield from gguf_deltas(path, config, shapes | _outer(config))
        return
    own = Adapter.open(path, config.family in TRANSPOSED_FAMILIES)
    with own.store:
        yield from own.deltas(shapes | _outer(config))
        if whole := own.replaced_names:
            raise CheckpointError(f"{path} replaces {shown(whole[0])} entirely, which is only supported by merging", MERGES)


def _outer(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """What surrounds the layers, by the names that adapters have for it, so that one which changes it is told what stands for that."""
    shape = config.vocab_size, config.hidden_size
    rules = families.get(config.family).outer_tensors(config).values()
    own = {name: rule.shape for rule in rules for name in (rule.name, *rule.also) if len(rule.shape) == 2}
    return {f"{HEAD}.weight": shape, f"model.{TABLE}.weight": shape} | own
