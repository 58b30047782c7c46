"""Repacking on read: tensors whose layout in the file differs from the kernels', converted each time they are needed.

The reading thread reads such a tensor chunk by chunk into a staging buffer and writes it to its destination from there, so nothing is
stored twice, neither in memory nor on disk. The number of staging buffers is fixed, so their memory, scratch arrays included, is known
before the first weight is read.
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

STAGING_NBYTES = 32 << 20  # of all staging buffers with their scratch arrays; there is always at least one
ALIGNMENT = 64  # of repacked tensors, as kernels require


@dataclass(frozen=True)
class RepackStep:
    """`ranges` are read together; `put` receives their bytes (uint8, at any alignment) and the memory of all tensors of the `Repack`, and
    writes what these bytes determine. Steps run concurrently. `put` raises CheckpointError, ValueError for damaged data."""

    ranges: tuple[Range, ...]
    put: Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]


@dataclass(frozen=True)
class Repack:
    """How tensors of `nbytes` each are made from `file_nbytes` of file. A staging buffer of `staging_nbytes` holds any one of the `pieces`
    (`staging_buffer`), `scratch_nbytes` the arrays in between. `pieces` is called when needed, since a model has very many."""

    nbytes: tuple[int, ...]
    file_nbytes: int
    staging_nbytes: int
    scratch_nbytes: int
    pieces: Callable[[], Sequence[RepackStep]]


def staging_buffer(*nbytes: int) -> int:
    """Bytes of a buffer for ranges of these sizes, at any alignment."""
    return sum(-(-each // BLOCK) * BLOCK + BLOCK for each in nbytes)


@dataclass(frozen=True)
class RepackedPart(Part):
    """A part of which some tensors are read directly, from `ranges`; the others, at the positions `made`, come from the `repack_plan`."""

    repack_plan: Repack
    made: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        ready = lay_out(self.ranges)[1]
        return ready + -(-sum(_align(nbytes) for nbytes in self.repack_plan.nbytes) // BLOCK) * BLOCK

    @property
    def read_nbytes(self) -> int:
        """Bytes read from the file."""
        return lay_out(self.ranges)[1] + self.repack_plan.file_nbytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor in it."""
        return self._all([own.nbytes for own in self.ranges], self.repack_plan.nbytes)

    def laid_out(self, start: int = 0) -> tuple[list, list[int]]:
        """What is read into memory from `start` on, and the offset of each tensor."""
        extents, at, ready = lay_out(self.ranges, start)
        at, places = at + start, []
        for nbytes in self.repack_plan.nbytes:
            places.append(at)
            at += _align(nbytes)
        return extents, list(self._all(ready, places))

    def repack_jobs(self, memory: np.ndarray, places: Sequence[int], staging: StagingBuffers) -> list[Job]:
        """Jobs that make the repacked tensors in `memory`, at their `places`."""
        sizes = zip(self.made, self.repack_plan.nbytes, strict=True)
        outs = tuple(memory[places[index] : places[index] + nbytes] for index, nbytes in sizes)
        return [RepackJob(step, outs, staging) for step in self.repack_plan.pieces()]

    def _all(self, ready: Sequence[int], made: Sequence[int]) -> tuple[int, ...]:
        """Merge per-tensor values of those read directly and those repacked, in order."""
        found, rest = dict(zip(self.made, made, strict=True)), iter(ready)
        return tuple(found[index] if index in found else next(rest) for index in range(len(ready) + len(made)))


@dataclass(frozen=True)
class StagingPlan:
    """`count` staging buffers, each with memory for what is read and for scratch arrays."""

    count: int = 0
    staging_nbytes: int = 0
    scratch_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.count * (self.staging_nbytes + self.scratch_nbytes)


def plan_staging(parts: Sequence[Part]) -> StagingPlan:
    """Staging buffers for any of `parts`: one per reader thread, within STAGING_NBYTES; none if nothing is repacked."""
    plans = [part.repack_plan for part in parts if isinstance(part, RepackedPart)]
    if not plans:
        return StagingPlan()
    buffer = -(-max(each.staging_nbytes for each in plans) // BLOCK) * BLOCK
    scratch = max(each.scratch_nbytes for each in plans)
    return StagingPlan(min(THREADS, max(1, STAGING_NBYTES // (buffer + scratch))), buffer, scratch)


class StagingBuffers:
    """The buffers of a plan. A thread waits for one only while others use them all."""

    def __init__(self, plan: StagingPlan) -> None:
        self.nbytes = plan.nbytes
        self._free: SimpleQueue[np.ndarray] = SimpleQueue()
        for _ in range(plan.count):
            self._free.put(anonymous(plan.staging_nbytes))

    def take(self) -> np.ndarray:
        return self._free.get()

    def give(self, buffer: np.ndarray) -> None:
        self._free.put(buffer)


@dataclass(frozen=True)
class RepackJob:
    """A reader's job: read a step's ranges, then `put` them."""

    step: RepackStep
    outs: tuple[np.ndarray, ...]
    staging: StagingBuffers

    def run(self, fill: Callable[[Read], int]) -> int:
        """Returns the bytes read. Raises CheckpointError."""
        buffer, ranges = self.staging.take(), self.step.ranges
        try:
            extents, nbytes, places = lay_out(ranges, gap=0)
            count = sum(fill(read) for read in reads_of(extents, buffer, nbytes))
            self.step.put([buffer[place : place + own.nbytes] for place, own in zip(places, ranges, strict=True)], self.outs)
        except CheckpointError:
            raise
        except Exception as error:  # it would end the thread, and waiters would wait forever: the error goes to the job's ticket
            raise CheckpointError(f"{ranges[0].file} holds weights that cannot be repacked: {error}", AGAIN) from error
        finally:
            self.staging.give(buffer)
        return count


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
