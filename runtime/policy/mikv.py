"""MiKV's score (Yang et al., 2024, "No Token Left Behind"): the attention that a page's tokens gathered, all added up.

There it decides token by token which keys and values stay in more bits; here page by page, because pages are the format.
"""

from __future__ import annotations

import numpy as np

from .keep import Policy
from .salient import Salient


def score(attention: np.ndarray) -> float:
    """Attention [layers, KV heads, blocks] added up over a page's tokens, the mean over layers and heads."""
    return float(attention.sum(2, dtype=np.float64).mean())


def policy(share: float) -> Policy:
    """The pages of the highest scores so far get more bits."""
    return Salient(score, share)
