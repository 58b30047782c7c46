"""The default policy: every page that leaves the exact window is kept, at the codec's bits. And what every policy is asked, and may see."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np


class Action(Enum):
    """What happens to a page. A policy may only answer what the cache can do: `FEWER` where it has a second codec."""

    KEEP = "keep"
    FEWER = "fewer bits"


@dataclass(frozen=True)
class PageStats:
    """What a policy may look at: the page's index, first position and tokens, and where `Policy.probes` asks for it the attention that
    later tokens paid to it, float32 [layers, KV heads, blocks of 16 tokens] (`cache_probes.py`)."""

    page: int
    first: int
    count: int
    attention: np.ndarray | None = None


class Policy(Protocol):
    """A score and a budget, reduced to one question per page, asked in position order. A page that was asked about before comes again
    where the cache went back to it; what was said of it and of later ones is void then."""

    probes: bool

    def act(self, stats: PageStats) -> Action: ...


class Keep:
    """Forgets nothing."""

    probes = False

    def act(self, stats: PageStats) -> Action:
        return Action.KEEP
