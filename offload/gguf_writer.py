"""Writing a GGUF file: the header from typed values, then the tensors in order; renamed into place once the last byte is on disk."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np

from .. import DiskFull, EffllmError, UsageError, lacks_room
from .gguf_header import ARRAY, BLOCKS, BOOL, MAGIC, SCALARS, STRING, TYPES, Value
from .size import format_size

VERSION, ALIGNMENT = 3, 32
INTEGER, FLOAT = 4, 6  # u32 and f32, the usual types of model keys
SIGNED = 5  # i32, for negative numbers
NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
ARRAY_KINDS = {np.dtype(np.bool_): BOOL, **{np.dtype(name): kind for kind, name in SCALARS.items() if kind != BOOL}}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written; `shape` with rows first."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        values, nbytes = BLOCKS[self.type]
        return prod(self.shape) // values * nbytes


def gguf_head(metadata: Mapping[str, Value], tensors: Sequence[PlannedTensor]) -> bytes:
    """Everything before the tensors, padded. They follow in this order, each padded to ALIGNMENT."""
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    offset = 0
    for tensor in tensors:
        head += _text(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        head += struct.pack("<IQ", NUMBERS[tensor.type], offset)
        offset += padded(tensor.nbytes)
    return bytes(head + bytes(padded(len(head)) - len(head)))


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "replace")  # a folder's name may not be valid text
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    """A value, preceded by its type. bool first, since it is an int in Python."""
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", INTEGER, value) if value >= 0 else struct.pack("<Ii", SIGNED, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", ARRAY, ARRAY_KINDS[value.dtype], len(value)) + value.tobytes()
    return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))


class NewFile:
    """An atomic write: the file grows under a hidden name beside `path` until `commit`; an error removes it. A context manager.

    The hidden file is locked, so that two processes never write the same one. Raises UsageError if another process does, EffllmError if the
    disk or the location refuses. `left_nbytes`: disk space of a killed run's hidden file, freed by now."""

    def __init__(self, path: Path, nbytes: int = 0) -> None:
        """`nbytes`: the final size, if known, for a message when the disk fills up."""
        self.path, self._part, self._left = path, path.with_name(f".{path.name}.part"), nbytes
        self._fd = -1
        with self._refusals("choose another path with -o"):
            # No symlinks: their target may belong to another program. Opening a pipe would block.
            self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            if not self._lock():
                raise UsageError(f"another effllm is writing {path}", "wait for it, or choose another path with -o")
            with self._refusals("choose another path with -o"):
                self.left_nbytes = os.fstat(self._fd).st_blocks * 512
                os.ftruncate(self._fd, 0)
        except BaseException:
            self._close()
            raise

    def _lock(self) -> bool:
        """Whether the hidden file is this writer's. Without file locks it is assumed to be."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        try:
            return os.fstat(self._fd).st_ino == self._part.stat().st_ino
        except FileNotFoundError:
            return False  # it has been renamed into place meanwhile

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes, unbuffered, so that a full disk is reported here or in `commit`."""
        view = memoryview(data).cast("B")
        with self._refusals():
            while view:
                count = os.write(self._fd, view)
                view, self._left = view[count:], self._left - count

    def commit(self) -> None:
        with self._refusals():
            os.fsync(self._fd)
            os.replace(self._part, self.path)
        self._close()

    @contextmanager
    def _refusals(self, hint: str = "free some space on the disk, or choose another path with -o") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if lacks_room(error):
                too_large = error.errno == errno.EFBIG
                full = "the file system does not allow a file of that size" if too_large else f"the disk of {self.path.parent} is full"
                missing = f": {self.path.name} needs {format_size(self._left)} more" if self._left > 0 else ""
                raise DiskFull(f"{full}{missing}",
                               "free some space and run it again (it starts over), or choose another disk with -o") from error
            raise EffllmError(f"{self.path} cannot be written: {error.strerror}", hint) from error

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._fd < 0:
            return
        try:
            self._part.unlink(missing_ok=True)  # while it is locked: afterwards it may be another process's
        finally:
            self._close()
