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
from .architecture import ROPE_FACTOR_TENSORS

if TYPE_CHECKING:
    from ..config import ModelConfig

TYPE = "NVFP4"
MATRIX, SCALE, ACTIVATION_SCALE = ".weight", ".scale", ".input_scale"
MAX_SCALES = 1 << 16  # in a tensor


def is_scale(name: str, header: GgufHeader) -> bool:
    """Whether a tensor holds scales of an NVFP4 matrix."""
    for suffix in (ACTIVATION_SCALE, SCALE):
        if name.endswith(suffix):
            matrix = header.tensors.get(name.removesuffix(suffix) + MATRIX)
            return matrix is not None and matrix.type == TYPE
    return False


def is_weight(name: str, config: ModelConfig, header: GgufHeader) -> bool:
    """Whether a tensor is one of the model's weights. Others are read separately: rotary divisors, scales of NVFP4, the dense layers of
    embedding models."""
    return name not in ROPE_FACTOR_TENSORS and not (config.bidirectional and name in DENSE.values()) and not is_scale(name, header)


def tensor_scales(header: GgufHeader, opened: Mapping[Path, OpenFile], experts: int) -> dict[str, np.ndarray]:
    """Name of a matrix -> float32 [1] or [experts], for NVFP4 matrices. Raises CheckpointError for another shape, NaN and infinity."""
    scales, store = {}, TensorStore(header.path, {}, dict(opened))
    for name, tensor in header.tensors.items():
        if not name.endswith(SCALE) or not is_scale(name, header):
            continue
        matrix = header.tensors[name.removesuffix(SCALE) + MATRIX]
        count = tensor.nbytes // 4
        if tensor.type != "F32" or len(tensor.shape) != 1 or count > MAX_SCALES or \
                count not in (1, experts if len(matrix.shape) == 3 else 1):
            damaged(header.path, f"has tensor {shown(name)} as {tensor.type} {list(tensor.shape)}, expected one float32, or one an expert")
        values = np.empty(count, np.float32)
        store.read_at(tensor.file, tensor.offset, memoryview(values).cast("B"))
        if not np.isfinite(values).all():
            damaged(header.path, f"has tensor {shown(name)} with a scale of NaN or infinity")
        scales[matrix.name] = values
    return scales
