"""Maps the tensors of a GGUF file to checkpoint tensors: one to one, one to several that are fused, or several to one.

Reads no weights; `store.py` reads them by this mapping.
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
from .config import RopeFactors
from .deepseek4 import OUTPUT_DOWN, output_group_names
from .gemma3n import STACKED_MATRICES, stacked_names
from .gemma4 import is_unused
from .latent_attention import KV_B_HALVES, SplitKvB, split_kv_b
from .linear_attention import fused_rows
from .mrope_sections import gguf_row_order
from .nextn import is_ignored_mtp, mtp_names
from .qwen4 import ngram_table_name
from .recurrent_layers import NEGATIVE_DECAYS, POSITIVE_DECAYS
from .rwkv7 import is_ignored
from .split_matrices import SplitMatrix, split_matrix, split_parts
from .tensor_names import checkpoint_names
from .tensor_scales import is_weight, tensor_scales
from .tensor_sources import EXPERT_TABLE_SUFFIX, INTEGER_TYPE, RAW_TYPES, Source

UNIT_SCALE = np.ones(1, np.float32)


@dataclass(frozen=True)
class GgufFile:
    """An open file, or the parts of a split one: header, descriptors, architecture."""

    header: GgufHeader
    opened: Mapping[Path, OpenFile]
    architecture: Architecture
    rope_factors: RopeFactors


@dataclass
class TensorMapping:
    """Where the tensors of a model come from; keys are checkpoint names unless noted."""

    high_precision: frozenset[str]  # tensors that are never kept as low-bit codes
    scales: Mapping[str, np.ndarray]  # per-tensor scales of NVFP4, by the file's names
    tensors: dict[str, TensorInfo] = field(default_factory=dict)  # as the store lists them
    stored: dict[str, StoredTensor] = field(default_factory=dict)  # formats of those kept as codes
    sources: dict[str, Source] = field(default_factory=dict)  # those that are a tensor of the file, or rows of one
    kv_b: dict[str, SplitKvB] = field(default_factory=dict)  # KV up-projections that the file holds as two halves
    split_matrices: dict[str, SplitMatrix] = field(default_factory=dict)  # those concatenated from several tensors of the file


def map_tensors(file: GgufFile, config: ModelConfig, dequant_dtype: str, low_bit: bool) -> TensorMapping:
    """Map the tensors of a file for a model of this config; `dequant_dtype` and `low_bit` as for `open_gguf_store`.

    Raises CheckpointError for unknown, missing or misshapen tensors.
    """
    rules = _rules(config)
    scales = tensor_scales(file.header, file.opened, config.moe.num_experts if config.moe else 0)
    mapping = TensorMapping(frozenset(rule.name for rule in rules if rule.plain or rule.coefficients), scales)
    _Mapper(file, config, dequant_dtype.upper(), low_bit, {rule.name: rule.shape for rule in rules}, mapping).run()
    return mapping


@dataclass(frozen=True)
class _Mapper:
    """Fills `mapping`."""

    file: GgufFile
    config: ModelConfig
    dequant_dtype: str
    low_bit: bool
    shapes: Mapping[str, tuple[int, ...]]  # of the model's tensors
    mapping: TensorMapping

    @property
    def path(self) -> Path:
        return self.file.header.path

    def run(self) -> None:
        part_of = split_parts(self.config)
        kv_b_parts, parts_of = defaultdict[str, dict](dict), defaultdict[str, dict[int, Source]](dict)
        for stored in self.file.header.tensors.values():
            if not is_weight(stored.name, self.config, self.file.header):
                continue
            if is_ignored_mtp(stored.name, self.config):
                continue
            tensor = _flatten_matrices(stored)
            names = self._names(tensor.name)
            if names is not None and all(is_unused(name, self.config) or is_ignored(name, self.config) for name in names):
                continue
            part = part_of.get(names[0]) if names and names[0] not in self.shapes else None
            if names is None or not part and not self.shapes.keys() >= set(names):
                raise CheckpointError(f"{self.path} holds tensor {shown(tensor.name)}, which no {self.config.family} model has",
                                      "the file's contents do not match its stated architecture")
            self._check_type(tensor)
            if (half := self._half_of(tensor.name)) is not None:
                kv_b_parts[names[0]][half] = stored
            elif part:
                parts_of[part[0]][part[1]] = Source(tensor, (), scale=float(self._scales(tensor.name)[0]))
            else:
                self._add(tensor, names)
        for name, halves in kv_b_parts.items():
            self._add_halves(name, halves)
        for name, parts in parts_of.items():
            self._add_split(name, parts)

    def _names(self, name: str) -> tuple[str, ...] | None:
        """The checkpoint's names of the tensors in a tensor of the file; None for an unknown one."""
        config = self.config
        names = checkpoint_names(name, self.file.architecture, config.moe.num_experts if config.moe else 0)
        if name.endswith(f".{OUTPUT_DOWN}") and config.compressed_attention is not None:
            names = output_group_names(name, config)
        if name in STACKED_MATRICES:
            names = stacked_names(name, config)
        names = ngram_table_name(name, config) or names
        if config.family == nemotron_h.FAMILY and nemotron_h.is_mtp(name, config):
            return ()
        mtp_prefixes = tuple(f"blk.{config.num_hidden_layers + i}." for i in range(config.mtp_layers))
        return mtp_names(name, names, config) if name.startswith(mtp_prefixes) else names

    def _check_type(self, tensor: GgufTensor) -> None:
        is_expert_table = tensor.type == INTEGER_TYPE and tensor.name.endswith(EXPERT_TABLE_SUFFIX)
        if tensor.type not in DECODERS and tensor.type not in RAW_TYPES and not is_expert_table:
            raise CheckpointError(f"{self.path} has tensor {shown(tensor.name)} of type {tensor.type}, which is not supported",
                                  f"known: {', '.join((*RAW_TYPES, *DECODERS))}")
        if tensor.type in LEVELED and (grid := LEVELED[tensor.type].grid):
            try:
                grid_of(grid)
            except GridsMissing:
                raise CheckpointError(f"{self.path} has tensor {shown(tensor.name)} of type {tensor.type}, whose grid of codes is in "
                                      "the package gguf, which this installation lacks", "python -m pip install gguf") from None

    def _half_of(self, name: str) -> str | None:
        """Which half of latent attention's joint matrix a tensor is; None for other tensors."""
        return None if self.config.mla is None else next((part for part in KV_B_HALVES if name.endswith(part)), None)

    def _scales(self, name: str) -> np.ndarray:
        return self.mapping.scales.get(name, UNIT_SCALE)

    def _add(self, tensor: GgufTensor, names: tuple[str, ...]) -> None:
        """Map a tensor that is one or several of the checkpoint's."""
        if len(names) == 1 and _same_values(tensor.shape, self.shapes[names[0]]):
            tensor = replace(tensor, shape=self.shapes[names[0]])
        elif len(tensor.shape) == 2 and all(len(self.shapes[name]) == 1 for name in names):
            tensor = replace(tensor, shape=(prod(tensor.shape),))  # biases of all experts
        scales = self._scales(tensor.name)
        for index, (name, source) in enumerate(self._split(tensor, names)):
            source = self.mapping.sources[name] = replace(source, scale=float(scales[index * len(scales) // len(names)]))
            is_matrix = len(tensor.shape) == 2 and f".{ROUTER}." not in tensor.name and name not in self.mapping.high_precision
            if self.low_bit and tensor.type in NATIVE and is_matrix:
                self._add_low_bit(name, tensor, source.shape)
                continue
            is_vector = len(tensor.shape) == 1 or tensor.type == INTEGER_TYPE or source.is_negative_decay or source.is_positive_decay
            dtype = tensor.type if tensor.type in RAW_TYPES and not source.is_transformed else "F32" if is_vector else self.dequant_dtype
            self._add_raw(name, tensor, source.shape, dtype)

    def _add_halves(self, name: str, parts: Mapping[str, GgufTensor]) -> None:
        kv_b = self.mapping.kv_b[name] = split_kv_b(self.path, name, parts, self.config)
        dtype = kv_b.keys.type if kv_b.keys.type == kv_b.values.type and kv_b.keys.type in RAW_TYPES else self.dequant_dtype
        self._add_raw(name, kv_b.keys, kv_b.shape, dtype)

    def _add_split(self, name: str, parts: Mapping[int, Source]) -> None:
        matrix = self.mapping.split_matrices[name] = split_matrix(self.path, name, parts, self.shapes[name], self.config)
        first = matrix.parts[0].tensor
        if self.low_bit and matrix.keeps_codes and name not in self.mapping.high_precision:
            self._add_low_bit(name, first, matrix.shape)
        else:
            self._add_raw(name, first, matrix.shape, matrix.dtype(self.dequant_dtype.lower()))

    def _add_low_bit(self, name: str, tensor: GgufTensor, shape: Sequence[int]) -> None:
        """Map a tensor that kernels multiply from the codes of its blocks."""
        stored = self.mapping.stored[name] = StoredTensor(name, NATIVE[tensor.type], shape, 0)
        self.mapping.tensors[name] = TensorInfo(name, "U8", (stored.nbytes,), tensor.file, tensor.offset, stored.nbytes)

    def _add_raw(self, name: str, tensor: GgufTensor, shape: Sequence[int], dtype: str) -> None:
        """Map a tensor of raw values."""
        nbytes = prod(shape) * (4 if dtype == "F32" else 2)
        self.mapping.tensors[name] = TensorInfo(name, dtype, shape, tensor.file, tensor.offset, nbytes)

    def _split(self, tensor: GgufTensor, names: tuple[str, ...]) -> Iterator[tuple[str, Source]]:
        """(name, source) of the tensors in a tensor of the file: all of it, or one part after the other."""
        config, architecture, shapes = self.config, self.file.architecture, self.shapes
        heights, expected = [tensor.shape[0] // len(names)] * len(names), [shapes[name][0] for name in names]
        if len(names) == 3 and ".q_proj." in names[0]:  # q, k and v
            heights = [count * config.projected_head_dim for count in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        elif sum(expected) == tensor.shape[0]:  # the parts of a fused state-space projection differ in rows
            heights = expected
        if sum(heights) != tensor.shape[0]:
            damaged(self.path, f"has tensor {shown(tensor.name)} of {tensor.shape[0]} rows, the config says {sum(heights)}")
        if (rows_by_name := fused_rows(names, config)) is not None:
            for name, rows in zip(names, rows_by_name, strict=True):
                yield name, Source(tensor, (len(rows), *tensor.shape[1:]), rows=rows)
            return
        first = 0
        for name, rows in zip(names, heights, strict=True):
            order = hy_v4.gguf_row_order(config, name) if config.family == hy_v4.FAMILY else gguf_row_order(self.file.header, config, name)
            if order is not None:
                yield name, Source(tensor, (rows, *tensor.shape[1:]), rows=first + order)
                first += rows
                continue
            heads = heads_of(name, config) if architecture.interleaved else 0
            if heads and rows % (2 * heads):
                damaged(self.path, f"has tensor {shown(tensor.name)} of {rows} rows for {heads} heads")
            yield name, Source(tensor, (rows, *tensor.shape[1:]), first, heads, architecture.offset(name), name.endswith(NEGATIVE_DECAYS),
                               name.endswith(POSITIVE_DECAYS))
            first += rows


def _flatten_matrices(tensor: GgufTensor) -> GgufTensor:
    """Flatten a stack of matrices (one per expert) into one matrix. Also removes inner dimensions of 1, which some writers add."""
    if len(tensor.shape) > 3 and prod(tensor.shape[1:-1]) == 1:
        return replace(tensor, shape=(tensor.shape[0], tensor.shape[-1]))
    if len(tensor.shape) != 3:
        return tensor
    return replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))


def _same_values(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether both are shapes of one tensor: writers omit dimensions of 1, and group vectors."""
    squeezed, expected_squeezed = (tuple(size for size in sizes if size != 1) for sizes in (shape, expected))
    return squeezed == expected_squeezed or len(expected) == 1 and prod(shape) == expected[0]


def _rules(config: ModelConfig) -> list[TensorRule]:
    """The rules of all tensors of the model and of its MTP layer."""
    family, layers = families.get(config.family), range(config.num_hidden_layers)
    groups = [family.outer_tensors(config), mtp_rules(config), *(family.layer_tensors(config, layer) for layer in layers)]
    return [rule for rules in groups for rule in rules.values()]


def heads_of(name: str, config: ModelConfig) -> int:
    """The number of heads of q or k, whose rows interleaved files reorder within heads; 0 for other tensors."""
    if ".q_proj." in name:
        return config.num_attention_heads
    if ".k_proj." not in name:
        return 0
    return config.kv_heads_of(int(name.split(".")[2]))[0] if config.family == deci.FAMILY else config.num_key_value_heads
