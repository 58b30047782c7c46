"""The meaning of a gated short convolution, in NumPy and float64.

T tokens, C channels: gates b of what goes in and c of what comes out, x itself.
"""

from __future__ import annotations

import numpy as np


def mix(b: np.ndarray, c: np.ndarray, x: np.ndarray, before: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """c times the causal convolution of b * x [T, C] behind `before` [taps - 1, C]: weight [taps, C], the last of the token itself."""
    taps, whole = len(weight), np.concatenate([before, b.astype(np.float64) * x])
    return c * sum(weight[tap] * whole[tap : tap + len(x)] for tap in range(taps))
