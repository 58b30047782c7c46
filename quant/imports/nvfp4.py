"""NVFP4: sixteen levels of E2M1, 16 of which share a float of eight bits (E4M3), under one float32 for a matrix. Pure functions of arrays.

`codebooks.MXFP` holds the levels doubled, as whole numbers, so a row's scale is half of the matrix's.
"""

from __future__ import annotations

import numpy as np

from ..codebooks import E4M3, MXFP
from ..codes import Codes
from ..spec import QuantSpec
from .mxfp4 import unpack_pairs

GROUP = 16
SPEC = QuantSpec(4, GROUP, "nvfp")
SIGN = np.uint8(0x80)


def matrix_scale(divisor: np.ndarray | None, factor: np.ndarray | None) -> np.float32:
    """What all of a matrix is multiplied by, of a float32 that it is divided by, as compressed-tensors has it, or multiplied, as ModelOpt.
    Raises ValueError where it is not one number that can be."""
    given = divisor if factor is None else factor
    if given is None or given.size != 1:
        raise ValueError(f"a scale of shape {None if given is None else given.shape}, expected one for the weight")
    with np.errstate(divide="ignore", over="ignore"):
        scale = np.float32(1) / given.reshape(-1)[0] if factor is None else np.float32(given.reshape(-1)[0])
    if not np.isfinite(scale):
        raise ValueError("the scale of the weight is NaN, zero or infinity")
    return np.float32(scale)


def check(packed: np.ndarray, scales: np.ndarray) -> None:
    """Raises ValueError where codes uint8 [N, K / 2] and scales uint8 [N, K / 16] do not fit one another, or a scale is NaN."""
    if packed.dtype != np.uint8 or scales.dtype != np.uint8 or scales.shape != (len(packed), packed.shape[1] * 2 // GROUP) or (
            packed.shape[1] * 2 % GROUP):
        raise ValueError(f"scales {scales.shape} of {scales.dtype} for codes {packed.shape} of {packed.dtype}")
    if ((scales & ~SIGN) == ~SIGN).any():
        raise ValueError("a scale is NaN")


def packable(packed: np.ndarray, scales: np.ndarray, scale: np.float32) -> Codes:
    """Codes, two neighbours in a byte, and scales -> what SPEC holds. Raises ValueError, see `check`."""
    check(packed, scales)
    return Codes(unpack_pairs(packed), scales.view(np.int8), None, np.full(len(packed), scale / 2, np.float32), MXFP)


def dequantize(packed: np.ndarray, scales: np.ndarray, scale: np.float32) -> np.ndarray:
    """float32 [N, K], of which only the product with `scale` is rounded. Raises ValueError, see `check`."""
    check(packed, scales)
    return MXFP.astype(np.float32)[unpack_pairs(packed)] * np.repeat(E4M3[scales], GROUP, axis=1) * (scale / np.float32(2))
