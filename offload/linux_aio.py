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
    """A read of `nbytes` at `offset` of an O_DIRECT descriptor into memory at `address`; all three in whole blocks."""

    descriptor: int
    address: int
    offset: int
    nbytes: int


class AioQueue:
    """An AIO context with at most `max_reads` reads in flight."""

    def __init__(self, max_reads: int) -> None:
        """Raises OSError where AIO is not available."""
        if sys.platform != "linux" or platform.machine() not in CALLS or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._setup, self._destroy, self._submit, self._collect = CALLS[platform.machine()]
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype, self._syscall.argtypes = ctypes.c_long, [ctypes.c_long] * 6
        context = ctypes.c_ulong(0)
        self._call(self._setup, max_reads, ctypes.addressof(context))
        self._context = context.value
        self._control_blocks, self._events = np.zeros((max_reads, BLOCK_COLUMNS), np.int64), np.zeros((max_reads, EVENT_COLUMNS), np.int64)
        self._control_blocks[:, DATA] = range(max_reads)
        self._blocks_address = self._control_blocks.ctypes.data
        self._timeout = np.zeros(2, np.int64)  # seconds, nanoseconds
        self._collect_args = self._events.ctypes.data, self._timeout.ctypes.data
        self._free_slots, self._tags = list(range(max_reads)), {}

    @property
    def in_flight(self) -> Collection[object]:
        """The tags of reads that have not been collected yet."""
        return self._tags.values()

    def submit(self, reads: Sequence[tuple[object, AioRead]]) -> int:
        """Submit reads, each with the tag that `collect` returns; returns how many were accepted (a prefix)."""
        reads = reads[: len(self._free_slots)]
        if not reads:
            return 0
        slots = self._free_slots[-len(reads) :]
        self._control_blocks[slots, DESCRIPTOR : OFFSET + 1] = [
            (read.descriptor << 32, read.address, read.nbytes, read.offset) for _, read in reads]
        addresses = self._blocks_address + 8 * BLOCK_COLUMNS * np.array(slots, np.int64)
        try:
            num_accepted = self._call(self._submit, self._context, len(reads), addresses.ctypes.data)
        except OSError:  # the very first was refused: the fallback reader reports why
            return 0
        del self._free_slots[-len(reads) :]
        self._free_slots += slots[num_accepted:]
        self._tags.update((slot, tag) for slot, (tag, _) in zip(slots[:num_accepted], reads))
        return num_accepted

    def collect(self, min_completed: int = 0, timeout_s: float = 0.0) -> list[tuple[object, int]]:
        """Wait at most `timeout_s` for at least `min_completed` reads to complete.

        Returns (tag, bytes read or a negative errno) of all that completed since the last call."""
        self._timeout[:] = divmod(int(1e9 * timeout_s), 10**9)
        try:
            count = self._call(self._collect, self._context, min(min_completed, len(self._tags)), len(self._events), *self._collect_args)
        except InterruptedError:
            return []
        completed = self._events[:count, [DATA, RESULT]].tolist()
        self._free_slots += [slot for slot, _ in completed]
        return [(self._tags.pop(slot), result) for slot, result in completed]

    def close(self) -> None:
        """Destroy the context, unless a read hangs: the kernel would wait for it, so it is left to process exit."""
        if not self._tags:
            self._call(self._destroy, self._context)

    def _call(self, number: int, *arguments: int) -> int:
        result = self._syscall(number, *arguments, *[0] * (5 - len(arguments)))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result
