"""Weight streaming: a fixed set of parts stays in memory, the rest is read from disk on every pass.

Parts are used in the same order on every pass. Streamed ones rotate through a ring, each always at the same address, so records prepared
for a part hold for every pass. Read-ahead continues past the end of a pass: the next one's first parts arrive while the head and the
sampler run. A part is read as soon as nothing still needed occupies its destination; a user waits for that part alone.

Reads cover whole blocks of the file, so a part takes slightly more memory than its bytes, and its tensors are aligned as in the file: to 64
bytes in a folder written by effllm, to their type everywhere, which the code that cuts parts ensures.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .checkpoint import TensorInfo, TensorStore
from .direct_io import BLOCK, READ_NBYTES, Job, Read, Reader
from .memory import anonymous
from .placement import Residency
from .read_ahead import ReadAhead
from .resident_pager import ReadingPager, ResidentPager, unshared

GAP = 64 << 10  # gaps up to this size are read along: a separate read costs as much
FETCH_NBYTES = 4 << 20  # buffer for unscheduled reads


@dataclass(frozen=True)
class Range:
    """A byte range of a file."""

    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Part:
    """A unit of streaming: byte ranges that are read and used together."""

    ranges: tuple[Range, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return lay_out(self.ranges)[1]

    @property
    def read_nbytes(self) -> int:
        """Bytes read from the file."""
        return self.nbytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor in it."""
        return tuple(own.nbytes for own in self.ranges)

    def laid_out(self, start: int = 0) -> tuple[list[_Extent], list[int]]:
        """What is read into memory from `start` on, and the offset of each tensor."""
        extents, _, places = lay_out(self.ranges, start)
        return extents, places

    def repack_jobs(self, memory: np.ndarray, places: Sequence[int], staging: object) -> list[Job]:
        """Further jobs to prepare it: none, it is used as it lies in the file."""
        return []


def same_parts(parts: Sequence[Part]) -> tuple[int, ...]:
    """For each part, the index of the first one with the same bytes."""
    found: dict[tuple[Range, ...], int] = {}
    return tuple(found.setdefault(part.ranges, index) for index, part in enumerate(parts))


@dataclass(frozen=True)
class _Extent:
    """Whole blocks of a file and their destination; only the first `needed` bytes must exist."""

    file: Path
    offset: int
    nbytes: int
    needed: int
    at: int


def lay_out(ranges: Sequence[Range], start: int = 0, gap: int = GAP) -> tuple[list[_Extent], int, list[int]]:
    """How to read `ranges` into memory from `start` (block-aligned): the extents, the bytes of memory, and the offset of each range. Gaps
    of up to `gap` bytes are read along; without a gap, a range takes no more than its bytes and two blocks."""
    extents: list[_Extent] = []
    places = [0] * len(ranges)
    at = start
    for index in sorted(range(len(ranges)), key=lambda i: (str(ranges[i].file), ranges[i].offset)):
        own = ranges[index]
        begin, end = own.offset // BLOCK * BLOCK, own.offset + own.nbytes
        last = extents[-1] if extents else None
        if last is not None and last.file == own.file and begin <= last.offset + last.nbytes + gap:
            needed = max(last.needed, end - last.offset)
            extents[-1] = last = _Extent(last.file, last.offset, -(-needed // BLOCK) * BLOCK, needed, last.at)
        else:
            last = _Extent(own.file, begin, -(-(end - begin) // BLOCK) * BLOCK, end - begin, at)
            extents.append(last)
        places[index] = last.at + own.offset - last.offset
        at = last.at + last.nbytes
    return extents, at - start, places


class Lease:
    """A streamed part for the duration of a `with` block; reusable on every pass."""

    def __init__(self, turns: ReadAhead, place: int) -> None:
        self._turns, self._place = turns, place

    def __enter__(self) -> None:
        self._turns.enter(self._place)

    def __exit__(self, *error: object) -> None:
        self._turns.leave()

    def join(self) -> bool:
        """Enter it in addition to those already entered, if that needs no wait and leaves the disk half of the ring. Returns whether it was
        entered."""
        return self._turns.join(self._place)


class StreamingPager(ReadingPager):
    """`always`: groups of tensors that stay whole, as in `ResidentPager`; `parts` in order of use, some of them pinned.

    `cancelled` is polled while waiting. The store must stay open until `close`."""

    resident = False
    stays = False  # leased memory may be overwritten after the lease
    reads_with: type[Reader] = Reader

    def __init__(self, store: TensorStore, always: Mapping[Hashable, Sequence[TensorInfo]], parts: Sequence[Part], residency: Residency,
                 cancelled: Callable[[], bool] = lambda: False, direct: bool = True) -> None:
        self._store, self._parts, self._residency = store, parts, residency
        self._rest = ResidentPager(store, always)
        self._reader = self.reads_with({file: store.descriptor(file) for file in store.files}, direct=direct)
        self._views: dict[int, tuple[np.ndarray, ...]] = {}
        self._pinned: list[np.ndarray] = []
        self._ring = anonymous(residency.ring_nbytes)
        self._spare: np.ndarray | None = None
        self._bounds: list[tuple[int, int]] = []  # memory range of each streamed part, by position in the order
        self._extents: list[list[_Extent]] = []
        at = 0
        for index in residency.streamed:
            nbytes = parts[index].nbytes
            if at + nbytes > residency.ring_nbytes:
                at = 0
            extents, _, places = lay_out(parts[index].ranges, at)
            self._extents.append(extents)
            self._bounds.append((at, at + nbytes))
            self._views[index] = views(self._ring, parts[index], places)
            at += nbytes
        self._turns = ReadAhead(self._reader, self._ask, cancelled, len(self._bounds))
        self._leases = {index: Lease(self._turns, place) for place, index in enumerate(residency.streamed)}
        self.nbytes = self._rest.nbytes + residency.nbytes + FETCH_NBYTES
        self.load_nbytes = sum(info.nbytes for infos in unshared(always).values() for info in infos) + residency.pinned_nbytes

    def resident_arrays(self) -> Iterator[np.ndarray]:
        """Pinned weights, which are certain to be in memory."""
        yield from self._pinned

    # -- what stays ------------------------------------------------------------------------------------------------------------

    def load(self) -> Iterator[tuple[int, int]]:
        """Load what stays, yielding (bytes done, bytes total); then start reading the first parts."""
        done, tickets = 0, []
        for done, _ in self._rest.load():
            yield done, self.load_nbytes
        try:
            same, held = same_parts(self._parts), dict[int, int]()
            for index in self._residency.pinned:
                if (first := held.setdefault(same[index], index)) != index:
                    self._views[index] = self._views[first]
                    continue
                extents, nbytes, places = lay_out(self._parts[index].ranges)
                memory = anonymous(nbytes)
                self._pinned.append(memory)
                self._views[index] = views(memory, self._parts[index], places)
                tickets.append((self._reader.submit(reads_of(extents, memory)), nbytes))
            for ticket, nbytes in tickets:
                self._turns.wait(ticket)
                done += nbytes
                yield done, self.load_nbytes
        finally:
            for ticket, _ in tickets:
                self._reader.drop(ticket)
        self._store.check_unchanged()
        self._turns.read_ahead()

    def lease(self, key: Hashable) -> AbstractContextManager[Mapping[str, np.ndarray]]:
        """The group's resident tensors, as uint8 arrays."""
        return self._rest.lease(key)

    # -- parts -----------------------------------------------------------------------------------------------------------------

    def part(self, index: int) -> tuple[tuple[np.ndarray, ...], Lease | None]:
        """The ranges of a part as uint8 arrays, and the lease during which they are valid (None: always)."""
        return self._views[index], self._leases.get(index)

    @contextmanager
    def fetch(self, ranges: Sequence[Range]) -> Iterator[list[np.ndarray]]:
        """Unscheduled bytes, valid until the next call. At most FETCH_NBYTES including two blocks per range, else ValueError."""
        if self._spare is None:
            self._spare = anonymous(FETCH_NBYTES)
        extents, nbytes, places = lay_out(ranges)
        if nbytes > FETCH_NBYTES:  # for rows close to each other, mostly the gaps between them
            extents, nbytes, places = lay_out(ranges, gap=0)
        if nbytes > FETCH_NBYTES:
            raise ValueError(f"{nbytes} bytes to fetch at once, at most {FETCH_NBYTES}")
        ticket = self._reader.submit(reads_of(extents, self._spare), urgent=True)
        try:
            self._turns.wait(ticket)
        except BaseException:
            self._reader.drop(ticket)
            if ticket.left:
                self._spare = None  # a read in flight still writes there
            raise
        yield [self._spare[place : place + own.nbytes] for place, own in zip(places, ranges, strict=True)]

    def check_unchanged(self) -> None:
        """Raises CheckpointError if a file was truncated or rewritten since its header was read."""
        self._store.check_unchanged()

    def _ask(self, place: int, taken: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], list[Read]] | None:
        """The memory [begin, end) for a streamed part and its reads, if nobody else's data occupies it."""
        begin, end = self._bounds[place]
        if any(begin < other_end and other < end for other, other_end in taken):
            return None
        return (begin, end), reads_of(self._extents[place], self._ring)

    def close(self) -> None:
        self._reader.close()
        self._rest.close()
        self._views, self._pinned = {}, []


def views(memory: np.ndarray, part: Part, places: Sequence[int]) -> tuple[np.ndarray, ...]:
    return tuple(memory[place : place + nbytes] for place, nbytes in zip(places, part.sizes, strict=True))


def reads_of(extents: Sequence[_Extent], memory: np.ndarray, most: int = READ_NBYTES) -> list[Read]:
    """Extents split into reads of at most `most` bytes."""
    view = memoryview(memory)
    return [Read(each.file, each.offset + begin, view[each.at + begin : each.at + min(begin + most, each.nbytes)],
                 min(most, each.needed - begin))
            for each in extents for begin in range(0, each.nbytes, most)]
