"""Constant tables of the codebook formats: the values of codes and of scale codes.

Levels are Lloyd-Max centroids of a real model's weights and of Gaussian noise in groups of 16 under the scales below, rounded to
integers; with sixteen of them, having one at zero costs nothing. Steps are spaced so that the scale of most groups is represented within
4%. The lowest is zero, so a group of zeros is exact. Five bits per scale would gain 0.5 dB and cost what 0.4 dB is worth.
"""

from __future__ import annotations

import numpy as np

LEVELS = {
    4: (-64, -52, -41, -33, -25, -18, -11, -5, 0, 6, 13, 19, 27, 35, 45, 58),
    3: (-64, -39, -22, -8, 5, 18, 35, 59),
    2: (-64, -18, 17, 62),
}
MXFP = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # E2M1, doubled: what MXFP4's codes stand for
STEPS = (0, 24, 32, 38, 44, 50, 56, 62, 68, 74, 81, 88, 96, 105, 115, 127)


def _e4m3() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[(codes & 127) == 127] = np.nan
    return np.where(codes >= 128, -values, values).astype(np.float32)


E4M3 = _e4m3()  # float32 [256], what a float of eight bits is: no infinities, one NaN of either sign


def levels(bits: int) -> np.ndarray:
    """int8 [2**bits], ascending."""
    return np.array(LEVELS[bits], np.int8)


def steps() -> np.ndarray:
    """uint8 [16], ascending."""
    return np.array(STEPS, np.uint8)
