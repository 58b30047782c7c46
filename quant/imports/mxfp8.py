"""MXFP8 (OCP microscaling formats): floats of eight bits (E4M3), 32 of which share a power of two. Pure functions of arrays.

A scale is E8M0 as of MXFP4, 2**(code - 127). A value has four bits, so bfloat16 holds all of them.
"""

from __future__ import annotations

import numpy as np

from ..codebooks import E4M3
from .fp8 import powers_of_two
from .mxfp4 import check_scales

GROUP = 32


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 codes [N, K] and scales [N, K / 32] -> float32 [N, K], exactly. Raises ValueError where they do not fit one another, or a scale
    is NaN."""
    n, k = codes.shape
    if scales.shape != (n, k // GROUP) or k % GROUP:
        raise ValueError(f"codes {codes.shape} and scales {scales.shape}")
    check_scales(scales)
    with np.errstate(over="ignore"):  # the largest scales are beyond float32: infinity, which whoever runs the model finds
        return E4M3[codes] * np.repeat(powers_of_two(scales), GROUP, axis=1)
