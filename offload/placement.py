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

RING_NBYTES = 64 << 20  # at most
# Every byte of the ring is a byte not pinned: a small share of what streams, but enough reads to keep a disk busy.
RING_LEAST, RING_SHARE = 16 << 20, 8
LEAST_SHARE = 16  # minimum share of a layer's units with slots, whatever the budget


@dataclass(frozen=True)
class Residency:
    """Indices of pinned and streamed blocks, in order of use, and their bytes. Weights that belong to no block (norms, biases, row scales)
    always stay in memory and are not counted. `ring_nbytes`: buffer for streamed blocks; 0 if nothing streams, else room for two of the
    largest, so that one is read while another is used."""

    pinned: tuple[int, ...]
    streamed: tuple[int, ...]
    pinned_nbytes: int
    streamed_nbytes: int
    ring_nbytes: int

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
    """Bytes on a GPU: weights (`head_bytes` of which the host holds too), cache, workspace with `buffers` for copied layers."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    workspace_bytes: int = 0
    buffers_bytes: int = 0
    head_bytes: int = 0


@dataclass(frozen=True)
class Placement:
    """A plan that fits. `devices` has one entry per layer; `total_bytes` is host memory and `vram_bytes` GPU memory, slack included; the
    weights and KV figures are sums over both. `residency`: which blocks stream; None if none does. `always_bytes`: memory for what stays
    when others stream (`Demand.always`), 0 if everything fits. `slots`: units in memory per layer; empty if all fit, or there are none.
    `expert_slots`: experts in memory, if not all fit. `kv_pages`: pages of the cache in memory, None for all; `kv_bytes` counts those in
    memory, `kv_disk_bytes` those on disk with a full context. `gpu`: the GPU's part of the sums. `disk_layers`: layers of which a token
    reads from disk. `copied_from`: passes of at least this many tokens copy the host's layers to the GPU (None: none do)."""

    devices: tuple[str, ...]
    ctx: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    baseline_bytes: int
    total_bytes: int
    budget: Budget
    notes: tuple[str, ...] = ()
    vram_bytes: int = 0
    residency: Residency | None = None
    kv_bytes_per_token: int = 0
    slots: tuple[int, ...] = ()
    window_bytes: int = 0
    expert_slots: int | None = None
    kv_pages: int | None = None
    kv_disk_bytes: int = 0
    gpu: GpuBytes = GpuBytes()
    disk_layers: tuple[int, ...] = ()
    copied_from: int | None = None
    always_bytes: int = 0

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
        kept = self.always_bytes + self.window_bytes
        return self.host_weights_bytes if self.residency is None else self.residency.pinned_nbytes + kept

    @property
    def host_kv_bytes(self) -> int:
        """Bytes of the cache in host memory."""
        return self.kv_bytes - self.gpu.kv_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that every pass reads from disk."""
        return self.residency.streamed_nbytes if self.residency else 0


def choose_pinned(blocks: Sequence[int], budget: int, ring: int = RING_NBYTES, same: Sequence[int] = ()) -> Residency:
    """Pin as many bytes of `blocks` (bytes each, in order of use) as `budget` holds beside a ring of at most `ring` bytes, with the
    streamed ones spread evenly. Everything is pinned if everything fits. `same`: for each block, the first one with the same bytes, where a
    pass uses some several times: it is pinned once, or read each time.

    Raises DoesNotFit if `budget` holds no ring, ValueError for a block larger than half of `ring`."""
    if same:
        own = first_copies(same)
        once = choose_pinned([blocks[index] for index in own], budget, ring)
        away = {own[index] for index in once.streamed}
        read = tuple(index for index, first in enumerate(same) if first in away)
        kept = tuple(index for index, first in enumerate(same) if first not in away)
        return Residency(kept, read, once.pinned_nbytes, sum(blocks[index] for index in read), once.ring_nbytes)
    total, largest = sum(blocks), max(blocks, default=0)
    if total <= budget:
        return Residency(tuple(range(len(blocks))), (), total, 0, 0)
    if 2 * largest > ring:
        raise ValueError(f"a block of {largest} bytes does not go twice into a ring of {ring}: cut it")
    if 2 * largest > budget:
        raise DoesNotFit(f"{format_size(budget)} for weights cannot hold a ring of two blocks of {format_size(largest)}",
                         f"--ram with {-(-(2 * largest - budget) // 2**20)}Mi more")
    held = min(ring, budget, max(2 * largest, RING_LEAST, (total - budget) // RING_SHARE))
    room, wanted = budget - held, total - (budget - held)
    while (pinned := total - sum(blocks[index] for index in _spread(blocks, wanted))) > room:
        wanted += pinned - room
    streamed, spare = set(_spread(blocks, wanted)), room - pinned
    # What is left of the budget is less than a block or two: take the largest that fit, to read not a megabyte more than necessary.
    for index in sorted(streamed, key=lambda index: (-blocks[index], index)):
        if blocks[index] <= spare:
            streamed.remove(index)
            spare -= blocks[index]
    kept = tuple(index for index in range(len(blocks)) if index not in streamed)
    read = sum(blocks[index] for index in streamed)
    return Residency(kept, tuple(sorted(streamed)), total - read, read, min(held, max(read, 2 * largest)))


def least_budget(blocks: Sequence[int], same: Sequence[int] = ()) -> int:
    """The smallest budget that `choose_pinned` accepts: the ring alone, or everything where that is less."""
    return min(sum(blocks[index] for index in first_copies(same)) if same else sum(blocks), 2 * max(blocks))


def first_copies(same: Sequence[int]) -> list[int]:
    """The blocks that are not a repetition of an earlier one."""
    return [index for index, first in enumerate(same) if index == first]


@dataclass(frozen=True)
class Units:
    """What can be read on demand in a layer: how many units, and bytes of each. `missed`, if measured: (share of slots, share of units that
    a token then reads), ascending."""

    count: int
    nbytes: int
    missed: tuple[tuple[float, float], ...] = ()

    @property
    def least(self) -> int:
        """The fewest slots: two groups of a prompt, and as many as a token of a sparse model is likely to use."""
        return min(self.count, max(2, -(-self.count // LEAST_SHARE)))


def slots_for(layers: Sequence[Units], budget: int) -> tuple[int, ...]:
    """Slots of each layer for `budget` bytes, at least the minimum and at most its units: the same share for all layers, or, where miss
    rates were measured, most where they save most."""
    if layers and all(layer.missed for layer in layers):
        return _slots_by_need(layers, budget)
    whole = sum(layer.count * layer.nbytes for layer in layers)
    return tuple(min(layer.count, max(layer.least, budget * layer.count // max(1, whole))) for layer in layers)


def _slots_by_need(layers: Sequence[Units], budget: int) -> tuple[int, ...]:
    """Starting from the minimum, repeatedly grow the layer that saves most reads per byte by one measured step; the rest by size."""
    slots = [layer.least for layer in layers]
    left = budget - sum(own * layer.nbytes for own, layer in zip(slots, layers, strict=True))
    while True:
        best, gain = None, 0.0
        for index, layer in enumerate(layers):
            now = _missed(layer, slots[index])
            for share, missed in (*layer.missed, (1.0, 0.0)):
                more = min(layer.count, round(share * layer.count)) - slots[index]
                if 0 < more * layer.nbytes <= left and (now - missed) * layer.count / more > gain:
                    best, gain = (index, more), (now - missed) * layer.count / more
        if best is None:
            break
        slots[best[0]] += best[1]
        left -= best[1] * layers[best[0]].nbytes
    for index in sorted(range(len(layers)), key=lambda index: -_missed(layers[index], slots[index])):
        more = max(0, min(layers[index].count - slots[index], left // layers[index].nbytes))
        slots[index] += more
        left -= more * layers[index].nbytes
    return tuple(slots)


def _missed(layer: Units, slots: int) -> float:
    """Share of the units that a token reads, interpolated linearly."""
    share, before = slots / layer.count, (0.0, layer.missed[0][1])
    for known in (*layer.missed, (1.0, 0.0)):
        if share <= known[0]:
            width = known[0] - before[0]
            return before[1] + (known[1] - before[1]) * (share - before[0]) / width if width else known[1]
        before = known
    return 0.0


def _spread(blocks: Sequence[int], wanted: int) -> list[int]:
    """About `wanted` bytes of blocks, evenly spread: a block is taken when the share owed reaches half of it."""
    total, owed, taken = sum(blocks), 0, []
    for index, nbytes in enumerate(blocks):
        owed += min(wanted, total) * nbytes
        if nbytes and 2 * owed >= total * nbytes:
            taken.append(index)
            owed -= total * nbytes
    return taken


def split_evenly(nbytes: int, most: int, multiple: int = 1) -> list[int]:
    """`nbytes` split into the fewest nearly equal pieces of at most `most` bytes, all but the last multiples of `multiple` (a row)."""
    count = -(-nbytes // (most // multiple * multiple))
    if count < 2:
        return [nbytes] if nbytes else []
    each = -(-nbytes // (count * multiple)) * multiple
    return [each] * ((nbytes - 1) // each) + [(nbytes - 1) % each + 1]
