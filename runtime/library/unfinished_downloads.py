"""Interrupted downloads: which files of which repository are partly here, under the names the user typed.

A blob is named by its checksum, and so are its partial files; a note beside the data and the journal says what they will become:

    models--org--name/blobs/<etag>.effllm.incomplete            the bytes, at their full length
    models--org--name/blobs/<etag>.effllm-journal.incomplete    which ranges have arrived
    models--org--name/blobs/<etag>.effllm-note.incomplete       {"name", "revision", "commit", "of"}, removed once the file is complete
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...offload.partial_file import Digest, read_journal
from .. import hub
from ..gguf import file_names

DATA, JOURNAL, NOTE = ".effllm.incomplete", ".effllm-journal.incomplete", ".effllm-note.incomplete"
MAX_NOTE_NBYTES = 4096  # bytes of a note


@dataclass(frozen=True)
class PartialFile:
    """A file of a repository that is partly here. `paths`: what lies in the cache for it. Bytes: `held` of `size`; `of`: the whole download
    that it was a part of, 0 where that is not known."""

    repo: str
    name: str
    revision: str
    commit: str
    paths: tuple[Path, ...]
    held: int
    size: int
    of: int = 0


@dataclass(frozen=True)
class StoppedDownload:
    """A model of which a download was stopped: a GGUF `file` of a repository, or, where that is None, its folder. Bytes: `held` of `size`,
    what is whole of it included."""

    repo: str
    revision: str
    commit: str
    file: str | None
    held: int
    size: int
    parts: tuple[PartialFile, ...]


def note(data: Path, name: str, revision: str, commit: str, of: int = 0) -> None:
    """Record beside `data`, a blob's name plus DATA, what it will become, and `of`, the bytes of the whole download. Raises OSError."""
    note_path = data.with_name(data.name.removesuffix(DATA) + NOTE)
    temporary = note_path.with_name(f".{note_path.name}")
    temporary.unlink(missing_ok=True)  # whatever lies there: a link might show another program's file
    with temporary.open("x", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, "revision": revision, "commit": commit, "of": of}))
    os.replace(temporary, note_path)


def partial_files(env: Mapping[str, str], repo: str) -> Iterator[PartialFile]:
    """Sorted by blob; a note without data, or one truncated by a kill, is ignored."""
    blobs = hub.repo_folder(env, repo) / "blobs"
    for each in hub.names_in(blobs) if hub.is_repo(repo) else ():
        if not each.endswith(NOTE):
            continue
        etag = each.removesuffix(NOTE)
        paths = tuple(blobs / (etag + suffix) for suffix in (DATA, JOURNAL, NOTE))
        try:
            with paths[-1].open("rb") as file:
                said = json.loads(file.read(MAX_NOTE_NBYTES))
            size = paths[0].stat().st_size
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(said, dict) and all(isinstance(said.get(key), str) for key in ("name", "revision", "commit")) and _is_sound(**said):
            noted = read_journal(*paths[:2], size, Digest("", etag))
            yield PartialFile(repo, said["name"], said["revision"], said["commit"], tuple(path for path in paths if path.exists()),
                       noted[0].count if noted else 0, size, of if type(of := said.get("of")) is int else 0)


def _is_sound(name: str, revision: str, commit: str, **more: object) -> bool:
    """Whether a note refers to nothing outside its repository."""
    inside = hub.GGUF_PATH.fullmatch(name) is not None or "/" not in name and name not in ("", ".", "..")
    return inside and hub.is_revision(revision) and hub.COMMIT.fullmatch(commit) is not None


def stopped_downloads(env: Mapping[str, str], repo: str) -> list[StoppedDownload]:
    """Interrupted downloads of a repository, one entry per model."""
    groups: dict[tuple[str, str, str | None], list[PartialFile]] = {}
    for part in partial_files(env, repo):
        file = file_names.all_parts(part.name)[0] if part.name.lower().endswith(file_names.SUFFIX) else None
        groups.setdefault((part.revision, part.commit, file), []).append(part)
    downloads = []
    for (revision, commit, file), group in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1], item[0][2] or "")):
        complete_nbytes = _complete_nbytes(hub.repo_folder(env, repo) / "snapshots" / commit, file)
        held, size = (complete_nbytes + sum(counts) for counts in zip(*((part.held, part.size) for part in group), strict=True))
        size = max(size, *(part.of for part in group))  # also of files that had not begun to come
        downloads.append(StoppedDownload(repo, revision, commit, file, held, size, tuple(group)))
    return downloads


def all_stopped(env: Mapping[str, str]) -> list[StoppedDownload]:
    """Interrupted downloads of every repository in the cache."""
    return [each for repo in hub.repos(env) for each in stopped_downloads(env, repo)]


def find_stopped(env: Mapping[str, str], repo: str, revision: str, file: str | None) -> list[StoppedDownload]:
    """The GGUF files that are partly here which a name or a tag means, or with None the folder of a repository, at a branch, a tag, a
    commit or the beginning of one."""
    candidates = [each for each in stopped_downloads(env, repo) if _is_at(each, revision)]
    if file is None:
        return [each for each in candidates if each.file is None]
    files = {each.file for each in candidates if each.file is not None} | {part.name for each in candidates for part in each.parts}
    matching = {file_names.all_parts(name)[0] for name in file_names.matching(file, files)}
    return [each for each in candidates if each.file in matching]


def _is_at(each: StoppedDownload, revision: str) -> bool:
    return revision in (each.revision, each.commit) or bool(hub.COMMIT.fullmatch(revision)) and each.commit.startswith(revision)


def _complete_nbytes(snapshot: Path, file: str | None) -> int:
    """Bytes of the files of a model that are whole already."""
    if file is not None:
        each = [snapshot / name for name in file_names.all_parts(file)]
    else:
        each = [snapshot / name for name in hub.names_in(snapshot) if not name.lower().endswith(file_names.SUFFIX)]
    return sum(path.stat().st_size for path in each if path.is_file())
