"""The default policy: every page that leaves the exact window is kept, at the codec's bits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Action(Enum):
    """What happens to a page. A policy may only answer what the cache can do."""

    KEEP = "keep"


@dataclass(frozen=True)
class PageStats:
    """What a policy may look at: the page's index, first position and tokens."""

    page: int
    first: int
    count: int


class Policy(Protocol):
    """A score and a budget, reduced to one question per page."""

    def act(self, stats: PageStats) -> Action: ...


class Keep:
    """Forgets nothing."""

    def act(self, stats: PageStats) -> Action:
        return Action.KEEP
