"""The header of a GGUF file, parsed as hostile input.

A file is `magic, version, tensor count, key count | keys with typed values | tensor entries | padding | tensor bytes`, little-endian
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Counts and lengths precede what they count, so each is checked against the
bytes that remain, and against a limit of its own, before anything is allocated from it. A vocabulary is two or three arrays of 100,000
strings: those are parsed in one pass over a buffer that grows with the header.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np

from .safetensors_header import CheckpointError, damaged, pread_exactly, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 512 << 20  # bytes; the largest published vocabularies take 20 MB
MAX_KEYS, MAX_TENSORS, MAX_STRINGS = 1 << 16, 1 << 17, 1 << 22
MAX_NAME, MAX_TEXT = 1 << 12, 16 << 20  # bytes of a key or tensor name, of any other string
MAX_VALUES = 1 << 48  # of a tensor: keeps products of hostile numbers cheap
MAX_RANK = 4
PIECE = 1 << 20

# Type number in the file -> (name, values per block, bytes per block).
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}  # fmt: skip
I2_S = 36  # in files of bitnet.cpp
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"}
BOOL, STRING, ARRAY = 7, 8, 9

Scalar = int | float | bool | str
Value = Scalar | list[str] | np.ndarray


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. `shape` is the weight's, rows first (the reverse of the file's order); `offset` counts from the start of
    `file`; a row is `row_nbytes` long."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: Path

    @property
    def rows(self) -> int:
        return self.nbytes // self.row_nbytes

    @property
    def row_nbytes(self) -> int:
        return row_nbytes(self.type, self.shape[-1])


@dataclass(frozen=True)
class GgufHeader:
    """`metadata` by key: numbers, strings, lists of strings, and numeric arrays as NumPy arrays. `left_out`: tensors of the file that do
    not belong to the language model; `sees`: it also holds a vision tower."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    left_out: tuple[str, ...] = ()
    sees: bool = False


def row_nbytes(kind: str, width: int) -> int:
    """Bytes of `width` values, a multiple of the type's block size."""
    values, nbytes = BLOCKS[kind]
    return width // values * nbytes


BLOCKS = {name: (values, nbytes) for name, values, nbytes in TYPES.values()}


def read_gguf_header(path: Path, fd: int) -> GgufHeader:
    """The header of an open file. Raises CheckpointError in one line that names the key or tensor."""
    size = os.fstat(fd).st_size
    cursor = _Cursor(path, fd, size)
    tensors, keys = _counts(cursor, size)
    metadata: dict[str, Value] = {}
    for _ in range(keys):
        key = _key(cursor, metadata)
        metadata[key] = cursor.value(cursor.number(4), key)
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        damaged(path, f"states general.alignment {shown_value(alignment)}, expected a power of two from 8 on")
    begin = -(-cursor.at // alignment) * alignment
    return GgufHeader(path, metadata, _placed(path, entries, begin, size, alignment))


def read_gguf_keys(path: Path, head: bytes, size: int) -> tuple[dict[str, Value], dict[str, int]]:
    """The metadata of a file of `size` bytes, as far as its first bytes `head` hold it, and the lengths of lists (of one that ends after
    `head`, only the length). Raises CheckpointError; `path` is for messages."""
    cursor = _Beginning(path, head, size)
    metadata: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    try:
        for _ in range(_counts(cursor, size)[1]):
            key = _key(cursor, metadata)
            if (kind := cursor.number(4)) == ARRAY:
                at = cursor.at
                lengths[key] = (cursor.number(4), cursor.number(8))[1]
                cursor.at = at
            metadata[key] = cursor.value(kind, key)
    except _Behind:
        return metadata, lengths
    return metadata, lengths


def _counts(cursor: _Cursor, size: int) -> tuple[int, int]:
    """The tensor and key counts of a file with a valid preamble."""
    path = cursor.path
    if size < 24:
        damaged(path, f"is cut short: {size} bytes is less than the smallest header")
    magic, version = bytes(cursor.take(4, "magic")), cursor.number(4)
    if magic != MAGIC:
        if magic == b"vers":
            raise CheckpointError(f"{path} is a Git LFS pointer, not the weights", f"git -C {path.parent} lfs pull")
        if magic[:1] == b"<":
            raise CheckpointError(f"{path} is a web page, not the weights", "download the file again: a web page was saved in its place")
        if not any(magic):
            raise CheckpointError(f"{path} begins with zeros: its download is incomplete", "download the file again")
        raise CheckpointError(f"{path} is not a GGUF file: its first four bytes are not GGUF", "give a GGUF file, or a model folder")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        what = "a big-endian GGUF file" if swapped else f"GGUF version {version}, versions 2 and 3 are supported"
        raise CheckpointError(f"{path} is {what}", "convert the original checkpoint again")
    return cursor.count(8, MAX_TENSORS, 24, "tensors"), cursor.count(8, MAX_KEYS, 12, "keys")


def _key(cursor: _Cursor, metadata: Mapping[str, Value]) -> str:
    """Read the next key-value pair; returns its key."""
    key = cursor.text(MAX_NAME, "a key")
    if key in metadata:
        damaged(cursor.path, f"states key {shown(key)} twice")
    return key


def shown_value(value: object) -> str:
    """A metadata value for a one-line message."""
    return f"[{len(value)} values]" if isinstance(value, list | np.ndarray) else shown(value)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape with rows first, type, offset) as stated."""
    name = cursor.text(MAX_NAME, "a tensor name")
    rank = cursor.number(4)
    if not 1 <= rank <= MAX_RANK:
        damaged(cursor.path, f"has tensor {shown(name)} of {rank} dimensions, expected 1 to {MAX_RANK}")
    shape = tuple(cursor.number(8) for _ in range(rank))[::-1]
    return name, shape, cursor.number(4), cursor.number(8)


def _placed(path: Path, entries: list, begin: int, size: int, alignment: int) -> dict[str, GgufTensor]:
    """Tensors by name, checked to lie inside the file and not to overlap."""
    found: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in found:
            damaged(path, f"holds tensor {shown(name)} twice")
        if kind == I2_S:
            raise CheckpointError(f"{path} has tensor {shown(name)} of type {kind}, Microsoft's i2_s, whose layout depends on "
                                  "the processor and version that wrote it, which the file does not record",
                                  "use the model's safetensors, or a TQ2_0 or TQ1_0 file from llama.cpp's converter")
        if kind not in TYPES:
            damaged(path, f"has tensor {shown(name)} of unknown type {kind}")
        label, block, block_nbytes = TYPES[kind]
        count = 1
        for n in shape:
            count *= n
            if not 0 < count <= MAX_VALUES:
                damaged(path, f"has tensor {shown(name)} with an impossible shape {shown(list(shape))}")
        if shape[-1] % block:
            damaged(path, f"has tensor {shown(name)} with rows of {shape[-1]} values, {label} comes in blocks of {block}")
        nbytes = count // block * block_nbytes
        if offset % alignment:
            damaged(path, f"has tensor {shown(name)} at offset {offset}, which is not a multiple of the alignment {alignment}")
        if begin + offset + nbytes > size:
            damaged(path, f"is cut short: tensor {shown(name)} ends at byte {begin + offset + nbytes}, the file at {size}")
        found[name] = GgufTensor(name, label, shape, begin + offset, nbytes, path)
    for one, two in pairwise(sorted(found.values(), key=lambda tensor: tensor.offset)):
        if one.offset + one.nbytes > two.offset:
            damaged(path, f"has tensors {shown(one.name)} and {shown(two.name)} that overlap")
    return found


class _Cursor:
    """A cursor over the header. Every step is checked against the file size and MAX_HEADER before it reads."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path, self.at = path, 0
        self._fd, self._size, self._end = fd, size, min(size, MAX_HEADER)
        self._held = bytearray()

    def _hold(self, end: int, what: str) -> None:
        """Buffer the bytes up to `end`."""
        if end > self._end:
            if end > self._size:
                self._cut(what)
            damaged(self.path, f"has a header of more than {MAX_HEADER} bytes (at {what})")
        have = len(self._held)
        if end > have:
            grown = min(self._end, max(end, have + PIECE))
            self._held += pread_exactly(self.path, self._fd, grown - have, have)

    def _cut(self, what: str) -> NoReturn:
        damaged(self.path, f"is cut short, or lies about the length of {what}")

    def take(self, nbytes: int, what: str) -> memoryview:
        begin, self.at = self.at, self.at + nbytes
        self._hold(self.at, what)
        # A copy: a view would keep the buffer from growing.
        return memoryview(bytes(self._held[begin : self.at]))

    def number(self, nbytes: int) -> int:
        begin, self.at = self.at, self.at + nbytes
        self._hold(self.at, "the header")
        return int.from_bytes(self._held[begin : self.at], "little")

    def count(self, nbytes: int, most: int, least_each: int, what: str) -> int:
        """A count of items of at least `least_each` bytes."""
        count = self.number(nbytes)
        if count > most:
            damaged(self.path, f"claims {count} {what}, more than {most}")
        if count * least_each > self._size - self.at:
            self._cut(f"its list of {count} {what}")
        return count

    def text(self, most: int, what: str) -> str:
        length = self.number(8)
        if length > most:
            damaged(self.path, f"has {what} of {length} bytes, more than {most}")
        raw = self.take(length, what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            damaged(self.path, f"has {what} that is not UTF-8 text")

    def value(self, kind: int, key: str) -> Value:
        what = f"key {shown(key)}"
        if kind == STRING:
            return self.text(MAX_TEXT, what)
        if kind == ARRAY:
            return self._array(what)
        if kind not in SCALARS:
            damaged(self.path, f"has {what} of unknown type {kind}")
        return self._scalars(kind, 1, what)[0].item() if kind != BOOL else bool(self._scalars(kind, 1, what)[0])

    def _array(self, what: str) -> Value:
        kind, count = self.number(4), self.number(8)
        if kind == STRING:
            if count > MAX_STRINGS or count * 8 > self._size - self.at:
                damaged(self.path, f"has {what} with {count} texts, more than it can hold")
            return self._strings(count, what)
        if kind not in SCALARS:
            damaged(self.path, f"has {what} of " + ("nested arrays, which are not supported" if kind == ARRAY else f"unknown type {kind}"))
        return self._scalars(kind, count, what)

    def _scalars(self, kind: int, count: int, what: str) -> np.ndarray:
        dtype = np.dtype(SCALARS[kind])
        if count * dtype.itemsize > self._end - self.at:
            damaged(self.path, f"has {what} with {count} values, more than it can hold")
        values = np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        if kind == BOOL and values.size and values.max() > 1:
            damaged(self.path, f"has {what} that is neither true nor false")
        return values

    def _strings(self, count: int, what: str) -> list[str]:
        """An array of strings, parsed in one pass without a call per string where the buffer already holds it."""
        out, at, unpack = [], self.at, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                if at + 8 > len(self._held):
                    self._hold(at + 8, what)
                (length,) = unpack(self._held, at)
                if length > MAX_TEXT:
                    damaged(self.path, f"has {what} with a text of {length} bytes, more than {MAX_TEXT}")
                begin, at = at + 8, at + 8 + length
                if at > len(self._held):
                    self._hold(at, what)
                out.append(self._held[begin:at].decode("utf-8"))
        except UnicodeDecodeError:
            damaged(self.path, f"has {what} with a text that is not UTF-8")
        self.at = at
        return out


class _Behind(Exception):
    """The requested bytes are beyond the prefix that is available."""


class _Beginning(_Cursor):
    """A cursor over the first bytes of a header whose file is elsewhere."""

    def __init__(self, path: Path, head: bytes, size: int) -> None:
        super().__init__(path, -1, size)
        self._held += head

    def _hold(self, end: int, what: str) -> None:
        if end > self._size:
            self._cut(what)
        if end > len(self._held):
            raise _Behind
