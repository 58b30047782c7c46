"""The header of a safetensors file, parsed as hostile input.

A file is `u64 header length | JSON header | tensor bytes`; the header maps a name to dtype, shape and a [begin, end) range counted from the
end of the header (https://github.com/huggingface/safetensors#format). Every claim is checked against the file's size before anything is
allocated from it, so later code may trust a `TensorInfo` blindly. The price: a file with holes, overlaps or trailing bytes is refused even
where each tensor alone would be readable; such a file is truncated, or was written to hide something.
"""

import json
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from .. import EffllmError

# The format's own cap; it also bounds what parsing may cost.
MAX_HEADER = 100_000_000
# NumPy's limit on dimensions.
MAX_RANK = 64
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

AGAIN = "download the model again"
BLOB = re.compile(r"sha256[-:][0-9a-f]{64}")


class CheckpointError(EffllmError):
    """The checkpoint's files are damaged, incomplete, or of an unsupported kind."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `offset` counts from the start of `file`; `dtype` is spelled as in safetensors ("BF16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_header(path: Path, fd: int, size: int) -> list[TensorInfo]:
    """All tensors of an open file of `size` bytes, in byte order. Raises CheckpointError."""
    if size < 8:
        damaged(path, f"is cut short: {size} bytes is less than the smallest header")
    head = pread_exactly(path, fd, 8, 0)
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER or length > size - 8:
        if head == b"version ":
            raise CheckpointError(f"{path} is a Git LFS pointer, not the weights", f"git -C {path.parent} lfs pull")
        if length > MAX_HEADER:
            damaged(path, f"is not a safetensors file: it claims a header of {length} bytes, the format allows {MAX_HEADER}")
        damaged(path, f"is cut short: its header needs {length} bytes, the file has {size - 8} after the length")
    entries = parse_json(path, "header", pread_exactly(path, fd, length, 8))
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        damaged(path, "has metadata that does not map names to strings")
    begin = 8 + length
    tensors = sorted((_tensor(path, name, entry, begin, size) for name, entry in entries.items()), key=_range)
    _check_cover(path, tensors, begin, size)
    return tensors


def _range(info: TensorInfo) -> tuple[int, int]:
    return info.offset, info.nbytes


def _check_cover(path: Path, tensors: list[TensorInfo], begin: int, size: int) -> None:
    """Check that the sorted tensors cover `begin` to `size` without gaps or overlaps."""
    if tensors and tensors[0].offset != begin:
        damaged(path, f"has {tensors[0].offset - begin} bytes before its first tensor {shown(tensors[0].name)}")
    for one, two in pairwise(tensors):
        end = one.offset + one.nbytes
        if two.offset < end:
            damaged(path, f"has tensors {shown(one.name)} and {shown(two.name)} that overlap")
        if two.offset > end:
            damaged(path, f"has {two.offset - end} bytes between tensors {shown(one.name)} and {shown(two.name)}")
    end = tensors[-1].offset + tensors[-1].nbytes if tensors else begin
    if end != size:
        damaged(path, f"has {size - end} bytes that belong to no tensor")


def _tensor(path: Path, name: str, entry: Any, data_begin: int, size: int) -> TensorInfo:
    """One header entry, checked against the file's size. Raises CheckpointError at the first problem."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        damaged(path, f"describes tensor {shown(name)} by other fields than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        damaged(path, f"has tensor {shown(name)} of unknown dtype {shown(dtype)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_count(n) for n in shape):
        damaged(path, f"has tensor {shown(name)} with an impossible shape {shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        damaged(path, f"has tensor {shown(name)} with impossible offsets {shown(offsets)}")
    begin, end = offsets
    if begin > end or data_begin + end > size:
        damaged(path, f"has tensor {shown(name)} at bytes {begin}:{end}, but holds {size - data_begin} bytes of tensors")
    nbits = DTYPE_BITS[dtype]
    for n in shape:
        nbits *= n
    if nbits != 8 * (end - begin):
        damaged(path, f"has tensor {shown(name)} whose {end - begin} bytes do not match {dtype} {shown(shape)}")
    return TensorInfo(name, dtype, tuple(shape), path, data_begin + begin, end - begin)


def is_gguf(path: Path) -> bool:
    """Whether this is the name of a GGUF file, the only format in which a model is a single file. Kept here so that it needs neither the
    parser nor NumPy."""
    return path.suffix.lower() == ".gguf" or is_blob(path.name)


def is_blob(name: str) -> bool:
    """Whether this is the name of a blob in Ollama's library: a checksum, without an extension."""
    return BLOB.fullmatch(name) is not None


def _is_count(value: Any) -> bool:
    # bool is an int in Python; the bound keeps products of hostile numbers cheap.
    return type(value) is int and 0 <= value < 2**63


def parse_json(path: Path, what: str, text: bytearray) -> dict[str, Any]:
    """A JSON object without duplicate keys; any damage, excessive nesting included, is a CheckpointError."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise CheckpointError(f"{path} has a damaged {what}: it nests too deeply", AGAIN) from error
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged {what}: {shown(str(error))}", AGAIN) from error
    if not isinstance(value, dict):
        damaged(path, f"has a damaged {what}: it is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, _ in pairs:
        # Lone surrogates cannot be written to a terminal or file; encode() raises a ValueError for them.
        key.encode("utf-8")
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def pread_exactly(path: Path, fd: int, nbytes: int, offset: int) -> bytearray:
    """`nbytes` at `offset` of a file whose size was checked; CheckpointError if it shrank meanwhile or the disk fails."""
    text = bytearray(nbytes)
    pread_into(path, fd, memoryview(text), offset)
    return text


def pread_into(path: Path, fd: int, out: memoryview, offset: int) -> None:
    """Fill `out` from `offset`; one call may return less than asked (the kernel stops at 2 GiB)."""
    done = 0
    while done < len(out):
        try:
            count = os.preadv(fd, [out[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}", "check the disk, then try again") from error
        if count == 0:
            damaged(path, "became shorter while it was being read")
        done += count


def shown(value: Any) -> str:
    """A value from the file for a one-line message: escaped and shortened."""
    if isinstance(value, dict):
        return "{...}"
    if isinstance(value, list):
        items = ["..." if isinstance(item, list | dict | str) else ascii(item) for item in value[: MAX_RANK + 1]]
        text = f"[{', '.join(items)}]"
    else:
        text = ascii(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def damaged(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path} {reason}", AGAIN)
