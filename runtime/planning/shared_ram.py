"""Memory that processes share which hold a model each, for whoever decides which of them stay."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from ...offload import hardware
from ..prepare import RESERVE


def shared_ram(ram: int | None, pids: Iterable[int]) -> int:
    """Bytes that these processes may have together: of a budget of `ram`, what this process leaves; without one, what is free and what
    came free if they ended."""
    if ram is not None:
        return ram - hardware.rss()
    return hardware.memory_available() + sum(map(own_nbytes, pids)) - RESERVE


def own_nbytes(pid: int) -> int:
    """Bytes of a process that come free when it ends; files that it has in memory count as free already."""
    try:
        taken = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return max(0, taken.rss - getattr(taken, "shared", 0))
