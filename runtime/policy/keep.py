"""What a policy is asked and may see, its budget, and the default, which makes no difference between pages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Protocol

import numpy as np


class Action(Enum):
    """Which of a cache's two codecs packs a page. Where there is one, as without `--kv …+NAME`, both answers mean that one."""

    MORE = "more bits"
    FEWER = "fewer bits"


@dataclass(frozen=True)
class PageStats:
    """What a policy may look at: the page's index, first position and tokens, and where `Policy.probes` asks for it the attention that
    later tokens paid to it, float32 [layers, KV heads, blocks of 16 tokens] (`attention_probes.py`)."""

    page: int
    first: int
    count: int
    attention: np.ndarray | None = None


class Policy(Protocol):
    """One question per page that leaves the exact window, asked in position order. A page that was asked about before comes again where
    the cache went back to it; what was said of it and of later ones is void then.

    The budget is the share with which a policy is made: of the pages so far, `max_upgraded` may have more bits, and the plan counted
    the memory of no more. The cache holds to it whatever is answered: beyond it MORE is taken as FEWER. So a policy may answer by a page
    alone and leave the counting to the cache; one that would rather give a later page the bits has to count.

    `probes`: whether it looks at attention, for which queries are kept and scores computed.
    """

    probes: bool

    def act(self, stats: PageStats) -> Action: ...


def max_upgraded(share: float, pages: int) -> int:
    """How many of the first `pages` may have more bits."""
    return ceil(share * pages)


class Keep:
    """All pages alike: the policy of a cache with one codec."""

    probes = False

    def act(self, stats: PageStats) -> Action:
        return Action.FEWER
