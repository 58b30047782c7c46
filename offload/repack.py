"""Tensors whose layout in a file is not the one that kernels read, converted each time they are needed: what, where and by whom.

What a file holds of such a tensor is read to a desk, piece by piece, and put from there where it belongs, by the thread that read it. So
nothing of it is held twice, on the disk neither. There are few desks, whatever comes and goes: their bytes and those of the arrays in
between are a sum that is known before a byte of weights is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from .checkpoint import CheckpointError
from .direct_io import BLOCK, THREADS, Job, Read
from .memory import anonymous
from .safetensors_header import AGAIN
from .streaming_pager import Part, Range, lay_out, reads_of

STAGING_NBYTES = 32 << 20  # of all desks together with what is between; one there always is
ALIGNMENT = 64  # on which made tensors begin: what kernels want of a blob


@dataclass(frozen=True)
class RepackStep:
    """`ranges` are read together; `put` gets their bytes (uint8, on any border) and the memory of all tensors of the arrival, and fills
    what of those is made of these. Several are put at the same time. `put` raises CheckpointError, ValueError for what is damaged."""

    ranges: tuple[Range, ...]
    put: Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]


@dataclass(frozen=True)
class Repack:
    """How tensors of `nbytes` each are made out of `file_nbytes`. `desk_nbytes` holds any one of the `pieces` as it is read
    (`staging_buffer`), `scratch_nbytes` the arrays between it and the tensors. `pieces` are looked up when they are needed: a model has
    very many."""

    nbytes: tuple[int, ...]
    file_nbytes: int
    desk_nbytes: int
    scratch_nbytes: int
    pieces: Callable[[], Sequence[RepackStep]]


def staging_buffer(*nbytes: int) -> int:
    """Bytes of memory to read ranges of so many bytes into, wherever they lie."""
    return sum(-(-each // BLOCK) * BLOCK + BLOCK for each in nbytes)


@dataclass(frozen=True)
class RepackedPart(Part):
    """Some of its tensors lie ready, in `ranges`; the others, which `made` numbers among all of them, come of the `arrival`."""

    arrival: Repack
    made: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        ready = lay_out(self.ranges)[1]
        return ready + -(-sum(_bordered(nbytes) for nbytes in self.arrival.nbytes) // BLOCK) * BLOCK

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read for it."""
        return lay_out(self.ranges)[1] + self.arrival.file_nbytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor in it."""
        return self._all([own.nbytes for own in self.ranges], self.arrival.nbytes)

    def laid_out(self, start: int = 0) -> tuple[list, list[int]]:
        """What is read into memory from `start` on, and where each tensor then begins."""
        extents, at, ready = lay_out(self.ranges, start)
        at, places = at + start, []
        for nbytes in self.arrival.nbytes:
            places.append(at)
            at += _bordered(nbytes)
        return extents, list(self._all(ready, places))

    def makings(self, memory: np.ndarray, places: Sequence[int], desks: StagingBuffers) -> list[Job]:
        """What makes its other tensors in `memory`, where they begin at their `places`."""
        outs = tuple(memory[places[index] : places[index] + nbytes] for index, nbytes in zip(self.made, self.arrival.nbytes, strict=True))
        return [RepackJob(piece, outs, desks) for piece in self.arrival.pieces()]

    def _all(self, ready: Sequence[int], made: Sequence[int]) -> tuple[int, ...]:
        """Something of each tensor, from what is known of those that lie ready and those that are made."""
        found, rest = dict(zip(self.made, made, strict=True)), iter(ready)
        return tuple(found[index] if index in found else next(rest) for index in range(len(ready) + len(made)))


@dataclass(frozen=True)
class StagingPlan:
    """`count` desks, each with memory for what is read and for what is between."""

    count: int = 0
    desk_nbytes: int = 0
    scratch_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.count * (self.desk_nbytes + self.scratch_nbytes)


def plan_staging(parts: Sequence[Part]) -> StagingPlan:
    """Desks for any of `parts`, none where nothing is made: as many as there are threads to read, as far as DESKS_NBYTES go."""
    arrivals = [part.arrival for part in parts if isinstance(part, RepackedPart)]
    if not arrivals:
        return StagingPlan()
    desk = -(-max(arrival.desk_nbytes for arrival in arrivals) // BLOCK) * BLOCK
    scratch = max(arrival.scratch_nbytes for arrival in arrivals)
    return StagingPlan(min(THREADS, max(1, STAGING_NBYTES // (desk + scratch))), desk, scratch)


class StagingBuffers:
    """The desks of a plan. A thread waits for one only while another one works at it."""

    def __init__(self, plan: StagingPlan) -> None:
        self.nbytes = plan.nbytes
        self._free: SimpleQueue[np.ndarray] = SimpleQueue()
        for _ in range(plan.count):
            self._free.put(anonymous(plan.desk_nbytes))

    def take(self) -> np.ndarray:
        return self._free.get()

    def give(self, desk: np.ndarray) -> None:
        self._free.put(desk)


@dataclass(frozen=True)
class RepackJob:
    """A piece that is read and put: a job of a reader."""

    piece: RepackStep
    outs: tuple[np.ndarray, ...]
    desks: StagingBuffers

    def run(self, fill: Callable[[Read], int]) -> int:
        """Returns the bytes read. Raises CheckpointError."""
        desk, ranges = self.desks.take(), self.piece.ranges
        try:
            extents, nbytes, places = lay_out(ranges, gap=0)
            count = sum(fill(read) for read in reads_of(extents, desk, nbytes))
            self.piece.put([desk[place : place + own.nbytes] for place, own in zip(places, ranges, strict=True)], self.outs)
        except CheckpointError:
            raise
        except Exception as error:  # it would end the thread, and whoever waits would wait for ever: it hears what a job's ticket says
            raise CheckpointError(f"{ranges[0].file} holds weights that cannot be put in order: {error}", AGAIN) from error
        finally:
            self.desks.give(desk)
        return count


def _bordered(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
