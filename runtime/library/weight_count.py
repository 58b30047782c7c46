"""Number of weights in a model folder, counted from tensor headers."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ...offload.safetensors_header import TensorInfo
    from ..stores.container import StoredTensor

# The endings of codes of GPTQ, AWQ and compressed-tensors, and of what stands beside those of bitsandbytes and ModelOpt.
PACKED_SUFFIXES = (".qweight", ".weight_packed", ".weight.absmax", ".SCB", ".weight_scale_2")
PACKED_DTYPES = ("F8_E8M0", "U32")  # the types of scales that are powers of two, and of MLX's words


def count_weights(folder: Path, store: TensorStore) -> int:
    """How many weights a folder that effllm did not make holds. Of codes in words, or beside scales of other kinds, their number tells
    nothing: their store is asked."""
    if not any(name.endswith(PACKED_SUFFIXES) or info.dtype in PACKED_DTYPES for name, info in store.tensors.items()):
        return sum(weights(*each) for each in store.tensors.items())
    from ..source import open_store

    with open_store(folder) as wide:
        return sum(prod(info.shape) for info in wide.tensors.values())


def weights(name: str, tensor: TensorInfo | StoredTensor) -> int:
    """How many a tensor holds; of MXFP4, two in a byte, and none in what belongs to them."""
    if getattr(tensor, "dtype", "") == "U8" and name.endswith(("_proj_blocks", "_proj_scales")):
        return 2 * prod(tensor.shape) if name.endswith("_blocks") else 0
    return prod(tensor.shape)
