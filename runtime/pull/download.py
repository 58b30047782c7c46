"""Downloads the files of a plan into the hub cache, in its standard layout and under its standard locks.

    models--org--name/blobs/<etag>                   the bytes; partial ones: see `unfinished_downloads.py`
    models--org--name/snapshots/<commit>/<name>      links to blobs
    models--org--name/refs/<branch>                  the commit
    .locks/models--org--name/<etag>.lock             held while a blob is written
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Protocol

from ...offload.connection import Response
from ...offload.partial_file import PartialFile, read_journal
from ...offload.transfer import transfer
from ...offload.transfer_types import Complete, Download, Received, Retrying
from .. import hub
from ..config_reader import show
from ..events import Notice, Progress
from ..library.unfinished_downloads import DATA, JOURNAL, NOTE, note
from .client import Client, DownloadFailed, RemoteFile
from .disk import Rate, acquire_lock, disk_errors
from .repository import Repository, companions

PHASE = "downloading"


class Destination(Protocol):
    """Where files are downloaded to."""

    def is_here(self, file: RemoteFile) -> bool: ...
    def part(self, file: RemoteFile) -> PartialFile: ...
    def blob(self, file: RemoteFile) -> Path: ...
    def link(self, file: RemoteFile) -> None: ...


class CacheFolder:
    """The folder of one repository in the hub cache, at one commit."""

    def __init__(self, env: Mapping[str, str], repository: Repository) -> None:
        self.root = hub.repo_folder(env, repository.requested_name)
        self.blobs, self.snapshot = self.root / "blobs", self.root / "snapshots" / repository.commit
        self.locks = hub.cache_folder(env) / ".locks" / self.root.name
        self._ref = self.root / "refs" / repository.revision if repository.revision != repository.commit else None
        self._revision, self._commit = repository.revision, repository.commit
        self.total = 0  # bytes of the whole download, for the notes beside partial files

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
        """Bytes of a file that are downloaded already."""
        if self.is_here(file):
            return file.size
        journal = read_journal(self.blobs / (file.etag + DATA), self.blobs / (file.etag + JOURNAL), file.size, file.digest)
        return journal[0].count if journal else 0

    def link(self, file: RemoteFile) -> None:
        """Link a complete blob into the snapshot."""
        (self.blobs / (file.etag + NOTE)).unlink(missing_ok=True)
        path = self.snapshot / file.name
        if self._is_linked(file):
            return
        path.parent.mkdir(parents=True, exist_ok=True)  # GGUF files may be in subfolders
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self._target(file))
        os.replace(temporary, path)

    def _target(self, file: RemoteFile) -> str:
        return os.path.relpath(self.blob(file), (self.snapshot / file.name).parent)

    def _is_linked(self, file: RemoteFile) -> bool:
        path = self.snapshot / file.name
        return path.is_symlink() and os.readlink(path) == self._target(file)

    def is_whole(self, files: Sequence[RemoteFile]) -> bool:
        """Whether everything is complete and linked, so that nothing has to be written: the cache may be read-only."""
        ref_is_current = self._ref is None or hub.read_ref(self._ref) == self._commit
        return ref_is_current and all(self.is_here(file) and self._is_linked(file) for file in files)

    def create(self) -> None:
        for folder in (self.blobs, self.snapshot, self.locks):
            folder.mkdir(parents=True, exist_ok=True)

    def update_ref(self) -> None:
        """Let the branch point to this commit."""
        if self._ref is None:
            return
        self._ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._ref.with_name(f".{self._ref.name}.{os.getpid()}")
        temporary.write_text(self._commit, encoding="ascii")
        os.replace(temporary, self._ref)


def download(repository: Repository, files: Sequence[RemoteFile], client: Client,
             env: Mapping[str, str]) -> Iterator[Progress | Notice | Path]:
    """Complete `files` of a repository; yields progress, the snapshot folder last. Finished data stays when the generator is closed
    early."""
    cache = CacheFolder(env, repository)
    first = [file for file in files if file in companions(repository) or file.name == hub.INDEX]
    if cache.is_whole(files) and len(_with_index(cache, repository, files)) == len(files):
        yield cache.snapshot
        return
    distinct = {file.etag: file for file in files}.values()
    with disk_errors(hub.cache_folder(env), "HF_HUB_CACHE",
                     lambda: sum(file.size - cache.held(file) for file in distinct)), ExitStack() as locks:
        cache.create()
        for etag in sorted({file.etag for file in files}):
            message = f"another program is downloading {repository.requested_name}: waiting for it, then resuming from what it left"
            locks.callback(os.close, (yield from acquire_lock(cache.locks / f"{etag}.lock", message)))
        cache.total = total = sum({file.etag: file.size for file in files}.values())
        yield from complete(cache, repository, first, client, 0, total)
        rest = _with_index(cache, repository, [file for file in files if file not in first])
        done = sum({file.etag: file.size for file in first}.values())
        yield from complete(cache, repository, rest, client, done, max(total, done + sum(file.size for file in rest)))
        cache.update_ref()
    yield cache.snapshot


def _with_index(cache: CacheFolder, repository: Repository, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """`files`, and the weights that the index names in addition. Raises DownloadFailed if the repository lacks one."""
    if not (cache.snapshot / hub.INDEX).exists():
        return list(files)
    missing = [name for name in hub.missing_files(cache.snapshot) if name not in {file.name for file in files}]
    absent = [name for name in missing if name not in repository.files]
    if absent:
        raise DownloadFailed(f"{repository.repo} is incomplete: its index names {show(absent[0])}, which it does not have",
                             "contact its publisher, or choose another repository of this model")
    return [*files, *(repository.files[name] for name in missing)]


def complete(destination: Destination, repository: Repository, files: Sequence[RemoteFile], client: Client, before: int,
             total: int) -> Iterator[Progress | Notice]:
    """Download what is missing and link everything. `before` and `total` are bytes of the whole download."""
    by_etag: dict[str, list[RemoteFile]] = {}
    for file in files:
        by_etag.setdefault(file.etag, []).append(file)
    missing = [same[0] for same in by_etag.values() if not destination.is_here(same[0])]
    before += sum(same[0].size for same in by_etag.values()) - sum(file.size for file in missing)
    for same in by_etag.values():
        for file in same if same[0] not in missing else ():
            destination.link(file)
    if not missing:
        return
    by_name = {file.name: file for file in missing}
    downloads = [Download(file.name, destination.part(file), partial(client.xet_hash, file)) for file in missing]
    try:
        yield from (Notice(text) for item in downloads if (text := item.part.restart_notice(item.name)))
        rate = Rate(sum(item.part.received_nbytes for item in downloads))

        def open_range(name: str, begin: int, end: int) -> Response:
            return client.open_range(repository.requested_name, repository.commit, by_name[name], begin, end)

        with closing(transfer(downloads, open_range, client.network, backoff=client.backoff)) as events:
            for event in events:
                if isinstance(event, Received):
                    yield Progress(PHASE, before + event.nbytes, total, "bytes", rate=rate.update(event.nbytes))
                elif isinstance(event, Retrying):
                    yield Notice(event.text)
                elif isinstance(event, Complete):
                    file = by_name[event.download.name]
                    event.download.part.finish(destination.blob(file))
                    for same in by_etag[file.etag]:
                        destination.link(same)
    finally:
        for item in downloads:
            item.part.close()
