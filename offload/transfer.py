"""Parallel downloads: many files over many connections, in ranges, each hashed as soon as a contiguous prefix has arrived.

The caller supplies the bytes (`OpenRange`). A range that breaks off resumes where it stopped; one that keeps failing without progress is
abandoned after some attempts. The threads live inside `transfer` and are gone when it ends, however it ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from .. import DownloadFailed, EffllmError
from .backoff import Backoff
from .connection import ConnectionFailed, Network
from .running_hash import RunningHash, Xet, begin_hash
from .transfer_types import Complete, Download, OpenRange, Received, RestartFile, Retrying, RetryLater

CONNECTIONS = 8
RANGE_NBYTES = 32 << 20
FIRST_NBYTES = 4 << 20  # the first ranges of a file are small, so that hashing starts at once
BACKLOG_NBYTES = 64 << 20  # beyond this backlog the hash determines when the file is complete, and receivers leave it the CPU
PIECE_NBYTES, PIECE_S = 1 << 20, 0.3  # written at once: this much, or what arrived in this time
TICK_S = 0.1
SILENCE_S = 3.0
LEAVE_S = 3.0  # for a thread that is writing; one that waits for a host's first response is abandoned
DAMAGES = 2  # complete downloads with a wrong hash before giving up


@dataclass
class _State:
    wanted: Download
    generation: int = 0  # counts restarts: ranges of an earlier generation are void
    damages: int = 0
    is_doubted: bool = False  # its Xet hash did not match: its own digest decides
    received: int = 0  # bytes of this generation
    hashed: int = 0  # bytes, earlier runs included
    writing: threading.Lock = field(default_factory=threading.Lock)  # keeps writes of an earlier generation out of a newer one


@dataclass
class _Range:
    state: _State
    begin: int
    end: int
    generation: int


def transfer(files: Sequence[Download], open_range: OpenRange, network: Network, connections: int = CONNECTIONS,
             backoff: Backoff | None = None) -> Iterator[Received | Complete | Retrying]:
    """Complete every file; they are reported in order. Raises the first error that a retry cannot cure; what has arrived is kept."""
    work = _Work(files, open_range, network, backoff or Backoff())
    threads = [threading.Thread(target=work.receive, name=f"effllm-receive-{n}", daemon=True) for n in range(min(connections, work.ranges))]
    threads.append(threading.Thread(target=work.check, name="effllm-check", daemon=True))
    most = 0
    try:
        for thread in threads:
            thread.start()
        left = len(files)
        while left:
            for event in work.events():
                left -= isinstance(event, Complete)
                yield event
            most = max(most, sum(each.part.held for each in files))
            yield Received(most)
    finally:
        work.stop()
        for thread in threads:
            if thread.ident is not None and thread not in work.unanswered:
                thread.join(LEAVE_S)


@dataclass
class _Work:
    """State shared by the threads, under one condition variable."""

    files: Sequence[Download]
    open_range: OpenRange
    network: Network
    backoff: Backoff
    _queue: deque[_Range] = field(default_factory=deque)
    _events: deque[Complete | Retrying] = field(default_factory=deque)
    _failure: Exception | None = None
    _stopping: bool = False
    _running: RunningHash | None = None
    _said: dict[str, float] = field(default_factory=dict)
    _quiet_until: float = 0.0  # after an overload response all connections pause

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        # Threads whose host has not responded: name lookup and connecting cannot be interrupted. Such a thread, when all others
        # stop, no longer touches any file.
        self.unanswered: set[threading.Thread] = set()
        self._states = [_State(wanted) for wanted in self.files]
        self._checking = 0  # index of the file being hashed
        for state in self._states:
            self._enqueue(state)

    def _enqueue(self, state: _State, whole: bool = False) -> None:
        for begin, end in state.wanted.part.missing():
            while begin < end:
                step = end - begin if whole else min(RANGE_NBYTES, max(FIRST_NBYTES, begin // CONNECTIONS))
                self._queue.append(_Range(state, begin, min(end, begin + step), state.generation))
                begin += step

    @property
    def ranges(self) -> int:
        """How many ranges are left, at least one: a file that restarts adds more."""
        return max(1, len(self._queue))

    # -- consumer side -----------------------------------------------------------------------------------------------------------

    def events(self) -> list[Complete | Retrying]:
        """Events since the last call, after a short wait if there are none."""
        with self._changed:
            if not self._events and self._failure is None:
                self._changed.wait(TICK_S)
            found = list(self._events)
            self._events.clear()
            if not found and self._failure is not None:
                raise self._failure
            return found

    def stop(self) -> None:
        with self._changed:
            self._stopping, running = True, self._running
            self._changed.notify_all()
        self.network.cut()
        if running is not None:
            running.stop()

    # -- receiving ---------------------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Receive range after range until there are none; a file that restarts may add more."""
        buffer = memoryview(bytearray(PIECE_NBYTES))
        try:
            while (piece := self._next()) is not None:
                self._complete(piece, buffer)
        except Exception as error:
            self._fail(error)

    def _next(self) -> _Range | None:
        with self._changed:
            while not self._stopping:
                if self._queue:
                    return self._queue.popleft()
                self._changed.wait()
            return None

    def _complete(self, piece: _Range, buffer: memoryview) -> None:
        failures = 0
        while not self._stopping and piece.begin < piece.end and piece.generation == piece.state.generation:
            before, asked = piece.begin, None
            try:
                self._stream(piece, buffer)
                continue
            except RestartFile as error:
                self._start_over(piece, error)
                return
            except RetryLater as error:
                reason, asked = error.reason, error.after
            except ConnectionFailed as error:
                if not error.again:
                    raise DownloadFailed(error.reason, error.step or "check the network, then run the same command again") from error
                reason = error.reason
            failures = 1 if piece.begin > before else failures + 1
            if not self._stopping:
                self._wait_after(piece.state.wanted.name, failures, reason, asked)

    def _stream(self, piece: _Range, buffer: memoryview) -> None:
        """Receive from `piece.begin` on, advancing it with what is written."""
        self.unanswered.add(thread := threading.current_thread())
        try:
            body = self.open_range(piece.state.wanted.name, piece.begin, piece.end)
        finally:
            with self._changed:
                if not self._stopping:
                    self.unanswered.discard(thread)
        try:
            while piece.begin < piece.end:
                room = min(len(buffer), piece.end - piece.begin)
                filled, since = 0, time.monotonic()
                try:
                    while filled < room and not self._stopping and not (filled and time.monotonic() - since >= PIECE_S):
                        count = body.readinto(buffer[filled:room])
                        if not count:
                            raise ConnectionFailed("the response ended early")
                        filled += count
                finally:
                    self._put(piece, buffer[:filled])
                if self._stopping or piece.generation != piece.state.generation:
                    return
                self._let_hash(piece)
        finally:
            body.close()

    def _let_hash(self, piece: _Range) -> None:
        """Pause while the hash is far behind what this run received: then the user waits for the hash, and the farther behind it is, the
        less of its input is still in the page cache."""
        with self._changed:
            while not self._stopping and piece.generation == piece.state.generation and self._backlog() >= BACKLOG_NBYTES:
                self._changed.wait()

    def _backlog(self) -> int:
        """Bytes that wait only for the hash. Call with the condition held."""
        ahead = sum(state.received - state.hashed for state in self._states)
        state = self._states[self._checking]
        return min(ahead, state.wanted.part.covered_from(state.hashed) - state.hashed)

    def _put(self, piece: _Range, data: memoryview) -> None:
        with piece.state.writing:
            if piece.generation != piece.state.generation or not len(data):
                return
            piece.state.received += piece.state.wanted.part.write(piece.begin, data)
        piece.begin += len(data)
        with self._changed:
            self._changed.notify_all()

    def _start_over(self, piece: _Range, error: RestartFile) -> None:
        with self._changed:
            state = piece.state
            if self._stopping or piece.generation != state.generation:
                return
            state.damages += not error.whole
            if state.damages > DAMAGES:
                raise DownloadFailed(f"{state.wanted.name}: {error.reason}", "the hub or a proxy alters it; try again later")
            self._events.append(Retrying(f"{state.wanted.name}: {error.reason}; downloading it from the beginning"))
            self._renew(state, error.whole)

    def _renew(self, state: _State, whole: bool) -> None:
        """Discard a file and queue it again. Call with the condition held."""
        with state.writing:
            state.generation += 1
            state.received = state.hashed = 0
            state.wanted.part.restart()
        self._queue = deque(each for each in self._queue if each.state is not state)
        self._enqueue(state, whole)
        self._changed.notify_all()

    def _wait_after(self, name: str, failures: int, reason: str, asked: float | None) -> None:
        if failures >= self.backoff.attempts or (asked or 0) > self.backoff.patience:
            wait = f" and asks to wait {asked:.0f} s" if asked else ""
            raise DownloadFailed(f"{name}: {reason}{wait}", "partial downloads are kept; run the same command to resume")
        delay = self.backoff.delay(failures, asked)
        with self._changed:
            until = time.monotonic() + delay
            if asked:
                self._quiet_until = max(self._quiet_until, until)
            if time.monotonic() - self._said.get(reason, -SILENCE_S) >= SILENCE_S:  # connections fail together, and one message is enough
                self._said[reason] = time.monotonic()
                self._events.append(Retrying(f"{name}: {reason}; retrying in {max(1, round(delay))} s"))
            while not self._stopping and (left := max(until, self._quiet_until) - time.monotonic()) > 0:
                self._changed.wait(left)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._failure is None and not self._stopping:
                self._failure = error
            self._changed.notify_all()

    # -- checking ----------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Hash each file behind its receivers, in order."""
        try:
            for index, state in enumerate(self._states):
                self._checking = index
                while not self._matches(state):
                    if self._stopping:
                        return
                with self._changed:
                    self._events.append(Complete(state.wanted))
                    self._changed.notify_all()
        except Exception as error:
            self._fail(error)

    def _matches(self, state: _State) -> bool:
        """Wait for all bytes and hash them; False if stopping, if the file must be downloaded again or if another hash has to decide."""
        part, generation, at = state.wanted.part, state.generation, 0
        if self._reaches(state, generation, at) is None:  # until then the server has not named a hash
            return False
        with closing(begin_hash(part, None if state.is_doubted else state.wanted.xet)) as running, self._stoppable(running):
            while at < part.size:
                if (end := self._reaches(state, generation, at)) is None:
                    return False
                try:
                    count = running.take(part, at, end - at)
                except OSError:
                    if isinstance(running, Xet):  # the other hash tells whether the file was at fault
                        return self._doubt(state)
                    raise
                if not count:
                    with state.writing:  # a restart truncates the file for a moment
                        if state.generation != generation:
                            return False
                    raise EffllmError(f"{part.path} became shorter while it was being written", "run the same command again")
                at += count
                with self._changed:
                    if state.generation == generation:
                        state.hashed = at
                        self._changed.notify_all()
            if running.is_right():
                return True
        if isinstance(running, Xet):
            return self._doubt(state)
        with self._changed:
            state.damages += 1
            if state.damages >= DAMAGES:
                part.restart()
                raise DownloadFailed(f"{state.wanted.name}: wrong checksum, twice", "the hub or a proxy alters it; "
                                     "try another network, or later")
            self._events.append(Retrying(f"{state.wanted.name}: wrong checksum; downloading it again"))
            self._renew(state, whole=False)
        return False

    @contextmanager
    def _stoppable(self, running: RunningHash) -> Iterator[None]:
        """Register a hash that may wait for a child process, so that `stop` reaches it."""
        with self._changed:
            self._running = running
        try:
            yield
        finally:
            with self._changed:
                self._running = None

    def _reaches(self, state: _State, generation: int, at: int) -> int | None:
        """The end of the file's contiguous prefix, once it is past `at`; None if stopping or if the file restarts."""
        with self._changed:
            while not self._stopping and state.generation == generation:
                end = state.wanted.part.covered_from(at)
                if end > at or at >= state.wanted.part.size:
                    return end
                self._changed.wait(1.0)
            return None

    def _doubt(self, state: _State) -> bool:
        """Hash it again with the digest under which the cache stores it: that one decides whether to download again."""
        with self._changed:
            state.is_doubted, state.hashed = True, 0
        return False
