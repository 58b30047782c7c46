"""Products with stored weights on a device: in one Triton kernel where its results check out (`kernel_choice.py`), else with torch ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ..device_memory import MAX_WIDENED
from . import low_bit
from .kernel_choice import FEW_TOKENS, KernelChoice, Run

if TYPE_CHECKING:
    from ...quant.weight import Weight

MAX_BLOB_NBYTES = 1 << 31  # larger blobs exceed a kernel's 32-bit offsets

# The tensor that a product is added to (None: none), and the factor of the product.
ResidualAndFactor = tuple[torch.Tensor | None, float]


class Matmul:
    """Products on one device: x float32 [T, K] times a weight [N, K], transposed, plus bias -> [T, N]; `residual_and_factor`: a
    tensor to add the result to, and a factor."""

    def __init__(self, kernel_choice: KernelChoice) -> None:
        self._kernel_choice = kernel_choice
        self.kinds: set[tuple[object, ...]] = set()  # kinds of weights multiplied so far

    def plain(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None,
              residual_and_factor: ResidualAndFactor = (None, 1.0)) -> torch.Tensor:
        """With a float32 weight."""
        return _added(functional.linear(x, weight.parts["data"], bias), *residual_and_factor)

    def of_codes(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None,
                 residual_and_factor: ResidualAndFactor = (None, 1.0)) -> torch.Tensor:
        """With a low-bit weight."""
        spec, blob = weight.spec, weight.parts["data"]
        form = low_bit.Format(spec.bits, spec.group, spec.scheme, weight.shape, spec.sections(weight.shape))
        if blob.numel() >= MAX_BLOB_NBYTES:
            return _added(low_bit.product(x, blob, form, bias), *residual_and_factor)

        def by_triton(kernels: ModuleType, *residual_and_factor: object) -> torch.Tensor:
            if len(x) <= FEW_TOKENS:
                return kernels.low_bit_matmul(x, blob, form, bias, *residual_and_factor)
            return _added(low_bit.product(x, blob, form, bias, kernels.dequantize), *residual_and_factor)

        return self._chosen((spec.scheme, spec.bits, spec.group, bool(spec.outliers)), len(x), by_triton,
                            partial(low_bit.product, x, blob, form, bias), residual_and_factor)

    def widened(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None,
                residual_and_factor: ResidualAndFactor = (None, 1.0)) -> torch.Tensor:
        """With a 16-bit weight."""
        data = weight.parts["data"]
        by_torch = partial(tiled, x, data, bias)
        if len(x) > FEW_TOKENS:
            return _added(by_torch(), *residual_and_factor)
        return self._chosen((weight.spec.scheme,), len(x), lambda kernels,
                            *residual_and_factor: kernels.half_matmul(x, data, bias, *residual_and_factor), by_torch, residual_and_factor)

    @property
    def is_slow(self) -> bool:
        """Whether a kind of weight that has a kernel is multiplied by torch ops."""
        return bool(self._kernel_choice.broken) or any(self._kernel_choice.declined.get(kind) for kind in self.kinds)

    def _chosen(self, kind: tuple[object, ...], tokens: int, by_triton: Callable[..., torch.Tensor], by_torch: Run,
                residual_and_factor: ResidualAndFactor) -> torch.Tensor:
        """Choose for a `kind` of weight and number of tokens; calls served by the same compiled kernel share a choice."""
        case = *kind, min(2 * FEW_TOKENS, 1 << (tokens - 1).bit_length())
        self.kinds.add(case)
        return self._kernel_choice.chosen(case, f"multiplies {'-'.join(map(str, kind[:2]))} weights",
                                          lambda: by_triton(_kernels(), *residual_and_factor),
                                          lambda: _added(by_torch(), *residual_and_factor),
                                          lambda: (by_triton(_kernels(), None, 1.0), by_torch()))


def _added(branch: torch.Tensor, residual: torch.Tensor | None, factor: float) -> torch.Tensor:
    return branch if residual is None else residual.add_(branch, alpha=factor)


def tiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x float32 [T, K] times a weight [N, K] of any type, transposed, by tiles of rows, so that no float32 copy of the whole weight is ever
    held."""
    rows = max(1, MAX_WIDENED // weight.shape[1])
    out = torch.empty(len(x), len(weight), device=x.device)
    for begin in range(0, len(weight), rows):
        out[:, begin : begin + rows] = x @ weight[begin : begin + rows].float().T
    return out if bias is None else out.add_(bias)


def _kernels() -> ModuleType:
    from . import triton_matmul

    return triton_matmul
