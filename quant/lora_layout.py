"""Memory layout of LoRA's thin matrices: column-major blocks, so that each block of a kernel's work is contiguous.

    into [r, K]     THIN_INPUTS inputs, of those strips of THIN_RANKS ranks, of those input by input
    out  [N, r]     strips of THIN_OUTPUTS outputs, of those rank by rank

The last block is as narrow as what is left, so a matrix takes no padding. `kernels/cpu/lora_loops.py` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..kernels.layout import LORA_BLOCK_INPUTS, LORA_BLOCK_OUTPUTS, LORA_BLOCK_RANKS
from .spec import QuantSpec
from .weight import Linear, Weight, from_f32, to_f32

NARROW = ("bf16", "f16")  # as which a matrix is kept where that loses nothing


@dataclass(frozen=True)
class LoraMatrix:
    """A raw matrix of this shape; `data` are its values in their stored type, in strips of `strip` rows of `span` columns."""

    scheme: str
    shape: tuple[int, int]
    data: np.ndarray
    strip: int
    span: int

    @classmethod
    def into(cls, values: np.ndarray, narrow: Sequence[str] = NARROW) -> LoraMatrix:
        """A matrix that leads into few numbers, float32 [r, K]; in two bytes a number where one of `narrow` says the same, else in four."""
        return _laid(values, LORA_BLOCK_RANKS, LORA_BLOCK_INPUTS, narrow)

    @classmethod
    def out(cls, values: np.ndarray, narrow: Sequence[str] = NARROW) -> LoraMatrix:
        """One that leads out of them, float32 [N, r]."""
        return _laid(values, LORA_BLOCK_OUTPUTS, values.shape[1], narrow)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @cached_property
    def address(self) -> int:
        return self.data.ctypes.data

    @cached_property
    def stored(self) -> np.ndarray:
        """The matrix in its stored type [rows, columns]: a copy."""
        made, at = np.empty(self.shape, self.data.dtype), 0
        for block in _blocks(made, self.strip, self.span):
            block.T[:] = self.data[at : at + block.size].reshape(block.shape[::-1])
            at += block.size
        return made

    def put(self, put: Callable[[np.ndarray, str], object]) -> Linear:
        """A product with it on a device that `put` brings arrays to, where the matrix lies by whole columns."""
        return Linear(Weight(QuantSpec.raw(self.scheme), self.shape, {"data": put(self.stored.T, self.scheme).T}))

    def to_f32(self) -> np.ndarray:
        """What it means, float32 [rows, columns]: a copy."""
        return to_f32(self.stored, self.scheme).copy()


@dataclass(frozen=True)
class LoraPair:
    """What one adapter adds to a product, out(s * into(x)): its number, and both matrices as a backend has them, `LoraMatrix` on the CPU
    and `Linear` on a device."""

    adapter: int
    into: object
    out: object


def _laid(values: np.ndarray, strip: int, span: int, narrow: Sequence[str]) -> LoraMatrix:
    values = np.asarray(values, np.float32)
    with np.errstate(over="ignore"):
        scheme = next((each for each in narrow if np.array_equal(to_f32(from_f32(values, each), each), values)), "f32")
    stored = from_f32(values, scheme)
    return LoraMatrix(scheme, values.shape, np.concatenate([block.T.reshape(-1) for block in _blocks(stored, strip, span)]), strip, span)


def _blocks(matrix: np.ndarray, strip: int, span: int) -> Iterator[np.ndarray]:
    """In the order in which they lie."""
    rows, columns = matrix.shape
    for begin in range(0, columns, span):
        for first in range(0, rows, strip):
            yield matrix[first : first + strip, begin : begin + span]
