"""Reference for a gated short convolution, in NumPy and float64.

T tokens, C channels: input gates b, output gates c, and the values x.
"""

from __future__ import annotations

import numpy as np


def mix(b: np.ndarray, c: np.ndarray, x: np.ndarray, before: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """c times the causal convolution of b * x [T, C], following `before` [taps - 1, C]: weight [taps, C], the last tap for the token
    itself."""
    taps, inputs = len(weight), np.concatenate([before, b.astype(np.float64) * x])
    return c * sum(weight[tap] * inputs[tap : tap + len(x)] for tap in range(taps))
