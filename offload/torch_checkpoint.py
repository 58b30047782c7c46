"""Locating the tensors of a torch.save file without unpickling it.

Such a file is a zip archive: `data.pkl`, a pickle that describes the tensors, and uncompressed members with the bytes of each storage. A
pickle is a program for a stack machine. The interpreter here knows the few opcodes that a table of tensors needs; a name stays a name, the
only callables are three that make a tensor or a table, and everything else is refused. So nothing in the file is ever imported or called,
and tensors are read by offset as from a safetensors file.
"""

from __future__ import annotations

import io
import os
import pickletools
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from .checkpoint import OpenFile, TensorStore, open_regular_file
from .safetensors_header import AGAIN, DTYPE_BITS, MAX_RANK, CheckpointError, TensorInfo, damaged, pread_exactly, shown

FILE = "pytorch_model.bin"  # its usual name in a folder
MOST_NBYTES = 1 << 20  # of the pickle; a draft model's has a few thousand
LOCAL, LOCAL_NBYTES = b"PK\x03\x04", 30  # magic of an archive member
STORAGES = {"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "LongStorage": "I64",
            "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL"}
TABLE, TENSOR, PARAMETER = "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
CONVERTED = "convert it with transformers or torch: load it with weights_only=True, and save_file of safetensors"
VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
NAMED_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Name:
    """A global that the pickle would import."""

    text: str


@dataclass(frozen=True)
class Storage:
    """Values of one type in a member of the archive."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True)
class Tensor:
    """A view of a storage, starting at value `offset`."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Mark:
    """A mark on the stack."""


def open_torch_checkpoint(path: Path) -> TensorStore:
    """The tensors of a torch.save file, by name. Raises CheckpointError if it is damaged or holds anything else."""
    file = open_regular_file(path)
    try:
        infos = _tensors(path, file)
    except BaseException:
        file.close()
        raise
    return TensorStore(path.parent, {info.name: info for info in infos}, {path: file})


def open_folder(folder: Path) -> TensorStore:
    """The tensors of a folder: of safetensors files, or else of a torch.save file."""
    pickled = folder / FILE
    return open_torch_checkpoint(pickled) if pickled.is_file() and not any(folder.glob("*.safetensors")) else TensorStore.open(folder)


def _tensors(path: Path, file: OpenFile) -> list[TensorInfo]:
    members = _members(path, file)
    described = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
    if len(described) != 1:
        damaged(path, "holds no table of tensors")
    root = described[0].removesuffix("data.pkl")
    order = members.get(f"{root}byteorder")
    if order is not None and pread_exactly(path, file.fd, min(order[1], 16), order[0]) != b"little":
        raise CheckpointError(f"{path} was written on a machine of another byte order", CONVERTED)
    begin, nbytes = members[described[0]]
    if nbytes > MOST_NBYTES:
        damaged(path, f"describes its tensors in {nbytes} bytes, more than the {MOST_NBYTES} that it may take")
    table = _run(path, bytes(pread_exactly(path, file.fd, nbytes, begin)))
    found = {name: each for name, each in table.items() if isinstance(name, str) and isinstance(each, Tensor)}
    if not found:
        damaged(path, "holds no tensors by name")
    return [_info(path, name, tensor, members, root) for name, tensor in found.items()]


def _members(path: Path, file: OpenFile) -> dict[str, tuple[int, int]]:
    """(offset, bytes) of each member of the archive."""
    found = {}
    try:
        with zipfile.ZipFile(io.FileIO(os.dup(file.fd), closefd=True)) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                    damaged(path, f"has a compressed member {shown(member.filename)}")
                head = pread_exactly(path, file.fd, LOCAL_NBYTES, member.header_offset)
                names, more = struct.unpack("<HH", head[26:30])
                begin = member.header_offset + LOCAL_NBYTES + names + more
                if head[:4] != LOCAL or begin + member.file_size > file.stamp[0]:
                    damaged(path, f"has no place for its member {shown(member.filename)}")
                found[member.filename] = begin, member.file_size
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, RuntimeError, OSError, ValueError, struct.error):  # whatever the archive claims
        raise CheckpointError(f"{path} is not a tensor archive: it is damaged, or was saved by torch before 1.6",
                              f"{AGAIN}, or {CONVERTED}") from None
    return found


def _info(path: Path, name: str, tensor: Tensor, members: Mapping[str, tuple[int, int]], root: str) -> TensorInfo:
    """Where a tensor lies. Raises CheckpointError if it is not contiguous and complete."""
    shape, storage = tensor.shape, tensor.storage
    rows = [prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(size > 1 and stride != row for size, stride, row in zip(shape, tensor.strides, rows)) or len(tensor.strides) != len(shape):
        raise CheckpointError(f"{path}: tensor {shown(name)} is not contiguous", CONVERTED)
    begin, nbytes = members.get(f"{root}data/{storage.key}", (0, -1))
    each, count = DTYPE_BITS[storage.dtype] // 8, prod(shape)
    if (tensor.offset + count) * each > nbytes:
        damaged(path, f"lacks the bytes of tensor {shown(name)}")
    return TensorInfo(name, storage.dtype, shape, path, begin + each * tensor.offset, each * count)


def _run(path: Path, text: bytes) -> dict[Any, Any]:
    """Interpret the pickle; returns its table."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def popped(count: int) -> list[Any]:
        taken = [stack.pop() for _ in range(count)]
        if any(isinstance(each, Mark) for each in taken):
            raise IndexError
        return taken[::-1]

    def since_mark() -> list[Any]:
        taken = []
        while not isinstance(each := stack.pop(), Mark):
            taken.append(each)
        return taken[::-1]

    try:
        for code, value, _ in pickletools.genops(text):
            name = code.name
            if name in VALUES:
                stack.append(value)
            elif name in NAMED_VALUES:
                stack.append(NAMED_VALUES[name])
            elif name == "MARK":
                stack.append(Mark())
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[value] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[value])
            elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
                stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[name])
            elif name in TUPLES:
                stack.append(tuple(popped(TUPLES[name])))
            elif name == "TUPLE":
                stack.append(tuple(since_mark()))
            elif name == "GLOBAL":
                stack.append(Name(value))
            elif name == "BINPERSID":
                stack.append(_storage(path, *popped(1)))
            elif name == "REDUCE":
                stack.append(_made(path, *popped(2)))
            elif name == "SETITEM":
                key, item = popped(2)
                stack[-1][key] = item
            elif name == "SETITEMS":
                pairs = since_mark()
                stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
            elif name == "BUILD":
                popped(1)  # the attributes of a table, which are ignored
            elif name == "STOP":
                (table,) = popped(1)
                if not isinstance(table, dict):
                    raise TypeError
                return table
            elif name != "PROTO":
                _refuse(path, f"by the instruction {name}")
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):  # a stack or a value that no table of tensors produces
        damaged(path, "has a damaged table of tensors")
    damaged(path, "has a table of tensors without an end")


def _storage(path: Path, said: Sequence[Any]) -> Storage:
    what, kind, key, _, count = said
    dtype = STORAGES.get(kind.text.removeprefix("torch "))
    if what != "storage" or dtype is None or not isinstance(key, str) or not _is_count(count):
        _refuse(path, f"of {shown(kind.text)}")
    return Storage(dtype, key, count)


def _made(path: Path, called: Name, given: Sequence[Any]) -> object:
    if called.text == TABLE and not given:
        return {}
    if called.text == PARAMETER and isinstance(given[0], Tensor):
        return given[0]
    if called.text != TENSOR:
        _refuse(path, f"by calling {shown(called.text.replace(' ', '.'))}")
    storage, offset, shape, strides = given[:4]
    if not isinstance(storage, Storage) or not all(map(_is_count, (offset, *shape, *strides))) or len(shape) > MAX_RANK:
        raise TypeError
    return Tensor(storage, offset, tuple(shape), tuple(strides))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**47


def _refuse(path: Path, how: str) -> NoReturn:
    raise CheckpointError(f"{path} holds more than a table of tensors, made {how}: none of it was executed",
                          f"if you trust it, {CONVERTED}")
