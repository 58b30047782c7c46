"""What happens to pages that leave the exact window: one file a policy, one line here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ... import UsageError
from . import mikv, zipcache
from .keep import Keep, Policy
from .salient import Salient

SCORES: dict[str, Callable[[np.ndarray], float]] = {"mikv": mikv.score, "zipcache": zipcache.score}


def open_policy(name: str, share: float) -> Policy:
    """The policy `--kv 4bit+NAME` asks for; "" keeps every page alike. `share`: of pages that may keep more bits. Raises UsageError."""
    if not name:
        return Keep()
    if name not in SCORES:
        raise UsageError(f"--kv …+{name}: there is no such policy", f"+{' or +'.join(SCORES)}")
    return Salient(SCORES[name], share)
