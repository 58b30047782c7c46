"""MiKV's score (Yang et al., 2024, "No Token Left Behind"): the accumulated attention to a page's tokens.

MiKV decides per token which keys and values keep more bits; here it is per page, because pages are the format.
"""

from __future__ import annotations

import numpy as np

from .keep import Policy
from .salient import Salient


def score(attention: np.ndarray) -> float:
    """Attention [layers, KV heads, blocks], summed over a page and averaged over layers and heads."""
    return float(attention.sum(2, dtype=np.float64).mean())


def policy(share: float) -> Policy:
    """The highest-scoring pages so far get more bits."""
    return Salient(score, share)
