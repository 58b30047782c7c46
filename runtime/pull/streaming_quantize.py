"""Quantizes a model while its shards are downloaded: a shard stays on disk until its last tensor is converted, then its space is freed.

The small files and the header of every shard come first, so that the whole result is planned from headers as for a local folder. A shard
is created at full length as a sparse file; its tensors go through `convert` once it is complete and its checksum verified. A weight
stored as several tensors (codes, scales) waits until the shards of all of them are here. The writer accepts tensors in any order, so the
bytes are those `quantize` would write.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from ...kernels.threads import MAX_WORKERS, ThreadPool
from ...offload import hardware
from ...offload.folder_writer import FolderWriter
from ...offload.partial_file import PartialFile
from ...offload.safetensors_header import MAX_HEADER, CheckpointError, read_header
from ...offload.shards import INDEX as RESULT_INDEX
from ...offload.shards import index_json
from ...offload.transfer import transfer
from ...offload.transfer_types import Download, Received, Retrying
from ...quant.recipe import Recipe
from ...quant.spec import QuantSpec
from .. import hub
from ..conversion.convert_plan import ConversionPlan, plan_conversion
from ..conversion.convert_tensors import Converter
from ..convert import Converted, ConvertOptions, check_target, companion_files, container, convert, fingerprint, resolve_plan
from ..events import Notice, Progress
from ..library import storage, unfinished_builds
from ..prepare import TEXT_ONLY_WARNING
from .client import Client, DownloadFailed, RemoteFile
from .disk import Rate, disk_errors, lock_path, locked, occupied_nbytes, source_folder
from .download import PHASE, CacheFolder, complete, download
from .plan import PullPlan
from .tower_collector import TowerCollector

HEAD_NBYTES = 64 << 10  # holds the header of most shards


def quantize_while_downloading(plan: PullPlan, client: Client, env: Mapping[str, str]) -> Iterator[Progress | Notice | Path]:
    """Make `plan.folder`; it is the last that is yielded. What is done stays when this is left early."""
    out, wish = plan.folder, plan.wish
    begun = occupied_nbytes(out)
    missing = lambda: max(0, plan.disk_bytes + begun - occupied_nbytes(out))  # noqa: E731
    with disk_errors(storage.models_folder(env), "XDG_DATA_HOME", missing), ExitStack() as held:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = yield from locked(lock_path(out), f"another effllm is building {out}: waiting for it")
        held.callback(os.close, lock)
        if wish.keep:
            yield from _after_download(plan, client, env)
        elif not (out / storage.MARKER).is_file():
            check_target(out, None)
            yield from _as_it_comes(plan, client, env)
        shutil.rmtree(source_folder(out), ignore_errors=True)  # also what a run that was killed after its last step has left
        note_branch(plan, env)
    yield out


def note_branch(plan: PullPlan, env: Mapping[str, str]) -> None:
    """Remember which commit the branch was that somebody pulled."""
    if plan.wish.revision != plan.repository.commit:
        storage.note_branch(env, plan.wish.repo, plan.wish.revision, plan.repository.commit)


def options_of(plan: PullPlan) -> ConvertOptions:
    wish = plan.wish
    source = {"model": wish.entry.alias if wish.entry else wish.repo, "repo": wish.repo, "revision": plan.repository.commit,
              "licence": plan.licence}
    return ConvertOptions(Recipe(QuantSpec.parse(wish.bits)), wish.bits, source={key: value for key, value in source.items() if value})


def _after_download(plan: PullPlan, client: Client, env: Mapping[str, str]) -> Iterator[Progress | Notice]:
    folder = plan.folder
    for item in download(plan.repository, plan.files, client, env):
        if isinstance(item, Path):
            folder = item
        else:
            yield item
    if (plan.folder / storage.MARKER).is_file():
        return
    check_target(plan.folder, None)
    for item in convert(folder, plan.folder, options_of(plan)):
        if not isinstance(item, Converted):
            yield item


class SourceFolder:
    """The small files and the growing shards, beside the folder that is made of them; gone when that is whole."""

    def __init__(self, plan: PullPlan, cache: CacheFolder) -> None:
        self.path = source_folder(plan.folder)
        self._files, self._cache = plan.files, cache

    def blob(self, file: RemoteFile) -> Path:
        return self.path / file.name

    def part(self, file: RemoteFile) -> PartialFile:
        return PartialFile(self.path / f".{file.name}.incomplete", self.path / f".{file.name}.journal", file.size, file.digest)

    def shard(self, file: RemoteFile) -> PartialFile:
        """The weights under their final name, whatever of them is here."""
        return PartialFile(self.path / file.name, self.path / f".{file.name}.journal", file.size, file.digest)

    def is_here(self, file: RemoteFile) -> bool:
        """Whether a file is whole; one that another tool has downloaded is linked, as long as it is there."""
        place, cached = self.path / file.name, self._cache.is_here(file)
        if cached or place.is_symlink():
            place.unlink(missing_ok=True)
        if cached:
            place.symlink_to(self._cache.blob(file).resolve())
        return place.exists() and place.stat().st_size == file.size

    def link(self, file: RemoteFile) -> None:
        """Nothing to do but for two names of the same content."""
        place = self.path / file.name
        if not place.exists():
            same = [self.path / other.name for other in self._files if other.etag == file.etag]
            shutil.copyfile(next(path for path in same if path.exists()), place)


@dataclass
class Shard:
    """`part` is None for one that lies whole in the cache. `head` ends where the tensors begin."""

    file: RemoteFile
    part: PartialFile | None
    head: bytes = b""


def _as_it_comes(plan: PullPlan, client: Client, env: Mapping[str, str]) -> Iterator[Progress | Notice]:
    source = SourceFolder(plan, CacheFolder(env, plan.repository))
    source.path.mkdir(exist_ok=True)
    for name in (before + file.name for file in plan.files if "/" in file.name for before in ("", ".")):  # itself, and what of it has come
        (source.path / name).parent.mkdir(exist_ok=True)
    unfinished_builds.note(plan.folder, plan.wish.revision, plan.files, unfinished_builds.finished_shards(plan.folder))
    weights = [file for file in plan.files if file.name.endswith(".safetensors")]
    small = [file for file in plan.files if file not in weights]
    yield from complete(source, plan.repository, small, client, 0, plan.total_bytes)
    indexed = any(file.name == hub.INDEX for file in small)  # a lone file may have any name
    lost = [name for name in hub.missing_files(source.path) if indexed and name not in {file.name for file in weights}]
    if lost:
        raise DownloadFailed(f"{plan.repository.repo} is incomplete: its index names {lost[0]}", "choose another repository of this model")
    shards: list[Shard] = []
    try:
        for file in weights:
            cached = source.is_here(file) and (source.path / file.name).is_symlink()
            shards.append(Shard(file, None if cached else source.shard(file)))
            if shards[-1].part is not None:
                shards[-1].head = _sound_head(shards[-1], plan, client)
        yield from _convert_shards(plan, source, shards, client, sum(file.size for file in small))
    finally:
        for shard in shards:
            if shard.part is not None:
                shard.part.close()


def _sound_head(shard: Shard, plan: PullPlan, client: Client) -> bytes:
    """Its head, fetched once more where that is none: no checksum holds for it until the shard is whole, and kept it would stay wrong."""
    part, said = shard.part, ""
    for _ in range(2):
        head = _head(shard, plan, client)
        try:
            with open(part.path, "rb") as file:
                read_header(part.path, file.fileno(), part.size)
            return head
        except CheckpointError as error:
            said = error.message.replace(str(part.path), shard.file.name)
            part.restart()
    raise DownloadFailed(f"{said}, twice", "the hub or a proxy alters it, or it was published so; try another network, or "
                         "another repository of this model")


def _head(shard: Shard, plan: PullPlan, client: Client) -> bytes:
    """Everything before the tensors; fetched where it is not here."""
    file, part = shard.file, shard.part

    def need(end: int) -> bytes:
        at = part.covered_from(0)
        if at < end:
            part.write(at, client.read_range(plan.repository.asked, plan.repository.commit, file, at, end))
        out = bytearray(end)
        part.readinto(0, memoryview(out))
        return bytes(out)

    here = part.covered_from(0)
    # Of a shard that is done with, the head alone was kept.
    first = need(min(file.size, HEAD_NBYTES, here if here >= 8 else HEAD_NBYTES))
    end = 8 + int.from_bytes(first[:8], "little")
    if not 8 < end <= min(file.size, MAX_HEADER):
        return first  # opening the folder says what is wrong with it
    return (first if end <= len(first) else need(end))[:end]


def _convert_shards(plan: PullPlan, source: SourceFolder, shards: list[Shard], client: Client,
                    before: int) -> Iterator[Progress | Notice]:
    options, tower = options_of(plan), TowerCollector(source.path)
    planned = plan_conversion(source.path, options.recipe, whole=False)
    with planned.store:
        for item in resolve_plan(planned, options):
            if not isinstance(item, ConversionPlan):
                yield item
        warnings = [each for each in planned.config.warnings if not (tower.nbytes and TEXT_ONLY_WARNING in each)]
        yield from (Notice(text) for text in (*warnings, *planned.notices()))
        stamps = [(shard.file.name, shard.file.size, shard.file.etag) for shard in shards]
        pool = ThreadPool(min(MAX_WORKERS, hardware.cpu_threads()))
        try:
            with FolderWriter(plan.folder, planned.files, fingerprint(planned, options, (), stamps), storage.MARKER) as writer:
                if writer.resumed:
                    yield Notice(f"resuming where an earlier run stopped: {len(writer.finished)} of {len(planned.jobs)} tensors are done")
                converter = Converter(planned, options.method, writer, pool, ())
                yield from _each_shard(plan, shards, client, before, converter, tower)
                kept = yield from tower.write(writer)
                texts = {RESULT_INDEX: index_json(planned.files)} if len(planned.files) > 1 else {}
                copies = companion_files(source.path)
                made = container(planned, writer.finished, options, ()).with_files(copies, texts)
                made = replace(made, files={**made.files, **kept})
                writer.commit(copies, {**texts, storage.MARKER: made.to_json()})
        finally:
            pool.close()


def _each_shard(plan: PullPlan, shards: list[Shard], client: Client, before: int, converter: Converter,
                tower: TowerCollector) -> Iterator[Progress | Notice]:
    """Download what is needed of shards, convert what is whole, and free the disk of what is done; `before` bytes have come."""
    takes = {job.name: {path.name for path in converter.plan.store.files_of(job.info)} for job in converter.todo}
    waiting, held = list(converter.todo), {}
    left = {shard.file.name for shard in shards if tower.lacks(shard.file.name)}
    done = {file.name for file in plan.files if file.name.endswith(".safetensors")} - left.union(*takes.values())
    unfinished_builds.note(plan.folder, plan.wish.revision, plan.files, done)
    for shard in shards:
        needed = set().union(*(takes[job.name] for job in waiting))
        if shard.part is not None and shard.file.name in needed | left:
            yield from _fetch(shard, plan, client, before)
        tower.keep(shard.file.name)
        held[shard.file.name] = shard
        yield from converter.convert([job for job in waiting if takes[job.name] <= held.keys()])
        waiting = [job for job in waiting if not takes[job.name] <= held.keys()]
        before += shard.file.size
        # What holds a part of a weight whose other parts are still missing stays whole.
        needed = set().union(*(takes[job.name] for job in waiting))
        for name in [name for name in held if name not in needed]:
            done.add(name)
            unfinished_builds.note(plan.folder, plan.wish.revision, plan.files, done)
            if (part := held[name].part) is not None:
                part.restart(keep=len(held[name].head))
            del held[name]


def _fetch(shard: Shard, plan: PullPlan, client: Client, before: int) -> Iterator[Progress | Notice]:
    """Complete a shard; its bytes are those that the hub's checksum names, and its head is the one that was planned with."""
    repository, part = plan.repository, shard.part
    if text := part.restart_notice(shard.file.name):
        yield Notice(text)
    rate = Rate(part.held)
    events = transfer([Download(shard.file.name, part, lambda: client.xet_hash(shard.file))],
                      lambda name, begin, end: client.open_range(repository.asked, repository.commit, shard.file, begin, end),
                      client.network, backoff=client.backoff)
    with closing(events):
        for event in events:
            if isinstance(event, Received):
                yield Progress(PHASE, before + event.nbytes, plan.total_bytes, "bytes", shard.file.name, rate.at(event.nbytes))
            elif isinstance(event, Retrying):
                yield Notice(event.text)
    head = bytearray(len(shard.head))
    part.readinto(0, memoryview(head))
    if head != shard.head:
        raise DownloadFailed(f"{shard.file.name}: its header was corrupted in transit", "run the same command again")
