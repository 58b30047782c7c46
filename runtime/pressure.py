"""Whether the system takes this process's memory away while it runs, and what is done about it.

A plan that fitted when it was made need not fit for ever: another program grows, or a budget was more than the machine has. Then parts of
the process are swapped out, or its files are dropped and read again, and every token waits for that. What the system counts is looked at
about once a second. Where pages of the KV cache may lie on the disk, half of those in memory go there, in order and past the file cache,
which costs less than what the system picks; else it is said once, with what to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..offload import hardware
from ..offload.size import format_size
from .cache import KVCache

EVERY_S = 1.0
SWAPPED_NBYTES = 16 << 20  # more than this since the last look
FAULTS = 200  # reads of a page that was in memory before, in a look


class Watch:
    """One process. `mapped`: its weights are a mapped file, whose pages are read in by faults always."""

    def __init__(self, mapped: bool = False, root: Path = hardware.ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        self._mapped, self._root, self._clock = mapped, root, clock
        self._next, self._last = 0.0, (0, 0)
        self._said: list[str] = []
        self._told = self._seen = False

    def look(self, cache: KVCache) -> None:
        """Look if it is time, and act."""
        if (now := self._clock()) < self._next:
            return
        self._next = now + EVERY_S
        (swapped, faults), before = (found := hardware.memory_lost(self._root)), self._last
        self._last = found
        if not self._seen:  # what happened before the first look is the start of the program
            self._seen = True
            return
        more = swapped - before[0]
        if more > SWAPPED_NBYTES or (faults - before[1] > FAULTS and not self._mapped):
            what = f"swaps {format_size(more)} of this process out" if more > SWAPPED_NBYTES else "reads this process from the disk again"
            self._act(cache, f"memory is short: the system {what}")

    def _act(self, cache: KVCache, why: str) -> None:
        freed = cache.shed()
        if freed:
            self._said.append(f"{why}; {format_size(freed)} of the KV cache went to the disk instead")
        elif not self._told:
            self._told = True
            self._said.append(f"{why} (--ram SIZE plans with less)")

    def announcements(self) -> list[str]:
        """What was done since the last call."""
        said, self._said = self._said, []
        return said
