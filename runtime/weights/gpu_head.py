"""The LM head on a GPU that has all layers: a CPU takes longer for a large vocabulary than such a GPU for the rest of a token.

The matrix stays on the host too, where it often is the embedding. Logits of a few tokens are copied back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.device_memory import head_workspace
from ...offload.plan_gpu import HeadBytes
from ...quant.weight import Linear, Norm, Weight

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..tensors import ModelTensor

ROWS = 32  # tokens whose logits are on the GPU at once


@dataclass(frozen=True)
class GpuHead:
    """The final norm and the head, as `ops` holds them on its device."""

    ops: object
    norm: Norm
    head: Linear
    softcap: float | None
    scale: float

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Logits of hidden states float32 [T, D] -> float32 [T, V]."""
        parts = [self._some(x[first : first + ROWS]) for first in range(0, len(x), ROWS)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _some(self, x: np.ndarray) -> np.ndarray:
        ops = self.ops
        return ops.to_host(ops.logits(ops.from_host(x), self.norm, self.head, self.softcap, self.scale))


def head_tensor(outer: Mapping[str, ModelTensor]) -> ModelTensor:
    """The head's matrix: its own, or the tied embedding."""
    return outer["head"] if "head" in outer else outer["embed"]


def head_bytes(outer: Mapping[str, ModelTensor], hidden: int) -> HeadBytes:
    """GPU memory for the head."""
    from ..planning.devices import gpu_nbytes

    tensor = head_tensor(outer)
    vectors = sum(gpu_nbytes(own) for role, own in outer.items() if role.startswith(("norm", "head_norm")) or role == "head_bias")
    return HeadBytes(gpu_nbytes(tensor) + vectors, head_workspace(ROWS, hidden, tensor.shape[0], prod(tensor.shape), tensor.spec.is_raw))


def head_on_gpu(ops: object, config: ModelConfig, tensor: ModelTensor, data: np.ndarray, norm: Norm,
           bias: np.ndarray | None = None) -> GpuHead | None:
    """Copy the head to the device of `ops`; None if it would take so many kernels that the CPU is faster. Raises DoesNotFit if the device
    has no room."""
    matrix = ops.put(data, tensor.spec.scheme)
    there = {name: None if getattr(norm, name) is None else ops.put(getattr(norm, name), "f32") for name in ("weight", "bias")}
    weight = Weight(tensor.spec, tensor.shape, {"data": matrix.reshape(tensor.shape) if tensor.spec.is_raw else matrix})
    own = Linear(weight, None if bias is None else ops.put(bias, "f32"))
    head = GpuHead(ops, replace(norm, **there), own, config.final_logit_softcapping, 1 / config.logits_scaling)
    with ops.within_memory("the GPU ran out of memory for the head"):
        head.logits(np.linspace(-1, 1, tensor.shape[1], dtype=np.float32)[None])
    return None if ops.products.is_slow else head
