"""Writing a weights folder atomically and resumably: it exists whole or not at all, and an interrupted run can continue.

Everything is written to `.NAME.partial` beside the folder: weight files at their full size with their headers, then tensor after tensor in
place, and a journal with one line per finished tensor, written after the tensor is on disk. The journal's first line is a fingerprint of
the job, with the name of its source; another fingerprint starts over. A tensor's line ends with its checksum: from the first damaged line
on, or one written by a version without checksums, tensors count as not written. Copies and the marker file come last, then the folder is
renamed into place. The journal stays locked while a process writes, so two processes never share a folder.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .. import DiskFull, EffllmError, UsageError, lacks_room, ls
from .safetensors_header import read_header
from .shards import PAD, PlannedFile
from .size import format_size

JOURNAL = "journal"
MAX_FIRST_LINE = 1 << 16  # bytes to read of a journal's first line: a file of that name may be the user's, of any size
COPY_NBYTES = 4 << 20
AT_FDCWD, RENAME_EXCHANGE = -100, 2


class FolderWriter:
    """Writes the tensors of `files` for the folder `out`. A context manager; leaving it without `commit` keeps everything for the next run.

    fingerprint: identifies the job that can be resumed
    marker:      name of the file whose presence makes the folder complete
    of:          name of the source, for whoever finds the folder unfinished
    finished:    name -> the entry passed to `finish`, earlier runs included
    discarded:   an earlier run left something of another job or in an older format, which has been deleted

    Raises UsageError if another process writes the same folder, DoesNotFit if the disk is full."""

    def __init__(self, out: Path, files: Sequence[PlannedFile], fingerprint: str, marker: str, of: str = "") -> None:
        self.out, self.files, self.marker, self._source = out, tuple(files), marker, of
        self.partial = partial_folder(out)
        self.finished: dict[str, Mapping[str, object]] = {}
        self.discarded = False
        self._tensor_offsets = {name: (file.name, place) for file in files for name, place in file.places.items()}
        self._fds: dict[str, int] = {}
        self._extra_sizes: dict[str, int] = {}  # sizes of the files beside the weights, once known
        self._journal = -1
        try:
            self._open(fingerprint)
        except BaseException:
            self.close()
            raise

    @property
    def resumed(self) -> bool:
        return bool(self.finished)

    def write(self, name: str, offset: int, data: memoryview | bytes) -> None:
        """Write bytes at `offset` of a tensor. Thread-safe."""
        file, place = self._tensor_offsets[name]
        with self._disk_errors():
            _pwrite(self._fds[file], data, place + offset)

    def finish(self, name: str, entry: Mapping[str, object]) -> None:
        """All bytes of a tensor have been written: sync them, then append to the journal. `entry` must be JSON-serialisable."""
        with self._disk_errors():
            _sync_data(self._fds[self._tensor_offsets[name][0]])
            _write_all(self._journal, _journal_line(name, entry))
            _sync_data(self._journal)
        self.finished[name] = entry

    def adding(self, name: str, pieces: Iterable[bytes]) -> Iterator[int]:
        """Write a file that is not one of `files`, from scratch; yields the bytes written so far."""
        temporary, written = self.partial / f".{name}.new", 0
        with self._disk_errors(), temporary.open("wb") as out:
            for piece in pieces:
                out.write(piece)
                written += len(piece)
                yield written
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(self.partial / name)

    def commit(self, copies: Mapping[str, Path], texts: Mapping[str, str], replace: bool = False) -> None:
        """Add copies and small files, the marker last, and rename the folder into place; `replace` swaps it with an existing one."""
        with self._disk_errors():
            self._extra_sizes = {name: source.stat().st_size for name, source in copies.items()}
            self._extra_sizes |= {name: len(text.encode()) for name, text in texts.items()}
            for name, source in copies.items():
                _copy(source, self.partial / name)
            for name in sorted(texts, key=lambda name: name == self.marker):
                _write_file(self.partial / name, texts[name].encode())
            _sync_folder(self.partial)
            exchanged = replace and self.out.exists()
            (_exchange if exchanged else os.rename)(self.partial, self.out)
            os.unlink(self.out / JOURNAL)  # last: if the process is killed before this, the next run has only this left to do
            if exchanged:
                remove_written(self.partial, self.marker)
            _sync_folder(self.out.parent)
        self.close()

    def close(self) -> None:
        fds, self._fds = [*self._fds.values(), self._journal], {}
        self._journal = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- opening -----------------------------------------------------------------------------------------------------------------

    def _open(self, fingerprint: str) -> None:
        """Lock the journal, and adopt what an earlier run of the same job has finished."""
        with self._disk_errors():
            if self.partial.is_dir() and not _is_ours(self.partial, self.marker):
                raise UsageError(f"{self.partial} is in the way: no unfinished run left it there", "move it away")
            self.partial.mkdir(exist_ok=True)
            path = self.partial / JOURNAL
            self._journal = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = os.fstat(self._journal).st_ino == path.stat().st_ino  # else another process has just removed it
            except (BlockingIOError, FileNotFoundError):
                is_locked = False
            if not is_locked:
                raise UsageError(f"another effllm is writing {self.out}", "wait for it, or choose another folder with -o")
            found_fingerprint, entries, valid_length = _read_journal(path)
            is_same_job = found_fingerprint == fingerprint and all(self._has_layout(file) for file in self.files)
            has_leftovers = found_fingerprint is not None or len(os.listdir(self.partial)) > 1
            self.discarded = not entries and _lacks_checksum(path, valid_length) if is_same_job else has_leftovers
            if is_same_job:
                os.ftruncate(self._journal, valid_length)  # a line cut off by a kill
                self.finished = {name: entry for name, entry in entries.items() if name in self._tensor_offsets}
            else:
                os.ftruncate(self._journal, 0)
                _remove_all(self.partial, keep=JOURNAL)
                self._create_files()
                _write_all(self._journal, (json.dumps({"fingerprint": fingerprint, "of": self._source}) + "\n").encode())
                os.fsync(self._journal)
                _sync_folder(self.partial)
            for file in self.files:
                self._fds[file.name] = os.open(self.partial / file.name, os.O_RDWR | os.O_CLOEXEC)

    def _has_layout(self, file: PlannedFile) -> bool:
        try:
            with (self.partial / file.name).open("rb") as opened:
                return os.fstat(opened.fileno()).st_size == file.size and opened.read(len(file.head)) == file.head
        except FileNotFoundError:
            return False

    def _create_files(self) -> None:
        for file in self.files:
            with (self.partial / file.name).open("wb") as opened:
                opened.write(file.head)
                opened.truncate(file.size)
                opened.flush()
                os.fsync(opened.fileno())

    def _disk_errors(self) -> _DiskErrors:
        return _DiskErrors(self)

    def missing_nbytes(self) -> int:
        """Disk space that the unfinished folder still needs: unallocated bytes of its files."""
        sizes = {file.name: file.size for file in self.files} | self._extra_sizes
        return sum(max(0, size - _allocated_nbytes(self.partial / name)) for name, size in sizes.items())


class _DiskErrors:
    """A context in which a failed write becomes an error that says how much space is missing and that nothing is lost."""

    def __init__(self, writer: FolderWriter) -> None:
        self._writer = writer

    def __enter__(self) -> None:
        """Nothing to set up."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, OSError):
            return
        out = self._writer.out
        if lacks_room(error):
            too_large = error.errno == errno.EFBIG
            reason = "the file system does not allow a file of that size" if too_large else f"the disk of {out.parent} is full"
            raise DiskFull(f"{reason}: {out.name} needs {format_size(self._writer.missing_nbytes())} more",
                           "free some space and run the same command again: it resumes where it stopped") from error
        raise EffllmError(f"{error.filename or self._writer.partial} cannot be written: {error.strerror}",
                          f"check the folder: {ls(out.parent)}") from error


def partial_folder(out: Path) -> Path:
    """The path of an unfinished `out`."""
    return out.parent / f".{out.name}.partial"


def partial_nbytes(out: Path) -> int:
    """Disk space that an unfinished `out` already takes."""
    try:
        return sum(_allocated_nbytes(Path(entry)) for entry in os.scandir(partial_folder(out)))
    except OSError:
        return 0


def _allocated_nbytes(path: Path) -> int:
    """Disk space of a file, 0 if it does not exist."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


@dataclass(frozen=True)
class Unfinished:
    """The state of an unfinished folder."""

    of: str  # name of its source, "" if unknown
    done: int  # tensor bytes written,
    size: int  # of so many


def unfinished(out: Path) -> Unfinished | None:
    """The state of an unfinished `out`; None if there is none, or if it was killed before it recorded anything."""
    partial, of, size, done = partial_folder(out), "", 0, 0
    try:
        fingerprint, finished, _ = _read_journal(partial / JOURNAL)
        if fingerprint is None:
            return None
        with (partial / JOURNAL).open("rb") as journal:
            of = json.loads(journal.readline()).get("of", "")
        for path in partial.glob("*.safetensors"):
            with path.open("rb") as file:
                for tensor in read_header(path, file.fileno(), os.fstat(file.fileno()).st_size):
                    size += 0 if tensor.name.startswith(PAD) else tensor.nbytes
                    done += tensor.nbytes if tensor.name in finished else 0
    except (OSError, ValueError, RecursionError, TypeError, EffllmError):
        return None
    return Unfinished(of if isinstance(of, str) else "", done, size)


def is_being_written(partial: Path) -> bool:
    """Whether a process is writing into this unfinished folder now."""
    try:
        journal = os.open(partial / JOURNAL, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(journal)


def needs_cleanup(out: Path, marker: str) -> bool:
    """Whether a run was killed after it had renamed `out` into place and before it had cleaned up: the folder is complete."""
    return (out / marker).is_file() and is_journal(out / JOURNAL)


def finish_cleanup(out: Path, fingerprint: str, marker: str) -> dict[str, Mapping[str, object]] | None:
    """Finish the cleanup of such a folder if it has this fingerprint; returns the entry of each tensor. None if it has another, or if its
    process is still at work. Raises OSError."""
    if not needs_cleanup(out, marker) or is_being_written(out):
        return None
    found_fingerprint, entries, _ = _read_journal(out / JOURNAL)
    if found_fingerprint != fingerprint:
        return None
    if (replaced := partial_folder(out)).is_dir() and (replaced / marker).is_file() and not (replaced / JOURNAL).exists():
        remove_written(replaced, marker)  # before the journal, so that a kill leaves this to be repeated
    os.unlink(out / JOURNAL)
    _sync_folder(out.parent)
    return entries


def is_journal(path: Path) -> bool:
    """Whether a file is a journal left behind by a kill between rename and cleanup."""
    try:
        if path.name != JOURNAL or not path.is_file():
            return False
        with path.open("rb") as file:
            first = json.loads(file.readline(MAX_FIRST_LINE))
        return isinstance(first, dict) and "fingerprint" in first
    except (OSError, ValueError, RecursionError):
        return False


def remove_written(folder: Path, marker: str) -> None:
    """Delete a flat folder of files, the marker last, so that what a kill leaves is still recognised."""
    _remove_all(folder, keep=marker)
    (folder / marker).unlink(missing_ok=True)
    folder.rmdir()


def _is_ours(folder: Path, marker: str) -> bool:
    names = os.listdir(folder)
    return not names or JOURNAL in names or marker in names


def _remove_all(folder: Path, keep: str) -> None:
    for name in os.listdir(folder):
        if name != keep:
            os.unlink(folder / name)


def _read_journal(path: Path) -> tuple[str | None, dict[str, Mapping[str, object]], int]:
    """The fingerprint (None without a complete first line), the entries by tensor, and the length up to the last complete line."""
    fingerprint, entries, length = None, {}, 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True)):
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            break
        if number == 0 and isinstance(value, dict):
            fingerprint = value.get("fingerprint")
        elif number and isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and line == _journal_line(*value[:2]):
            entries[value[0]] = value[1]
        else:
            break
        length += len(line)
    return fingerprint, entries, length


def _lacks_checksum(path: Path, at: int) -> bool:
    """Whether the line at this byte has no checksum, as written by older versions."""
    line, *_ = path.read_bytes()[at:].splitlines(keepends=True) or (b"",)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and [type(part) for part in value] == [str, dict]


def _journal_line(name: str, entry: Mapping[str, object]) -> bytes:
    """A journal line: a list of name, entry, and the checksum of their JSON."""
    return (json.dumps([name, entry, zlib.crc32(json.dumps([name, entry]).encode())]) + "\n").encode()


def _pwrite(fd: int, data: memoryview | bytes, offset: int) -> None:
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _sync_data(fd: int) -> None:
    """fdatasync, where the system has it, else fsync."""
    getattr(os, "fdatasync", os.fsync)(fd)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("wb") as writer:
        while piece := reader.read(COPY_NBYTES):
            writer.write(piece)
        writer.flush()
        os.fsync(writer.fileno())


def _write_file(path: Path, content: bytes) -> None:
    """Write a small file atomically."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders atomically where the system can; elsewhere in three renames, between which a kill leaves `old` under
    `.NAME.replaced`."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE) == 0:
        return
    temporary = old.parent / f".{old.name}.replaced"
    os.rename(old, temporary)
    os.rename(new, old)
    os.rename(temporary, new)
