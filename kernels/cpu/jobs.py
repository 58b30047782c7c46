"""Running kernels: at once, collected for one native call, or again as in the last pass.

Between two kernels the weights have driven the interpreter's own data out of the caches, and preparing a stage there costs several
times what it costs beforehand. The jobs of a forward pass are therefore collected and run by one call at its end. While an answer is
written, a pass differs from the last one of as many tokens in a position alone: its list is kept, and what the position changes is
refreshed in place, so that neither a token nor a draft costs any preparation. Where a pass depends on what comes from a disk, or on who is
routed where, an action stands in the list (`host_step`), and only that is done anew.
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
    """The jobs of a pass, with the actions between them. `key` says which passes are the same but for the position; `refresh` are told
    where the next one begins, or where each row of it lies. What its jobs read is its own, or the same in every recorded pass. `begin`: of
    the jobs that are collected, the first that is not in `steps` yet."""

    key: object
    begin: int = 0
    refresh: list[Callable[[Position], None]] = field(default_factory=list)
    steps: list[np.ndarray | Callable[[], None]] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)


class Jobs:
    """What a backend runs its kernels with. `flush` and `replay` belong inside `collecting`."""

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
        """Run a kernel, or note it where jobs are being collected. `block`, when given, may change before the job runs: it is copied."""
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
        """How many jobs are collected and have not run."""
        return len(self._collected or ())

    def run_beside(self, kernel: Kernel, block: np.ndarray, noted: int) -> None:
        """Run a kernel as one job with the last that was noted, whose outputs it does not read; by itself where none came behind `noted`
        jobs."""
        if self.pending <= noted:
            self.run(kernel, address(block), True, block)
            return
        first, where, _ = self._collected.pop()
        both = np.array([first, where, kernel.address, address(block)], np.int64)
        self._kept += [block, both]
        self._collected.append((side_by_side.address, address(both), True))

    def keep_alive(self, block: np.ndarray) -> None:
        """Keep an argument block alive until what was collected has run."""
        if self._collected is not None:
            self._kept.append(block)

    @contextmanager
    def shared_input(self) -> Iterator[None]:
        """The products inside have one input and one norm before it."""
        self._packed = {}
        try:
            yield
        finally:
            self._packed = None

    def must_pack(self, buffer: str, way: object) -> bool:
        """Is the input to be packed into `buffer` in this way, or does it lie there for an earlier product?"""
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
        """What is noted inside is the caller's, to `note` when it is to run; where nothing is collected, it runs at once."""
        before, own = self._collected, []
        self._collected = None if before is None else own
        try:
            yield own
        finally:
            self._collected = before

    def note(self, jobs: Sequence[tuple[int, int, bool]]) -> None:
        """Note jobs of `deferring`."""
        if jobs:
            self._collected += jobs

    def flush(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Run what was collected. A pass that needs this half-way depends on its values and is not recorded. `meanwhile`: as of
        `ThreadPool.run_list`, beside the first of these jobs."""
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
        """Run what was collected, then `action`, which may run kernels whose number and arguments nobody foresees. A recorded pass does the
        action anew when it comes again."""
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
        """Record the jobs that follow as a pass of so many tokens that may come again with this very `key`. None, and a pass that cannot be
        recorded, forget all: it may have written where the jobs of others read."""
        made = self._making = None if key is None else Recording(key, len(self._collected))
        before, self._recorded = self._recorded, {}
        yield
        if made is not None and self._making is made:
            made.steps.append(np.array(self._collected[made.begin :], np.int64))
            made.kept = list(self._kept)
            self._recorded, self._making = before | {tokens: made}, None

    def never_replay(self) -> None:
        """The pass that is being recorded will not come again as it is."""
        self._making = None

    def refresh(self, change: Callable[[Position], None]) -> None:
        """`change(position)` is to be called before the pass that is being recorded runs again."""
        if self._making is not None:
            self._making.refresh.append(change if self._row is None else partial(_of_row, change, self._row))

    @contextmanager
    def for_row(self, row: int) -> Iterator[None]:
        """What is noted inside is of one token of a pass whose tokens are of several texts: it is told that one's position."""
        self._row = row
        try:
            yield
        finally:
            self._row = None

    def forget(self) -> None:
        """No pass is recorded."""
        self._recorded.clear()

    def replay(self, key: object, tokens: int, position: Position) -> bool:
        """Run the recorded pass of so many tokens again from `position` on, if it has this key."""
        found = self._recorded.get(tokens)
        if found is None or found.key is not key:
            return False
        for change in found.refresh:
            change(position)
        self._again = found
        return True


def _of_row(change: Callable[[int], None], row: int, positions: np.ndarray) -> None:
    change(int(positions[row]))
