"""A layer's work between products: norms, activations, gates, rotary embedding; with torch ops, which define each, or one Triton kernel
each (`triton_stages.py`)."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ..layout import SILU_LIMIT, SWISH_LIMIT, SWISH_SLOPE, bound_of
from .kernel_choice import FEW_TOKENS, KernelChoice

if TYPE_CHECKING:
    from ...quant.weight import Norm

ACTIVATE = {"silu": functional.silu, "relu": functional.relu, "relu2": lambda x: functional.relu(x).square(),
            "gelu": functional.gelu, "none": lambda x: x,
            "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "clamped_swish": lambda x: _clamped_swish(x)}
CLAMPED_SILU = "clamped_silu"  # no Triton kernel
MAX_ROW_VALUES = 1 << 14  # limit of a row that a kernel normalizes


class Stages:
    """Stages on one device. Many tokens use torch: launching a kernel of ours takes Python longer than several of torch's, and those of a
    prompt run long anyway. In-place operations keep a copy of the original only while a kernel is tried."""

    def __init__(self, kernel_choice: KernelChoice) -> None:
        self._kernel_choice = kernel_choice

    def normalise(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Over the last axis: rms, rms+1 (weight stored minus one), layer or none, in float32."""
        by_torch = lambda: normalise(x, norm)  # noqa: E731
        if norm.weight is None or norm.weight.ndim > 1 or x.shape[-1] > MAX_ROW_VALUES or len(x) > FEW_TOKENS or not x.is_contiguous():
            return by_torch()
        by_triton = lambda: _kernels().normalise(x, norm)  # noqa: E731
        return self._kernel_choice.chosen(("norm", norm.kind, norm.bias is not None, x.shape[-1]), "normalises", by_triton, by_torch,
                                          lambda: (by_triton(), by_torch()))

    def gated(self, gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
        """act(gate) * up, as in `reference.gated`, in place of `gate`. Raises ValueError for an unknown activation."""
        if act not in ACTIVATE or len(gate) > FEW_TOKENS or not (gate.is_contiguous() and up.is_contiguous()):
            return _gated(gate, up, act)
        by_triton = lambda of: _kernels().gated(of, up, act)  # noqa: E731
        return self._kernel_choice.chosen(("gate", act), "gates", lambda: by_triton(gate), lambda: _gated(gate, up, act),
                                          lambda: (by_triton(gate.clone()), _gated(gate.clone(), up, act)))

    def rotated(self, y: torch.Tensor, heads: int, head_dim: int, cos: torch.Tensor, sin: torch.Tensor,
                interleaved: bool = False) -> torch.Tensor:
        """Rotary position on y[T, heads * head_dim] by angles [T, 1, R/2], in place, as in `reference.rotate_heads`."""
        by_torch = lambda of: _rotated(of, heads, head_dim, cos, sin, interleaved)  # noqa: E731
        if len(y) > FEW_TOKENS or not y.is_contiguous():
            return by_torch(y)
        by_triton = lambda of: _kernels().rotate(of, heads, head_dim, cos, sin, interleaved)  # noqa: E731
        return self._kernel_choice.chosen(("rope", cos.shape[-1], interleaved), "turns positions", lambda: by_triton(y),
                                          lambda: by_torch(y),
                                          lambda: (by_triton(y.clone()), by_torch(y.clone())))


def normalise(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """`Stages.normalise` with torch ops."""
    if norm.kind == "none":
        return x
    if norm.kind == "layer" and norm.weight is not None and norm.weight.ndim > 1:  # weights per head
        return functional.layer_norm(x, x.shape[-1:], None, None, norm.eps) * norm.weight
    if norm.kind == "layer":
        return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    return x * scale * (norm.weight + 1.0 if norm.kind == "rms+1" else norm.weight)


def activated(x: torch.Tensor, act: str) -> torch.Tensor:
    """act(x). Raises ValueError for an unknown activation."""
    if (bound := bound_of(act)) is not None:
        return functional.silu(x).clamp_(max=bound)
    if act == CLAMPED_SILU:
        return functional.silu(x.clamp(max=SILU_LIMIT))
    if act not in ACTIVATE:
        raise ValueError(f"no activation {act!r}; known: {', '.join(ACTIVATE)}")
    return ACTIVATE[act](x)


def _gated(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    if (bound := bound_of(act)) is not None:
        return activated(gate, act).mul_(up.clamp(-bound, bound))
    if act == CLAMPED_SILU:
        return activated(gate, act).mul_(up.clamp(-SILU_LIMIT, SILU_LIMIT))
    return activated(gate, act).mul_(up.clamp(-SWISH_LIMIT, SWISH_LIMIT) + 1 if act == "clamped_swish" else up)


def _clamped_swish(x: torch.Tensor) -> torch.Tensor:
    x = x.clamp(max=SWISH_LIMIT)
    return x * torch.sigmoid(SWISH_SLOPE * x)


def _rotated(y: torch.Tensor, heads: int, head_dim: int, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    split, half = y.view(len(y), heads, head_dim), cos.shape[-1]
    halves = (split[..., : 2 * half : 2], split[..., 1 : 2 * half : 2]) if interleaved else (split[..., :half], split[..., half : 2 * half])
    low, high = (side.clone() for side in halves)
    split[..., :half] = low * cos - high * sin
    split[..., half : 2 * half] = high * cos + low * sin
    return y


def _kernels() -> ModuleType:
    from . import triton_stages

    return triton_stages
