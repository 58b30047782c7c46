"""A GGUF file written: its header from typed values, then its tensors in order, and its final name when the last byte is on the disk."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np

from .. import EffllmError
from .gguf import ARRAY, BLOCKS, BOOL, MAGIC, SCALARS, STRING, TYPES, Value

VERSION, ALIGNMENT = 3, 32
INTEGER, FLOAT = 4, 6  # u32 and f32: what keys of models are
NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
ARRAY_KINDS = {np.dtype(name): kind for kind, name in SCALARS.items() if kind != BOOL}


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
    raw = value.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    """A value behind its type. bool is an int to Python and comes first."""
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", INTEGER, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", ARRAY, ARRAY_KINDS[value.dtype], len(value)) + value.tobytes()
    return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))


class NewFile:
    """A file that is not there until `commit`: it grows under a hidden name beside it, and an error removes that. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path, self._part = path, path.with_name(f".{path.name}.part")
        try:
            self._file = self._part.open("wb")
        except OSError as error:
            raise EffllmError(f"{path} cannot be written: {error.strerror}", "give another place with -o") from error

    def write(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise EffllmError(f"{self.path} cannot be written: {error.strerror}", "make room on the disk, or give another place with -o") \
                from error

    def commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self.path)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._file.closed:
            self._file.close()
            self._part.unlink(missing_ok=True)
