"""A file being downloaded: preallocated at full length, with a journal of the byte ranges that have arrived.

The journal has a line per range, appended after its bytes were written, so a killed process loses at most what it had not recorded. A
journal of another file (a different length or digest) is ignored: both start over.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .size import format_size


@dataclass(frozen=True)
class Digest:
    """The expected hash of the finished file: `sha256`, or `git-sha1`, which is preceded by git's blob header."""

    algorithm: str
    value: str


class ByteRanges:
    """A set of byte positions, as sorted, disjoint ranges [begin, end)."""

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.ends: list[int] = []

    def add(self, begin: int, end: int) -> int:
        """Add a range; returns how many of its positions are new."""
        if begin >= end:
            return 0
        first, last = bisect_left(self.ends, begin), bisect_right(self.begins, end)
        before = sum(e - b for b, e in zip(self.begins[first:last], self.ends[first:last]))
        low = min([begin, *self.begins[first:last]])
        high = max([end, *self.ends[first:last]])
        self.begins[first:last], self.ends[first:last] = [low], [high]
        return high - low - before

    def covered_from(self, position: int) -> int:
        """The end of the range that contains `position`, or `position`."""
        index = bisect_right(self.begins, position) - 1
        return max(position, self.ends[index]) if index >= 0 else position

    def missing(self, size: int) -> Iterator[tuple[int, int]]:
        at = 0
        for begin, end in zip(self.begins, self.ends):
            if at < begin:
                yield at, begin
            at = end
        if at < size:
            yield at, size

    @property
    def count(self) -> int:
        return sum(self.ends) - sum(self.begins)


def head_line(size: int, digest: Digest | None) -> bytes:
    return (json.dumps({"format": "effllm-part", "size": size, "digest": digest.value if digest else None}) + "\n").encode()


def read_journal(path: Path, journal: Path, size: int, digest: Digest | None) -> tuple[ByteRanges, int] | None:
    """The ranges that an earlier run recorded, and the length of the journal's valid part; None if nothing here belongs to this file."""
    try:
        lines = journal.read_bytes().splitlines(keepends=True)
        if not lines or lines[0] != head_line(size, digest) or path.stat().st_size != size:
            return None
    except OSError:
        return None
    ranges, length = ByteRanges(), len(lines[0])
    for line in lines[1:]:
        words = line.split()
        if not line.endswith(b"\n") or len(words) != 2 or not all(word.isdigit() for word in words):
            break  # cut off by a kill
        begin, end = map(int, words)
        if not begin < end <= size:
            break
        ranges.add(begin, end)
        length += len(line)
    return ranges, length


class PartialFile:
    """A file being downloaded. Safe for concurrent writers in one process; the caller keeps other processes out.

    path:    holds the bytes
    journal: file that records which bytes have arrived
    size:    length of the finished file
    digest:  its expected hash, None if unknown"""

    lost_nbytes = 0  # bytes that were there without a journal entry

    def __init__(self, path: Path, journal: Path, size: int, digest: Digest | None) -> None:
        self.path, self.journal, self.size, self.digest = path, journal, size, digest
        self._lock = threading.Lock()
        self._received = ByteRanges()
        self._header = head_line(size, digest)
        # No symlinks: their target may belong to another program.
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            self._journal_fd = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except BaseException:
            os.close(self._fd)
            raise
        try:
            self._resume()
        except BaseException:
            self.close()
            raise

    def _resume(self) -> None:
        """Adopt what an earlier run recorded, if it is about this file."""
        recorded = read_journal(self.path, self.journal, self.size, self.digest)
        if recorded is None:
            self.lost_nbytes = min(self.size, 512 * os.fstat(self._fd).st_blocks)
            self.restart()
        else:
            self._received, length = recorded
            os.ftruncate(self._journal_fd, length)

    def restart_notice(self, name: str) -> str:
        """A notice for a file that has `lost_nbytes`; "" for others."""
        if not self.lost_nbytes:
            return ""
        why = "which ones is unknown (a damaged journal, or another version)"
        return f"{name} starts over: of {format_size(self.lost_nbytes)} that are here, {why}"

    @property
    def received_nbytes(self) -> int:
        """Bytes that have arrived."""
        with self._lock:
            return self._received.count

    def covered_from(self, position: int) -> int:
        """The end of the contiguous range that contains `position`, or `position`."""
        with self._lock:
            return self._received.covered_from(position)

    def missing(self) -> list[tuple[int, int]]:
        with self._lock:
            return list(self._received.missing(self.size))

    def write(self, offset: int, data: memoryview | bytes) -> int:
        """Write and record bytes; returns how many of them are new."""
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], offset + done)
        with self._lock:
            os.write(self._journal_fd, b"%d %d\n" % (offset, offset + done))
            return self._received.add(offset, offset + done)

    def readinto(self, offset: int, view: memoryview) -> int:
        return os.preadv(self._fd, [view], offset)

    def splice(self, offset: int, pipe: int, nbytes: int) -> int:
        """Send up to `nbytes` from `offset` into a pipe without copying; 0 past the end of the file. Raises BlockingIOError if the pipe is
        full, OSError if nobody reads it or the file system cannot splice."""
        return os.splice(self._fd, pipe, nbytes, offset_src=offset, flags=os.SPLICE_F_NONBLOCK)

    def restart(self, keep: int = 0) -> None:
        """Discard everything from `keep` on; the file keeps its length, the disk space is freed."""
        with self._lock:
            self._received = ByteRanges()
            os.ftruncate(self._journal_fd, 0)
            os.write(self._journal_fd, self._header)
            if keep:
                self._received.add(0, keep)
                os.write(self._journal_fd, b"0 %d\n" % keep)
            if os.fstat(self._fd).st_size > keep:  # ext4 flushes a file truncated to zero when it is closed: 0.5 s per GB
                os.ftruncate(self._fd, keep)
            os.ftruncate(self._fd, self.size)

    def close(self) -> None:
        for fd in (self._fd, self._journal_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._journal_fd = -1

    def discard(self) -> None:
        """Close, and delete both files."""
        self.close()
        self.path.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)

    def finish(self, target: Path) -> None:
        """Close, and rename to the final name."""
        self.close()
        os.replace(self.path, target)
        self.journal.unlink(missing_ok=True)
