"""Interrupted builds in our own data folder: models that were being quantized or exported, and how much of each is there.

`run --keep`, `quantize -o` and `export -o` leave partial output under `.NAME.partial` (`offload/folder_writer.py`). `pull --bits` keeps the
source files beside the folder being built (`pull/streaming_quantize.py`), with a note describing the result. A shard already converted
has been deleted; only the note records that it was downloaded.

    <data>/models/<org>--<repo>/<commit>/.<format>.source/.pull.json    {"revision", "files": [[name, size, etag], ...], "done": [name]}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...offload.folder_writer import partial_folder, unfinished
from ...offload.partial_file import Digest, read_journal
from .. import hub
from ..pull.disk import source_folder
from . import storage

NOTE = ".pull.json"
MAX_NOTE_NBYTES = 1 << 20  # bytes of a note


class RepoFile(Protocol):
    """A file of a repository."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def etag(self) -> str: ...


@dataclass(frozen=True)
class NotedFile:
    """A file as recorded in the note."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True)
class StoppedPull:
    """`folder` is the one being built. Bytes of the published files: `held` downloaded, of `size`."""

    repo: str
    revision: str
    commit: str
    spec: str
    folder: Path
    held: int
    size: int


def note(out: Path, revision: str, files: Iterable[RepoFile], done: Collection[str]) -> None:
    """Record beside `out` which revision is being built, the files it needs, and the shards already converted. Raises OSError."""
    content = {"revision": revision, "files": [[file.name, file.size, file.etag] for file in files], "done": sorted(done)}
    storage.replace_text(source_folder(out) / NOTE, json.dumps(content))


def finished_shards(out: Path) -> frozenset[str]:
    """Shards already converted, according to the note; empty without one."""
    content = _read(out)
    return content[2] if content else frozenset()


def held_nbytes(out: Path, files: Iterable[RepoFile]) -> int:
    """Bytes of the published files that need not be downloaded again."""
    source, done = source_folder(out), finished_shards(out)
    return sum(file.size if file.name in done else _downloaded_nbytes(source, file) for file in files)


def _downloaded_nbytes(source: Path, file: RepoFile) -> int:
    digest = Digest("", file.etag)
    for data in (source / file.name, source / f".{file.name}.incomplete"):  # of weights, and of what lies beside them
        if (journal := read_journal(data, source / f".{file.name}.journal", file.size, digest)) is not None:
            return journal[0].count
    place = source / file.name
    try:
        is_full_length = place.is_symlink() or not file.name.endswith(".safetensors")  # weights have their length from the start
        return file.size if is_full_length and place.stat().st_size == file.size else 0
    except OSError:
        return 0


def stopped_pulls(env: Mapping[str, str]) -> Iterator[StoppedPull]:
    """All interrupted `pull --bits`, sorted by folder; a note truncated by a kill is ignored."""
    root = storage.models_folder(env)
    for name in hub.names_in(root):
        repo = name.replace("--", "/")
        for commit in hub.names_in(root / name) if hub.is_repo(repo) else ():
            for entry in hub.names_in(root / name / commit):
                out = root / name / commit / entry.removeprefix(".").removesuffix(".source")
                if source_folder(out).name != entry or (out / storage.MARKER).is_file() or (content := _read(out)) is None:
                    continue
                revision, files, _ = content
                yield StoppedPull(repo, revision, commit, out.name, out, held_nbytes(out, files), sum(file.size for file in files))


@dataclass(frozen=True)
class StoppedConversion:
    """`folder` was being built from the model named `of`, where that is known. Bytes of its weights: `held` of `size`."""

    folder: Path
    of: str
    held: int
    size: int


def stopped_conversions(env: Mapping[str, str]) -> Iterator[StoppedConversion]:
    """What a stopped `run --keep`, `quantize -o` or `export -o` has left in our own folder, in alphabetical order. What a pull was making
    is told by its note, and what is whole by itself."""
    for partial in storage.model_subfolders(env):
        folder = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
        if partial_folder(folder) != partial or source_folder(folder).is_dir() or (folder / storage.CONFIG).is_file():
            continue
        if (journal := unfinished(folder)) is not None:
            yield StoppedConversion(folder, journal.of, journal.done, journal.size)


def find_stopped(env: Mapping[str, str], repo: str, revision: str, spec: str) -> list[StoppedPull]:
    """Interrupted pulls of a repository at a branch, tag, commit or commit prefix, in a format."""
    return [each for each in stopped_pulls(env) if (each.repo, each.spec) == (repo, spec)
            and (revision in (each.revision, each.commit) or hub.COMMIT.fullmatch(revision) and each.commit.startswith(revision))]


def leftover_folders(out: Path) -> tuple[Path, ...]:
    """Folders left behind by an interrupted build of `out`."""
    return tuple(each for each in (source_folder(out), partial_folder(out)) if each.is_dir())


def _read(out: Path) -> tuple[str, list[NotedFile], frozenset[str]] | None:
    try:
        with (source_folder(out) / NOTE).open("rb") as file:
            content = json.loads(file.read(MAX_NOTE_NBYTES))
        revision, done = content["revision"], frozenset(content["done"])
        files = [NotedFile(name, size, etag) for name, size, etag in content["files"]]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    is_valid = isinstance(revision, str) and hub.is_revision(revision) and all(map(_is_valid, files))
    return (revision, files, done) if is_valid else None


def _is_valid(file: NotedFile) -> bool:
    has_types = isinstance(file.name, str) and isinstance(file.etag, str) and type(file.size) is int
    return has_types and "/" not in file.name and file.size >= 0
