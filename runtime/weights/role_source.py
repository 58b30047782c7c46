"""A layer's tensors by role, converted to what a backend computes with; layer records are assembled from these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...quant.weight import Linear, LowRank, Norm, Weight
from ..adapters.loaded_adapters import NO_ADAPTERS, LoadedAdapters
from ..tensors import ModelTensor, as_float32, typed

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .streamed_weights import StreamedWeights

BEHIND = ("o_norm", "down_norm")  # norms after attention and MLP


def build_norm(config: ModelConfig, weight: object, bias: object | None, kind: str | None = None, eps: float | None = None) -> Norm:
    """A norm with the model's kind and epsilon unless overridden; kernels have no LayerNorm with weights stored minus one."""
    kind, eps = kind or config.norm_kind, config.norm_eps if eps is None else eps
    return Norm("layer", weight + 1, bias, eps) if kind == "layer+1" else Norm(kind, weight, bias, eps)


@dataclass(frozen=True)
class RoleSource:
    """The tensors of a layer, or of "outer", by role, their bytes by name, and the backend `ops` to convert them for.

    Methods return None for a role without a tensor."""

    config: ModelConfig
    layer: int | str
    roles: Mapping[str, ModelTensor]
    raw: Mapping[str, np.ndarray]
    ops: object
    streamed: StreamedWeights | None = None  # matrices that stay on disk
    adapters: LoadedAdapters = NO_ADAPTERS
    place: Callable[[ModelTensor], object] | None = None  # returns a matrix that was copied to its backend separately
    looked_up: Collection[str] = ()  # names of tensors in lookup layout

    def values(self, role: str) -> np.ndarray:
        """float32, flat, on the host."""
        return as_float32(self.roles[role], self.raw)

    def number(self, role: str) -> float:
        """The first (or only) value of a tensor."""
        return float(self.values(role)[0])

    def put(self, values: np.ndarray) -> object:
        """Copy float32 host values to the backend."""
        return self.ops.put(np.ascontiguousarray(values), "f32")

    def vector(self, role: str) -> object | None:
        """float32, flat."""
        return None if role not in self.roles else self.put(self.values(role))

    def shaped(self, role: str) -> object:
        """float32, in the tensor's shape."""
        return self.vector(role).reshape(self.roles[role].shape)

    def weight(self, role: str) -> Weight | None:
        """As stored."""
        if role not in self.roles:
            return None
        tensor = self.roles[role]
        if self.streamed is not None and self.streamed.holds(tensor):
            return self.streamed.matrix(tensor, self.raw)
        data = self.ops.put(typed(self.raw[tensor.name], tensor.spec), tensor.spec.scheme) if self.place is None else self.place(tensor)
        data = data.reshape(tensor.shape) if tensor.spec.is_raw else data
        return Weight(tensor.spec, tensor.shape, {"data": data}, tensor.name in self.looked_up)

    def linear(self, role: str) -> Linear | None:
        """With its bias and adapters."""
        weight = self.weight(role)
        return weight and Linear(weight, self.vector(f"{role}_bias"), self.adapters.beside(self.layer, role, self.ops))

    def low_rank(self, low: str, out: str, norm: str = "") -> LowRank | None:
        """Two matrices applied in turn, through a narrow dimension."""
        return LowRank(self.linear(low), self.linear(out), *([self.norm(norm)] if norm else ())) if low in self.roles else None

    def norm(self, role: str) -> Norm | None:
        """Of the model's kind; per head if its weight has two dimensions."""
        if role not in self.roles:
            return None
        eps = self.config.post_norm_eps if role in BEHIND else None
        return build_norm(self.config, self.shaped(role) if len(self.roles[role].shape) > 1 else self.vector(role),
                         self.vector(f"{role}_bias"), eps=eps)

    def ones(self, size: int, factors: np.ndarray | float = 1.0, kind: str = "rms") -> Norm:
        """A norm without a weight tensor, which multiplies by `factors`."""
        return Norm(kind, self.put(np.ones(size, np.float32) * np.float32(factors)), None, self.config.norm_eps)
