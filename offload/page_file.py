"""Immutable, content-addressed files of KV pages, written atomically.

The name is the key (which model, which tokens) and the SHA-256 of the bytes, so whoever needs the same page finds the same file, concurrent
writers cannot harm each other, and corruption is detected on read. After a header of `HEADER` bytes the pages are stored as they are in
memory.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .. import EffllmError

MAGIC, VERSION = b"EFPF", 1
HEADER = struct.Struct("<4sIQ16s32s")  # magic, version, bytes that follow, key, their SHA-256
SUFFIX = ".kv"
KEY_NBYTES = 16


class DamagedPage(EffllmError):
    """A page file whose contents do not match its name. The caller decides what to do about it."""


@dataclass(frozen=True)
class PageFile:
    """The identity of a file: its key (16 bytes in hex), the SHA-256 of its payload, and the payload's length."""

    key: str
    sha256: str
    nbytes: int

    @property
    def name(self) -> str:
        """The path relative to the folder of pages."""
        return f"{self.key[:2]}/{self.key}-{self.sha256}{SUFFIX}"

    @property
    def stored_nbytes(self) -> int:
        return HEADER.size + self.nbytes

    def header(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, self.nbytes, bytes.fromhex(self.key), bytes.fromhex(self.sha256))


def describe(key: str, parts: Sequence[bytes | memoryview]) -> PageFile:
    """The file that the concatenation of `parts` makes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return PageFile(key, digest.hexdigest(), sum(len(part) for part in parts))


def write_page_file(folder: Path, file: PageFile, parts: Sequence[bytes | memoryview], lasting: bool = True) -> None:
    """Write a file atomically; `lasting`: fsync it. Raises OSError, and leaves nothing behind."""
    path = folder / file.name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with open(descriptor, "wb") as out:
            out.write(file.header())
            for part in parts:
                out.write(part)
            if lasting:
                on_disk(out)
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def read_page_file(folder: Path, file: PageFile) -> memoryview:
    """The payload. Raises DamagedPage for a file that is missing, truncated, corrupt, or of another version."""
    path = folder / file.name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            size = os.fstat(descriptor).st_size
            if size != file.stored_nbytes:  # checked before allocating as much as a session claims
                raise DamagedPage(f"has {size} bytes instead of {file.stored_nbytes}")
            raw = bytearray(size)
            with open(descriptor, "rb", closefd=False) as source:
                source.readinto(raw)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise DamagedPage("is gone") from error
    except OSError as error:
        raise DamagedPage(f"cannot be read: {error.strerror}") from error
    view = memoryview(raw)
    magic, version, *_ = HEADER.unpack(view[: HEADER.size])
    if magic == MAGIC and version != VERSION:
        raise DamagedPage(f"is of version {version}, this effllm reads {VERSION}")
    if view[: HEADER.size] != file.header() or hashlib.sha256(view[HEADER.size :]).hexdigest() != file.sha256:
        raise DamagedPage("is corrupt: its checksum does not match")
    return view[HEADER.size :]


def on_disk(out: IO[bytes]) -> None:
    """fsync a file."""
    out.flush()
    os.fsync(out.fileno())


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that its entries survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
