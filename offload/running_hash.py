"""Incremental hash of a growing file: sha256 and git's sha1 in process, Xet's hash in a child process.

A hub that stores files in Xet names two hashes of each: sha256, a chain over all bytes, and a BLAKE3 tree over content-defined chunks.
Without SHA instructions a CPU takes two to three times as long for sha256, longer than a fast line takes for the bytes
(`benchmarks/pull_rate.py` has the rates). hf_xet, which comes with huggingface_hub, computes the other. It intercepts Ctrl-C and writes a
log wherever it is imported, so it runs in a child process, and the bytes are spliced from file to pipe without passing through this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Protocol

from .partial_file import Digest, PartialFile

HASH_NBYTES = 4 << 20
LARGE_NBYTES = 128 << 20  # the size from which a child process pays off: it takes a tenth of a second to start
SLOW = 0.8e9  # sha256 in bytes per second: 0.2 to 0.5e9 without SHA instructions, 1.5 to 2.5e9 with them
PROBE_NBYTES = 1 << 20
PIPE_NBYTES = 1 << 20  # the limit for unprivileged processes
F_SETPIPE_SZ = 1031  # Linux; in `fcntl` since Python 3.10, and not on other systems
XET = "import hf_xet; print(hf_xet.hash_files(['/dev/stdin'])[0].hash)"
LEAVE_S = 0.5  # for a process that has read to the end of its pipe, and for one that was terminated
END_S = 60.0  # without progress on the pipe, and for its remaining contents once everything has been written


class RunningHash(Protocol):
    """A hash fed with a file in order."""

    def take(self, part: PartialFile, at: int, nbytes: int) -> int:
        """Hash up to `nbytes` from `at`, which have arrived; returns how many, 0 if the file is shorter. Raises OSError."""

    def is_right(self) -> bool: ...

    def stop(self) -> None:
        """From another thread: make a blocked `take` or `is_right` return soon."""

    def close(self) -> None: ...


class Read:
    """The file's own digest, computed in process; without a digest, only checks that the bytes are there."""

    def __init__(self, digest: Digest | None, size: int) -> None:
        self._digest, self._hash = digest, new_hash(digest, size)
        self._buffer = memoryview(bytearray(min(HASH_NBYTES, max(1, size))))

    def take(self, part: PartialFile, at: int, nbytes: int) -> int:
        count = part.readinto(at, self._buffer[: min(len(self._buffer), nbytes)])
        if self._hash is not None:
            self._hash.update(self._buffer[:count])
        return count

    def is_right(self) -> bool:
        return self._hash is None or self._hash.hexdigest() == self._digest.value

    def stop(self) -> None:
        """Nothing is waited for."""

    def close(self) -> None:
        """Nothing is open."""


class Xet:
    """Xet's hash. If its process dies, hangs or cannot be fed, `take` raises OSError: the caller falls back to the other hash."""

    def __init__(self, value: str) -> None:
        self._value = value
        # With no name it would write logs to the user's HF_HOME, and delete older ones there.
        env = os.environ | {"HF_XET_LOG_DEST": os.devnull}
        self._process = subprocess.Popen([sys.executable, "-I", "-c", XET], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C is handled by this process
        self._pipe = self._process.stdin.fileno()
        self._room = select.poll()
        self._room.register(self._pipe, select.POLLOUT)
        with contextlib.suppress(OSError):  # a smaller pipe is only slower
            import fcntl

            fcntl.fcntl(self._pipe, F_SETPIPE_SZ, PIPE_NBYTES)

    def take(self, part: PartialFile, at: int, nbytes: int) -> int:
        while True:
            if not self._room.poll(END_S * 1000):
                raise TimeoutError("the process of the hash takes nothing")
            with contextlib.suppress(BlockingIOError):
                return part.splice(at, self._pipe, min(HASH_NBYTES, nbytes))

    def is_right(self) -> bool:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            return self._process.communicate(timeout=END_S)[0].decode("ascii", "replace").strip() == self._value
        return False

    def stop(self) -> None:
        """Leaves the pipe open: its descriptor belongs to the feeding thread, which finds that nobody reads it any more."""
        self._end(0.0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._end(LEAVE_S)
        self._process.stdout.close()

    def _end(self, patience_s: float) -> None:
        """Wait for the process; then terminate it; then kill it, also if Ctrl-C is pressed in between."""
        try:
            if not self._has_ended(patience_s):
                self._process.terminate()
                self._has_ended(LEAVE_S)
        finally:
            self._process.kill()
            self._process.wait()

    def _has_ended(self, within_s: float) -> bool:
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def begin_hash(part: PartialFile, xet: Callable[[], str | None] | None) -> RunningHash:
    """The hash that verifies `part` soonest. `xet` returns what the server has named so far."""
    if xet is not None and part.size >= LARGE_NBYTES and can_xet() and sha256_is_slow() and (value := xet()) is not None:
        with contextlib.suppress(OSError):  # no process could be started
            return Xet(value)
    return Read(part.digest, part.size)


@cache
def can_xet() -> bool:
    return getattr(os, "splice", None) is not None and bool(sys.executable) and importlib.util.find_spec("hf_xet") is not None


@cache
def sha256_is_slow() -> bool:
    """Measured, since the instructions used depend on the library."""
    data, took = bytes(PROBE_NBYTES), []
    for _ in range(3):
        began = time.perf_counter()
        hashlib.sha256(data).digest()
        took.append(time.perf_counter() - began)
    return PROBE_NBYTES / min(took) < SLOW


def new_hash(digest: Digest | None, size: int):
    """An incremental hash for a digest; None if there is nothing to verify."""
    if digest is None:
        return None
    if digest.algorithm == "git-sha1":
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return hashlib.sha256()


def matches(path: str | os.PathLike, digest: Digest) -> bool:
    """Whether a file on the disk hashes to `digest`."""
    with open(path, "rb") as file:
        running = new_hash(digest, os.fstat(file.fileno()).st_size)
        while piece := file.read(HASH_NBYTES):
            running.update(piece)
    return running.hexdigest() == digest.value
