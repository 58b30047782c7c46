"""Memory shared by several model processes, for the router that decides which of them stay loaded."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from ...offload import hardware
from ..prepare import SYSTEM_RESERVE


def shared_ram(ram: int | None, pids: Iterable[int]) -> int:
    """Bytes that these processes may use together: of a budget of `ram`, what this process leaves; without one, free memory plus theirs."""
    if ram is not None:
        return ram - hardware.rss()
    return hardware.memory_available() + sum(map(reclaimable_nbytes, pids)) - SYSTEM_RESERVE


def reclaimable_nbytes(pid: int) -> int:
    """Bytes of a process that become free when it ends; mapped files already count as free."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return max(0, memory.rss - getattr(memory, "shared", 0))
