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
FIRST_NBYTES = 4 << 20  # smallest range: the first ranges of a file are small, so that hashing starts at once
BACKLOG_NBYTES = 64 << 20  # bytes waiting for the hash beyond which receivers pause and leave it the CPU
PIECE_NBYTES, PIECE_S = 1 << 20, 0.3  # received before a write: so many bytes, or what arrives in this time
TICK_S = 0.1  # how long `events` waits for one
REPORT_INTERVAL_S = 3.0  # between messages of the same failure
JOIN_TIMEOUT_S = 3.0  # for a thread that is writing; one that waits for a host's first response is abandoned
MAX_DAMAGES = 2  # complete downloads with a wrong hash before giving up


@dataclass
class _FileState:
    """The progress of one file."""

    download: Download
    generation: int = 0  # counts restarts: ranges of an earlier generation are void
    damages: int = 0
    is_doubted: bool = False  # its Xet hash did not match: its own digest decides
    received: int = 0  # bytes of this generation
    hashed: int = 0  # bytes, earlier runs included
    writing: threading.Lock = field(default_factory=threading.Lock)  # keeps writes of an earlier generation out of a newer one


@dataclass
class _Range:
    """A byte range [begin, end) to be received; `begin` advances with what is written."""

    state: _FileState
    begin: int
    end: int
    generation: int


def transfer(files: Sequence[Download], open_range: OpenRange, network: Network, connections: int = CONNECTIONS,
             backoff: Backoff | None = None) -> Iterator[Received | Complete | Retrying]:
    """Complete every file; they are reported in order. Raises the first error that a retry cannot cure; what has arrived is kept."""
    state = _Transfer(files, open_range, network, backoff or Backoff())
    threads = [threading.Thread(target=state.receive, name=f"effllm-receive-{n}", daemon=True)
               for n in range(min(connections, state.ranges))]
    threads.append(threading.Thread(target=state.check, name="effllm-check", daemon=True))
    total = 0
    try:
        for thread in threads:
            thread.start()
        files_left = len(files)
        while files_left:
            for event in state.events():
                files_left -= isinstance(event, Complete)
                yield event
            total = max(total, sum(item.part.received_nbytes for item in files))
            yield Received(total)
    finally:
        state.stop()
        for thread in threads:
            if thread.ident is not None and thread not in state.connecting:
                thread.join(JOIN_TIMEOUT_S)


@dataclass
class _Transfer:
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
    _reported_at: dict[str, float] = field(default_factory=dict)
    _paused_until: float = 0.0  # after an overload response all connections pause

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        # Threads whose host has not responded: name lookup and connecting cannot be interrupted. Such a thread, when all others
        # stop, no longer touches any file.
        self.connecting: set[threading.Thread] = set()
        self._states = [_FileState(download) for download in self.files]
        self._hashing_index = 0  # index of the file being hashed
        for state in self._states:
            self._enqueue(state)

    def _enqueue(self, state: _FileState, whole: bool = False) -> None:
        for begin, end in state.download.part.missing():
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
            events = list(self._events)
            self._events.clear()
            if not events and self._failure is not None:
                raise self._failure
            return events

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
                self._receive_range(piece, buffer)
        except Exception as error:
            self._fail(error)

    def _next(self) -> _Range | None:
        with self._changed:
            while not self._stopping:
                if self._queue:
                    return self._queue.popleft()
                self._changed.wait()
            return None

    def _receive_range(self, piece: _Range, buffer: memoryview) -> None:
        failures = 0
        while not self._stopping and piece.begin < piece.end and piece.generation == piece.state.generation:
            begin, retry_after_s = piece.begin, None
            try:
                self._stream(piece, buffer)
                continue
            except RestartFile as error:
                self._restart_file(piece, error)
                return
            except RetryLater as error:
                reason, retry_after_s = error.reason, error.after
            except ConnectionFailed as error:
                if not error.again:
                    raise DownloadFailed(error.reason, error.step or "check the network, then run the same command again") from error
                reason = error.reason
            failures = 1 if piece.begin > begin else failures + 1
            if not self._stopping:
                self._wait_before_retry(piece.state.download.name, failures, reason, retry_after_s)

    def _stream(self, piece: _Range, buffer: memoryview) -> None:
        """Receive from `piece.begin` on, advancing it with what is written."""
        self.connecting.add(thread := threading.current_thread())
        try:
            body = self.open_range(piece.state.download.name, piece.begin, piece.end)
        finally:
            with self._changed:
                if not self._stopping:
                    self.connecting.discard(thread)
        try:
            while piece.begin < piece.end:
                limit = min(len(buffer), piece.end - piece.begin)
                filled, started = 0, time.monotonic()
                try:
                    while filled < limit and not self._stopping and not (filled and time.monotonic() - started >= PIECE_S):
                        count = body.readinto(buffer[filled:limit])
                        if not count:
                            raise ConnectionFailed("the response ended early")
                        filled += count
                finally:
                    self._write_piece(piece, buffer[:filled])
                if self._stopping or piece.generation != piece.state.generation:
                    return
                self._wait_for_hash(piece)
        finally:
            body.close()

    def _wait_for_hash(self, piece: _Range) -> None:
        """Pause while the hash is far behind what this run received: then the user waits for the hash, and the farther behind it is, the
        less of its input is still in the page cache."""
        with self._changed:
            while not self._stopping and piece.generation == piece.state.generation and self._backlog() >= BACKLOG_NBYTES:
                self._changed.wait()

    def _backlog(self) -> int:
        """Bytes that wait only for the hash. Call with the condition held."""
        ahead = sum(state.received - state.hashed for state in self._states)
        state = self._states[self._hashing_index]
        return min(ahead, state.download.part.covered_from(state.hashed) - state.hashed)

    def _write_piece(self, piece: _Range, data: memoryview) -> None:
        with piece.state.writing:
            if piece.generation != piece.state.generation or not len(data):
                return
            piece.state.received += piece.state.download.part.write(piece.begin, data)
        piece.begin += len(data)
        with self._changed:
            self._changed.notify_all()

    def _restart_file(self, piece: _Range, error: RestartFile) -> None:
        with self._changed:
            state = piece.state
            if self._stopping or piece.generation != state.generation:
                return
            state.damages += not error.whole
            if state.damages > MAX_DAMAGES:
                raise DownloadFailed(f"{state.download.name}: {error.reason}", "the hub or a proxy alters it; try again later")
            self._events.append(Retrying(f"{state.download.name}: {error.reason}; downloading it from the beginning"))
            self._requeue(state, error.whole)

    def _requeue(self, state: _FileState, whole: bool) -> None:
        """Discard a file and queue it again. Call with the condition held."""
        with state.writing:
            state.generation += 1
            state.received = state.hashed = 0
            state.download.part.restart()
        self._queue = deque(each for each in self._queue if each.state is not state)
        self._enqueue(state, whole)
        self._changed.notify_all()

    def _wait_before_retry(self, name: str, failures: int, reason: str, retry_after_s: float | None) -> None:
        if failures >= self.backoff.attempts or (retry_after_s or 0) > self.backoff.patience:
            wait = f" and asks to wait {retry_after_s:.0f} s" if retry_after_s else ""
            raise DownloadFailed(f"{name}: {reason}{wait}", "partial downloads are kept; run the same command to resume")
        delay = self.backoff.delay(failures, retry_after_s)
        with self._changed:
            until = time.monotonic() + delay
            if retry_after_s:
                self._paused_until = max(self._paused_until, until)
            # Connections fail together, and one message is enough.
            if time.monotonic() - self._reported_at.get(reason, -REPORT_INTERVAL_S) >= REPORT_INTERVAL_S:
                self._reported_at[reason] = time.monotonic()
                self._events.append(Retrying(f"{name}: {reason}; retrying in {max(1, round(delay))} s"))
            while not self._stopping and (remaining := max(until, self._paused_until) - time.monotonic()) > 0:
                self._changed.wait(remaining)

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
                self._hashing_index = index
                while not self._matches(state):
                    if self._stopping:
                        return
                with self._changed:
                    self._events.append(Complete(state.download))
                    self._changed.notify_all()
        except Exception as error:
            self._fail(error)

    def _matches(self, state: _FileState) -> bool:
        """Wait for all bytes and hash them; False if stopping, if the file must be downloaded again or if another hash has to decide."""
        part, generation, at = state.download.part, state.generation, 0
        if self._wait_for_prefix(state, generation, at) is None:  # until then the server has not named a hash
            return False
        with closing(begin_hash(part, None if state.is_doubted else state.download.xet)) as running, self._stoppable(running):
            while at < part.size:
                if (end := self._wait_for_prefix(state, generation, at)) is None:
                    return False
                try:
                    count = running.take(part, at, end - at)
                except OSError:
                    if isinstance(running, Xet):  # the other hash tells whether the file was at fault
                        return self._rehash(state)
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
            return self._rehash(state)
        with self._changed:
            state.damages += 1
            if state.damages >= MAX_DAMAGES:
                part.restart()
                raise DownloadFailed(f"{state.download.name}: wrong checksum, twice", "the hub or a proxy alters it; "
                                     "try another network, or later")
            self._events.append(Retrying(f"{state.download.name}: wrong checksum; downloading it again"))
            self._requeue(state, whole=False)
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

    def _wait_for_prefix(self, state: _FileState, generation: int, at: int) -> int | None:
        """The end of the file's contiguous prefix, once it is past `at`; None if stopping or if the file restarts."""
        with self._changed:
            while not self._stopping and state.generation == generation:
                end = state.download.part.covered_from(at)
                if end > at or at >= state.download.part.size:
                    return end
                self._changed.wait(1.0)
            return None

    def _rehash(self, state: _FileState) -> bool:
        """Hash a file again with the digest under which the cache stores it: that one decides whether to download again."""
        with self._changed:
            state.is_doubted, state.hashed = True, 0
        return False
