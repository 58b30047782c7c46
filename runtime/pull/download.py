"""Downloads the files of a plan into the hub cache, in its standard layout and under its standard locks.

    models--org--name/blobs/<etag>                   the bytes; for partial ones see `unfinished_downloads.py`
    models--org--name/snapshots/<commit>/<name>      links to blobs
    models--org--name/refs/<branch>                  the commit
    .locks/models--org--name/<etag>.lock             held by whoever writes a blob
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Protocol

from ...offload.partial_file import PartialFile, read_journal
from ...offload.transfer import transfer
from ...offload.transfer_types import Complete, Download, Received, Retrying
from .. import hub
from ..config_reader import show
from ..events import Notice, Progress
from ..library.unfinished_downloads import DATA, JOURNAL, NOTE, note
from .client import Client, DownloadFailed, RemoteFile
from .disk import Rate, disk_errors, locked
from .repository import Repository, companions

PHASE = "downloading"


class Place(Protocol):
    """Where files are completed: what is here, what is on its way, and the name that it gets."""

    def is_here(self, file: RemoteFile) -> bool: ...
    def part(self, file: RemoteFile) -> PartialFile: ...
    def blob(self, file: RemoteFile) -> Path: ...
    def link(self, file: RemoteFile) -> None: ...


class CacheFolder:
    """Where the files of one repository at one commit lie."""

    def __init__(self, env: Mapping[str, str], repository: Repository) -> None:
        self.root = hub.repo_folder(env, repository.asked)
        self.blobs, self.snapshot = self.root / "blobs", self.root / "snapshots" / repository.commit
        self.locks = hub.cache_folder(env) / ".locks" / self.root.name
        self._ref = self.root / "refs" / repository.revision if repository.revision != repository.commit else None
        self._revision, self._commit = repository.revision, repository.commit
        self.total = 0  # bytes of all that is to come, for the notes beside what has begun to

    def blob(self, file: RemoteFile) -> Path:
        return self.blobs / file.etag

    def part(self, file: RemoteFile) -> PartialFile:
        data = self.blobs / (file.etag + DATA)
        note(data, file.name, self._revision, self._commit, self.total)
        return PartialFile(data, self.blobs / (file.etag + JOURNAL), file.size, file.digest)

    def is_here(self, file: RemoteFile) -> bool:
        try:
            return self.blob(file).stat().st_size == file.size
        except OSError:
            return False

    def held(self, file: RemoteFile) -> int:
        """Bytes of a file that need not be fetched."""
        if self.is_here(file):
            return file.size
        noted = read_journal(self.blobs / (file.etag + DATA), self.blobs / (file.etag + JOURNAL), file.size, file.digest)
        return noted[0].count if noted else 0

    def link(self, file: RemoteFile) -> None:
        """Let the snapshot show a blob that is here."""
        (self.blobs / (file.etag + NOTE)).unlink(missing_ok=True)
        place = self.snapshot / file.name
        if self._is_linked(file):
            return
        place.parent.mkdir(parents=True, exist_ok=True)  # of a GGUF file in a folder of its own
        aside = place.with_name(f".{place.name}.{os.getpid()}")
        aside.unlink(missing_ok=True)
        aside.symlink_to(self._target(file))
        os.replace(aside, place)

    def _target(self, file: RemoteFile) -> str:
        return os.path.relpath(self.blob(file), (self.snapshot / file.name).parent)

    def _is_linked(self, file: RemoteFile) -> bool:
        place = self.snapshot / file.name
        return place.is_symlink() and os.readlink(place) == self._target(file)

    def is_whole(self, files: Sequence[RemoteFile]) -> bool:
        """Whether all of it is in its place, so that nothing has to be written: the cache may be one that is only read."""
        pointed = self._ref is None or hub.read_ref(self._ref) == self._commit
        return pointed and all(self.is_here(file) and self._is_linked(file) for file in files)

    def make(self) -> None:
        for folder in (self.blobs, self.snapshot, self.locks):
            folder.mkdir(parents=True, exist_ok=True)

    def point(self) -> None:
        """Let the branch stand for this commit."""
        if self._ref is None:
            return
        self._ref.parent.mkdir(parents=True, exist_ok=True)
        aside = self._ref.with_name(f".{self._ref.name}.{os.getpid()}")
        aside.write_text(self._commit, encoding="ascii")
        os.replace(aside, self._ref)


def download(repository: Repository, files: Sequence[RemoteFile], client: Client,
             env: Mapping[str, str]) -> Iterator[Progress | Notice | Path]:
    """Complete `files` of a repository; yields progress, the snapshot folder last. Finished data stays when the generator is closed
    early."""
    place = CacheFolder(env, repository)
    first = [file for file in files if file in companions(repository) or file.name == hub.INDEX]
    if place.is_whole(files) and len(_with_index(place, repository, files)) == len(files):
        yield place.snapshot
        return
    each = {file.etag: file for file in files}.values()
    with disk_errors(hub.cache_folder(env), "HF_HUB_CACHE",
                     lambda: sum(file.size - place.held(file) for file in each)), ExitStack() as locks:
        place.make()
        for etag in sorted({file.etag for file in files}):
            busy = f"another program is downloading {repository.asked}: waiting for it, then resuming from what it left"
            locks.callback(os.close, (yield from locked(place.locks / f"{etag}.lock", busy)))
        place.total = total = sum({file.etag: file.size for file in files}.values())
        yield from complete(place, repository, first, client, 0, total)
        rest = _with_index(place, repository, [file for file in files if file not in first])
        done = sum({file.etag: file.size for file in first}.values())
        yield from complete(place, repository, rest, client, done, max(total, done + sum(file.size for file in rest)))
        place.point()
    yield place.snapshot


def _with_index(place: CacheFolder, repository: Repository, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The weights, and those that the index names beyond the usual names."""
    if not (place.snapshot / hub.INDEX).exists():
        return list(files)
    missing = [name for name in hub.missing_files(place.snapshot) if name not in {file.name for file in files}]
    lost = [name for name in missing if name not in repository.files]
    if lost:
        raise DownloadFailed(f"{repository.repo} is incomplete: its index names {show(lost[0])}, which it does not have",
                             "contact its publisher, or choose another repository of this model")
    return [*files, *(repository.files[name] for name in missing)]


def complete(place: Place, repository: Repository, files: Sequence[RemoteFile], client: Client, before: int,
              total: int) -> Iterator[Progress | Notice]:
    """Fetch what is not here and link everything. `before` and `total` are bytes of the whole download."""
    by_etag: dict[str, list[RemoteFile]] = {}
    for file in files:
        by_etag.setdefault(file.etag, []).append(file)
    absent = [same[0] for same in by_etag.values() if not place.is_here(same[0])]
    before += sum(same[0].size for same in by_etag.values()) - sum(file.size for file in absent)
    for same in by_etag.values():
        for file in same if same[0] not in absent else ():
            place.link(file)
    if not absent:
        return
    named = {file.name: file for file in absent}
    parts = [Download(file.name, place.part(file), partial(client.xet_hash, file)) for file in absent]
    try:
        yield from (Notice(text) for each in parts if (text := each.part.restart_notice(each.name)))
        rate = Rate(sum(wanted.part.held for wanted in parts))
        events = transfer(parts, lambda name, begin, end: client.open_range(repository.asked, repository.commit, named[name], begin, end),
                          client.network, backoff=client.backoff)
        with closing(events):
            for event in events:
                if isinstance(event, Received):
                    yield Progress(PHASE, before + event.nbytes, total, "bytes", rate=rate.at(event.nbytes))
                elif isinstance(event, Retrying):
                    yield Notice(event.text)
                elif isinstance(event, Complete):
                    file = named[event.wanted.name]
                    event.wanted.part.finish(place.blob(file))
                    for same in by_etag[file.etag]:
                        place.link(same)
    finally:
        for wanted in parts:
            wanted.part.close()
