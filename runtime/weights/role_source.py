"""A layer's tensors by role, as weights on a backend; the records of a layer are assembled from these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...quant.weight import Linear, LowRank, Norm, Weight
from ..adapters.loaded_adapters import NO_ADAPTERS, LoadedAdapters
from ..tensors import ModelTensor, as_float32, typed

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .streamed_weights import StreamedWeights

POST_NORMS = ("o_norm", "down_norm")  # of the outputs of attention and MLP, with `ModelConfig.post_norm_eps`

STREAM_NORMS = ("input_norm", "post_norm")  # read the residual stream, the first of a layer and the second


def build_norm(config: ModelConfig, weight: object, bias: object | None, kind: str | None = None, eps: float | None = None) -> Norm:
    """A norm with the model's kind and epsilon unless overridden."""
    kind, eps = kind or config.norm_kind, config.norm_eps if eps is None else eps
    if kind == "layer+1":  # weights are stored minus one, for which kernels have no LayerNorm
        return Norm("layer", weight + 1, bias, eps)
    return Norm(kind, weight, bias, eps)


@dataclass(frozen=True)
class RoleSource:
    """The tensors of a layer, and the backend that its weights are made for.

    `vector`, `weight`, `linear`, `low_rank` and `norm` return None for a role without a tensor; the other methods require one.
    """

    config: ModelConfig
    layer: int | str  # "outer": the tensors outside the layers
    roles: Mapping[str, ModelTensor]
    raw: Mapping[str, np.ndarray]  # bytes by tensor name
    ops: object
    streamed: StreamedWeights | None = None  # makes the weights of matrices that stay on disk; None: there are none
    adapters: LoadedAdapters = NO_ADAPTERS
    place: Callable[[ModelTensor], object] | None = None  # returns a matrix already on the backend; None: matrices are copied from `raw`
    lut_tensors: Collection[str] = ()  # names of tensors in lookup layout

    def values(self, role: str) -> np.ndarray:
        """The tensor's values: float32, flat, on the host."""
        return as_float32(self.roles[role], self.raw)

    def scalar(self, role: str) -> float:
        """The first (or only) value of a tensor."""
        return float(self.values(role)[0])

    def put(self, values: np.ndarray) -> object:
        """Float32 host values, copied to the backend."""
        return self.ops.put(np.ascontiguousarray(values), "f32")

    def vector(self, role: str) -> object | None:
        """A tensor on the backend: float32, flat."""
        return None if role not in self.roles else self.put(self.values(role))

    def shaped(self, role: str) -> object:
        """A tensor on the backend: float32, in its own shape."""
        return self.vector(role).reshape(self.roles[role].shape)

    def weight(self, role: str) -> Weight | None:
        """A matrix as it is stored."""
        if role not in self.roles:
            return None
        tensor = self.roles[role]
        if self.streamed is not None and self.streamed.holds(tensor):
            return self.streamed.matrix(tensor, self.raw)
        if self.place is not None:
            data = self.place(tensor)
        else:
            data = self.ops.put(typed(self.raw[tensor.name], tensor.spec), tensor.spec.scheme)
        if tensor.spec.is_raw:
            data = data.reshape(tensor.shape)
        return Weight(tensor.spec, tensor.shape, {"data": data}, tensor.name in self.lut_tensors)

    def linear(self, role: str) -> Linear | None:
        """A matrix with its bias and adapters."""
        weight = self.weight(role)
        return weight and Linear(weight, self.vector(f"{role}_bias"), self.adapters.beside(self.layer, role, self.ops))

    def gate(self, role: str) -> Linear | None:
        """A matrix of gates by head; a bias may have one value for a head, which all its channels share."""
        made = self.linear(role)
        if made is None or made.bias is None or len(made.bias) == made.weight.shape[0]:
            return made
        return replace(made, bias=self.put(np.repeat(self.values(f"{role}_bias"), made.weight.shape[0] // len(made.bias))))

    def low_rank(self, down: str, up: str, post_norm: str = "") -> LowRank | None:
        """A low-rank projection, from the roles of its matrices and of its norm, if it has one."""
        if down not in self.roles:
            return None
        return LowRank(self.linear(down), self.linear(up), self.norm(post_norm) if post_norm else None)

    def norm(self, role: str) -> Norm | None:
        """A norm of the model's kind; head by head if its weight has two dimensions."""
        if role not in self.roles:
            return None
        weight = self.shaped(role) if len(self.roles[role].shape) > 1 else self.vector(role)
        eps = self.config.post_norm_eps if role in POST_NORMS else None
        if self.config.depth_scaled_residual and role in STREAM_NORMS:
            eps = self.config.norm_eps * (2 * self.layer + 1 + STREAM_NORMS.index(role))
        return build_norm(self.config, weight, self.vector(f"{role}_bias"), eps=eps)

    def constant_norm(self, size: int, weight: np.ndarray | float = 1.0, kind: str = "rms") -> Norm:
        """A norm of vectors [size] whose weight is not a tensor of the checkpoint; a number is the weight of all channels."""
        return Norm(kind, self.put(np.ones(size, np.float32) * np.float32(weight)), None, self.config.norm_eps)
