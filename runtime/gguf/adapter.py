"""LoRA adapters in GGUF files, as llama.cpp's converter writes them: `blk.0.attn_q.weight.lora_a` [r, K] and `.lora_b` [N, r] for each
adapted weight, s = adapter.lora.alpha / r (1 where no alpha is stated). Those of all experts of a layer are [E, r, K] and [E, N, r]; of
the embedding [V, D], which is looked up by row, `.lora_a` is [V, r] and `.lora_b` [D, r].

Rows of B follow the row order of the GGUF weight: interleaved queries and keys in llama files, several matrices in one. They are
returned under checkpoint names in checkpoint order, so the adapter applies to any model, however that is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.gguf_header import GgufHeader, GgufTensor
from ...offload.safetensors_header import shown
from ...quant.imports.gguf import DECODERS, dequantize
from ...quant.weight import RAW_NUMPY, to_f32
from .. import families
from ..adapters.adapter import Delta
from ..config import ModelConfig
from .architecture import Architecture
from .architectures import architecture
from .file_architecture import ARCHITECTURE_BY_FAMILY, file_architecture
from .linear_attention import fused_rows
from .recurrent_layers import reordering
from .split_files import close_all, open_parts
from .tensor_mapping import heads_of
from .tensor_names import checkpoint_names
from .tensor_sources import RAW_TYPES, deinterleaved

LORA_SUFFIXES = {".lora_a": "a", ".lora_b": "b"}
EMBEDDING = "token_embd.weight"
ALPHA, INVOCATION_TOKENS = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
CONVERT_HINT = "convert a PEFT adapter with llama.cpp's convert_lora_to_gguf.py, or give its folder"


def gguf_deltas(path: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Delta]]:
    """(checkpoint name, delta) for each weight that the adapter changes; `shapes`: of the model's weights by checkpoint name.

    Raises CheckpointError for a file that is not a LoRA adapter, is for another architecture, or does not fit the weights.
    """
    header, opened = open_parts(path)
    try:
        arch = _architecture(path, header, config)
        parts: dict[str, dict[str, GgufTensor]] = {}
        for tensor in header.tensors.values():
            name, dot, ending = tensor.name.rpartition(".")
            if (part := LORA_SUFFIXES.get(dot + ending)) is None:
                raise CheckpointError(f"{path} replaces {shown(tensor.name)} entirely, which is not supported", CONVERT_HINT)
            parts.setdefault(name, {})[part] = tensor
        store, family = TensorStore(path, {}, opened), families.get(config.family)
        roles = {rule.name: role for i in range(config.num_hidden_layers) for role, rule in family.layer_tensors(config, i).items()}
        for name, pair in parts.items():
            yield from _tensor_deltas(path, name, pair, store, header, arch, config, shapes, roles)
    finally:
        close_all(opened)


def open_adapter_file(path: Path) -> TensorStore:
    """Open an adapter file; the caller closes the store, which lists no tensors."""
    return TensorStore(path, {}, open_parts(path)[1])


def _architecture(path: Path, header: GgufHeader, config: ModelConfig) -> Architecture:
    stated = {key: header.metadata.get(key) for key in ("general.type", "adapter.type", "general.architecture")}
    if stated["general.type"] != "adapter" or stated["adapter.type"] != "lora":
        raise CheckpointError(f"{path} is not a LoRA adapter but {shown(stated['general.type'] or 'a model')}", CONVERT_HINT)
    if INVOCATION_TOKENS in header.metadata:
        raise CheckpointError(f"{path} is an activated LoRA (aLoRA), which is not supported", CONVERT_HINT)
    name = stated["general.architecture"]
    arch = architecture(path, name)
    if arch.family != config.family and (config.family not in ARCHITECTURE_BY_FAMILY or file_architecture(config) != name):
        raise CheckpointError(f"{path} is an adapter for {shown(name)}, but the model is {config.family}",
                              "is this its base model?")
    return arch


def _tensor_deltas(path: Path, name: str, pair: Mapping[str, GgufTensor], store: TensorStore, header: GgufHeader, arch: Architecture,
                   config: ModelConfig, shapes: Mapping[str, tuple[int, int]], roles: Mapping[str, str]) -> Iterator[tuple[str, Delta]]:
    """Deltas of one GGUF tensor: of one weight, or of the several fused in it."""
    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{path} {why}", "is this its base model?")

    if pair.keys() != {"a", "b"}:
        raise refuse(f"holds only one of the two LoRA matrices of {shown(name)}")
    names = checkpoint_names(name, arch, config.moe.num_experts if config.moe else 0)
    if names is None or not shapes.keys() >= {*names}:
        raise refuse(f"changes {shown(name)}, which is not supported")
    alpha = header.metadata.get(ALPHA, 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha):
        raise refuse(f"states {ALPHA} {shown(alpha)}, which is not a number")
    a, b = (_values(path, store, pair[part]) for part in "ab")
    if name == EMBEDDING and a.ndim == b.ndim == 2:
        a, b = np.ascontiguousarray(b.T), a
    stated_shapes, count = f"{list(a.shape)} and {list(b.shape)}", config.moe.num_experts if config.moe else 1
    experts = count if a.ndim == 3 and len(names) % count == 0 else 1
    a, b = (each if each.ndim == 3 else each[None] for each in (a, b))
    ranks, heights = {a.shape[-2], b.shape[-1]}, [shapes[each][0] for each in names[: len(names) // experts]]
    width = shapes[names[0]][1]
    if a.ndim != 3 or b.ndim != 3 or len(ranks) > 1 or (len(a), len(b)) != (experts, experts) or a.shape[2] != width \
            or b.shape[1] != sum(heights):
        raise refuse(f"changes {shown(name)} with matrices of {stated_shapes}, but in the model it has "
                     f"{sum(heights)} rows of {width}")
    scale = float(alpha) / a.shape[1] if alpha else 1.0
    for expert in range(experts):
        yield from _matrix_deltas(names[expert * len(heights) : (expert + 1) * len(heights)], a[expert], b[expert], scale, heights, arch,
                                  config,
                                  roles)


def _matrix_deltas(names: Sequence[str], a: np.ndarray, b: np.ndarray, scale: float, heights: Sequence[int], arch: Architecture,
                   config: ModelConfig, roles: Mapping[str, str]) -> Iterator[tuple[str, Delta]]:
    """Deltas of weights that are concatenated by rows and share A."""
    ends = np.cumsum(heights)
    for each, rows in zip(names, fused_rows(names, config) or [np.arange(end - height, end) for end, height in zip(ends, heights)]):
        heads = heads_of(each, config) if arch.interleaved else 0
        lora_b = b[rows[deinterleaved(np.arange(len(rows)), len(rows) // heads)] if heads else rows]
        yield each, Delta(*_checkpoint_order(a, lora_b, roles.get(each, ""), config), scale, None)


def _checkpoint_order(a: np.ndarray, b: np.ndarray, role: str, config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a role in the checkpoint's order of value heads."""
    rows, columns = reordering(role, config)
    if rows is not None:
        b = b[np.argsort(rows)]
    return a if columns is None else np.ascontiguousarray(a[:, np.argsort(columns)]), b


def _values(path: Path, store: TensorStore, tensor: GgufTensor) -> np.ndarray:
    """The values of a tensor, float32. Raises CheckpointError for NaN, infinity and an unsupported type."""
    raw = np.empty(tensor.nbytes, np.uint8)
    store.read_at(tensor.file, tensor.offset, memoryview(raw))
    if tensor.type in RAW_TYPES:
        values = to_f32(raw.view(RAW_NUMPY[tensor.type.lower()]), tensor.type.lower()).reshape(tensor.shape)
    elif tensor.type in DECODERS:
        values = dequantize(raw, tensor.type, tensor.shape[-1]).reshape(tensor.shape)
    else:
        raise CheckpointError(f"{path} has tensor {shown(tensor.name)} of type {tensor.type}, which is not supported", CONVERT_HINT)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{path} has NaN or infinity in {shown(tensor.name)}", "the adapter is damaged: download it again")
    return values
