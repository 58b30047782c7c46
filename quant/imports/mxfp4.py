"""MXFP4 (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf): sixteen levels of E2M1, 32 of which share
a power of two. Pure functions of arrays.

`codebooks.MXFP` holds the levels doubled, as whole numbers. A scale is E8M0, 2**(code - 127); 255 is NaN.
"""

from __future__ import annotations

import numpy as np

from ..codebooks import MXFP
from ..spec import QuantSpec

GROUP, GROUP_NBYTES = 32, 16
SPEC = QuantSpec(4, GROUP, "mxfp")
NOT_A_NUMBER = 255


def unpack_pairs(blocks: np.ndarray) -> np.ndarray:
    """Codes as checkpoint folders hold them, uint8 [..., 16] -> uint8 [..., 32]: neighbours share a byte, the first in its low half."""
    out = np.empty((*blocks.shape[:-1], 2 * blocks.shape[-1]), np.uint8)
    np.bitwise_and(blocks, np.uint8(15), out=out[..., ::2])
    np.right_shift(blocks, np.uint8(4), out=out[..., 1::2])
    return out


def check_scales(scales: np.ndarray) -> None:
    """Raises ValueError where one is NaN."""
    if (scales == NOT_A_NUMBER).any():
        raise ValueError("a scale is NaN")


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 codes [N, K] and scales [N, K / 32] -> float32 [N, K], exactly; every value is one that bfloat16 holds, too.

    Raises ValueError where they do not fit one another, or a scale is NaN.
    """
    n, k = codes.shape
    if scales.shape != (n, k // GROUP) or k % GROUP:
        raise ValueError(f"codes {codes.shape} and scales {scales.shape}")
    check_scales(scales)
    doubled = MXFP.astype(np.float32)[codes].reshape(n, -1, GROUP)
    with np.errstate(over="ignore"):  # the largest scales are beyond float32: infinity, which whoever runs the model finds
        return np.ldexp(doubled, scales[:, :, None].astype(np.int32) - 128).reshape(n, k)
