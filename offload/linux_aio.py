"""Linux native asynchronous I/O (io_submit): a batch of direct reads is submitted by one call and collected by another.

A reader thread wakes up for every read, and wakes late where kernels compute on all cores, so the disk waits for the threads. With
io_submit the kernel starts all reads at once and records completions by itself. Where it is missing or forbidden (a container's seccomp
filter), `AioQueue` raises OSError and threads read as before.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

# io_setup, io_destroy, io_submit, io_getevents, by architecture
CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
# Columns of a control block (iocb) as int64: the tag returned with its event, two zeros, (opcode, 0 for a read | descriptor << 32),
# buffer, bytes, offset; and of an event: tag, address of its control block, bytes read or a negative errno.
DATA, DESCRIPTOR, MEMORY, NBYTES, OFFSET, BLOCK_COLUMNS = 0, 2, 3, 4, 5, 8
EVENT_COLUMNS, RESULT = 4, 2


@dataclass(frozen=True)
class AioRead:
    """A read of `nbytes` at `offset` from an O_DIRECT descriptor to an address: whole blocks, all of them."""

    descriptor: int
    address: int
    offset: int
    nbytes: int


class AioQueue:
    """An AIO context with at most `most` reads in flight."""

    def __init__(self, most: int) -> None:
        """Raises OSError where AIO is not available."""
        if sys.platform != "linux" or platform.machine() not in CALLS or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._setup, self._destroy, self._submit, self._collect = CALLS[platform.machine()]
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype, self._syscall.argtypes = ctypes.c_long, [ctypes.c_long] * 6
        context = ctypes.c_ulong(0)
        self._call(self._setup, most, ctypes.addressof(context))
        self._context = context.value
        self._blocks, self._events = np.zeros((most, BLOCK_COLUMNS), np.int64), np.zeros((most, EVENT_COLUMNS), np.int64)
        self._blocks[:, DATA] = range(most)
        self._first = self._blocks.ctypes.data
        self._patience = np.zeros(2, np.int64)  # seconds, nanoseconds
        self._at = self._events.ctypes.data, self._patience.ctypes.data
        self._free, self._kept = list(range(most)), {}

    @property
    def under_way(self) -> Collection[object]:
        """The tags of reads that have not been collected yet."""
        return self._kept.values()

    def submit(self, reads: Sequence[tuple[object, AioRead]]) -> int:
        """Submit reads, each with the tag that `collect` returns; returns how many were accepted (a prefix)."""
        reads = reads[: len(self._free)]
        if not reads:
            return 0
        places = self._free[-len(reads) :]
        self._blocks[places, DESCRIPTOR : OFFSET + 1] = [(own.descriptor << 32, own.address, own.nbytes, own.offset) for _, own in reads]
        addresses = self._first + 8 * BLOCK_COLUMNS * np.array(places, np.int64)
        try:
            taken = self._call(self._submit, self._context, len(reads), addresses.ctypes.data)
        except OSError:  # the very first was refused: the fallback reader reports why
            return 0
        del self._free[-len(reads) :]
        self._free += places[taken:]
        self._kept.update((place, name) for place, (name, _) in zip(places[:taken], reads))
        return taken

    def collect(self, least: int = 0, patience_s: float = 0.0) -> list[tuple[object, int]]:
        """(tag, bytes read or a negative errno) of reads completed since the last call; waits for at least `least` of them, but no longer
        than `patience_s`."""
        self._patience[:] = divmod(int(1e9 * patience_s), 10**9)
        try:
            count = self._call(self._collect, self._context, min(least, len(self._kept)), len(self._events), *self._at)
        except InterruptedError:
            return []
        done = self._events[:count, [DATA, RESULT]].tolist()
        self._free += [place for place, _ in done]
        return [(self._kept.pop(place), result) for place, result in done]

    def close(self) -> None:
        """Destroy the context, unless a read hangs: the kernel would wait for it, so it is left to process exit."""
        if not self._kept:
            self._call(self._destroy, self._context)

    def _call(self, number: int, *arguments: int) -> int:
        result = self._syscall(number, *arguments, *[0] * (5 - len(arguments)))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result
