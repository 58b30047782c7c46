"""Job execution: run a kernel at once, collect jobs for one native call, or replay a recorded pass.

Streaming weights evicts the interpreter's own data from the caches, so preparing a stage between two kernels costs several times more than
beforehand. The jobs of a forward pass are therefore collected and run by one call at its end. In decode, a pass differs from the previous
one with as many tokens only in its position: its job list is stored, and arguments that depend on the position are updated in place, so
that neither a token nor a draft costs any preparation. Where a pass depends on disk reads or on expert routing, an action is part of the
list (`host_step`), and only that is repeated.
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

Position = "int | np.ndarray"  # of a pass's first token; int64 [T] for a pass with one token of each of several texts


@dataclass
class Recording:
    """The jobs of a pass, with the host actions between them. Its jobs read data of its own or data shared by all recorded passes."""

    key: object  # identifies passes that are equal except for the position
    begin: int = 0  # the first collected job that is not in `steps` yet
    refresh: list[Callable[[Position], None]] = field(default_factory=list)  # called with the position of the next pass
    steps: list[np.ndarray | Callable[[], None]] = field(default_factory=list)  # lists of jobs, and actions
    arrays: list[np.ndarray] = field(default_factory=list)  # kept alive: the jobs read them


class Jobs:
    """Runs a backend's kernels. `flush` and `replay` must be called inside `collecting`."""

    def __init__(self, pool: ThreadPool) -> None:
        self.pool = pool
        self._queue: list[tuple[int, int, bool]] | None = None
        self._kept_alive: list[np.ndarray] = []
        self._recording: Recording | None = None
        self._recorded: dict[int, Recording] = {}  # by number of tokens
        self._replaying: Recording | None = None
        self._current_row: int | None = None
        # packing of the shared input that each buffer holds; None: inputs are not shared
        self._packed_inputs: dict[str, object] | None = None

    def run(self, kernel: Kernel, where: int, parallel: bool = True, block: np.ndarray | None = None) -> None:
        """Run a kernel, or enqueue it while jobs are being collected. `block`, if given, may change before the job runs: it is copied."""
        if self._queue is None:
            self.pool.run(kernel, where, parallel)
            return
        if block is not None:
            block = block.copy()
            self._kept_alive.append(block)
            where = address(block)
        self._queue.append((kernel.address, where, parallel))

    @property
    def pending(self) -> int:
        """Number of collected jobs that have not run."""
        return len(self._queue or ())

    def run_merged(self, kernel: Kernel, block: np.ndarray, pending_before: int) -> None:
        """Merge a kernel into one job with the last pending one, whose outputs it does not read; a job of its own if none was added after
        the first `pending_before`."""
        if self.pending <= pending_before:
            self.run(kernel, address(block), True, block)
            return
        first, where, _ = self._queue.pop()
        pair = np.array([first, where, kernel.address, address(block)], np.int64)
        self._kept_alive += [block, pair]
        self._queue.append((side_by_side.address, address(pair), True))

    def keep_alive(self, block: np.ndarray) -> None:
        """Keep an argument block alive until the collected jobs have run."""
        if self._queue is not None:
            self._kept_alive.append(block)

    @contextmanager
    def shared_input(self) -> Iterator[None]:
        """The products inside share one input and one norm before it."""
        self._packed_inputs = {}
        try:
            yield
        finally:
            self._packed_inputs = None

    def must_pack(self, buffer: str, packing: object) -> bool:
        """Whether the input must be packed into `buffer` by this method, or is there already from an earlier product."""
        if self._packed_inputs is None:
            return True
        previous, self._packed_inputs[buffer] = self._packed_inputs.get(buffer), packing
        return previous != packing

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the jobs of a forward pass and run them at the end (or at `flush`). Outputs may be read only after the end."""
        self._queue = []
        try:
            yield
            self.flush()
        finally:
            self._queue = self._recording = self._replaying = None
            # A job left open by Ctrl-C still reads its arguments. If a second Ctrl-C ends the wait for it, they stay alive until the next
            # pass.
            self.pool.settle()
            self._kept_alive.clear()

    @contextmanager
    def deferring(self) -> Iterator[list[tuple[int, int, bool]]]:
        """Jobs issued inside go to a list, which the caller passes to `enqueue` when they should run; if nothing is being collected, they
        run at once."""
        queue, deferred = self._queue, []
        self._queue = None if queue is None else deferred
        try:
            yield deferred
        finally:
            self._queue = queue

    def enqueue(self, jobs: Sequence[tuple[int, int, bool]]) -> None:
        """Enqueue jobs from `deferring`."""
        if jobs:
            self._queue += jobs

    def flush(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Run the pending jobs. A pass that needs this half-way depends on its values and is not recorded. `meanwhile`: as for
        `ThreadPool.run_list`, alongside the first of these jobs."""
        self._recording = None
        if self._queue:
            jobs, self._queue = np.array(self._queue, np.int64), []
            self.pool.run_list(jobs, meanwhile)
        elif meanwhile is not None:
            meanwhile()
        if self._replaying is not None:
            recording, self._replaying = self._replaying, None
            for step in recording.steps:
                if callable(step):
                    step()
                    self.flush()
                else:
                    self.pool.run_list(step)

    def host_step(self, action: Callable[[], None]) -> None:
        """Run the pending jobs, then `action`, which may run kernels not known in advance. A replayed pass repeats the action."""
        recording = self._recording
        if recording is not None:
            recording.steps += [np.array(self._queue[recording.begin :], np.int64), action]
        self.flush()
        action()
        self.flush()
        self._recording = recording
        if recording is not None:
            recording.begin = 0

    @contextmanager
    def recording(self, key: object | None, tokens: int) -> Iterator[None]:
        """Record the following jobs as a pass of this many tokens that may be replayed for this very `key`. None, or a pass that cannot be
        recorded, drops all recordings: it may have written where other recordings' jobs read."""
        recording = self._recording = None if key is None else Recording(key, len(self._queue))
        previous, self._recorded = self._recorded, {}
        yield
        if recording is not None and self._recording is recording:
            recording.steps.append(np.array(self._queue[recording.begin :], np.int64))
            recording.arrays = list(self._kept_alive)
            self._recorded, self._recording = previous | {tokens: recording}, None

    def discard_recording(self) -> None:
        """Do not keep the pass that is being recorded."""
        self._recording = None

    def refresh(self, change: Callable[[Position], None]) -> None:
        """Register `change(position)` to be called before the pass that is being recorded is replayed."""
        if self._recording is not None:
            self._recording.refresh.append(change if self._current_row is None else partial(_of_row, change, self._current_row))

    @contextmanager
    def for_row(self, row: int) -> Iterator[None]:
        """Jobs issued inside belong to one row of a pass whose rows are from different texts: refresh callbacks receive that row's
        position."""
        self._current_row = row
        try:
            yield
        finally:
            self._current_row = None

    def forget(self) -> None:
        """Drop all recordings."""
        self._recorded.clear()

    def replay(self, key: object, tokens: int, position: Position) -> bool:
        """Replay the recorded pass of this many tokens from `position` on, if it has this key."""
        recording = self._recorded.get(tokens)
        if recording is None or recording.key is not key:
            return False
        for change in recording.refresh:
            change(position)
        self._replaying = recording
        return True


def _of_row(change: Callable[[int], None], row: int, positions: np.ndarray) -> None:
    change(int(positions[row]))
