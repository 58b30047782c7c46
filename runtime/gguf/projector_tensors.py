"""Tensors of an exported mmproj file, each made from one of the checkpoint's.

Matrices of layers and of the projector become F16; vectors, position embeddings, patch embeddings and convolutions stay F32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.gguf_writer import PlannedTensor
from ...offload.safetensors_header import TensorInfo
from ...quant.weight import from_f32
from ..images.tower_ops import to_float32
from ..images.tower_weights import STORED
from .projector_names import CLASS_EMBD

FLOAT32_PREFIXES = ("v.patch_embd", "v.position_embd", CLASS_EMBD, "a.position_embd", "a.conv1d",
                    "a.conv2d")  # matrices that stay F32
DEPTHWISE_SUFFIX = ".conv_dw.weight"  # stays F32 too


@dataclass(frozen=True)
class ProjectorTensor:
    """A tensor of the file, and how to make it from a checkpoint tensor."""

    planned: PlannedTensor
    info: TensorInfo  # of the checkpoint
    transform: Callable[[np.ndarray], np.ndarray]  # float32 values of the checkpoint -> of the file

    def bytes_of(self, store: TensorStore) -> np.ndarray:
        """The encoded values."""
        values = self.transform(to_float32(store.read(self.info).view(STORED[self.info.dtype]).reshape(self.info.shape)))
        return np.ascontiguousarray(from_f32(np.ascontiguousarray(values, np.float32), self.planned.type.lower()))


def projector_tensor(name: str, info: TensorInfo, transform: Callable[[np.ndarray], np.ndarray] = lambda values: values,
                     shape: tuple[int, ...] | None = None) -> ProjectorTensor:
    """A tensor of this name; `shape` None for the checkpoint's. Raises CheckpointError for a source that is not F32, F16 or BF16."""
    shape = info.shape if shape is None else shape
    if info.dtype not in STORED:
        raise CheckpointError(f"{info.name} is stored as {info.dtype}: only F32, F16 and BF16 are supported for the vision tower",
                              "use a version of the model with a bfloat16 vision tower")
    is_float32 = len(shape) < 2 or name.startswith(FLOAT32_PREFIXES) or name.endswith(DEPTHWISE_SUFFIX)
    return ProjectorTensor(PlannedTensor(name, "F32" if is_float32 else "F16", shape), info, transform)
