"""Group-quantized integers with a float scale and a zero point: what GPTQ, AWQ and compressed-tensors checkpoints hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..codes import Codes
from ..spec import GROUPS, QuantSpec
from ..weight import from_f32

BITS = (8, 4)  # that kernels multiply with such scales
SCALES = ("F16", "BF16", "F32")  # the last rounded to half precision, which moves a weight as little as widening it to that would
TOP = 15  # binary exponent of the largest scale of a row, in half precision


@dataclass(frozen=True)
class Groups:
    """codes uint8 [N, K]; zeros uint8 and scales float32 [N, G]; order int [K], the group of every input: w = scale * (code - zero)."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    order: np.ndarray

    def values(self) -> np.ndarray:
        """float32 [N, K]."""
        return self.scales[:, self.order] * (self.codes.astype(np.int16) - self.zeros.astype(np.int16)[:, self.order])


def spec_of(bits: int, dtype: str, depth: int, groups: int) -> QuantSpec | None:
    """The format that holds such a weight if its groups lie in order, exactly but for scales of 32 bits, None where there is none. A group
    longer than the longest is several with one scale."""
    if bits not in BITS or dtype not in SCALES or groups < 1 or depth % groups:
        return None
    fitting = [group for group in GROUPS["offset"] if depth // groups % group == 0]
    return QuantSpec(bits, max(fitting), "offset") if fitting else None


def in_order(order: np.ndarray, groups: int) -> bool:
    """Whether the groups of the inputs `order` [K] are contiguous (no activation reordering)."""
    return groups > 0 and len(order) % groups == 0 and np.array_equal(order, np.arange(len(order)) // (len(order) // groups))


def packable(held: Groups, spec: QuantSpec) -> Codes:
    """Groups in order -> codes of `spec`. Raises ValueError for a scale that is no number."""
    return Codes(held.codes, *factors(held.zeros, held.scales, held.codes.shape[1], spec))


def factors(zeros: np.ndarray, scales: np.ndarray, depth: int, spec: QuantSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Zero points and scales [N, G] of weights of `depth` inputs -> scales uint16 [N, depth / spec.group], as many zeros, rows float32 [N],
    as in `Codes`. Raises ValueError for a scale that is no number.

    Rows take a power of two: a row's largest scale comes near the top of half precision, so that bfloat16 scales lose nothing either,
    unless one is 2**32 times smaller than its row's largest.
    """
    if not np.isfinite(scales).all():
        raise ValueError("a scale is NaN or infinity")
    most = np.abs(scales).max(axis=1)
    powers = np.where(most > 0, np.frexp(most)[1] - TOP, 0)
    times = depth // scales.shape[1] // spec.group
    halves = from_f32(np.ldexp(scales, -powers[:, None]), "f16")
    return np.repeat(halves, times, axis=1), np.repeat(zeros, times, axis=1), np.ldexp(np.float32(1), powers).astype(np.float32)
