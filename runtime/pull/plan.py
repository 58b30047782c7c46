"""Plan of a pull before it starts, from a few kilobytes: bytes to download and to store, disk, memory, speed, licence, gating.

One request describes the repository, one fetches config.json; shapes and types of the weights follow from it, so the size of a quantized
result is exact and the memory is what `effllm plan` would report for the finished model. For a published folder that `quantize` wrote, a
third request fetches effllm.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ... import ModelNotFound, UsageError
from ...offload.safetensors_header import AGAIN, CheckpointError, parse_json
from ...offload.size import format_size
from ...offload.torch_checkpoint import FILE as PICKLED
from ...quant.spec import QuantSpec
from .. import hub
from ..catalog import find_entry, near_names
from ..config import ModelConfig, parse_config
from ..config_reader import show
from ..encoders import is_encoder_config
from ..library import storage, unfinished_builds
from ..library.aliases import CatalogEntry, catalog, open_alternative
from ..library.model_name import Reference
from ..planning.expected_store import ExpectedStore
from ..speculation.draft_types import is_assistant, is_eagle3
from ..stores.composite import text_model_config
from ..stores.container import Container, parse_container
from ..stores.import_config import quantization_section
from .client import Client, DownloadFailed, Gated, NoSuchRepository, RemoteFile
from .disk import check_space, free_nbytes, occupied_nbytes
from .download import CacheFolder
from .remote_gguf_header import DRAFTS, READS, read_head
from .repository import Repository, companions, describe, named_files, projector_file, ranking_file, weights
from .run_estimate import RunEstimate, estimate_run
from .shard_disk_peak import peak_shard_nbytes

if TYPE_CHECKING:
    from ..prepare import EngineOptions

CONFIG_LIMIT, CONTAINER_LIMIT = 128 << 10, 32 << 20
# Bytes of memory for a byte of a tokenizer's file (128,000 tokens: 100 MiB for 15.5), by format: a base64 line takes more.
TOKENIZER_FACTORS = {"tokenizer.json": 6, "tekken.json": 8, "tiktoken.model": 50, "hy.tiktoken": 50, hub.WORLD: 60}
TOKEN_NBYTES = 800  # bytes of memory for a token of a GGUF file, whose tokenizer has no file size


@dataclass(frozen=True)
class PullTarget:
    """What to pull: a repository, or one format or file of it."""

    reference: Reference
    repo: str
    revision: str
    entry: CatalogEntry | None = None
    bits: str | None = None  # quantize to this while downloading, like 4bit; None for as published
    keep: bool = False  # keep the published weights too
    on_load: str | None = None  # of a single file, which is downloaded as it is: quantize to this when it is loaded
    bits_from_settings: bool = False  # the bits come from settings: ignored if the published weights are quantized already


@dataclass(frozen=True)
class PullPlan:
    """What a pull will do."""

    target: PullTarget
    repository: Repository
    files: tuple[RemoteFile, ...]
    folder: Path  # of the finished model
    total_bytes: int  # of all files
    held_bytes: int  # of these, already downloaded
    kept_bytes: int  # on the disk at the end
    disk_bytes: int  # more than now, at the peak
    disk_free: int
    licence: str | None
    nbytes_read: int  # downloaded for the plan
    alternative: str | None = None  # of a gated model: an alias without a gate
    run: RunEstimate = RunEstimate()  # memory and speed of a run of the finished model
    smaller: tuple[int, int] | None = None  # fewer bits that suit the model's size, and the bytes on the disk with them
    is_done: bool = False  # nothing is left to do
    projector: RemoteFile | None = None  # of `files`, the vision part of a GGUF model
    quantized_as: str = ""  # the format, if `effllm quantize` wrote the published weights

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether no file of the model is a tokenizer."""
        return self.target.reference.file is None and not any(file.name in TOKENIZER_FACTORS for file in self.files)

    @property
    def download_bytes(self) -> int:
        return self.total_bytes - self.held_bytes

    def to_json(self) -> dict[str, object]:
        run, memory = self.run, self.run.memory
        return {"model": self.target.reference.text, "repo": self.repository.repo, "revision": self.repository.commit,
                "bits": self.target.bits, "bits_on_load": self.target.on_load,
                "files": [file.name for file in self.files], "folder": str(self.folder),
                "bytes_total": self.total_bytes, "bytes_here": self.held_bytes, "bytes_to_load": self.download_bytes,
                "bytes_kept": self.kept_bytes, "disk_needed_bytes": self.disk_bytes, "disk_free_bytes": self.disk_free,
                "licence": self.licence, "gated": self.repository.gated, "parameters": self.repository.parameters,
                "alternative": self.alternative,
                "smaller": self.smaller and {"bits": self.smaller[0], "bytes_kept": self.smaller[1]},
                "memory": memory and memory.to_json(), "tokens_per_s_estimate": run.tokens_per_s, "tokens_per_s_error": run.error,
                "speed_unknown": run.unknown or None, "bytes_read_for_plan": self.nbytes_read}


def pull_target(reference: Reference, env: Mapping[str, str], bits: str | None = None, keep: bool = False) -> PullTarget:
    """The repository that a reference means. Raises ModelNotFound for one that names none, UsageError for a model that needs no download
    and for a format that does not exist."""
    bits = bits or reference.variant
    if bits is not None:
        QuantSpec.parse(bits)
    if bits and reference.file:
        raise UsageError(f"{reference.text}: a single file is pulled without quantizing",
                         f"effllm pull {reference.to_pull}; effllm run {reference.to_pull}:{bits} quantizes it on load")
    entry = find_entry(catalog(env), reference.name)
    if entry is not None and entry.repo is None:
        raise UsageError(f"{entry.alias} needs no download: it is {entry.library or f'at {entry.path}'}" if entry.own else
                         f"{entry.alias} needs no download: it comes with effllm", f"effllm run {entry.alias}")
    repo = entry.repo if entry else reference.name
    if entry is None and "/" not in repo:
        from ..catalog import resolve

        resolve(reference.text, env)  # raises ModelNotFound with suggestions
    if not hub.is_repo(repo):
        raise ModelNotFound(f"{show(repo)} is not a valid repository name",
                            "expected org/name: letters, digits, dashes and dots")
    return PullTarget(reference, repo, reference.revision or (entry.revision if entry else "main"), entry, bits, keep)


def run_target(reference: Reference, env: Mapping[str, str], bits: str | None, bits_from_settings: bool) -> PullTarget:
    """What to pull for a run at `bits`: a repository is quantized while downloading, a single file when it is loaded."""
    if reference.file is None:
        return replace(pull_target(reference, env, bits), bits_from_settings=bits_from_settings)
    file = pull_target(replace(reference, text=reference.to_pull, variant=None), env)
    return replace(file, on_load=bits, bits_from_settings=bits_from_settings)


def plan_pull(target: PullTarget, client: Client, env: Mapping[str, str], options: EngineOptions | None = None) -> PullPlan:
    """The plan of a pull; `options`: of the run that follows. Raises ModelNotFound (gated, missing), DownloadFailed, ConfigError for a
    model that effllm does not run, and UsageError for options that it cannot have."""
    if client.offline:
        raise DownloadFailed(f"{target.repo} is not here, and downloads are off (--offline or HF_HUB_OFFLINE)",
                             "effllm list shows the models that are here")
    repository, projector = _describe(target, client, env), None
    cache, nbytes_read = CacheFolder(env, repository), repository.nbytes_read
    licence = (target.entry and target.entry.licence) or repository.licence
    file = repository.default_file
    if target.reference.file is None and (target.bits is None or target.bits_from_settings) and file is not None:
        # A file is downloaded as it is: bits of the settings apply when it is loaded.
        target = replace(target, reference=replace(target.reference, text=f"{target.reference.base}:{file}", file=file), bits=None,
                         keep=False, on_load=target.on_load or target.bits)
    if target.reference.file is not None:
        files = named_files(repository, target.reference.file)
        projector = projector_file(repository, files[0].name)
    else:
        files = [*companions(repository), *_weights(target, repository, client)]
    alternative = _alternative(target, repository, files, env)
    try:
        model = _read_model(target, repository, files, cache, client)
    except Gated as error:
        size = sum(file.size for file in files)
        raise Gated(f"{error.message} ({format_size(size)}, licence {licence or 'not stated'})",
                    error.hint + (f"; of about the same size without a gate: effllm pull {alternative}" if alternative else "")) from error
    nbytes_read += model.nbytes_read
    ranking = ranking_file(repository, files[0].name) if target.reference.file is not None else None
    files += [file for file in (projector, ranking) if file]
    distinct = {file.etag: file for file in files}.values()
    total, held = sum(file.size for file in distinct), sum(cache.held(file) for file in distinct)
    plan = PullPlan(target, repository, tuple(files), cache.snapshot, total, held, total, total - held, free_nbytes(cache.root), licence,
                    nbytes_read, alternative, projector=projector, quantized_as=model.quantized_as)
    if model.config is None:
        return replace(plan, run=RunEstimate(unknown=model.unknown))
    if target.bits_from_settings and _is_quantized(model.store, model.section):
        target = replace(target, bits=None, keep=False, on_load=None)
        plan = replace(plan, target=target)
    smaller, is_done = _smaller(plan, model.config), False
    if target.bits is not None:
        plan = _with_bits(plan, model.config, model.section is not None, client, env)
        is_done = (plan.folder / storage.MARKER).is_file() and (not target.keep or cache.is_whole(files))
    if is_done:
        plan = replace(plan, held_bytes=total, disk_bytes=0)
    store = _expected(target, model.config, model.section) if model.store is None or target.on_load else model.store
    return replace(plan, smaller=smaller, run=_estimate(plan, model.config, store, options), is_done=is_done)


@dataclass(frozen=True)
class _PublishedModel:
    """What the first bytes of a published model say."""

    config: ModelConfig | None = None  # None if `unknown`
    section: Mapping[str, object] | None = None  # quantization_config of config.json
    store: ExpectedStore | None = None  # its tensors, of a GGUF file or a folder that `quantize` wrote
    quantized_as: str = ""
    unknown: str = ""  # why the memory of a run is unknown
    nbytes_read: int = 0


def _read_model(target: PullTarget, repository: Repository, files: Sequence[RemoteFile], cache: CacheFolder,
                client: Client) -> _PublishedModel:
    """Read the config of a repository, or the header of a GGUF file."""
    if target.reference.file is not None:
        if all(cache.is_here(file) for file in files):
            return _PublishedModel(unknown="its files are here: see effllm plan")
        head = read_head(repository, files, client)
        return _PublishedModel(head.config, store=head.store, unknown=head.unknown, nbytes_read=head.nbytes_read)
    raw, nbytes = _raw_config(target, repository, client)
    if is_assistant(raw) or is_eagle3(raw):
        return _PublishedModel(unknown=_as_stored(target, "drafts for another model", DRAFTS), nbytes_read=nbytes)
    if is_encoder_config(raw):
        return _PublishedModel(unknown=_as_stored(target, "is an embedding model or a reranker", READS), nbytes_read=nbytes)
    config, section = parse_config(raw), quantization_section(text_model_config(raw))
    if (container := _container(target, repository, client)) is None:
        return _PublishedModel(config, section, nbytes_read=nbytes)
    return _PublishedModel(config, section, ExpectedStore(config, container=container), container.spec_text,
                           nbytes_read=nbytes + repository.files[storage.MARKER].size)


def check_disk(plan: PullPlan, env: Mapping[str, str]) -> None:
    """Raises DoesNotFit if a disk is too small; the cache and the folder of quantized models may be on two."""
    cached = plan.download_bytes if plan.target.bits is None or plan.target.keep else 0
    variable = "XDG_DATA_HOME" if plan.target.bits is not None else "HF_HUB_CACHE"
    check_space([(hub.cache_folder(env), cached, "HF_HUB_CACHE"), (plan.folder, max(0, plan.disk_bytes - cached), variable)])


def _describe(target: PullTarget, client: Client, env: Mapping[str, str]) -> Repository:
    """The hub's description of the repository. Raises NoSuchRepository, with similar names."""
    try:
        return describe(client, target.repo, target.revision)
    except NoSuchRepository as error:
        similar = near_names(target.repo, env)
        raise NoSuchRepository(error.message, (f"did you mean {' or '.join(similar)}? else " if similar else "") + error.hint) from error


def _alternative(target: PullTarget, repository: Repository, files: Sequence[RemoteFile], env: Mapping[str, str]) -> str | None:
    """An alias of about the same size without a gate, if the repository is gated: the one in its catalog entry, else the nearest."""
    if not repository.gated:
        return None
    if target.entry is not None and target.entry.alternative:
        return target.entry.alternative
    return open_alternative(catalog(env), 2 * repository.parameters if repository.parameters else sum(file.size for file in files))


def _weights(target: PullTarget, repository: Repository, client: Client) -> list[RemoteFile]:
    """One copy of the weights. No model is read from a pickle, except EAGLE-3 heads (`offload/torch_checkpoint.py`)."""
    try:
        return weights(repository, target.entry.exclude if target.entry else "", target.bits)
    except ModelNotFound:
        if PICKLED in repository.files and "config.json" in repository.files and is_eagle3(_raw_config(target, repository, client)[0]):
            return [repository.files[PICKLED]]
        raise

def _raw_config(target: PullTarget, repository: Repository, client: Client) -> tuple[Mapping[str, object], int]:
    """(content of config.json, bytes downloaded)."""
    if "config.json" not in repository.files:
        raise ModelNotFound(f"{repository.repo} has no config.json, so neither transformers nor effllm can run it",
                            "choose another repository of this model")
    text = client.small_file(target.repo, repository.commit, repository.files["config.json"], CONFIG_LIMIT)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raw = None
    if not isinstance(raw, dict):
        raise DownloadFailed(f"config.json of {repository.repo} is not a JSON object", "the hub or a proxy alters it")
    return raw, len(text)


def _container(target: PullTarget, repository: Repository, client: Client) -> Container | None:
    """The container of published weights that `quantize` wrote, None for others. Raises UsageError if they should be quantized again,
    CheckpointError for a damaged one."""
    if storage.MARKER not in repository.files:
        return None
    path = Path(storage.MARKER)
    raw = client.small_file(target.repo, repository.commit, repository.files[storage.MARKER], CONTAINER_LIMIT)
    try:
        container = parse_container(parse_json(path, "content", raw), path)
    except CheckpointError as error:
        raise CheckpointError(f"{target.repo}: {error.message}", "its publisher has to quantize and upload it again"
                              if error.hint == AGAIN else error.hint) from error
    if target.bits is not None and not target.bits_from_settings:
        raise UsageError(f"{target.repo} is quantized already ({container.spec_text})", f"effllm pull {target.reference.base}")
    return container


def _as_stored(target: PullTarget, what: str, reason: str) -> str:
    """`reason`, for a model that does not generate and so has no estimate. Raises UsageError for bits, because it runs as it is stored."""
    if target.bits is not None and not target.bits_from_settings:
        raise UsageError(f"{target.repo} {what}, and runs as it is stored", f"effllm pull {target.reference.base}")
    return reason


def _with_bits(plan: PullPlan, config: ModelConfig, has_parts: bool, client: Client, env: Mapping[str, str]) -> PullPlan:
    """The plan with weights quantized while downloading: one shard is on the disk at a time, unless the published weights are kept.
    `has_parts`: a weight is several tensors, which may be in two shards."""
    folder = storage.own_folder(env, plan.target.repo, plan.repository.commit, plan.target.bits)
    result = ExpectedStore(config, QuantSpec.parse(plan.target.bits)).nbytes
    small, tower = sum(file.size for file in companions(plan.repository)), _tower_nbytes(plan, config, has_parts)
    cache = CacheFolder(env, plan.repository)
    shards = [file for file in plan.files if file.name.endswith(".safetensors") and not cache.is_here(file)]
    if plan.target.keep:
        written = 0 if (folder / storage.MARKER).is_file() else result + small + tower
        return replace(plan, folder=folder, kept_bytes=plan.total_bytes + result + small + tower, disk_bytes=plan.download_bytes + written)
    peak, nbytes_read = max((file.size for file in shards), default=0), 0
    if has_parts:
        peak, nbytes_read = peak_shard_nbytes(plan.repository, shards, client)
    needed = peak + result + 2 * (small + tower)  # the tower tensors of each shard are kept until all are here
    distinct = {file.etag: file for file in plan.files}.values()
    here = [file for file in distinct if cache.is_here(file)]
    held = sum(file.size for file in here) + unfinished_builds.held_nbytes(folder, [file for file in distinct if file not in here])
    return replace(plan, folder=folder, kept_bytes=result + small + tower, disk_bytes=max(0, needed - occupied_nbytes(folder)),
                   held_bytes=held, disk_free=free_nbytes(folder), nbytes_read=plan.nbytes_read + nbytes_read)


def _tower_nbytes(plan: PullPlan, config: ModelConfig, has_parts: bool) -> int:
    """An upper bound of the vision tower's bytes, which are stored unquantized: all weights outside the text part."""
    from ..prepare import TEXT_ONLY_WARNING

    if has_parts or not any(TEXT_ONLY_WARNING in warning for warning in config.warnings):
        return 0
    stored = {file.etag: file.size for file in plan.files if file.name.endswith(".safetensors")}
    return max(0, sum(stored.values()) - ExpectedStore(config).nbytes)


def _smaller(plan: PullPlan, config: ModelConfig) -> tuple[int, int] | None:
    """(bits that the catalog suggests for the model, bytes of disk with them); None if bits were requested, or if they save nothing."""
    entry = plan.target.entry
    if plan.target.bits is not None or plan.target.reference.file or entry is None or entry.default_bits >= 16:
        return None
    kept = ExpectedStore(config, QuantSpec.parse(f"{entry.default_bits}bit")).nbytes
    kept += sum(file.size for file in companions(plan.repository))
    return (entry.default_bits, kept) if kept < plan.kept_bytes else None


def _expected(target: PullTarget, config: ModelConfig, section: Mapping[str, object] | None) -> ExpectedStore:
    """The tensors of the finished model. `section`: quantization_config of config.json."""
    from ..stores.expected_formats import expected_formats
    from ..stores.import_config import METHODS

    if bits := target.bits or target.on_load:
        return ExpectedStore(config, QuantSpec.parse(bits))
    is_imported = section is not None and section.get("quant_method") in METHODS
    return ExpectedStore(config, formats=expected_formats(section) if is_imported else None)

def _is_quantized(store: ExpectedStore | None, section: Mapping[str, object] | None) -> bool:
    """Whether the published weights will run from codes, as `source.is_low_bit` says of local ones. Of a GGUF file, more than half of them
    must; its types are inferred from its length."""
    from ..stores.import_config import is_quantized

    if section is not None:
        return is_quantized(section)
    if store is None or store.container is None:
        return False
    sizes = [(prod(tensor.shape), not tensor.spec.is_raw) for tensor in store.container.tensors.values()]
    return 2 * sum(size for size, low_bit in sizes if low_bit) > sum(size for size, _ in sizes)


def _estimate(plan: PullPlan, config: ModelConfig, store: ExpectedStore, options: EngineOptions | None) -> RunEstimate:
    """Memory and speed of the finished model on this machine, as it is now."""
    from ..prepare import EngineOptions

    tokenizer = sum(TOKENIZER_FACTORS.get(file.name, 0) * file.size for file in plan.files)
    tokenizer_nbytes = tokenizer if plan.target.reference.file is None else TOKEN_NBYTES * config.vocab_size
    return estimate_run(config, store, options or EngineOptions(), plan.folder, tokenizer_nbytes)
