"""The policy interface, its budget, and the default, which treats all pages alike."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Protocol

import numpy as np


class Action(Enum):
    """Which of a cache's two codecs packs a page. With a single codec, as without `--kv …+NAME`, both mean that one."""

    MORE = "more bits"
    FEWER = "fewer bits"


@dataclass(frozen=True)
class PageStats:
    """What a policy may know of a page."""

    page: int  # index
    first: int  # first position
    count: int  # tokens
    # With `Policy.probes`: attention that later tokens paid to the page, float32 [layers, KV heads, blocks of 16 tokens], see
    # `attention_probes.py`.
    attention: np.ndarray | None = None


class Policy(Protocol):
    """Decides once per page, in position order, when the page leaves the exact window. After the cache was truncated a page may come again;
    decisions on it and later ones are then void.

    The budget is the share that a policy is created with: of the pages so far, `max_upgraded` may have more bits, and the plan allocated
    memory for no more. The cache enforces it: beyond the budget MORE is taken as FEWER. So a policy may judge a page by itself and leave
    the counting to the cache; one that would rather save the bits for a later page has to count.

    `probes`: whether it uses attention, for which queries are kept and scores computed."""

    probes: bool

    def act(self, stats: PageStats) -> Action:
        """The codec for a page."""
        ...


def max_upgraded(share: float, pages: int) -> int:
    """How many of the first `pages` may have more bits."""
    return ceil(share * pages)


class Keep:
    """All pages alike, for a cache with one codec."""

    probes = False

    def act(self, stats: PageStats) -> Action:
        return Action.FEWER
