"""`verify`: the bytes of a quantized folder against the checksums that were recorded when it was made, and those of a downloaded one
against the names of their blobs, which are checksums too."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from .. import EffllmError, ModelNotFound, UsageError
from ..offload.part_file import Digest
from ..offload.running_hash import matches
from .config import read_config
from .container import Container, check_stored, read_container
from .events import Progress
from .gguf.names import all_parts
from .hub import SETTINGS
from .kv_profile_file import load_profile, profile_paths
from .source import open_store

PIECE = 8 << 20
BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


@dataclass(frozen=True)
class Verified:
    """`damaged` names the tensors (or `kind` files) whose bytes are not those that were written, and of small files beside tensors those
    that are not what they were; so many were looked at (`files`), and `unknown` were not recorded."""

    count: int
    nbytes: int
    damaged: tuple[str, ...]
    kind: str = "tensors"
    files: int = 0
    unknown: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        beside = {"files": self.files} if self.kind == "tensors" else {}
        return {self.kind: self.count, "bytes": self.nbytes, "damaged": list(self.damaged), **beside, "not_recorded": list(self.unknown)}


def verify(folder: Path) -> Iterator[Progress | Verified]:
    """Read every tensor, of a downloaded model every file; yields Progress and the result last.

    Raises CheckpointError where effllm.json or a header is damaged already, UsageError for a folder without checksums.
    """
    container = read_container(folder)
    if container is None:
        if not folder.exists():
            raise ModelNotFound(f"there is no folder {folder}", "effllm list shows the models on this machine")
        if (found := downloaded(folder)).blobs or found.lost:
            yield from _verify_blobs(found)
            return
        if folder.is_file():
            raise UsageError(f"{folder} has no checksums: GGUF files come without, downloads have them",
                             "give a folder that effllm quantize made, or a model from the hub cache")
        raise UsageError(f"{folder} has no checksums: effllm quantize records them, downloads have them, other checkpoints come without",
                         "give a folder that effllm quantize made, or a model from the hub cache")
    with open_store(folder, whole=False) as store:
        check_stored(container, store)
        total = sum(store.tensors[name].nbytes for name in container.tensors)
        done, damaged = 0, []
        piece = np.empty(PIECE, np.uint8)
        for stored in container.tensors.values():
            info, crc = store.tensors[stored.name], 0
            for at in range(0, info.nbytes, PIECE):
                view = memoryview(piece[: min(PIECE, info.nbytes - at)])
                store.read_at(info.file, info.offset + at, view)
                crc = zlib.crc32(view, crc)
                done += len(view)
                yield Progress("verifying", done, total, "bytes", stored.name)
            if crc != stored.crc32:
                damaged.append(stored.name)
        store.check_unchanged()
    wrong, count, unknown = _small_files(folder, container)
    yield Verified(len(container.tensors), total, (*damaged, *wrong), files=count, unknown=unknown)


def _small_files(folder: Path, container: Container) -> tuple[list[str], int, tuple[str, ...]]:
    """Files beside the tensors: those that are not what was recorded, how many were looked at, and those of which nothing was."""
    wrong = []
    for name, checksum in container.files.items():
        try:
            is_right = (folder / name).is_file() and zlib.crc32((folder / name).read_bytes()) == checksum
        except OSError:
            is_right = False
        wrong += [] if is_right else [name]
    count, profile = len(container.files), profile_paths(folder)[0]
    if profile.exists():
        count += 1
        try:
            load_profile(folder, read_config(folder))
        except EffllmError:
            wrong.append(profile.name)
    present = {each.name for each in folder.iterdir() if any(fnmatch(each.name, pattern) for pattern in SETTINGS)}
    return wrong, count, tuple(sorted(present - container.files.keys()))


@dataclass(frozen=True)
class Downloaded:
    """Files of a snapshot in the hub cache: by path those whose blobs are named by their checksums, by name those whose blob is `lost`, and
    those that are no link to one and have no checksum, such as what was measured of the model."""

    blobs: dict[str, Digest]
    lost: tuple[str, ...]
    unknown: tuple[str, ...]


def downloaded(model: Path) -> Downloaded:
    """The files of a snapshot, or a GGUF file in one and its other parts. Raises ModelNotFound for a part that is missing."""
    blobs, lost, unknown = {}, [], []
    for path in sorted(model.rglob("*")) if model.is_dir() else map(model.with_name, all_parts(model.name)):
        if not model.is_dir() and not path.exists():
            raise ModelNotFound(f"{model.name} is a part of a model, and {path.name} is missing", "effllm pull fetches all parts")
        name = os.readlink(path).rpartition("/")[2] if path.is_symlink() else ""
        if BLOB.fullmatch(name) and path.exists():
            blobs[str(path)] = Digest("sha256" if len(name) == 64 else "git-sha1", name)
        elif BLOB.fullmatch(name):
            lost.append(path.name)
        elif path.is_symlink() or not path.is_dir():
            unknown.append(path.name)
    return Downloaded(blobs, tuple(lost), tuple(unknown))


def _verify_blobs(found: Downloaded) -> Iterator[Progress | Verified]:
    """A link that leads nowhere was a file once: its blob went, and the model is not whole."""
    sizes = {path: os.stat(path).st_size for path in found.blobs}
    total, done, damaged = sum(sizes.values()), 0, list(found.lost)
    for path, digest in found.blobs.items():
        yield Progress("verifying", done, total, "bytes", Path(path).name)
        if not matches(path, digest):
            damaged.append(Path(path).name)
        done += sizes[path]
    yield Progress("verifying", done, total, "bytes")
    yield Verified(len(found.blobs) + len(found.lost), total, tuple(damaged), "files", unknown=found.unknown)
