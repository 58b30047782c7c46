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
from ..stores.import_config import section_of
from .client import Client, DownloadFailed, Gated, NoSuchRepository, RemoteFile
from .disk import check_space, free_nbytes, occupied_nbytes
from .download import CacheFolder
from .remote_gguf_header import DRAFTS, READS, RemoteGguf, read_head
from .repository import Repository, companions, describe, named_files, projector_file, ranking_file, weights
from .run_estimate import RunEstimate, estimate_run
from .shard_disk_peak import peak_shard_nbytes

if TYPE_CHECKING:
    from ..prepare import EngineOptions

CONFIG_LIMIT, CONTAINER_LIMIT = 128 << 10, 32 << 20
# Bytes of memory for a byte of a tokenizer (128,000 tokens: 100 MiB of 15.5), of which a line of base64 says little.
TOKENIZER_TIMES = {"tokenizer.json": 6, "tekken.json": 8, "tiktoken.model": 50, "hy.tiktoken": 50, hub.WORLD: 60}
TOKEN_NBYTES = 800  # and for a token, of which the length in a file is not known


@dataclass(frozen=True)
class PullTarget:
    """What a person asked for: a repository, one format or file of it. `keep`: the published weights too. `bits` is 4bit or None; `on_load`
    the same of a file, which comes as it is and is quantized by the run that follows. `gives_way`: the format stands in a variable or a
    file of settings, and is left out where the published weights are quantized already."""

    reference: Reference
    repo: str
    revision: str
    entry: CatalogEntry | None = None
    bits: str | None = None
    keep: bool = False
    on_load: str | None = None
    gives_way: bool = False


@dataclass(frozen=True)
class PullPlan:
    """`folder` is what will hold the model. Bytes: `total_bytes` of all files, `held_bytes` of them here already, `kept_bytes` on the disk
    at the end, `disk_bytes` more than now at the worst moment. `run`: what a run would take then, and its speed. `smaller`: fewer bits that
    suit the model's size and the bytes that they keep. `alternative`: to a gated one, an alias without a gate. `is_done`: nothing is
    left to do. `sees`: of `files` the part of a GGUF model that sees. `made_at`: the bits of published weights that `quantize` made."""

    wish: PullTarget
    repository: Repository
    files: tuple[RemoteFile, ...]
    folder: Path
    total_bytes: int
    held_bytes: int
    kept_bytes: int
    disk_bytes: int
    disk_free: int
    licence: str | None
    nbytes_read: int
    alternative: str | None = None
    run: RunEstimate = RunEstimate()
    smaller: tuple[int, int] | None = None
    is_done: bool = False
    sees: RemoteFile | None = None
    made_at: str = ""

    @property
    def lacks_tokenizer(self) -> bool:
        """Is there nothing that tells words from tokens among what will be here?"""
        return self.wish.reference.file is None and not any(file.name in TOKENIZER_TIMES for file in self.files)

    @property
    def to_load(self) -> int:
        return self.total_bytes - self.held_bytes

    def to_json(self) -> dict[str, object]:
        run, memory = self.run, self.run.memory
        return {"model": self.wish.reference.text, "repo": self.repository.repo, "revision": self.repository.commit,
                "bits": self.wish.bits, "bits_on_load": self.wish.on_load,
                "files": [file.name for file in self.files], "folder": str(self.folder),
                "bytes_total": self.total_bytes, "bytes_here": self.held_bytes, "bytes_to_load": self.to_load,
                "bytes_kept": self.kept_bytes, "disk_needed_bytes": self.disk_bytes, "disk_free_bytes": self.disk_free,
                "licence": self.licence, "gated": self.repository.gated, "parameters": self.repository.parameters,
                "alternative": self.alternative,
                "smaller": self.smaller and {"bits": self.smaller[0], "bytes_kept": self.smaller[1]},
                "memory": memory and memory.to_json(), "tokens_per_s_estimate": run.tokens_per_s, "tokens_per_s_error": run.error,
                "speed_unknown": run.unknown or None, "bytes_read_for_plan": self.nbytes_read}


def pull_target(reference: Reference, env: Mapping[str, str], bits: str | None = None, keep: bool = False) -> PullTarget:
    """Which repository a reference means. Raises ModelNotFound for one that names none, UsageError for a model that is
    here without a hub and for a format that does not exist."""
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

        resolve(reference.text, env)  # says what was probably meant
    if not hub.is_repo(repo):
        raise ModelNotFound(f"{show(repo)} is not a valid repository name",
                            "expected org/name: letters, digits, dashes and dots")
    return PullTarget(reference, repo, reference.revision or (entry.revision if entry else "main"), entry, bits, keep)


def run_target(reference: Reference, env: Mapping[str, str], bits: str | None, gives_way: bool) -> PullTarget:
    """What has to come for a run at `bits`: a repository can be quantized as it comes, a file of one is when it is loaded."""
    if reference.file is None:
        return replace(pull_target(reference, env, bits), gives_way=gives_way)
    return replace(pull_target(replace(reference, text=reference.to_pull, variant=None), env), on_load=bits, gives_way=gives_way)


def plan_pull(wish: PullTarget, client: Client, env: Mapping[str, str], options: EngineOptions | None = None) -> PullPlan:
    """`options`: of the run that is to follow. Raises ModelNotFound (gated, missing), DownloadFailed, ConfigError for a model that effllm
    does not run, and UsageError for options that it cannot have."""
    if client.offline:
        raise DownloadFailed(f"{wish.repo} is not here, and downloads are off (--offline or HF_HUB_OFFLINE)",
                             "effllm list shows the models that are here")
    repository, sees = _described(wish, client, env), None
    place, nbytes_read = CacheFolder(env, repository), repository.nbytes_read
    licence = (wish.entry and wish.entry.licence) or repository.licence
    if wish.reference.file is None and (wish.bits is None or wish.gives_way) and (file := repository.usual_file) is not None:
        # A file comes as it is: bits of the settings are for when it is loaded.
        wish = replace(wish, reference=replace(wish.reference, text=f"{wish.reference.base}:{file}", file=file), bits=None, keep=False,
                       on_load=wish.on_load or wish.bits)
    if wish.reference.file is not None:
        files = named_files(repository, wish.reference.file)
        sees = projector_file(repository, files[0].name)
    else:
        files = [*companions(repository), *_weights(wish, repository, client)]
    alternative = _alternative(wish, repository, files, env)
    head, section, made_at = RemoteGguf(), None, ""
    try:
        if wish.reference.file is None:
            raw, count = _raw_config(wish, repository, client)
            if is_assistant(raw) or is_eagle3(raw):
                head, config = RemoteGguf(unknown=_as_stored(wish, "drafts for another model", DRAFTS)), None
            elif is_encoder_config(raw):
                head, config = RemoteGguf(unknown=_as_stored(wish, "is an embedding model or a reranker", READS)), None
            else:
                config, section = parse_config(raw), section_of(text_model_config(raw))
                if (made_of := _container(wish, repository, client)) is not None:
                    head, made_at = RemoteGguf(store=ExpectedStore(config, container=made_of)), made_of.spec_text
                    count += repository.files[storage.MARKER].size
        elif all(place.is_here(file) for file in files):
            config, count = None, 0
            head = RemoteGguf(unknown="its files are here: see effllm plan")
        else:
            head = read_head(repository, files, client)
            config, count = head.config, head.nbytes_read
    except Gated as error:
        size = sum(file.size for file in files)
        raise Gated(f"{error.message} ({format_size(size)}, licence {licence or 'not stated'})",
                    error.hint + (f"; of about the same size without a gate: effllm pull {alternative}" if alternative else "")) from error
    nbytes_read += count
    ranks = ranking_file(repository, files[0].name) if wish.reference.file is not None else None
    files += [each for each in (sees, ranks) if each]
    distinct = {file.etag: file for file in files}.values()
    total, held = sum(file.size for file in distinct), sum(place.held(file) for file in distinct)
    made = PullPlan(wish, repository, tuple(files), place.snapshot, total, held, total, total - held, free_nbytes(place.root), licence,
                    nbytes_read, alternative, sees=sees, made_at=made_at)
    if config is None:
        return replace(made, run=RunEstimate(unknown=head.unknown))
    if wish.gives_way and _is_quantized(head, section):
        wish = replace(wish, bits=None, keep=False, on_load=None)
        made = replace(made, wish=wish)
    smaller, finished = _smaller(made, config), False
    if wish.bits is not None:
        made = _with_bits(made, config, section is not None, client, env)
        finished = (made.folder / storage.MARKER).is_file() and (not wish.keep or place.is_whole(files))
    if finished:
        made = replace(made, held_bytes=total, disk_bytes=0)
    store = _expected(wish, config, section) if head.store is None or wish.on_load else head.store
    run = _run(made, config, store, options)
    return replace(made, smaller=smaller, run=run, is_done=finished)


def check_disk(plan: PullPlan, env: Mapping[str, str]) -> None:
    """Raises DoesNotFit where a disk is too small; the cache and the folder of what is made may lie on two."""
    cached = plan.to_load if plan.wish.bits is None or plan.wish.keep else 0
    made = "XDG_DATA_HOME" if plan.wish.bits is not None else "HF_HUB_CACHE"
    check_space([(hub.cache_folder(env), cached, "HF_HUB_CACHE"), (plan.folder, max(0, plan.disk_bytes - cached), made)])


def _described(wish: PullTarget, client: Client, env: Mapping[str, str]) -> Repository:
    """What the hub says of the repository; of one that it does not show, with the names that may have been meant."""
    try:
        return describe(client, wish.repo, wish.revision)
    except NoSuchRepository as error:
        near = near_names(wish.repo, env)
        raise NoSuchRepository(error.message, (f"did you mean {' or '.join(near)}? else " if near else "") + error.hint) from error


def _alternative(wish: PullTarget, repository: Repository, files: Sequence[RemoteFile], env: Mapping[str, str]) -> str | None:
    """An alias of about the same size without a gate, where the repository has one: what the catalog says, else the nearest."""
    if not repository.gated:
        return None
    if wish.entry is not None and wish.entry.alternative:
        return wish.entry.alternative
    return open_alternative(catalog(env), 2 * repository.parameters if repository.parameters else sum(file.size for file in files))


def _weights(wish: PullTarget, repository: Repository, client: Client) -> list[RemoteFile]:
    """One copy of the weights. Of a pickle no model is read, but for a head that drafts (`offload/torch_checkpoint.py`)."""
    try:
        return weights(repository, wish.entry.exclude if wish.entry else "", wish.bits)
    except ModelNotFound:
        if PICKLED in repository.files and "config.json" in repository.files and is_eagle3(_raw_config(wish, repository, client)[0]):
            return [repository.files[PICKLED]]
        raise


def _raw_config(wish: PullTarget, repository: Repository, client: Client) -> tuple[Mapping[str, object], int]:
    """The model's config.json, and the bytes that it took."""
    if "config.json" not in repository.files:
        raise ModelNotFound(f"{repository.repo} has no config.json, so neither transformers nor effllm can run it",
                            "choose another repository of this model")
    text = client.small_file(wish.repo, repository.commit, repository.files["config.json"], CONFIG_LIMIT)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raw = None
    if not isinstance(raw, dict):
        raise DownloadFailed(f"config.json of {repository.repo} is not a JSON object", "the hub or a proxy alters it")
    return raw, len(text)


def _container(wish: PullTarget, repository: Repository, client: Client) -> Container | None:
    """What `quantize` made of the published weights, None where it made nothing. Raises UsageError for bits that are asked for again,
    CheckpointError for a damaged one."""
    if storage.MARKER not in repository.files:
        return None
    path = Path(storage.MARKER)
    raw = client.small_file(wish.repo, repository.commit, repository.files[storage.MARKER], CONTAINER_LIMIT)
    try:
        made = parse_container(parse_json(path, "content", raw), path)
    except CheckpointError as error:
        raise CheckpointError(f"{wish.repo}: {error.message}", "its publisher has to quantize and upload it again"
                              if error.hint == AGAIN else error.hint) from error
    if wish.bits is not None and not wish.gives_way:
        raise UsageError(f"{wish.repo} is quantized already ({made.spec_text})", f"effllm pull {wish.reference.base}")
    return made


def _as_stored(wish: PullTarget, does: str, said: str) -> str:
    """What is `said` of a run of one that `does` something else than write. Raises UsageError for bits, which it has as they are stored."""
    if wish.bits is not None and not wish.gives_way:
        raise UsageError(f"{wish.repo} {does}, and runs as it is stored", f"effllm pull {wish.reference.base}")
    return said


def _with_bits(plan: PullPlan, config: ModelConfig, parted: bool, client: Client, env: Mapping[str, str]) -> PullPlan:
    """The same with weights quantized as they come: one shard is on the disk at a time, unless the published weights are kept. `parted`:
    a weight is several tensors, which may lie in two shards."""
    folder = storage.own_folder(env, plan.wish.repo, plan.repository.commit, plan.wish.bits)
    result = ExpectedStore(config, QuantSpec.parse(plan.wish.bits)).nbytes
    beside, tower = sum(file.size for file in companions(plan.repository)), _tower_nbytes(plan, config, parted)
    place = CacheFolder(env, plan.repository)
    shards = [file for file in plan.files if file.name.endswith(".safetensors") and not place.is_here(file)]
    if plan.wish.keep:
        made = 0 if (folder / storage.MARKER).is_file() else result + beside + tower
        return replace(plan, folder=folder, kept_bytes=plan.total_bytes + result + beside + tower, disk_bytes=plan.to_load + made)
    together, count = peak_shard_nbytes(plan.repository, shards, client) if parted else (max((file.size for file in shards), default=0), 0)
    needed = together + result + 2 * (beside + tower)  # of each shard the tower's part is kept until all are here
    distinct = {file.etag: file for file in plan.files}.values()
    here = [file for file in distinct if place.is_here(file)]
    held = sum(file.size for file in here) + unfinished_builds.held_nbytes(folder, [file for file in distinct if file not in here])
    return replace(plan, folder=folder, kept_bytes=result + beside + tower, disk_bytes=max(0, needed - occupied_nbytes(folder)),
                   held_bytes=held, disk_free=free_nbytes(folder), nbytes_read=plan.nbytes_read + count)


def _tower_nbytes(plan: PullPlan, config: ModelConfig, parted: bool) -> int:
    """At most so much of the weights is what a model sees with, which goes along unrounded: what is not its text part."""
    from ..prepare import TEXT_ONLY_WARNING

    if parted or not any(TEXT_ONLY_WARNING in each for each in config.warnings):
        return 0
    stored = {file.etag: file.size for file in plan.files if file.name.endswith(".safetensors")}
    return max(0, sum(stored.values()) - ExpectedStore(config).nbytes)


def _smaller(plan: PullPlan, config: ModelConfig) -> tuple[int, int] | None:
    """The bits that suit a model of the catalog, and the bytes of disk that they keep; None where they are asked for or gain nothing."""
    entry = plan.wish.entry
    if plan.wish.bits is not None or plan.wish.reference.file or entry is None or entry.default_bits >= 16:
        return None
    kept = ExpectedStore(config, QuantSpec.parse(f"{entry.default_bits}bit")).nbytes
    kept += sum(file.size for file in companions(plan.repository))
    return (entry.default_bits, kept) if kept < plan.kept_bytes else None


def _expected(wish: PullTarget, config: ModelConfig, section: Mapping[str, object] | None) -> ExpectedStore:
    """The tensors of the finished model."""
    from ..stores.expected_formats import expected_formats
    from ..stores.import_config import METHODS

    if bits := wish.bits or wish.on_load:
        return ExpectedStore(config, QuantSpec.parse(bits))
    foreign = section is not None and section.get("quant_method") in METHODS
    return ExpectedStore(config, formats=expected_formats(section) if foreign else None)


def _is_quantized(head: RemoteGguf, section: Mapping[str, object] | None) -> bool:
    """Whether the published weights will run from codes, as `source.is_low_bit` says of those that are here. Of a GGUF file most of them
    must: which types it has is reckoned from its length."""
    from ..stores.import_config import is_quantized

    if section is not None:
        return is_quantized(section)
    if head.store is None or head.store.container is None:
        return False
    sizes = [(prod(tensor.shape), not tensor.spec.is_raw) for tensor in head.store.container.tensors.values()]
    return 2 * sum(size for size, low in sizes if low) > sum(size for size, _ in sizes)


def _run(plan: PullPlan, config: ModelConfig, store: ExpectedStore, options: EngineOptions | None) -> RunEstimate:
    """What the planner says of the finished model on this machine, as it is now; the speed from what was measured before."""
    from ..prepare import EngineOptions

    tokenizer = sum(TOKENIZER_TIMES.get(file.name, 0) * file.size for file in plan.files)
    beside = tokenizer if plan.wish.reference.file is None else TOKEN_NBYTES * config.vocab_size
    return estimate_run(config, store, options or EngineOptions(), plan.folder, beside)
