"""How a product with a stored weight is made on a device: in one kernel where that gives the numbers, else by torch's.

`stored_product.py` needs Triton, which compiles for the card that is there. Whether it does is tried where a kind of weight is first
multiplied, both ways over the same memory. Not by the clock: two runs would choose differently, and their answers differ by rounding.
What fails is said once, and no kernel is compiled after one that could not be.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ..device_memory import TILE
from . import low_bit
from .device import Device

if TYPE_CHECKING:
    from ...quant.weight import Weight

Run = Callable[[], torch.Tensor]
CLOSE = 1e-5  # of the largest result: two orders of the same float32 sums
REACH = 1 << 31  # bytes of a blob that a kernel's offsets reach
OTHERS = "the results of one are others"
FEW = 8  # tokens that a kernel multiplies a weight by while it is in registers


class Products:
    """Products on one device. `declined`: the kinds of product that were tried, and why one kernel does not make them; "" of those it
    does. `broken`: why nothing is compiled any more."""

    def __init__(self, on: Device) -> None:
        self._on = on
        self.declined: dict[tuple[object, ...], str] = {}
        self.broken = ""
        self._said: set[str] = set()
        self._pending: list[str] = []

    def plain(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """With a weight that lies in float32."""
        return functional.linear(x, weight.parts["data"], bias)

    def of_codes(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """With a low-bit weight."""
        spec, blob = weight.spec, weight.parts["data"]
        form = low_bit.Format(spec.bits, spec.group, spec.scheme, weight.shape, spec.sections(weight.shape))
        by_torch = partial(low_bit.product, x, blob, form, bias)
        if not self._on.compiles or blob.numel() >= REACH:
            return by_torch()

        def in_one(kernels: ModuleType) -> torch.Tensor:
            if len(x) <= FEW:
                return kernels.of_codes(x, blob, form, bias)
            return low_bit.product(x, blob, form, bias, kernels.opened)

        return self._chosen((spec.scheme, spec.bits, spec.group, bool(spec.outliers)), len(x), in_one, by_torch)

    def widened(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """With a 16-bit weight."""
        data = weight.parts["data"]
        by_torch = partial(tiled, x, data, bias)
        if not self._on.compiles or len(x) > FEW:
            return by_torch()
        return self._chosen((weight.spec.scheme,), len(x), lambda kernels: kernels.of_halves(x, data, bias), by_torch)

    @property
    def is_slow(self) -> bool:
        """Whether a kind of weight that kernels are for is multiplied by torch's operations."""
        return bool(self.broken) or any(self.declined.values())

    def announcements(self) -> list[str]:
        """What failed since the last call."""
        pending, self._pending = self._pending, []
        return pending

    def _chosen(self, kind: tuple[object, ...], tokens: int, in_one: Callable[[ModuleType], torch.Tensor], by_torch: Run) -> torch.Tensor:
        """`kind` of weight by so many tokens, of which those are alike that are multiplied by one compiled kernel."""
        known = *kind, min(2 * FEW, 1 << (tokens - 1).bit_length())
        if self.broken or self.declined.get(known):
            return by_torch()
        try:
            found = in_one(_kernels())
            if known in self.declined:
                return found
            out = by_torch()
            is_close = bool(((found - out).abs().max() <= CLOSE * out.abs().max()).item())
        except torch.OutOfMemoryError:  # says nothing of kernels; torch's way may need less, or says so
            return by_torch()
        except Exception as error:  # whatever a compiler or its absence raises, for this shape or any, there is another way
            self.broken = _reason(error)
            self._say(f"the GPU multiplies weights by several kernels each: {self.broken}")
            return by_torch()
        self.declined[known] = "" if is_close else OTHERS
        if not is_close:
            self._say(f"the GPU multiplies {'-'.join(map(str, kind[:2]))} weights by several kernels each: {OTHERS}")
        return found if is_close else out  # what all later products of this kind give

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._pending.append(line)


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "Triton is not installed (pip install 'effllm[cuda]')"
    if isinstance(error, subprocess.CalledProcessError | OSError):
        return "Triton cannot compile here: it needs a C compiler, Python's headers and a cache folder"
    return (str(error) or type(error).__name__).splitlines()[0]


def tiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x float32 [T, K] times a weight [N, K] of any type transposed, by tiles of rows, so that no float32 copy of it is ever held whole."""
    rows = max(1, TILE // weight.shape[1])
    out = torch.empty(len(x), len(weight), device=x.device)
    for begin in range(0, len(weight), rows):
        out[:, begin : begin + rows] = x @ weight[begin : begin + rows].float().T
    return out if bias is None else out.add_(bias)


def _kernels() -> ModuleType:
    from . import stored_product

    return stored_product
