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
from .disk import Rate, acquire_lock, disk_errors, lock_path, occupied_nbytes, source_folder
from .download import PHASE, CacheFolder, complete, download
from .plan import PullPlan
from .tower_collector import TowerCollector

HEAD_NBYTES = 64 << 10  # holds the header of most shards


def quantize_while_downloading(plan: PullPlan, client: Client, env: Mapping[str, str]) -> Iterator[Progress | Notice | Path]:
    """Build `plan.folder`, and yield it last. Finished work stays when the generator is closed early."""
    out, target = plan.folder, plan.target
    occupied_before = occupied_nbytes(out)
    missing = lambda: max(0, plan.disk_bytes + occupied_before - occupied_nbytes(out))  # noqa: E731
    with disk_errors(storage.models_folder(env), "XDG_DATA_HOME", missing), ExitStack() as locks:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = yield from acquire_lock(lock_path(out), f"another effllm is building {out}: waiting for it")
        locks.callback(os.close, lock)
        if target.keep:
            yield from _quantize_after_download(plan, client, env)
        elif not (out / storage.MARKER).is_file():
            check_target(out, None)
            yield from _quantize_streaming(plan, client, env)
        shutil.rmtree(source_folder(out), ignore_errors=True)  # also leftovers of a run that was killed after its last step
        note_branch(plan, env)
    yield out


def note_branch(plan: PullPlan, env: Mapping[str, str]) -> None:
    """Store which commit the pulled branch was."""
    if plan.target.revision != plan.repository.commit:
        storage.note_branch(env, plan.target.repo, plan.target.revision, plan.repository.commit)


def convert_options(plan: PullPlan) -> ConvertOptions:
    target = plan.target
    source = {"model": target.entry.alias if target.entry else target.repo, "repo": target.repo, "revision": plan.repository.commit,
              "licence": plan.licence}
    return ConvertOptions(Recipe(QuantSpec.parse(target.bits)), target.bits, source={key: value for key, value in source.items() if value})


def _quantize_after_download(plan: PullPlan, client: Client, env: Mapping[str, str]) -> Iterator[Progress | Notice]:
    folder = plan.folder
    for item in download(plan.repository, plan.files, client, env):
        if isinstance(item, Path):
            folder = item
        else:
            yield item
    if (plan.folder / storage.MARKER).is_file():
        return
    check_target(plan.folder, None)
    for item in convert(folder, plan.folder, convert_options(plan)):
        if not isinstance(item, Converted):
            yield item


class SourceFolder:
    """A folder beside the result with the small files and the partial shards; removed when the result is complete."""

    def __init__(self, plan: PullPlan, cache: CacheFolder) -> None:
        self.path = source_folder(plan.folder)
        self._files, self._cache = plan.files, cache

    def blob(self, file: RemoteFile) -> Path:
        return self.path / file.name

    def part(self, file: RemoteFile) -> PartialFile:
        return PartialFile(self.path / f".{file.name}.incomplete", self.path / f".{file.name}.journal", file.size, file.digest)

    def shard(self, file: RemoteFile) -> PartialFile:
        """The shard under its final name, complete or not."""
        return PartialFile(self.path / file.name, self.path / f".{file.name}.journal", file.size, file.digest)

    def is_here(self, file: RemoteFile) -> bool:
        """Whether a file is complete; one in the hub cache is linked, as long as it is there."""
        path, cached = self.path / file.name, self._cache.is_here(file)
        if cached or path.is_symlink():
            path.unlink(missing_ok=True)
        if cached:
            path.symlink_to(self._cache.blob(file).resolve())
        return path.exists() and path.stat().st_size == file.size

    def link(self, file: RemoteFile) -> None:
        """Copy a file whose content was downloaded under another name."""
        path = self.path / file.name
        if not path.exists():
            same = [self.path / other.name for other in self._files if other.etag == file.etag]
            shutil.copyfile(next(source for source in same if source.exists()), path)


@dataclass
class Shard:
    """A shard of the published weights."""

    file: RemoteFile
    part: PartialFile | None  # None if it is complete in the hub cache
    head: bytes = b""  # everything before the tensors


def _quantize_streaming(plan: PullPlan, client: Client, env: Mapping[str, str]) -> Iterator[Progress | Notice]:
    source = SourceFolder(plan, CacheFolder(env, plan.repository))
    source.path.mkdir(exist_ok=True)
    for name in (prefix + file.name for file in plan.files if "/" in file.name for prefix in ("", ".")):  # "." for partial files
        (source.path / name).parent.mkdir(exist_ok=True)
    unfinished_builds.note(plan.folder, plan.target.revision, plan.files, unfinished_builds.finished_shards(plan.folder))
    weights = [file for file in plan.files if file.name.endswith(".safetensors")]
    small = [file for file in plan.files if file not in weights]
    yield from complete(source, plan.repository, small, client, 0, plan.total_bytes)
    indexed = any(file.name == hub.INDEX for file in small)  # without an index, the one file may have any name
    missing = [name for name in hub.missing_files(source.path) if indexed and name not in {file.name for file in weights}]
    if missing:
        raise DownloadFailed(f"{plan.repository.repo} is incomplete: its index names {missing[0]}",
                             "choose another repository of this model")
    shards: list[Shard] = []
    try:
        for file in weights:
            cached = source.is_here(file) and (source.path / file.name).is_symlink()
            shards.append(Shard(file, None if cached else source.shard(file)))
            if shards[-1].part is not None:
                shards[-1].head = _valid_head(shards[-1], plan, client)
        yield from _convert_shards(plan, source, shards, client, sum(file.size for file in small))
    finally:
        for shard in shards:
            if shard.part is not None:
                shard.part.close()


def _valid_head(shard: Shard, plan: PullPlan, client: Client) -> bytes:
    """The head of a shard, downloaded once more if it is invalid: its checksum is only known with the whole shard, so a damaged head would
    stay."""
    part, problem = shard.part, ""
    for _ in range(2):
        head = _head(shard, plan, client)
        try:
            with open(part.path, "rb") as file:
                read_header(part.path, file.fileno(), part.size)
            return head
        except CheckpointError as error:
            problem = error.message.replace(str(part.path), shard.file.name)
            part.restart()
    raise DownloadFailed(f"{problem}, twice", "the hub or a proxy alters it, or it was published so; try another network, or "
                         "another repository of this model")



def _head(shard: Shard, plan: PullPlan, client: Client) -> bytes:
    """Everything before the tensors; downloaded if it is missing."""
    file, part = shard.file, shard.part

    def read(end: int) -> bytes:
        begin = part.covered_from(0)
        if begin < end:
            part.write(begin, client.read_range(plan.repository.requested_name, plan.repository.commit, file, begin, end))
        out = bytearray(end)
        part.readinto(0, memoryview(out))
        return bytes(out)

    here = part.covered_from(0)
    # Of a converted shard only the head was kept.
    first = read(min(file.size, HEAD_NBYTES, here if here >= 8 else HEAD_NBYTES))
    end = 8 + int.from_bytes(first[:8], "little")
    if not 8 < end <= min(file.size, MAX_HEADER):
        return first  # opening the folder reports what is wrong with it
    return (first if end <= len(first) else read(end))[:end]


def _convert_shards(plan: PullPlan, source: SourceFolder, shards: list[Shard], client: Client,
                    before: int) -> Iterator[Progress | Notice]:
    options, tower = convert_options(plan), TowerCollector(source.path)
    planned = plan_conversion(source.path, options.recipe, whole=False)
    with planned.store:
        for item in resolve_plan(planned, options):
            if not isinstance(item, ConversionPlan):
                yield item
        warnings = [warning for warning in planned.config.warnings if not (tower.nbytes and TEXT_ONLY_WARNING in warning)]
        yield from (Notice(text) for text in (*warnings, *planned.notices()))
        stamps = [(shard.file.name, shard.file.size, shard.file.etag) for shard in shards]
        pool = ThreadPool(min(MAX_WORKERS, hardware.cpu_threads()))
        try:
            with FolderWriter(plan.folder, planned.files, fingerprint(planned, options, (), stamps), storage.MARKER) as writer:
                if writer.resumed:
                    yield Notice(f"resuming where an earlier run stopped: {len(writer.finished)} of {len(planned.jobs)} tensors are done")
                converter = Converter(planned, options.method, writer, pool, ())
                yield from _convert_each(plan, shards, client, before, converter, tower)
                tower_files = yield from tower.write(writer)
                texts = {RESULT_INDEX: index_json(planned.files)} if len(planned.files) > 1 else {}
                copies = companion_files(source.path)
                result = container(planned, writer.finished, options, ()).with_files(copies, texts)
                result = replace(result, files={**result.files, **tower_files})
                writer.commit(copies, {**texts, storage.MARKER: result.to_json()})
        finally:
            pool.close()


def _convert_each(plan: PullPlan, shards: list[Shard], client: Client, before: int, converter: Converter,
                  tower: TowerCollector) -> Iterator[Progress | Notice]:
    """Download the shards that are needed, convert every tensor whose shards are complete, and free the disk of converted shards. `before`:
    bytes downloaded so far."""
    shards_of = {job.name: {path.name for path in converter.plan.store.files_of(job.info)} for job in converter.todo}
    pending, held = list(converter.todo), {}
    with_tower = {shard.file.name for shard in shards if tower.lacks(shard.file.name)}
    done = {file.name for file in plan.files if file.name.endswith(".safetensors")} - with_tower.union(*shards_of.values())
    unfinished_builds.note(plan.folder, plan.target.revision, plan.files, done)
    for shard in shards:
        needed = set().union(*(shards_of[job.name] for job in pending))
        if shard.part is not None and shard.file.name in needed | with_tower:
            yield from _fetch(shard, plan, client, before)
        tower.collect(shard.file.name)
        held[shard.file.name] = shard
        yield from converter.convert([job for job in pending if shards_of[job.name] <= held.keys()])
        pending = [job for job in pending if not shards_of[job.name] <= held.keys()]
        before += shard.file.size
        # A shard with a part of a weight whose other parts are still missing is kept.
        needed = set().union(*(shards_of[job.name] for job in pending))
        for name in [name for name in held if name not in needed]:
            done.add(name)
            unfinished_builds.note(plan.folder, plan.target.revision, plan.files, done)
            if (part := held[name].part) is not None:
                part.restart(keep=len(held[name].head))
            del held[name]


def _fetch(shard: Shard, plan: PullPlan, client: Client, before: int) -> Iterator[Progress | Notice]:
    """Complete a shard and verify its checksum; its head must be the one that the conversion was planned with."""
    repository, part = plan.repository, shard.part
    if text := part.restart_notice(shard.file.name):
        yield Notice(text)
    rate = Rate(part.received_nbytes)
    events = transfer([Download(shard.file.name, part, lambda: client.xet_hash(shard.file))],
                      lambda name, begin, end: client.open_range(repository.requested_name, repository.commit, shard.file, begin, end),
                      client.network, backoff=client.backoff)
    with closing(events):
        for event in events:
            if isinstance(event, Received):
                yield Progress(PHASE, before + event.nbytes, plan.total_bytes, "bytes", shard.file.name, rate.update(event.nbytes))
            elif isinstance(event, Retrying):
                yield Notice(event.text)
    head = bytearray(len(shard.head))
    part.readinto(0, memoryview(head))
    if head != shard.head:
        raise DownloadFailed(f"{shard.file.name}: its header was corrupted in transit", "run the same command again")
