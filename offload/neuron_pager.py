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
MOST_TOGETHER = 16  # reads per thread at a time
MOST_VECTORS = 256  # slots filled by one read
GROUP_NBYTES = 8 << 20  # of a prompt's neurons at a time
MOST_TOKENS = 64  # tokens of a window that are tracked individually; older ones are merged
NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class BundlePlace:
    """Where a layer's bundles lie: `count` neurons of `stride` bytes from `offset` of a file, a multiple of BLOCK."""

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
    """Active neurons, ascending, whose bundles stay in memory until the next batch: `ready` at once, `late` after `wait`."""

    neurons: np.ndarray
    ready: np.ndarray
    late: np.ndarray
    last: bool
    addresses: Callable[[np.ndarray], np.ndarray]
    wait: Callable[[], None]


class ResidentBundles:
    """Bundles that are all in memory, contiguously."""

    def __init__(self, memory: np.ndarray, stride: int, count: int) -> None:
        self._memory, self._stride, self._count = memory, stride, count
        self._base = memory.ctypes.data

    def few(self, active: np.ndarray) -> Iterator[Batch]:
        yield Batch(active, active, NONE, True, self._addresses, _nothing)

    def groups(self) -> Iterator[tuple[int, int, int, int]]:
        """(first, neurons, address, stride in bytes) of runs that together cover all neurons."""
        each = max(1, GROUP_NBYTES // self._stride)
        for first in range(0, self._count, each):
            yield first, min(each, self._count - first), self._base + first * self._stride, self._stride

    def _addresses(self, neurons: np.ndarray) -> np.ndarray:
        return self._base + neurons * self._stride


@dataclass
class WindowStats:
    """Decode counters over all layers: units used, units missed, layer passes, and units prefetched on a prediction."""

    used: int = 0
    missed: int = 0
    passes: int = 0
    expected: int = 0


@dataclass
class Window:
    """Which units a layer's slots hold. `uses`: by how many tokens of the window; `free`: a stack of free slots."""

    slot_of: np.ndarray
    uses: np.ndarray
    free: np.ndarray
    top: int
    tokens: deque[np.ndarray] = field(default_factory=deque)

    @classmethod
    def empty(cls, units: int, slots: int) -> Window:
        return cls(np.full(units, -1, np.int64), np.zeros(units, np.int32), np.arange(slots)[::-1].copy(), slots)

    def use(self, units: np.ndarray) -> np.ndarray:
        """Make `units` (distinct, at most as many as slots) the newest token's; returns the missing ones, ascending, each with a slot
        assigned."""
        missing = units[self.slot_of[units] < 0]
        self.uses[units] += 1
        self.tokens.append(units)
        if len(self.tokens) > MOST_TOKENS:
            self._join_oldest()
        while self.top < len(missing):
            self._forget_oldest()
        self.top -= len(missing)
        self.slot_of[missing] = self.free[self.top : self.top + len(missing)]
        return missing

    def _join_oldest(self) -> None:
        first, second = self.tokens.popleft(), self.tokens.popleft()
        self.uses[np.intersect1d(first, second, assume_unique=True)] -= 1
        self.tokens.appendleft(np.union1d(first, second))

    def _forget_oldest(self) -> None:
        units = self.tokens.popleft()
        self.uses[units] -= 1
        gone = units[self.uses[units] == 0]
        self.free[self.top : self.top + len(gone)] = self.slot_of[gone]
        self.top += len(gone)
        self.slot_of[gone] = -1


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
        own_nbytes = sum(own * place.unit for own, place in zip(slots, places, strict=True))
        self.nbytes = rest.nbytes + own_nbytes
        memory, at = anonymous(own_nbytes), 0
        self.layers: list[WindowedBundles] = []
        self.used = WindowStats()
        for own, place in zip(slots, places, strict=True):
            self.layers.append(WindowedBundles(self, place, memory[at : at + own * place.unit], own))
            at += own * place.unit
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
        self._ahead: list[tuple[int, int, Ticket]] = []  # groups of a prompt in flight: first unit, units
        self._late: Ticket | None = None  # missing units that have not been waited for yet
        self._coming: tuple[np.ndarray, Ticket] | None = None  # prefetched units in flight
        self.following: WindowedBundles | None = None

    # -- decode ------------------------------------------------------------------------------------------------------------------

    def expect(self, neurons: np.ndarray) -> None:
        """Prefetch missing units of neurons, likeliest first, that the next `few` may ask for; at most half of the slots. Demand reads go
        first."""
        self._settle()
        of = neurons // self._place.together
        units = np.unique(of[np.sort(np.unique(of, return_index=True)[1])][: self._slots // 2])
        missing = self._window.use(units)
        self._pager.used.expected += len(missing)
        if len(missing):
            self._coming = missing, self._pager.submit(self._reads(missing), False, MOST_TOGETHER // 4)

    def few(self, active: np.ndarray) -> Iterator[Batch]:
        """See `kernels/cpu/bundled_mlp.py`."""
        self._settle(expected=False)
        of = active // self._place.together
        units = np.unique(of) if self._place.together > 1 else active
        self._pager.used.used += len(units)
        self._pager.used.passes += 1
        for begin in range(0, max(1, len(units)), self._slots):
            here = units[begin : begin + self._slots]
            last = begin + self._slots >= len(units)
            own = active if last and not begin else active[(of >= here[0]) & (of <= here[-1])]
            yield self._bring(here, own, last)

    def _bring(self, units: np.ndarray, neurons: np.ndarray, last: bool) -> Batch:
        of = neurons // self._place.together
        if self._coming is not None and int((self._window.slot_of[units] < 0).sum()) > self._window.top:
            self._arrive()  # slots are about to be reassigned, and no read may write into one that is
        held = self._window.slot_of[of] >= 0
        if self._coming is not None:
            held &= ~np.isin(of, self._coming[0], assume_unique=False)
        missing = self._window.use(units)
        self._pager.used.missed += len(missing)
        if len(missing):
            reads = self._reads(missing)
            self._late = self._pager.submit(reads, True, max(1, min(MOST_TOGETHER, len(reads) // (2 * THREADS))))
        elif self._coming is None:
            return Batch(neurons, neurons, NONE, last, self._addresses, _nothing)
        return Batch(neurons, neurons[held], neurons[~held], last, self._addresses, self._wait)

    def _wait(self) -> None:
        if self._late is not None:
            self._pager.wait(self._late)
            self._late = None
        self._arrive()

    def _arrive(self) -> None:
        """Wait for prefetched units."""
        if self._coming is not None:
            self._pager.wait(self._coming[1])
            self._coming = None

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
            if i < len(numbers) and numbers[i] == numbers[i - 1] + 1 and i - begin < MOST_VECTORS:
                continue
            offset = place.offset + numbers[begin] * size
            reads.append(Read(place.file, offset, views[begin], min((i - begin) * size, end - offset), tuple(views[begin + 1 : i])))
            begin = i
        return reads

    # -- a prompt ----------------------------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[tuple[int, int, int, int]]:
        """See `ResidentBundles.groups`."""
        place = self._place
        if not self._ahead or self._ahead[0][0] or self._ahead[0][2].error is not None:  # left over from an interrupted pass
            self.begin_groups()
        while self._ahead:
            first, units, ticket = self._ahead[0]
            self._pager.wait(ticket)
            neurons = first * place.together
            yield (neurons, min(units * place.together, place.count - neurons), self._base + self._half(first) * place.unit, place.stride)
            self._ahead.pop(0)
            self._ask(first + 2 * self._each)
            if not self._ahead and self.following is not None:
                self.following.begin_groups()

    def begin_groups(self) -> None:
        """Start reading the first groups for a prompt."""
        self._settle()
        self._window = Window.empty(self._place.units, self._slots)
        self._ask(0)
        self._ask(self._each)

    @property
    def _each(self) -> int:
        """Units per group: half of the slots, or as many as are read together."""
        return max(1, min(self._slots // 2, GROUP_NBYTES // self._place.unit))

    def _half(self, first: int) -> int:
        """The first slot of the group that begins at unit `first`."""
        return first // self._each % 2 * self._each

    def _ask(self, first: int) -> None:
        place, size = self._place, self._place.unit
        if first >= place.units:
            return
        units = min(self._each, place.units - first)
        at, offset = self._half(first) * size, place.offset + first * size
        needed = min(units * size, place.offset + place.nbytes - offset)
        reads = [Read(place.file, offset + begin, self._memory[at + begin : at + min(begin + READ_NBYTES, units * size)],
                      min(READ_NBYTES, needed - begin)) for begin in range(0, needed, READ_NBYTES)]
        self._ahead.append((first, units, self._pager.submit(reads, False)))

    def _settle(self, expected: bool = True) -> None:
        """Cancel what an interrupted pass left behind: unclaimed groups, units that did not arrive; with `expected`, also prefetched units
        that were not used."""
        expected = expected or self._late is not None or bool(self._ahead)
        if self._late is not None or self._ahead or (expected and self._coming is not None):
            self._window = Window.empty(self._place.units, self._slots)
        # Each is dropped only once nothing of it writes any more: if interrupted here, the next pass has to wait for the rest. Prefetched
        # units come first, because the others imply that they have to go.
        if expected and self._coming is not None:
            self._pager.give_up(self._coming[1])
            self._coming = None
        while self._ahead:
            self._pager.give_up(self._ahead[0][2])
            del self._ahead[0]
        if self._late is not None:
            self._pager.give_up(self._late)
            self._late = None


def _nothing() -> None:
    """There is nothing to wait for."""
