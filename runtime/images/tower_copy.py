"""Copies the towers of a model into a quantized folder: one unquantized file next to the weights.

A tower is a small part of a model and runs once per image, so nothing of it is rounded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from ...offload.checkpoint import READ_NBYTES, TensorStore
from ...offload.folder_writer import FolderWriter
from ...offload.safetensors_header import TensorInfo
from ..audio import AUDIO_ENCODERS
from ..events import Progress
from ..files.model_folder_files import TOWER
from . import MLX_VISION_PREFIXES, VISION_ENCODERS, is_mlx_quantized, model_type_of, raw_config
from .tower_weights import is_of_tower, tower_store


def tower_nbytes(folder: Path) -> int:
    """Bytes of a model's towers; 0 where they are not supported."""
    return sum(info.nbytes for info in tower_tensors(folder))


def copy_tower(folder: Path, writer: FolderWriter) -> Iterator[Progress]:
    """Write a model's towers next to the weights of `writer`; returns {file name: crc32}, empty without towers. Raises CheckpointError,
    DiskFull."""
    found = tower_tensors(folder)
    return (yield from write_tower(found, _read(folder, found), writer))


def write_tower(found: Sequence[TensorInfo], data: Iterator[bytes], writer: FolderWriter) -> Iterator[Progress]:
    """As `copy_tower`; `data` yields the bytes of all tensors in order."""
    if not found:
        return {}
    total, crc = sum(info.nbytes for info in found), 0

    def pieces() -> Iterator[bytes]:
        nonlocal crc
        for piece in chain([_head(found)], data):
            crc = zlib.crc32(piece, crc)
            yield piece

    for done in writer.adding(TOWER, pieces()):
        yield Progress("copying the vision and audio towers", min(done, total), total, "bytes")
    return {TOWER: crc}


def tower_tensors(folder: Path) -> list[TensorInfo]:
    """Tensors of a model's towers; empty where they are not supported."""
    kind = model_type_of(folder)
    if kind not in VISION_ENCODERS and kind not in AUDIO_ENCODERS \
            or is_mlx_quantized(raw_config(folder)) and kind not in MLX_VISION_PREFIXES:
        return []
    with tower_store(folder) as store:
        return [info for info in store.tensors.values() if is_of_tower(info.name, kind)]


def _head(found: Sequence[TensorInfo]) -> bytes:
    """Header of a safetensors file."""
    head, at = {}, 0
    for info in found:
        head[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, at + info.nbytes]}
        at += info.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read(folder: Path, found: Sequence[TensorInfo]) -> Iterator[bytes]:
    if not found:
        return
    with tower_store(folder) as store:
        for info in found:
            yield from pieces_of(store, info)


def pieces_of(store: TensorStore, info: TensorInfo) -> Iterator[bytes]:
    """The bytes of a tensor, in chunks."""
    if store.place(info) is None:  # made on the way in
        yield store.read(info).tobytes()
        return
    for begin in range(0, info.nbytes, READ_NBYTES):
        piece = bytearray(min(READ_NBYTES, info.nbytes - begin))
        store.read_at(info.file, info.offset + begin, memoryview(piece))
        yield bytes(piece)
