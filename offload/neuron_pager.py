"""On-demand neurons of sparse MLPs: read from disk when active, kept while recently used (LLM in a flash, arXiv:2312.11514).

Every layer has a fixed number of slots in one mapping, made once. A slot holds a unit: one neuron's bundle, or as many small ones as fill a
block. A layer's window is its last tokens, as many as the slots hold: a unit that no token of the window used is free, and missing units go
wherever slots are free, so nothing is moved and a replacement costs the same whatever the window holds. Reads are urgent and direct;
neighbours are read together.

A prompt uses every neuron: groups of them pass through the slots in two halves, one being read while the other is used, and the window
starts over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .checkpoint import CheckpointError, TensorStore
from .direct_io import BLOCK, READ_NBYTES, Interrupted, Read, Reader, Ticket
from .memory import anonymous
from .resident_pager import ReadingPager
from .streaming_pager import StreamingPager

THREADS = 8  # small reads want a deeper queue than large ones
MAX_BATCHED_READS = 16  # that a thread takes from the queue at a time
MAX_VECTORS = 256  # slots filled by one read
GROUP_NBYTES = 8 << 20  # of a prompt's neurons at a time
MOST_TOKENS = 64  # tokens of a window that are tracked individually; older ones are merged
NO_NEURONS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class BundlePlace:
    """Where a layer's bundles are stored: `count` neurons of `stride` bytes from `offset` of a file, a multiple of BLOCK."""

    file: Path
    offset: int
    stride: int
    count: int

    @property
    def together(self) -> int:
        return max(1, BLOCK // self.stride)

    @property
    def unit(self) -> int:
        """Bytes of a unit."""
        return self.stride * self.together

    @property
    def units(self) -> int:
        return -(-self.count // self.together)

    @property
    def nbytes(self) -> int:
        return self.count * self.stride


@dataclass(frozen=True)
class Batch:
    """Active neurons whose bundles stay in memory until the next batch."""

    neurons: np.ndarray  # ascending
    ready: np.ndarray  # those in memory
    late: np.ndarray  # those in memory after `wait`
    last: bool
    addresses: Callable[[np.ndarray], np.ndarray]
    wait: Callable[[], None]


class ResidentBundles:
    """Bundles that are all in memory, contiguously."""

    def __init__(self, memory: np.ndarray, stride: int, count: int) -> None:
        self._memory, self._stride, self._count = memory, stride, count
        self._base = memory.ctypes.data

    def few(self, active: np.ndarray) -> Iterator[Batch]:
        yield Batch(active, active, NO_NEURONS, True, self._addresses, _nothing)

    def groups(self) -> Iterator[tuple[int, int, int, int]]:
        """(first, neurons, address, stride in bytes) of runs that together cover all neurons."""
        each = max(1, GROUP_NBYTES // self._stride)
        for first in range(0, self._count, each):
            yield first, min(each, self._count - first), self._base + first * self._stride, self._stride

    def _addresses(self, neurons: np.ndarray) -> np.ndarray:
        return self._base + neurons * self._stride


@dataclass
class WindowStats:
    """Decode counters over all layers."""

    used: int = 0  # units
    missed: int = 0  # units that were not in memory
    passes: int = 0  # of a layer
    expected: int = 0  # units prefetched on a prediction


@dataclass
class Window:
    """Which units a layer's slots hold."""

    slot_of: np.ndarray  # by unit, -1: not in memory
    use_counts: np.ndarray  # by unit: how many tokens of the window use it
    free: np.ndarray  # a stack of free slots: its first `num_free` entries
    num_free: int
    tokens: deque[np.ndarray] = field(default_factory=deque)  # the units of each token of the window, oldest first

    @classmethod
    def empty(cls, units: int, slots: int) -> Window:
        return cls(np.full(units, -1, np.int64), np.zeros(units, np.int32), np.arange(slots)[::-1].copy(), slots)

    def use(self, units: np.ndarray) -> np.ndarray:
        """Make `units` (distinct, at most as many as slots) the newest token's; returns the missing ones, ascending, each with a slot
        assigned."""
        missing = units[self.slot_of[units] < 0]
        self.use_counts[units] += 1
        self.tokens.append(units)
        if len(self.tokens) > MOST_TOKENS:
            self._join_oldest()
        while self.num_free < len(missing):
            self._forget_oldest()
        self.num_free -= len(missing)
        self.slot_of[missing] = self.free[self.num_free : self.num_free + len(missing)]
        return missing

    def _join_oldest(self) -> None:
        first, second = self.tokens.popleft(), self.tokens.popleft()
        self.use_counts[np.intersect1d(first, second, assume_unique=True)] -= 1
        self.tokens.appendleft(np.union1d(first, second))

    def _forget_oldest(self) -> None:
        units = self.tokens.popleft()
        self.use_counts[units] -= 1
        evicted = units[self.use_counts[units] == 0]
        self.free[self.num_free : self.num_free + len(evicted)] = self.slot_of[evicted]
        self.num_free += len(evicted)
        self.slot_of[evicted] = -1


class NeuronPager(ReadingPager):
    """The bundles of all layers, `slots[i]` units of layer i in memory at a time. Wraps `rest`, the pager of all other weights. The store
    must stay open until `close`. Waits poll `cancelled` and raise Interrupted."""

    resident, stays = False, False

    def __init__(self, rest: StreamingPager, store: TensorStore, places: Sequence[BundlePlace], slots: Sequence[int],
                 cancelled: Callable[[], bool] = lambda: False, direct: bool = True) -> None:
        self._rest, self._cancelled = rest, cancelled
        self._reader = Reader({place.file: store.descriptor(place.file) for place in places}, THREADS, direct=direct)
        self.load, self.lease, self.part, self.fetch = rest.load, rest.lease, rest.part, rest.fetch
        self.check_unchanged, self.resident_arrays = rest.check_unchanged, rest.resident_arrays
        self.load_nbytes = rest.load_nbytes
        window_nbytes = sum(count * place.unit for count, place in zip(slots, places, strict=True))
        self.nbytes = rest.nbytes + window_nbytes
        memory, at = anonymous(window_nbytes), 0
        self.layers: list[WindowedBundles] = []
        self.stats = WindowStats()
        for count, place in zip(slots, places, strict=True):
            self.layers.append(WindowedBundles(self, place, memory[at : at + count * place.unit], count))
            at += count * place.unit
        for layer, following in zip(self.layers, self.layers[1:], strict=False):
            layer.following = following

    def submit(self, reads: Sequence[Read], urgent: bool, together: int = 1) -> Ticket:
        return self._reader.submit(reads, urgent, together)

    def wait(self, ticket: Ticket) -> None:
        if self._cancelled():
            raise Interrupted
        self._reader.wait(ticket, self._cancelled)

    def give_up(self, ticket: Ticket) -> None:
        """Cancel a ticket's queued reads, and wait until none of those in flight writes any more."""
        self._reader.drop(ticket)
        while ticket.left:
            with suppress(CheckpointError):
                self._reader.wait(ticket, self._cancelled)

    def close(self) -> None:
        self._reader.close()
        self._rest.close()


class WindowedBundles:
    """One layer's window of bundles."""

    def __init__(self, pager: NeuronPager, place: BundlePlace, memory: np.ndarray, slots: int) -> None:
        self._pager, self._place, self._slots = pager, place, slots
        self._memory, self._base = memoryview(memory), memory.ctypes.data
        self._window = Window.empty(place.units, slots)
        self._group_reads: list[tuple[int, int, Ticket]] = []  # groups of a prompt in flight: first unit, units
        self._demand_reads: Ticket | None = None  # missing units that have not been waited for yet
        self._prefetch: tuple[np.ndarray, Ticket] | None = None  # prefetched units in flight
        self.following: WindowedBundles | None = None

    # -- decode ------------------------------------------------------------------------------------------------------------------

    def expect(self, neurons: np.ndarray) -> None:
        """Prefetch missing units of neurons, likeliest first, that the next `few` may ask for; at most half of the slots. Demand reads go
        first."""
        self._cancel_pending()
        unit_of = neurons // self._place.together
        units = np.unique(unit_of[np.sort(np.unique(unit_of, return_index=True)[1])][: self._slots // 2])
        missing = self._window.use(units)
        self._pager.stats.expected += len(missing)
        if len(missing):
            self._prefetch = missing, self._pager.submit(self._reads(missing), False, MAX_BATCHED_READS // 4)

    def few(self, active: np.ndarray) -> Iterator[Batch]:
        """See `kernels/cpu/bundled_mlp.py`."""
        self._cancel_pending(expected=False)
        unit_of = active // self._place.together
        units = np.unique(unit_of) if self._place.together > 1 else active
        self._pager.stats.used += len(units)
        self._pager.stats.passes += 1
        for begin in range(0, max(1, len(units)), self._slots):
            batch_units = units[begin : begin + self._slots]
            last = begin + self._slots >= len(units)
            neurons = active if last and not begin else active[(unit_of >= batch_units[0]) & (unit_of <= batch_units[-1])]
            yield self._load_batch(batch_units, neurons, last)

    def _load_batch(self, units: np.ndarray, neurons: np.ndarray, last: bool) -> Batch:
        unit_of = neurons // self._place.together
        if self._prefetch is not None and int((self._window.slot_of[units] < 0).sum()) > self._window.num_free:
            self._wait_for_prefetch()  # slots are about to be reassigned, and no read may write into one that is
        is_ready = self._window.slot_of[unit_of] >= 0
        if self._prefetch is not None:
            is_ready &= ~np.isin(unit_of, self._prefetch[0], assume_unique=False)
        missing = self._window.use(units)
        self._pager.stats.missed += len(missing)
        if len(missing):
            reads = self._reads(missing)
            self._demand_reads = self._pager.submit(reads, True, max(1, min(MAX_BATCHED_READS, len(reads) // (2 * THREADS))))
        elif self._prefetch is None:
            return Batch(neurons, neurons, NO_NEURONS, last, self._addresses, _nothing)
        return Batch(neurons, neurons[is_ready], neurons[~is_ready], last, self._addresses, self._wait)

    def _wait(self) -> None:
        if self._demand_reads is not None:
            self._pager.wait(self._demand_reads)
            self._demand_reads = None
        self._wait_for_prefetch()

    def _wait_for_prefetch(self) -> None:
        """Wait for prefetched units."""
        if self._prefetch is not None:
            self._pager.wait(self._prefetch[1])
            self._prefetch = None

    def _addresses(self, neurons: np.ndarray) -> np.ndarray:
        place = self._place
        slots = self._window.slot_of[neurons // place.together]
        return self._base + slots * place.unit + neurons % place.together * place.stride

    def _reads(self, units: np.ndarray) -> list[Read]:
        """The reads for missing units, coalescing neighbours."""
        place, size = self._place, self._place.unit
        views = [self._memory[slot * size : (slot + 1) * size] for slot in self._window.slot_of[units].tolist()]
        end, numbers = place.offset + place.nbytes, units.tolist()
        reads, begin = [], 0
        for i in range(1, len(numbers) + 1):
            if i < len(numbers) and numbers[i] == numbers[i - 1] + 1 and i - begin < MAX_VECTORS:
                continue
            offset = place.offset + numbers[begin] * size
            reads.append(Read(place.file, offset, views[begin], min((i - begin) * size, end - offset), tuple(views[begin + 1 : i])))
            begin = i
        return reads

    # -- a prompt ----------------------------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[tuple[int, int, int, int]]:
        """See `ResidentBundles.groups`."""
        place = self._place
        # Unless the pager of the layer before has begun; what an interrupted pass left is started over.
        if not self._group_reads or self._group_reads[0][0] or self._group_reads[0][2].error is not None:
            self.begin_groups()
        while self._group_reads:
            first, units, ticket = self._group_reads[0]
            self._pager.wait(ticket)
            neurons = first * place.together
            count = min(units * place.together, place.count - neurons)
            yield neurons, count, self._base + self._group_slot(first) * place.unit, place.stride
            self._group_reads.pop(0)
            self._read_group(first + 2 * self._group_units)
            if not self._group_reads and self.following is not None:
                self.following.begin_groups()

    def begin_groups(self) -> None:
        """Start reading the first groups for a prompt."""
        self._cancel_pending()
        self._window = Window.empty(self._place.units, self._slots)
        self._read_group(0)
        self._read_group(self._group_units)

    @property
    def _group_units(self) -> int:
        """Units per group: half of the slots, or as many as are read together."""
        return max(1, min(self._slots // 2, GROUP_NBYTES // self._place.unit))

    def _group_slot(self, first: int) -> int:
        """The first slot of the group that begins at unit `first`."""
        return first // self._group_units % 2 * self._group_units

    def _read_group(self, first: int) -> None:
        place, size = self._place, self._place.unit
        if first >= place.units:
            return
        units = min(self._group_units, place.units - first)
        at, offset = self._group_slot(first) * size, place.offset + first * size
        needed = min(units * size, place.offset + place.nbytes - offset)
        reads = [Read(place.file, offset + begin, self._memory[at + begin : at + min(begin + READ_NBYTES, units * size)],
                      min(READ_NBYTES, needed - begin)) for begin in range(0, needed, READ_NBYTES)]
        self._group_reads.append((first, units, self._pager.submit(reads, False)))

    def _cancel_pending(self, expected: bool = True) -> None:
        """Cancel what an interrupted pass left behind: unclaimed groups, units that did not arrive; with `expected`, also prefetched units
        that were not used."""
        expected = expected or self._demand_reads is not None or bool(self._group_reads)
        if self._demand_reads is not None or self._group_reads or (expected and self._prefetch is not None):
            self._window = Window.empty(self._place.units, self._slots)
        # Each is dropped only once nothing of it writes any more: if interrupted here, the next pass has to wait for the rest. Prefetched
        # units come first, because the others imply that they have to go.
        if expected and self._prefetch is not None:
            self._pager.give_up(self._prefetch[1])
            self._prefetch = None
        while self._group_reads:
            self._pager.give_up(self._group_reads[0][2])
            del self._group_reads[0]
        if self._demand_reads is not None:
            self._pager.give_up(self._demand_reads)
            self._demand_reads = None


def _nothing() -> None:
    """There is nothing to wait for."""
