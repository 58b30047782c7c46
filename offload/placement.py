"""The result of planning, and the choice of pinned blocks: which weights stay in memory and which are streamed on every pass.

A block is read and used as a unit: a layer, or a part of one where layers exceed half the ring. A pass scans all blocks in order, so an LRU
cache would always miss; a fixed pinned set is optimal for such a scan. W bytes with M pinned take max((W - M) / disk, W / memory) seconds
when reading and computing overlap. They overlap only if streamed blocks are interleaved with pinned ones: in one run, the disk would idle
before it and the CPU during it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .. import DoesNotFit
from .size import format_size

RING_NBYTES = 64 << 20  # the largest ring
# The ring's bytes cannot be pinned, so it is a small share of what streams, but large enough to keep the disk busy.
MIN_RING_NBYTES, RING_DIVISOR = 16 << 20, 8
MIN_SLOT_DIVISOR = 16  # a layer has slots for at least this fraction of its units, whatever the budget


@dataclass(frozen=True)
class Residency:
    """Which blocks of weights are pinned and which are streamed. Weights that belong to no block (norms, biases, row scales) always stay in
    memory and are not counted."""

    pinned: tuple[int, ...]  # indices of blocks, in order of use
    streamed: tuple[int, ...]
    pinned_nbytes: int
    streamed_nbytes: int
    ring_nbytes: int  # buffer for streamed blocks: room for two of the largest, so that one is read while another is used; 0 without any

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the blocks take."""
        return self.pinned_nbytes + self.ring_nbytes


@dataclass(frozen=True)
class Budget:
    """Bytes that may be used: `ram` by the whole process, `vram` on the GPU."""

    ram: int
    vram: int = 0


@dataclass(frozen=True)
class GpuBytes:
    """Bytes on a GPU."""

    weights_bytes: int = 0  # including the head
    kv_bytes: int = 0
    workspace_bytes: int = 0  # including the buffers
    buffers_bytes: int = 0  # for host layers that are copied to the GPU
    head_bytes: int = 0  # the head's weights, which the host holds too


@dataclass(frozen=True)
class Placement:
    """A plan that fits. The weights and KV figures are sums over host and GPU; what is on the host alone is a property."""

    devices: tuple[str, ...]  # "cpu" or "cuda" for each layer
    ctx: int
    weights_bytes: int
    kv_bytes: int  # with pages on disk, what is in memory: pages, exact tokens and `kv_ring_bytes`
    workspace_bytes: int
    baseline_bytes: int
    total_bytes: int  # host memory, slack included
    budget: Budget
    notes: tuple[str, ...] = ()
    vram_bytes: int = 0  # GPU memory, slack included
    residency: Residency | None = None  # which blocks stream; None if none does
    kv_bytes_per_token: int = 0
    slots: tuple[int, ...] = ()  # neurons in memory, per layer; empty if all fit, or are not read individually
    window_bytes: int = 0  # memory for those neurons
    expert_slots: int | None = None  # experts in memory; None if all fit
    kv_pages: int | None = None  # pages of the cache in memory; None: all
    kv_disk_bytes: int = 0  # pages on disk when the context is full
    gpu: GpuBytes = GpuBytes()
    disk_layers: tuple[int, ...] = ()  # layers of which a token reads weights from disk
    copied_from: int | None = None  # passes of at least this many tokens copy host layers to the GPU; None: none does
    always_bytes: int = 0  # weights that stay in memory while others stream (`Demand.always_nbytes`); 0 if everything fits
    kv_ring_bytes: int = 0  # of `kv_bytes`, buffers for pages that are read from or written to the disk

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tier of each layer: gpu, memory, or disk if a token reads any of it from there."""
        return tuple("gpu" if device == "cuda" else "disk" if layer in self.disk_layers else "memory"
                     for layer, device in enumerate(self.devices))

    @property
    def host_weights_bytes(self) -> int:
        """Bytes of weights on the host."""
        return self.weights_bytes - self.gpu.weights_bytes

    @property
    def pinned_bytes(self) -> int:
        """Host memory that holds weights from pass to pass: all that are not on the GPU if nothing streams, else what always stays, the
        pinned blocks and the neuron window, without the ring. Experts are counted by their pager."""
        if self.residency is None:
            return self.host_weights_bytes
        return self.residency.pinned_nbytes + self.always_bytes + self.window_bytes

    @property
    def host_kv_bytes(self) -> int:
        """Bytes of the cache in host memory."""
        return self.kv_bytes - self.gpu.kv_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that every pass reads from disk."""
        return self.residency.streamed_nbytes if self.residency else 0


def choose_pinned(blocks: Sequence[int], budget: int, ring: int = RING_NBYTES, copy_of: Sequence[int] = ()) -> Residency:
    """Pin as many bytes of `blocks` as `budget` holds beside a ring of at most `ring` bytes, with the streamed ones spread evenly.

    `blocks`: bytes of each, in order of use. `copy_of`: for each block the first one with the same bytes, where a pass uses some several
    times; a repeated block is pinned once, or read each time. Raises DoesNotFit if `budget` holds no ring, ValueError for a block larger
    than half of `ring`."""
    if copy_of:
        originals = first_copies(copy_of)
        distinct = choose_pinned([blocks[index] for index in originals], budget, ring)
        streamed_originals = {originals[index] for index in distinct.streamed}
        streamed = tuple(index for index, first in enumerate(copy_of) if first in streamed_originals)
        pinned = tuple(index for index, first in enumerate(copy_of) if first not in streamed_originals)
        return Residency(pinned, streamed, distinct.pinned_nbytes, sum(blocks[index] for index in streamed), distinct.ring_nbytes)
    total, largest = sum(blocks), max(blocks, default=0)
    if total <= budget:
        return Residency(tuple(range(len(blocks))), (), total, 0, 0)
    if 2 * largest > ring:
        raise ValueError(f"a block of {largest} bytes does not go twice into a ring of {ring}: cut it")
    if 2 * largest > budget:
        raise DoesNotFit(f"{format_size(budget)} for weights cannot hold a ring of two blocks of {format_size(largest)}",
                         f"--ram with {-(-(2 * largest - budget) // 2**20)}Mi more")
    ring_nbytes = min(ring, budget, max(2 * largest, MIN_RING_NBYTES, (total - budget) // RING_DIVISOR))
    room, target = budget - ring_nbytes, total - (budget - ring_nbytes)
    while (pinned_nbytes := total - sum(blocks[index] for index in _evenly_spread(blocks, target))) > room:
        target += pinned_nbytes - room
    streamed, spare = set(_evenly_spread(blocks, target)), room - pinned_nbytes
    # What is left of the budget is less than a block or two: pin the largest that fit, to read as little as possible.
    for index in sorted(streamed, key=lambda index: (-blocks[index], index)):
        if blocks[index] <= spare:
            streamed.remove(index)
            spare -= blocks[index]
    pinned = tuple(index for index in range(len(blocks)) if index not in streamed)
    streamed_nbytes = sum(blocks[index] for index in streamed)
    return Residency(pinned, tuple(sorted(streamed)), total - streamed_nbytes, streamed_nbytes,
                     min(ring_nbytes, max(streamed_nbytes, 2 * largest)))


def least_budget(blocks: Sequence[int], copy_of: Sequence[int] = ()) -> int:
    """The smallest budget that `choose_pinned` accepts: the ring alone, or everything where that is less."""
    return min(sum(blocks[index] for index in first_copies(copy_of)) if copy_of else sum(blocks), 2 * max(blocks))


def min_streaming_nbytes(blocks: Sequence[int], copy_of: Sequence[int] = ()) -> int:
    """Memory for the blocks under `least_budget`."""
    return choose_pinned(blocks, least_budget(blocks, copy_of), copy_of=copy_of).nbytes


def first_copies(copy_of: Sequence[int]) -> list[int]:
    """The blocks that are not a copy of an earlier one."""
    return [index for index, first in enumerate(copy_of) if index == first]


@dataclass(frozen=True)
class Units:
    """What can be read on demand in a layer, such as neurons."""

    count: int
    nbytes: int  # of each
    miss_rates: tuple[tuple[float, float], ...] = ()  # if measured: (share of slots, share of units that a token then reads), ascending

    @property
    def min_slots(self) -> int:
        """The fewest slots: two groups of a prompt, and as many as a token of a sparse model is likely to use."""
        return min(self.count, max(2, -(-self.count // MIN_SLOT_DIVISOR)))


def slots_for(layers: Sequence[Units], budget: int) -> tuple[int, ...]:
    """Slots of each layer for `budget` bytes, at least the minimum and at most its units: the same share for all layers, or, where miss
    rates were measured, most where they save most."""
    if layers and all(layer.miss_rates for layer in layers):
        return _slots_by_miss_rate(layers, budget)
    total = sum(layer.count * layer.nbytes for layer in layers)
    return tuple(min(layer.count, max(layer.min_slots, budget * layer.count // max(1, total))) for layer in layers)


def _slots_by_miss_rate(layers: Sequence[Units], budget: int) -> tuple[int, ...]:
    """Starting from the minimum, repeatedly grow the layer that saves most reads per byte by one measured step. What is then left of the
    budget goes to the layers with the highest miss rates."""
    slots = [layer.min_slots for layer in layers]
    left = budget - sum(count * layer.nbytes for count, layer in zip(slots, layers, strict=True))
    while True:
        best, best_gain = None, 0.0
        for index, layer in enumerate(layers):
            current = _miss_rate(layer, slots[index])
            for share, miss_rate in (*layer.miss_rates, (1.0, 0.0)):
                added = min(layer.count, round(share * layer.count)) - slots[index]
                if 0 < added * layer.nbytes <= left and (current - miss_rate) * layer.count / added > best_gain:
                    best, best_gain = (index, added), (current - miss_rate) * layer.count / added
        if best is None:
            break
        index, added = best
        slots[index] += added
        left -= added * layers[index].nbytes
    for index in sorted(range(len(layers)), key=lambda index: -_miss_rate(layers[index], slots[index])):
        added = max(0, min(layers[index].count - slots[index], left // layers[index].nbytes))
        slots[index] += added
        left -= added * layers[index].nbytes
    return tuple(slots)


def _miss_rate(layer: Units, slots: int) -> float:
    """Share of the units that a token reads with this many slots, interpolated linearly."""
    share = slots / layer.count
    low_share, low_rate = 0.0, layer.miss_rates[0][1]
    for high_share, high_rate in (*layer.miss_rates, (1.0, 0.0)):
        if share <= high_share:
            width = high_share - low_share
            return low_rate + (high_rate - low_rate) * (share - low_share) / width if width else high_rate
        low_share, low_rate = high_share, high_rate
    return 0.0


def _evenly_spread(blocks: Sequence[int], target: int) -> list[int]:
    """About `target` bytes of blocks, evenly spread: a block is taken when the share owed reaches half of it."""
    total, owed, taken = sum(blocks), 0, []
    for index, nbytes in enumerate(blocks):
        owed += min(target, total) * nbytes
        if nbytes and 2 * owed >= total * nbytes:
            taken.append(index)
            owed -= total * nbytes
    return taken


def split_evenly(nbytes: int, max_nbytes: int, multiple: int = 1) -> list[int]:
    """`nbytes` split into the fewest nearly equal pieces of at most `max_nbytes`, all but the last multiples of `multiple` (a row)."""
    count = -(-nbytes // (max_nbytes // multiple * multiple))
    if count < 2:
        return [nbytes] if nbytes else []
    piece = -(-nbytes // (count * multiple)) * multiple
    return [piece] * ((nbytes - 1) // piece) + [(nbytes - 1) % piece + 1]
