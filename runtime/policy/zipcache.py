"""ZipCache's score (He et al., 2024): attention from a few probe tokens, as the mean over those that could see a token at all.

Sums over all queries, as MiKV takes them, favour tokens that came early, because more queries saw them. Probes that all see the whole
page (`attention_probes.py`) are that mean. A page counts as its most salient 16 tokens, so that one sentence that matters is not
lost among others.
"""

from __future__ import annotations

import numpy as np

from .keep import Policy
from .salient import Salient


def score(attention: np.ndarray) -> float:
    """Attention [layers, KV heads, blocks]: of a page's most salient block, the mean over layers and heads."""
    return float(attention.max(2).mean(dtype=np.float64))


def policy(share: float) -> Policy:
    """The pages of the highest scores so far get more bits."""
    return Salient(score, share)
