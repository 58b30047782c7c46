"""Per-tensor scales of NVFP4 matrices in GGUF files: one number per matrix, or one per expert.

They are tensors of their own, `<matrix>.scale` beside `<matrix>.weight`. Activation scales, `<matrix>.input_scale`, are for processors
that quantize activations to FP4; here activations are quantized by their own range.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...offload.checkpoint import OpenFile, TensorStore
from ...offload.gguf_header import GgufHeader
from ...offload.safetensors_header import damaged, shown
from ..hub import DENSE
from .architecture import DIVISORS

if TYPE_CHECKING:
    from ..config import ModelConfig

TYPE = "NVFP4"
MATRIX, SCALE, OF_ACTIVATIONS = ".weight", ".scale", ".input_scale"
MOST = 1 << 16  # numbers in such a tensor


def is_scale(name: str, header: GgufHeader) -> bool:
    """Is a tensor no weight but what belongs to one in NVFP4?"""
    for ending in (OF_ACTIVATIONS, SCALE):
        if name.endswith(ending):
            matrix = header.tensors.get(name.removesuffix(ending) + MATRIX)
            return matrix is not None and matrix.type == TYPE
    return False


def is_weight(name: str, config: ModelConfig, header: GgufHeader) -> bool:
    """Is a tensor one of a model's layers or of what surrounds them, and not read by itself: divisors of rotary positions, scales in NVFP4,
    matrices behind the mean of models that make vectors?"""
    return name not in DIVISORS and not (config.bidirectional and name in DENSE.values()) and not is_scale(name, header)


def tensor_scales(header: GgufHeader, opened: Mapping[Path, OpenFile], experts: int) -> dict[str, np.ndarray]:
    """Name of a matrix -> float32 [1] or [experts], for those that have such. Raises CheckpointError for what is neither, or no number."""
    found, store = {}, TensorStore(header.path, {}, dict(opened))
    for name, tensor in header.tensors.items():
        if not name.endswith(SCALE) or not is_scale(name, header):
            continue
        matrix = header.tensors[name.removesuffix(SCALE) + MATRIX]
        count = tensor.nbytes // 4
        if tensor.type != "F32" or len(tensor.shape) != 1 or count > MOST or count not in (1, experts if len(matrix.shape) == 3 else 1):
            damaged(header.path, f"has tensor {shown(name)} as {tensor.type} {list(tensor.shape)}, expected one float32, or one an expert")
        values = np.empty(count, np.float32)
        store.read_at(tensor.file, tensor.offset, memoryview(values).cast("B"))
        if not np.isfinite(values).all():
            damaged(header.path, f"has tensor {shown(name)} with a scale of NaN or infinity")
        found[matrix.name] = values
    return found
