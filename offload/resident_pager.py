"""Resident weights, handed out by lease.

A group (a layer, or what surrounds the layers) is one anonymous mapping with its tensors 64-byte aligned. Groups of 2 MiB and more are
aligned to huge pages and madvised: decode reads every weight once per token, and 4 KiB pages would cost a TLB miss per page. A group's tail
stays on small pages, so `nbytes` is what the group costs. Reads are 4 MiB each from a few threads, which suits NVMe disks and cold page
caches. `mmap=True` maps the files instead: an instant start and pages shared between processes, but small pages, and truncating a file in
use kills the process.
"""

from __future__ import annotations

import mmap as maps
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .checkpoint import TensorInfo, TensorStore
from .memory import anonymous

if TYPE_CHECKING:
    from .direct_io import Reader, ReadStats

ALIGNMENT = 64
READ_THREADS = 4


class ResidentPager:
    """All groups in memory after `load()`; `lease(key)` gives a group's tensors as raw bytes by name.

    The store must stay open until `load()` has ended. Leased views keep their memory alive even past `close()`."""

    resident = True  # all of it is in memory
    stays = True  # leased memory stays valid after the lease

    def __init__(self, store: TensorStore, groups: Mapping[Hashable, Sequence[TensorInfo]], mmap: bool = False) -> None:
        self._store = store
        self._groups = {key: tuple(infos) for key, infos in groups.items()}
        self._own = unshared(self._groups)
        self._mmap = mmap
        self._leases: dict[Hashable, dict[str, np.ndarray]] = {}
        self._loaded = False
        self._read_nbytes = 0
        # Bytes of memory that load() takes (with mmap: bytes of the files that a token touches).
        if mmap:
            self.nbytes = sum(info.nbytes for infos in self._own.values() for info in infos)
        else:
            self.nbytes = sum(map(resident_nbytes, self._own.values()))

    def load(self) -> Iterator[tuple[int, int]]:
        """Load every group, yielding (bytes done, bytes total); raises CheckpointError if a file changes meanwhile."""
        for done, total in self._map() if self._mmap else self._read():
            self._read_nbytes = done
            yield done, total
        self._store.check_unchanged()
        self._loaded = True

    def lease(self, key: Hashable) -> AbstractContextManager[Mapping[str, np.ndarray]]:
        """The group's tensors as read-only uint8 arrays, for a `with` block."""
        if not self._loaded:
            raise RuntimeError("lease() before load() has ended, or after close()")
        return nullcontext(self._leases[key])

    def release(self, key: Hashable) -> None:
        """Drop one group (its bytes moved to another device); the memory is freed with its last view."""
        del self._leases[key]

    def shed(self) -> int:
        """Bytes released under memory pressure: none, since nothing can be re-read."""
        return 0

    def announcements(self) -> list[str]:
        """Fallbacks since the last call: none."""
        return []

    @property
    def disk_nbytes(self) -> int:
        """Bytes read so far; for mapped files, the bytes touched."""
        return self._read_nbytes

    @property
    def busy_s(self) -> float:
        """Seconds of disk activity during passes: none."""
        return 0.0

    @property
    def wait_s(self) -> float:
        """Seconds that passes have waited for the disk: none."""
        return 0.0

    def resident_arrays(self) -> Iterator[np.ndarray]:
        """Tensors that are certain to be in memory: none of a mapped file."""
        if not self._mmap:
            yield from (array for group in self._leases.values() for array in group.values())

    def close(self) -> None:
        self._leases, self._loaded = {}, False

    def _read(self) -> Iterator[tuple[int, int]]:
        chunks: list[tuple[Callable[[], None], int]] = []
        views: dict[str, np.ndarray] = {}
        for infos in self._own.values():
            buffer, begin = anonymous(_group_nbytes(infos)), 0
            for info in infos:
                views[info.name] = view = buffer[begin : begin + info.nbytes]
                chunks += self._store.reads(info, view)
                begin += _round_up(info.nbytes, ALIGNMENT)
        self._leases = {key: {info.name: views[info.name] for info in infos} for key, infos in self._groups.items()}
        done, total = 0, sum(nbytes for _, nbytes in chunks)
        yield done, total
        with ThreadPoolExecutor(READ_THREADS, "effllm-read") as pool:
            try:
                reads = {pool.submit(read): nbytes for read, nbytes in chunks}
                for read in as_completed(reads):
                    read.result()
                    done += reads[read]
                    yield done, total
            finally:
                # Also reached when the consumer of progress stops iterating or one read fails: the rest need not be read.
                pool.shutdown(cancel_futures=True)

    def _map(self) -> Iterator[tuple[int, int]]:
        total = self.nbytes
        yield 0, total
        # Before mapping: a view past the end of a truncated file would raise SIGBUS, not an error.
        self._store.check_unchanged()
        # Private and writable, though nobody writes: a read-only array is another type to a compiled kernel.
        used = {info.file for infos in self._groups.values() for info in infos if info.nbytes}
        mapped = {file: np.frombuffer(maps.mmap(self._store.descriptor(file), 0, access=maps.ACCESS_COPY), np.uint8) for file in used}
        views = {info.name: self._mapped_view(info, mapped) for infos in self._own.values() for info in infos}
        self._leases = {key: {info.name: views[info.name] for info in infos} for key, infos in self._groups.items()}
        yield total, total

    def _mapped_view(self, info: TensorInfo, mapped: Mapping[Path, np.ndarray]) -> np.ndarray:
        if info.nbytes == 0:
            return np.empty(0, np.uint8)
        # A header of odd length misaligns the elements; such a tensor is copied.
        if info.offset % 8:
            copy = anonymous(info.nbytes)
            self._store.read_into(info, copy)
            return copy
        return mapped[info.file][info.offset : info.offset + info.nbytes]


def unshared(groups: Mapping[Hashable, Sequence[TensorInfo]]) -> dict[Hashable, tuple[TensorInfo, ...]]:
    """Groups without tensors that an earlier group has too (shared layers), which are in memory once."""
    seen: set[str] = set()
    made: dict[Hashable, tuple[TensorInfo, ...]] = {}
    for key, infos in groups.items():
        made[key] = tuple(info for info in infos if info.name not in seen)
        seen.update(info.name for info in infos)
    return made


def resident_nbytes(infos: Sequence[TensorInfo]) -> int:
    """Bytes of memory that a group takes."""
    return _round_up(_group_nbytes(infos), maps.PAGESIZE)


def _group_nbytes(infos: Sequence[TensorInfo]) -> int:
    return sum(_round_up(info.nbytes, ALIGNMENT) for info in infos)


def _round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


class ReadingPager:
    """Base of pagers that keep reading after `load()`: I/O counters, including those of the pager of all other weights."""

    _reader: Reader
    _rest: ResidentPager | ReadingPager

    def shed(self) -> int:
        """Bytes released under memory pressure: none, since each part has a fixed place."""
        return 0

    @property
    def traffic(self) -> ReadStats:
        """This pager's own I/O counters."""
        return self._reader.traffic

    @property
    def disk_nbytes(self) -> int:
        """Bytes read so far, both pagers."""
        return self._reader.traffic.nbytes + self._rest.disk_nbytes

    @property
    def busy_s(self) -> float:
        """Seconds of disk activity; time during which both read counts twice."""
        return self._reader.traffic.busy_s + self._rest.busy_s

    @property
    def wait_s(self) -> float:
        """Seconds that passes have waited for the disk."""
        return self._reader.traffic.wait_s + self._rest.wait_s

    def announcements(self) -> list[str]:
        """Fallbacks since the last call, without duplicates for files that both read."""
        return [*dict.fromkeys([*self._rest.announcements(), *self._reader.announcements()])]
