"""Which blocks of weights stay in memory and which are read from the disk on every pass.

A block is what is read and used together: a layer, or a piece of one where layers are larger than half the ring. A pass goes through
all blocks in order, so a cache of the newest would miss every time; a fixed set in memory is the best there is for such a scan, and W
bytes with M of them pinned cost max((W - M) / disk, W / memory) seconds when reading and computing overlap. They overlap only if the
streamed blocks lie evenly between pinned ones: streamed in one run, the disk would idle before it and the processor in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .. import DoesNotFit
from .size import format_size

RING_NBYTES = 64 << 20  # at most
# Every byte of the ring is a byte that is not pinned: a small part of what streams, but room for the reads that keep a disk busy.
RING_LEAST, RING_SHARE = 16 << 20, 8


@dataclass(frozen=True)
class Residency:
    """Indices of blocks, each list in the order of use. `ring_nbytes` of memory hold streamed blocks for the time that they are needed:
    0 where nothing streams, else room for two of the largest, so that one is read while another is used."""

    pinned: tuple[int, ...]
    streamed: tuple[int, ...]
    pinned_nbytes: int
    streamed_nbytes: int
    ring_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory that weights take."""
        return self.pinned_nbytes + self.ring_nbytes


def reside(blocks: Sequence[int], budget: int, ring: int = RING_NBYTES) -> Residency:
    """Pin as many bytes of `blocks` (bytes each, in order of use) as `budget` holds beside a ring of at most `ring` bytes, the
    streamed ones spread evenly through the order. Everything is pinned where everything fits.

    Raises DoesNotFit where `budget` holds no ring, ValueError for a block of more than half of `ring`.
    """
    total, largest = sum(blocks), max(blocks, default=0)
    if total <= budget:
        return Residency(tuple(range(len(blocks))), (), total, 0, 0)
    if 2 * largest > ring:
        raise ValueError(f"a block of {largest} bytes does not go twice into a ring of {ring}: cut it")
    if 2 * largest > budget:
        raise DoesNotFit(f"{format_size(budget)} for weights hold no ring of two blocks of {format_size(largest)}",
                         f"--ram with {-(-(2 * largest - budget) // 2**20)}Mi more")
    held = min(ring, budget, max(2 * largest, RING_LEAST, (total - budget) // RING_SHARE))
    room, wanted = budget - held, total - (budget - held)
    while (pinned := total - sum(blocks[index] for index in _spread(blocks, wanted))) > room:
        wanted += pinned - room
    streamed, spare = set(_spread(blocks, wanted)), room - pinned
    # What is left of the budget is less than a block or two: the largest that fit, so that not a megabyte more is read than must be.
    for index in sorted(streamed, key=lambda index: (-blocks[index], index)):
        if blocks[index] <= spare:
            streamed.remove(index)
            spare -= blocks[index]
    kept = tuple(index for index in range(len(blocks)) if index not in streamed)
    read = sum(blocks[index] for index in streamed)
    return Residency(kept, tuple(sorted(streamed)), total - read, read, min(held, max(read, 2 * largest)))


def _spread(blocks: Sequence[int], wanted: int) -> list[int]:
    """About `wanted` bytes of blocks, evenly through the order: a block is taken when the share that is owed reaches half of it."""
    total, owed, taken = sum(blocks), 0, []
    for index, nbytes in enumerate(blocks):
        owed += min(wanted, total) * nbytes
        if nbytes and 2 * owed >= total * nbytes:
            taken.append(index)
            owed -= total * nbytes
    return taken


def pieces(nbytes: int, most: int, multiple: int = 1) -> list[int]:
    """`nbytes` cut into the fewest nearly equal pieces of at most `most` bytes, all but the last multiples of `multiple` (a row)."""
    count = -(-nbytes // (most // multiple * multiple))
    if count < 2:
        return [nbytes] if nbytes else []
    each = -(-nbytes // (count * multiple)) * multiple
    return [each] * ((nbytes - 1) // each) + [(nbytes - 1) % each + 1]
