"""`verify`: checks a quantized folder against the checksums recorded when it was written, a downloaded model against the names of its
blobs, which are checksums, and any other against a SHA256SUMS file in the folder or beside it, as `sha256sum` writes it.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from ... import EffllmError, ModelNotFound, UsageError, ls, typed
from ...offload.partial_file import Digest
from ...offload.running_hash import matches
from ...offload.safetensors_header import CheckpointError, is_blob
from ..config import read_config
from ..config_reader import show
from ..events import Progress
from ..files.bounded_read import IrregularFile, read_bounded
from ..gguf.file_names import all_parts
from ..gguf.listwise import FILE
from ..gguf.projector_lookup import sibling_projectors
from ..hub import SETTINGS
from ..kv.kv_profile_file import load_profile, profile_paths
from ..source import open_store
from ..stores.container import Container, check_stored, read_container

PIECE = 8 << 20
BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
SUMS, MAX_SUMS_NBYTES = "SHA256SUMS", 1 << 20
SUM = re.compile(r"([0-9A-Fa-f]{64}) [ *](?:\./)?([^/\0][^\0]*)")  # and a path from the list's folder; `*`: it was read as binary


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

    Raises CheckpointError where effllm.json, a header or SHA256SUMS is damaged already, UsageError for a folder without checksums.
    """
    container = read_container(folder)
    if container is None:
        if not folder.exists():
            raise ModelNotFound(f"there is no folder {folder}", "effllm list shows the models on this machine")
        if (found := downloaded(folder)).blobs or found.lost:
            yield from _verify_blobs(found)
            return
        if (found := listed_files(folder)) is None:
            which = "a GGUF file has none" if folder.is_file() else "effllm quantize and downloads record them"
            raise UsageError(f"{folder} has no checksums to compare with ({which})",
                             f"to be able to verify it later: {checksum_command(folder)}")
        yield from _verify_blobs(found)
        return
    with open_store(folder, drop_tied=False) as store:
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
    damaged_files, count, unknown = _check_small_files(folder, container)
    yield Verified(len(container.tensors), total, (*damaged, *damaged_files), files=count, unknown=unknown)


def _check_small_files(folder: Path, container: Container) -> tuple[list[str], int, tuple[str, ...]]:
    """Files beside the tensors: those that are not what was recorded, how many were looked at, and those of which nothing was."""
    damaged = []
    for name, checksum in container.files.items():
        try:
            is_intact = (folder / name).is_file() and _crc32(folder / name) == checksum
        except OSError:
            is_intact = False
        damaged += [] if is_intact else [name]
    count, profile = len(container.files), profile_paths(folder)[0]
    if profile.exists():
        count += 1
        try:
            load_profile(folder, read_config(folder))
        except EffllmError:
            damaged.append(profile.name)
    present = {each.name for each in folder.iterdir() if any(fnmatch(each.name, pattern) for pattern in SETTINGS)}
    return damaged, count, tuple(sorted(present - container.files.keys()))


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return crc


@dataclass(frozen=True)
class DownloadedFiles:
    """Files of a snapshot in the hub cache: by path those whose blobs are named by their checksums, by name those whose blob is `lost`, and
    those that are no link to one and have no checksum, such as what was measured of the model. Of a folder with a list of checksums: those
    that it names, those of them that are gone, and the others."""

    blobs: dict[str, Digest]
    lost: tuple[str, ...]
    unknown: tuple[str, ...]


def downloaded(model: Path) -> DownloadedFiles:
    """The files of a snapshot, or a GGUF file in one, its other parts and what it sees with. Raises ModelNotFound for a part that is
    missing."""
    blobs, lost, unknown = {}, [], []
    for path in sorted(model.rglob("*")) if model.is_dir() else _files(model):
        if not model.is_dir() and not path.exists():
            raise ModelNotFound(f"{model.name} is one part of a split model, and {path.name} is missing", "effllm pull fetches all parts")
        name = os.readlink(path).rpartition("/")[2] if path.is_symlink() else ""
        name = path.name[len("sha256-"):] if is_blob(path.name) else name
        if BLOB.fullmatch(name) and path.exists():
            blobs[str(path)] = Digest("sha256" if len(name) == 64 else "git-sha1", name)
        elif BLOB.fullmatch(name):
            lost.append(path.name)
        elif path.is_symlink() or not path.is_dir():
            unknown.append(path.name)
    return DownloadedFiles(blobs, tuple(lost), tuple(unknown))


def _files(model: Path) -> list[Path]:
    """Of a GGUF model: its parts, and what it sees with or ranks by."""
    ranks = model.with_name(FILE)
    return [*map(model.with_name, all_parts(model.name)), *sibling_projectors(model)[:1], *([ranks] if os.path.lexists(ranks) else [])]


def checksum_command(model: Path) -> str:
    """The command that lists checksums of the files of a model as they are now: of all in a folder, of a GGUF file of its own."""
    folder = model if model.is_dir() else model.parent
    files = "*" if model.is_dir() else " ".join(typed(each.name) for each in _files(model) if each.parent == folder)
    cd = "" if folder == Path() else f"cd {typed(folder)} && "
    return f"{cd}sha256sum {files} {'>' if model.is_dir() else '>>'} {SUMS}"  # a list may be there already, of other files


def listed_files(model: Path) -> DownloadedFiles | None:
    """The files of a folder by a list of checksums in it, or in the folder above; of a GGUF file it and its other parts. None where no list
    speaks of them. Raises CheckpointError for a list in the folder that is none."""
    folder = model if model.is_dir() else model.parent
    sums = read_checksum_list(folder)
    if not sums and model.is_dir():  # one above may be of anything
        parent_sums, prefix = read_checksum_list(folder.absolute().parent, strict=False), f"{folder.absolute().name}/"
        sums = {name.removeprefix(prefix): value for name, value in parent_sums.items() if name.startswith(prefix)}
    sums.pop(SUMS, None)  # the shell made it, empty, before it was read
    if model.is_dir():
        present = {each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()}
    else:
        present = {each.name for each in _files(model) if each.parent == model.parent}
        sums = {name: sums[name] for name in present if name in sums}
        present &= {each.name for each in folder.iterdir()}
    blobs = {str(folder / name): Digest("sha256", value) for name, value in sums.items() if name in present}
    return DownloadedFiles(blobs, tuple(sums.keys() - present), tuple(sorted(present - sums.keys() - {SUMS}))) if sums else None


def read_checksum_list(folder: Path, strict: bool = True) -> dict[str, str]:
    """Checksums by path from a folder, of the list in it; empty where there is none. Raises CheckpointError where it is `strict`."""
    path, sums = folder / SUMS, {}
    try:
        lines = read_bounded(path, MAX_SUMS_NBYTES).decode(errors="replace").splitlines()
    except OSError as error:
        if isinstance(error, FileNotFoundError) or not strict:
            return {}
        reason = f"it is {error.strerror}" if isinstance(error, IrregularFile) else error.strerror
        raise CheckpointError(f"{path} cannot be read: {reason}", f"check it: {ls(path)}") from error
    for number, line in enumerate(lines, 1):
        if (found := SUM.fullmatch(line)) and ".." not in found[2].split("/"):
            sums[found[2]] = found[1].lower()
        elif strict:
            raise CheckpointError(f"{path}: line {number} is {show(line)}, expected a 64-digit checksum and the name of a file here",
                                  f"remove the line, or regenerate the list: {checksum_command(folder)}")
    return sums


def _verify_blobs(found: DownloadedFiles) -> Iterator[Progress | Verified]:
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
