"""What a model sees with, in a folder of quantized weights: a file of its own beside them, with its tensors as they were.

A tower is a small part of a model and is multiplied once for a picture, so nothing of it is rounded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from ...offload.checkpoint import READ_NBYTES, TensorStore
from ...offload.header import TensorInfo
from ...offload.writer import FolderWriter
from ..events import Progress
from ..files.written import TOWER
from . import SIGHTS, kind_of
from .tower_weights import is_of_tower, tower_store


def tower_nbytes(folder: Path) -> int:
    """Bytes of what the model in `folder` sees with; 0 of one whose pictures are not read here."""
    return sum(info.nbytes for info in _found(folder))


def keep_tower(folder: Path, writer: FolderWriter) -> Iterator[Progress]:
    """Write the tower of the model in `folder` beside the weights of `writer`; returns the file's name and crc32, nothing where there is no
    tower. Raises CheckpointError, DiskFull."""
    found, total, crc = _found(folder), tower_nbytes(folder), 0
    if not found:
        return {}

    def pieces() -> Iterator[bytes]:
        nonlocal crc
        with tower_store(folder) as store:
            for piece in _pieces(store, found):
                crc = zlib.crc32(piece, crc)
                yield piece

    for done in writer.adding(TOWER, pieces()):
        yield Progress("keeping what sees", min(done, total), total, "bytes")
    return {TOWER: crc}


def _found(folder: Path) -> list[TensorInfo]:
    if kind_of(folder) not in SIGHTS:
        return []
    with tower_store(folder) as store:
        return [info for info in store.tensors.values() if is_of_tower(info.name)]


def _pieces(store: TensorStore, found: list[TensorInfo]) -> Iterator[bytes]:
    """A safetensors file, piece by piece."""
    head, at = {}, 0
    for info in found:
        head[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, at + info.nbytes]}
        at += info.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for info in found:
        for begin in range(0, info.nbytes, READ_NBYTES):
            piece = bytearray(min(READ_NBYTES, info.nbytes - begin))
            store.read_at(info.file, info.offset + begin, memoryview(piece))
            yield bytes(piece)
