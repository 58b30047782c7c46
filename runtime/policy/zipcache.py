"""ZipCache's score (He et al., 2024): attention from a few probe tokens, averaged over those that could see a token at all.

Sums over all queries, as in MiKV, favour early tokens, because more queries see them. Probes that all see the whole page
(`attention_probes.py`) give that average directly. A page scores as its most salient 16 tokens, so that one sentence that matters is not
lost among others.
"""

from __future__ import annotations

import numpy as np

from .keep import Policy
from .salient import Salient


def score(attention: np.ndarray) -> float:
    """Attention [layers, KV heads, blocks] of a page's most salient block, averaged over layers and heads."""
    return float(attention.max(2).mean(dtype=np.float64))


def policy(share: float) -> Policy:
    """The highest-scoring pages so far get more bits."""
    return Salient(score, share)
