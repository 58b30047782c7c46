"""Maps the tensors of a GGUF file to checkpoint tensors: one to one, one to several that are fused, or several to one.

Reads no weights; `store.py` does, by this mapping.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np

from ...offload.checkpoint import OpenFile
from ...offload.gguf_header import GgufHeader, GgufTensor
from ...offload.safetensors_header import CheckpointError, TensorInfo, damaged, shown
from ...quant.imports.gguf import DECODERS, NATIVE
from ...quant.imports.gguf_codebooks import KINDS as LEVELED
from ...quant.imports.gguf_codebooks import GridsMissing, grid_of
from .. import families
from ..config import ModelConfig
from ..families import TensorRule
from ..speculation.mtp_tensors import mtp_rules
from ..stores.container import StoredTensor
from . import deci, hy_v4, nemotron_h
from .architecture import ROUTER, Architecture
from .config import Factors
from .deepseek4 import BEFORE_O, groups_in
from .gemma3n import STACKED, stacked
from .gemma4 import is_unused
from .latent_attention import HALVES, Halves, halves
from .linear_attention import joined_rows
from .mrope_sections import turned_rows
from .nextn import is_behind, mtp_names
from .qwen4 import table_name
from .recurrent_layers import DECAYS, GROWTHS
from .rwkv7 import is_left_out
from .split_matrices import SplitMatrix, split_matrix, split_parts
from .tensor_names import own_names
from .tensor_scales import is_weight, tensor_scales
from .tensor_sources import RAW, TABLE, WHOLE, Source

NO_SCALE = np.ones(1, np.float32)


@dataclass(frozen=True)
class GgufFile:
    """An open file, or the parts of a split one: header, descriptors, architecture."""

    header: GgufHeader
    opened: Mapping[Path, OpenFile]
    found: Architecture
    factors: Factors


@dataclass
class TensorMapping:
    """By a checkpoint's names. `tensors`: as the store lists them; `stored`: the formats of those that run from their codes; `plain`: those
    that are floats in any case. Where they come from: `sources` of a tensor of the file or a part of it, `halves` of two, `joined` of
    several, one after the other. `scales`: by names of the file."""

    plain: frozenset[str]
    scales: Mapping[str, np.ndarray]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    halves: dict[str, Halves] = field(default_factory=dict)
    split_matrices: dict[str, SplitMatrix] = field(default_factory=dict)


def map_tensors(file: GgufFile, config: ModelConfig, wide: str, low_bit: bool) -> TensorMapping:
    """Map the tensors of a file for a model of this config; `wide` and `low_bit` as of `GgufStore`. Raises CheckpointError for unknown,
    missing or misshapen tensors."""
    rules = _rules(config)
    scales = tensor_scales(file.header, file.opened, config.moe.num_experts if config.moe else 0)
    found = TensorMapping(frozenset(rule.name for rule in rules if rule.plain or rule.coefficients), scales)
    _Reading(file, config, wide.upper(), low_bit, {rule.name: rule.shape for rule in rules}, found).read()
    return found


@dataclass(frozen=True)
class _Reading:
    """Of `contents`. `wanted`: the shapes of the model's tensors."""

    file: GgufFile
    config: ModelConfig
    wide: str
    low_bit: bool
    wanted: Mapping[str, tuple[int, ...]]
    found: TensorMapping

    @property
    def path(self) -> Path:
        return self.file.header.path

    def read(self) -> None:
        of_whole, in_two, in_parts = split_parts(self.config), defaultdict[str, dict](dict), defaultdict[str, dict[int, Source]](dict)
        for whole in self.file.header.tensors.values():
            if not is_weight(whole.name, self.config, self.file.header):
                continue
            if is_behind(whole.name, self.config):
                continue
            tensor = _matrices(whole)
            names = self._names(tensor.name)
            if names is not None and all(is_unused(name, self.config) or is_left_out(name, self.config) for name in names):
                continue
            of_one = of_whole.get(names[0]) if names and names[0] not in self.wanted else None
            if names is None or not of_one and not self.wanted.keys() >= set(names):
                raise CheckpointError(f"{self.path} holds tensor {shown(tensor.name)}, which no {self.config.family} model has",
                                      "the file's contents do not match its stated architecture")
            self._demand_type(tensor)
            if (half := self._half_of(tensor.name)) is not None:
                in_two[names[0]][half] = whole
            elif of_one:
                in_parts[of_one[0]][of_one[1]] = Source(tensor, (), scale=float(self._scales(tensor.name)[0]))
            else:
                self._take(tensor, names)
        for name, parts in in_two.items():
            self._take_halves(name, parts)
        for name, parts in in_parts.items():
            self._take_joined(name, parts)

    def _names(self, name: str) -> tuple[str, ...] | None:
        """What a checkpoint calls a tensor of the file, or what lies in it; None where it knows none such."""
        config = self.config
        names = own_names(name, self.file.found, config.moe.num_experts if config.moe else 0)
        if name.endswith(f".{BEFORE_O}") and config.compressed_attention is not None:
            names = groups_in(name, config)
        if name in STACKED:
            names = stacked(name, config)
        names = table_name(name, config) or names
        if config.family == nemotron_h.FAMILY and nemotron_h.is_behind(name, config):
            return ()
        behind = tuple(f"blk.{config.num_hidden_layers + i}." for i in range(config.mtp_layers))
        return mtp_names(name, names, config) if name.startswith(behind) else names

    def _demand_type(self, tensor: GgufTensor) -> None:
        if tensor.type not in DECODERS and tensor.type not in RAW and (tensor.type != WHOLE or not tensor.name.endswith(TABLE)):
            raise CheckpointError(f"{self.path} has tensor {shown(tensor.name)} of type {tensor.type}, which is not supported",
                                  f"known: {', '.join((*RAW, *DECODERS))}")
        if tensor.type in LEVELED and (grid := LEVELED[tensor.type].grid):
            try:
                grid_of(grid)
            except GridsMissing:
                raise CheckpointError(f"{self.path} has tensor {shown(tensor.name)} of type {tensor.type}, whose grid of codes is in "
                                      "the package gguf, which this installation lacks", "python -m pip install gguf") from None

    def _half_of(self, name: str) -> str | None:
        """Which half a tensor is, of what latent attention has as one matrix."""
        return None if self.config.mla is None else next((part for part in HALVES if name.endswith(part)), None)

    def _scales(self, name: str) -> np.ndarray:
        return self.found.scales.get(name, NO_SCALE)

    def _take(self, tensor: GgufTensor, names: tuple[str, ...]) -> None:
        """A tensor that is one of the checkpoint's, or holds some of them."""
        if len(names) == 1 and _same_values(tensor.shape, self.wanted[names[0]]):
            tensor = replace(tensor, shape=self.wanted[names[0]])
        elif len(tensor.shape) == 2 and all(len(self.wanted[name]) == 1 for name in names):
            tensor = replace(tensor, shape=(prod(tensor.shape),))  # biases of all experts
        scales = self._scales(tensor.name)
        for index, (name, source) in enumerate(self._parts(tensor, names)):
            source = self.found.sources[name] = replace(source, scale=float(scales[index * len(scales) // len(names)]))
            is_matrix = len(tensor.shape) == 2 and f".{ROUTER}." not in tensor.name and name not in self.found.plain
            if self.low_bit and tensor.type in NATIVE and is_matrix:
                self._store(name, tensor, source.shape)
                continue
            plainly = len(tensor.shape) == 1 or tensor.type == WHOLE or source.decay or source.growth  # no matrix of the model's
            dtype = tensor.type if tensor.type in RAW and not source.changed else "F32" if plainly else self.wide
            self._widen(name, tensor, source.shape, dtype)

    def _take_halves(self, name: str, parts: Mapping[str, GgufTensor]) -> None:
        own = self.found.halves[name] = halves(self.path, name, parts, self.config)
        dtype = own.keys.type if own.keys.type == own.values.type and own.keys.type in RAW else self.wide
        self._widen(name, own.keys, own.shape, dtype)

    def _take_joined(self, name: str, parts: Mapping[int, Source]) -> None:
        own = self.found.split_matrices[name] = split_matrix(self.path, name, parts, self.wanted[name], self.config)
        first = own.parts[0].tensor
        if self.low_bit and own.is_kept and name not in self.found.plain:
            self._store(name, first, own.shape)
        else:
            self._widen(name, first, own.shape, own.dtype(self.wide.lower()))

    def _store(self, name: str, tensor: GgufTensor, shape: Sequence[int]) -> None:
        """A tensor that kernels multiply by the codes of its blocks."""
        stored = self.found.stored[name] = StoredTensor(name, NATIVE[tensor.type], shape, 0)
        self.found.tensors[name] = TensorInfo(name, "U8", (stored.nbytes,), tensor.file, tensor.offset, stored.nbytes)

    def _widen(self, name: str, tensor: GgufTensor, shape: Sequence[int], dtype: str) -> None:
        """A tensor of floats."""
        nbytes = prod(shape) * (4 if dtype == "F32" else 2)
        self.found.tensors[name] = TensorInfo(name, dtype, shape, tensor.file, tensor.offset, nbytes)

    def _parts(self, tensor: GgufTensor, names: tuple[str, ...]) -> Iterator[tuple[str, Source]]:
        """What lies in a tensor of the file, by name: all of it, or one part after the other."""
        config, found, wanted = self.config, self.file.found, self.wanted
        heights, stated = [tensor.shape[0] // len(names)] * len(names), [wanted[name][0] for name in names]
        if len(names) == 3 and ".q_proj." in names[0]:  # and k and v
            heights = [count * config.projected_head_dim for count in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        elif sum(stated) == tensor.shape[0]:  # parts of state spaces differ
            heights = stated
        if sum(heights) != tensor.shape[0]:
            damaged(self.path, f"has tensor {shown(tensor.name)} of {tensor.shape[0]} rows, the config says {sum(heights)}")
        if (rows_of_each := joined_rows(names, config)) is not None:
            for name, rows in zip(names, rows_of_each, strict=True):
                yield name, Source(tensor, (len(rows), *tensor.shape[1:]), rows=rows)
            return
        first = 0
        for name, rows in zip(names, heights, strict=True):
            order = hy_v4.rows_in_file(config, name) if config.family == hy_v4.FAMILY else turned_rows(self.file.header, config, name)
            if order is not None:
                yield name, Source(tensor, (rows, *tensor.shape[1:]), rows=first + order)
                first += rows
                continue
            heads = heads_of(name, config) if found.interleaved else 0
            if heads and rows % (2 * heads):
                damaged(self.path, f"has tensor {shown(tensor.name)} of {rows} rows for {heads} heads")
            yield name, Source(tensor, (rows, *tensor.shape[1:]), first, heads, found.offset(name), name.endswith(DECAYS),
                               name.endswith(GROWTHS))
            first += rows


def _matrices(tensor: GgufTensor) -> GgufTensor:
    """Matrices that lie in one tensor, as those of all experts, as one: their rows one after the other; and what some write as rows of rows
    of one."""
    if len(tensor.shape) > 3 and prod(tensor.shape[1:-1]) == 1:
        return replace(tensor, shape=(tensor.shape[0], tensor.shape[-1]))
    if len(tensor.shape) != 3:
        return tensor
    return replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))


def _same_values(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Are they one tensor? Writers leave out what is one row or channel, and part vectors into groups."""
    squeezed = [tuple(each for each in own if each != 1) for own in (shape, wanted)]
    return squeezed[0] == squeezed[1] or len(wanted) == 1 and prod(shape) == wanted[0]


def _rules(config: ModelConfig) -> list[TensorRule]:
    """Of all tensors that the model has, and may have to draft by."""
    family, layers = families.get(config.family), range(config.num_hidden_layers)
    groups = [family.outer_tensors(config), mtp_rules(config), *(family.layer_tensors(config, layer) for layer in layers)]
    return [rule for rules in groups for rule in rules.values()]


def heads_of(name: str, config: ModelConfig) -> int:
    """Heads of queries or keys whose rows are interleaved in llama files; 0 for what is neither."""
    if ".q_proj." in name:
        return config.num_attention_heads
    if ".k_proj." not in name:
        return 0
    return config.kv_heads_of(int(name.split(".")[2]))[0] if config.family == deci.FAMILY else config.num_key_value_heads
