"""Memory pressure: detecting that the system is reclaiming this process's memory, and shedding what can be re-read.

A plan that fitted when it was made may not fit forever: another program grows, or the budget exceeded the machine. Then parts of the
process are swapped out, or its files are dropped and read again, and every token waits for that; without swap, as in most containers, there
is next to no such phase before the process is killed. So available memory is checked too, about once a second. Under pressure, half of what
can be re-read is released: KV pages that may be spilled (read in order, bypassing the page cache), and experts that come from disk anyway.
If nothing can be released, a notice says so once, with the remedy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ... import EffllmError
from ...offload import hardware
from ...offload.size import format_size
from ..cache import KVCache

CHECK_INTERVAL_S = 1.0
MAX_SWAPPED_NBYTES = 16 << 20  # newly swapped between checks; more is pressure
MAX_FAULTS = 200  # major page faults between checks; more are pressure
LOW_NBYTES = 32 << 20  # less free memory is pressure
FALLING_SHARE = 0.75  # low memory is acted upon again once it falls below this share of what was free the last time


class MemoryMonitor:
    """Monitors this process.

    mapped: its weights are memory-mapped, so page faults are normal
    shed:   releases half of the weights that are read on demand, and returns the bytes released"""

    def __init__(self, mapped: bool = False, root: Path = hardware.ROOT, clock: Callable[[], float] = time.monotonic,
                 shed: Callable[[], int] = lambda: 0) -> None:
        self._mapped, self._root, self._clock, self._shed = mapped, root, clock, shed
        self._next, self._last = 0.0, (0, 0)
        self._free_when_acted: int | None = None  # free bytes when it was last acted upon, while memory is low
        self._announcements: list[str] = []
        self._has_warned = self._has_baseline = False

    def look(self, cache: KVCache) -> None:
        """Check if it is due, and act."""
        if (now := self._clock()) < self._next:
            return
        self._next = now + CHECK_INTERVAL_S
        (swapped, faults), before = (found := hardware.memory_lost(self._root)), self._last
        self._last = found
        if not self._has_baseline:  # faults before the first check belong to start-up
            self._has_baseline = True
            return
        free, low = hardware.memory_available(self._root), self._free_when_acted
        if free >= LOW_NBYTES:
            self._free_when_acted = None
        elif low is None or free < FALLING_SHARE * low:
            self._free_when_acted = free
            self._act(cache, f"memory is short: {format_size(free)} are free")
            return
        newly_swapped = swapped - before[0]
        if newly_swapped > MAX_SWAPPED_NBYTES or (faults - before[1] > MAX_FAULTS and not self._mapped):
            swaps = newly_swapped > MAX_SWAPPED_NBYTES
            action = f"swaps {format_size(newly_swapped)} of this process out" if swaps else "is reading this process from disk again"
            self._act(cache, f"memory is short: the system {action}")

    def _act(self, cache: KVCache, why: str) -> None:
        try:
            pages = cache.shed()
        except EffllmError as error:  # it can continue as it is, as long as the system allows
            pages, why = 0, f"{why}, and the KV cache cannot be moved: {error.message}"
        weights = self._shed()
        released = [f"{format_size(pages)} of the KV cache were moved to disk"] if pages else []
        released += [f"{format_size(weights)} of experts were released and are read again on demand"] if weights else []
        if released:
            self._announcements.append("; ".join([why, *released]))
        elif not self._has_warned:
            self._has_warned = True
            self._announcements.append(f"{why} (--ram SIZE plans with less)")

    def announcements(self) -> list[str]:
        """What was done since the last call."""
        announcements, self._announcements = self._announcements, []
        return announcements
