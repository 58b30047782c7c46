"""Job execution: run a kernel at once, collect jobs for one native call, or replay a recorded pass.

Streaming weights evicts the interpreter's own data from the caches, so preparing a stage between two kernels costs several times more than
beforehand. The jobs of a forward pass are therefore collected and run by one call at its end. In decode, a pass differs from the previous
one with as many tokens only in its position: its job list is kept, and what depends on the position is updated in place, so that neither a
token nor a draft costs any preparation. Where a pass depends on disk reads or on expert routing, an action is part of the list
(`host_step`), and only that is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..compile import Kernel
from ..threads import ThreadPool
from ..workspace import address
from .lora_loops import side_by_side

Position = "int | np.ndarray"  # of a pass's first token; where it has a token of each of several texts those of all, int64 [T]


@dataclass
class Recording:
    """The jobs of a pass, with the host actions between them. `key` identifies passes that are equal except for the position; `refresh`
    callbacks receive the start of the next pass, or the position of each row. Data read by its jobs is its own, or shared by all recorded
    passes. `begin`: the first collected job that is not in `steps` yet."""

    key: object
    begin: int = 0
    refresh: list[Callable[[Position], None]] = field(default_factory=list)
    steps: list[np.ndarray | Callable[[], None]] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)


class Jobs:
    """Runs a backend's kernels. `flush` and `replay` must be called inside `collecting`."""

    def __init__(self, pool: ThreadPool) -> None:
        self.pool = pool
        self._collected: list[tuple[int, int, bool]] | None = None
        self._kept: list[np.ndarray] = []
        self._making: Recording | None = None
        self._recorded: dict[int, Recording] = {}  # by tokens
        self._again: Recording | None = None
        self._row: int | None = None
        self._packed: dict[str, object] | None = None  # what buffers hold of the one input that products have; None: each has its own

    def run(self, kernel: Kernel, where: int, parallel: bool = True, block: np.ndarray | None = None) -> None:
        """Run a kernel, or enqueue it while jobs are being collected. `block`, if given, may change before the job runs: it is copied."""
        if self._collected is None:
            self.pool.run(kernel, where, parallel)
            return
        if block is not None:
            block = block.copy()
            self._kept.append(block)
            where = address(block)
        self._collected.append((kernel.address, where, parallel))

    @property
    def pending(self) -> int:
        """Number of collected jobs that have not run."""
        return len(self._collected or ())

    def run_beside(self, kernel: Kernel, block: np.ndarray, noted: int) -> None:
        """Merge a kernel into one job with the last pending one, whose outputs it does not read; a job of its own if none was added after
        the first `noted`."""
        if self.pending <= noted:
            self.run(kernel, address(block), True, block)
            return
        first, where, _ = self._collected.pop()
        both = np.array([first, where, kernel.address, address(block)], np.int64)
        self._kept += [block, both]
        self._collected.append((side_by_side.address, address(both), True))

    def keep_alive(self, block: np.ndarray) -> None:
        """Keep an argument block alive until the collected jobs have run."""
        if self._collected is not None:
            self._kept.append(block)

    @contextmanager
    def shared_input(self) -> Iterator[None]:
        """The products inside share one input and one norm before it."""
        self._packed = {}
        try:
            yield
        finally:
            self._packed = None

    def must_pack(self, buffer: str, way: object) -> bool:
        """Must the input be packed into `buffer` in this way, or is it there already from an earlier product?"""
        if self._packed is None:
            return True
        before, self._packed[buffer] = self._packed.get(buffer), way
        return before != way

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the jobs of a forward pass and run them at the end (or at `flush`). Outputs may be read only after the end."""
        self._collected = []
        try:
            yield
            self.flush()
        finally:
            self._collected = self._making = self._again = None
            # A job that Ctrl-C left open still reads what is kept; where a second one ends the wait for it, all stays until the next pass.
            self.pool.settle()
            self._kept.clear()

    @contextmanager
    def deferring(self) -> Iterator[list[tuple[int, int, bool]]]:
        """Jobs issued inside go to a list for the caller to pass to `note` when they are to run; if nothing is being collected, they run at
        once."""
        before, own = self._collected, []
        self._collected = None if before is None else own
        try:
            yield own
        finally:
            self._collected = before

    def note(self, jobs: Sequence[tuple[int, int, bool]]) -> None:
        """Enqueue jobs from `deferring`."""
        if jobs:
            self._collected += jobs

    def flush(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Run the pending jobs. A pass that needs this half-way depends on its values and is not recorded. `meanwhile`: as for
        `ThreadPool.run_list`, alongside the first of these jobs."""
        self._making = None
        if self._collected:
            jobs, self._collected = np.array(self._collected, np.int64), []
            self.pool.run_list(jobs, meanwhile)
        elif meanwhile is not None:
            meanwhile()
        if self._again is not None:
            again, self._again = self._again, None
            for step in again.steps:
                if callable(step):
                    step()
                    self.flush()
                else:
                    self.pool.run_list(step)

    def host_step(self, action: Callable[[], None]) -> None:
        """Run the pending jobs, then `action`, which may run kernels not known in advance. A replayed pass repeats the action."""
        making = self._making
        if making is not None:
            making.steps += [np.array(self._collected[making.begin :], np.int64), action]
        self.flush()
        action()
        self.flush()
        self._making = making
        if making is not None:
            making.begin = 0

    @contextmanager
    def recording(self, key: object | None, tokens: int) -> Iterator[None]:
        """Record the following jobs as a pass of this many tokens that may be replayed for this very `key`. None, or a pass that cannot be
        recorded, drops all recordings: it may have written where other recordings' jobs read."""
        made = self._making = None if key is None else Recording(key, len(self._collected))
        before, self._recorded = self._recorded, {}
        yield
        if made is not None and self._making is made:
            made.steps.append(np.array(self._collected[made.begin :], np.int64))
            made.kept = list(self._kept)
            self._recorded, self._making = before | {tokens: made}, None

    def never_replay(self) -> None:
        """Do not keep the pass that is being recorded."""
        self._making = None

    def refresh(self, change: Callable[[Position], None]) -> None:
        """Register `change(position)` to be called before the pass that is being recorded is replayed."""
        if self._making is not None:
            self._making.refresh.append(change if self._row is None else partial(_of_row, change, self._row))

    @contextmanager
    def for_row(self, row: int) -> Iterator[None]:
        """Jobs issued inside belong to one row of a pass whose rows are from different texts: refresh callbacks receive that row's
        position."""
        self._row = row
        try:
            yield
        finally:
            self._row = None

    def forget(self) -> None:
        """Drop all recordings."""
        self._recorded.clear()

    def replay(self, key: object, tokens: int, position: Position) -> bool:
        """Replay the recorded pass of this many tokens from `position` on, if it has this key."""
        found = self._recorded.get(tokens)
        if found is None or found.key is not key:
            return False
        for change in found.refresh:
            change(position)
        self._again = found
        return True


def _of_row(change: Callable[[int], None], row: int, positions: np.ndarray) -> None:
    change(int(positions[row]))
