"""Planning a run before a byte of weights is read: engine options, checks of headers against the config, and the placement.

`effllm plan` prints what `prepare` returns and a run uses the same value, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import DoesNotFit, MemoryTooSmall, UsageError, typed
from ..kernels.layout import PAGE
from ..kernels.threads import MAX_WORKERS, thread_limit_notice
from ..offload import hardware
from ..offload.checkpoint import TensorStore
from ..offload.demand import AUTO_CTX
from ..offload.notes import Fallback, refuse_fallbacks
from ..offload.placement import Budget, Placement
from ..offload.size import SPARE, format_size, parse_size
from ..quant.kv import PackedCodec, RawCodec, codec, of_types
from .adapters.loaded_adapters import NO_ADAPTERS, LoadedAdapters, load_adapters
from .cache import CacheShape
from .config import ModelConfig, read_config
from .generation import parallel
from .images.media import encoder_nbytes
from .images.modality import Modality
from .kv import kv_spill
from .kv.bidirectional import single_pass_options
from .kv.cross_attention_cache import cross_attention_nbytes
from .kv.kv_setting import AUTO
from .ngrams import away_nbytes
from .planning import devices, process_memory
from .planning.needed_kernels import kinds_of
from .planning.plan_request import PlanRequest, cache_layout
from .planning.settings_fit import check_context, drop_unsupported, predictors_of, resolve_sparse_attention
from .policy import POLICIES, check_policy
from .prefill_chunks import widest
from .source import check_mapping, open_weights
from .sparse.activation_predictors import Predictors
from .sparse.neuron_bundles import is_bundled, is_lossy
from .speculation import draft_model
from .speculation.mtp import own_cache_nbytes
from .speculation.mtp_tensors import MTP
from .speculation.speculation_plan import SpeculationPlan, decide, demand_own_layer, reads_of, wants_own_layer
from .stores.container import Container
from .stores.unused_tensors import unused_tensor_notices
from .tensors import check_tensors, with_own_layer
from .weights.paged_experts import PagedExperts
from .weights.stream_layout import StreamLayout
from .weights.streamed_weights import StreamingPlan

if TYPE_CHECKING:
    from ..kernels.cuda.device import Device
    from .tensors import ModelTensor

TEXT_ALONE = " too: effllm reads its text part"  # what a config's warning says of a model of which the text part runs
# How much more may be read from the disk per token to make room for a drafting layer; guesses as right as published give back more.
DEARER = 1.25
RESERVE = 64 << 20  # what the machine keeps for itself when no budget is given


@dataclass(frozen=True)
class EngineOptions:
    """How to run. `ctx` None: the smaller of the model's and what fits. Sizes like "6G". `overflow`: error or shift (forget the middle).
    `kernel`: of low-bit weights and one token, dot products or lookup. `exact`: low-bit weights times float32 activations. `spec`: whether
    tokens are drafted and verified several at a time (`speculate.py`); `draft`: the folder of a model that drafts. `kv_sink`,
    `kv_window`: first and newest tokens that a packed cache keeps exact, None: as the profile says, or 64 and 128. `kv_ram`: memory for
    the cache at most, its other pages go into a file in `spill_dir` of at most `disk`. `kv_read`: all of those are read for a token
    (exact), or few picked and the others estimated (sparse). `predict_neurons`: those that come from the disk begin to before it is certain
    that they are used. `parallel`: texts at once, each with a cache of its own. `kept`: bytes that the process comes to keep besides.
    `lora`: adapters beside the weights, FOLDER or FOLDER:SCALE. `sight`: the folder or GGUF file whose tower sees pictures, where some may
    come; its memory is kept free. `mmproj`: the file of that tower, where one was named. `preset`: options that were not asked of this
    model but stand in a person's settings; where it cannot have them they are left, with a notice."""

    device: str = "auto"
    threads: int | None = None
    ctx: int | None = None
    kv: str = "16bit"
    cache_k: str | None = None  # with cache_v another way to say kv
    cache_v: str | None = None
    kv_sink: int | None = None
    kv_window: int | None = None
    ram: str | None = None
    vram: str | None = None
    gpu_layers: int | None = None
    load: str = "ram"
    strict: bool = False
    force: bool = False
    overflow: str = "error"
    chunk: int = 512
    kernel: str = "auto"
    exact: bool = False
    spec: str = "auto"
    draft: str | None = None
    kv_ram: str | None = None
    disk: str | None = None
    spill_dir: str | None = None
    kv_read: str = "exact"
    predict_neurons: bool = False
    parallel: int = 1
    kept: int = 0
    lora: tuple[str, ...] = ()
    sight: str | None = None
    mmproj: str | None = None
    preset: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        choices = {"device": ("auto", "cpu", "cuda"), "load": ("ram", "mmap"), "overflow": ("error", "shift"),
                   "kernel": ("auto", "dot", "lut"), "spec": ("auto", "off", "lookup", "mtp"), "kv_read": ("exact", "sparse")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)!r} is not known", f"use {' or '.join(allowed)}")
        for name, least in (("threads", 1), ("ctx", 1), ("kv_sink", 0), ("kv_window", 0), ("gpu_layers", 0), ("chunk", 1), ("parallel", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                away = "; leave it out for the model's default" if name == "ctx" else ""
                raise UsageError(f"--{name.replace('_', '-')} {value} is too small", f"at least {least}{away}")
        if self.ram is not None and self.ram.strip().isdigit() and parse_size(self.ram) < SPARE:
            raise UsageError(f"--ram {self.ram} is {self.ram} bytes", f"with its unit: --ram {self.ram.strip()}G, or M")
        if self.draft and self.spec == "off":
            raise UsageError("--draft gives a model to speculate with, --spec off forbids it", "drop one of them")
        if self.draft and self.spec == "mtp":
            raise UsageError("--draft lets another model draft, --spec mtp a layer of this one", "drop one of them")
        if self.exact and self.kernel == "lut":
            raise UsageError("--exact multiplies in float32, --kernel lut uses table lookup", "give one of them")
        if self.exact:
            object.__setattr__(self, "kernel", "dot")  # weights stay in the order that the exact product reads
        if self.kv.isdecimal():  # as --bits takes it
            object.__setattr__(self, "kv", f"{self.kv}bit")
        if self.cache_k or self.cache_v:
            if self.kv != "16bit":
                raise UsageError("--kv and -ctk or -ctv say the same thing", "give one of them")
            object.__setattr__(self, "kv", of_types(self.cache_k or "f16", self.cache_v or "f16"))
            if {name for name in ("cache_k", "cache_v") if getattr(self, name)} <= self.preset:
                object.__setattr__(self, "preset", self.preset | {"kv"})
            object.__setattr__(self, "cache_k", None)
            object.__setattr__(self, "cache_v", None)
        if self.kv != AUTO:
            check_policy(codec(self.kv, POLICIES).policy)


@dataclass(frozen=True)
class Prepared:
    """What is known before a byte of weights is read. `chunk`: the grid of a prompt's chunks, of which `shape` may take several at once.
    `gpu`: the GPU of a run that may use one. `predictors`: of neurons on the disk. `window`: newest exact tokens (`shape` cuts it).
    `adapted`: what adapters add to products. `modalities`: bytes of the vision and audio encoders, counted with the program."""

    folder: Path | None
    config: ModelConfig
    store: TensorStore
    placement: Placement
    shape: CacheShape
    options: EngineOptions
    notices: tuple[str, ...]
    container: Container | None = None
    codecs: tuple[RawCodec | PackedCodec, ...] | None = None
    streams: StreamingPlan | PagedExperts | None = None
    chunk: int = PAGE
    speculating: SpeculationPlan = SpeculationPlan()
    gpu: Device | None = None
    predictors: Predictors | None = None
    window: int = CacheShape.window
    adapted: LoadedAdapters = NO_ADAPTERS
    modalities: Mapping[Modality, int] = field(default_factory=dict)


def prepare(folder: Path, options: EngineOptions, beside: int = 0, rehearsal: bool = False) -> Prepared:
    """Read headers, check them against the config, plan. Raises DoesNotFit with the numbers if no plan exists, and with `strict`
    UsageError for a plan with fallbacks. `beside`, `rehearsal`: see `prepare_with`."""
    config = read_config(folder, strict=options.strict)
    if options.load == "mmap" and "load" not in options.preset:
        check_mapping(folder)
    store, container = open_weights(folder)
    with ExitStack() as unless_planned:
        unless_planned.callback(store.close)
        made = prepare_with(folder, config, store, options, container, beside, None, unless_planned, rehearsal)
        unless_planned.pop_all()
    return made


def prepare_with(folder: Path | None, config: ModelConfig, store: TensorStore, options: EngineOptions,
                 container: Container | None = None, beside: int = 0, program: process_memory.Program | None = None,
                 unless_planned: ExitStack | None = None, rehearsal: bool = False) -> Prepared:
    """`prepare` for a given config and store. `beside`: bytes that the process will allocate besides. `program`: its measured size.
    `unless_planned` is told what else was opened. `rehearsal`: never refuse for lack of memory."""
    begun: list[str] = []
    config, options = resolve_sparse_attention(config, single_pass_options(config, options), begun)
    tensors = check_tensors(config, store, container)
    modalities = encoder_nbytes(options.sight, config, options.mmproj, options.threads)
    warnings = [each for each in config.warnings if not (modalities and TEXT_ALONE in each)]
    notices = [*begun, *warnings, *store.notices, *too_many_threads(options.threads), *unused_tensor_notices(config, store, tensors),
               *table_notices(config, tensors["outer"])]
    options = drop_unsupported(parallel.fitted(options, notices), folder, config, store, notices, container)
    if options.spec == "mtp":
        demand_own_layer(config, store, container)
    gpu = devices.gpu(options, notices)
    options, cache = cache_layout(options, folder, config, store, notices.append)
    keys = cross_attention_nbytes(config, cache.kv, options.parallel)
    modalities = {modality: nbytes + keys for modality, nbytes
                  in modalities.items()}  # of which a model whose layers attend to them has one
    if cache.kv.policy and gpu is not None:
        raise UsageError(f"--kv {options.kv}: policies see attention only on the CPU",
                         f"--device cpu, or no +{cache.kv.policy}")
    check_context(options, config)
    options, draft = draft_model.draft_or_without(folder, config, container, options, notices) if gpu is None else (options, None)
    if draft is not None and unless_planned is not None:
        unless_planned.callback(draft.store.close)
    bundled, beside_weights = is_bundled(container), load_adapters(options.lora, config, tensors)  # before the process is weighed
    budget = _budget(options, gpu, notices, beside_weights.nbytes)
    beside += options.kept + SpeculationPlan(draft=draft).draft_nbytes + parallel.drafts_nbytes(options.parallel) + sum(modalities.values())
    predictors = predictors_of(options, folder, config)  # before the process is weighed, which they are a part of
    kinds = kinds_of(config, store, container, options)
    baseline = process_memory.baseline(kinds) + beside if program is None else program.with_kinds(kinds)
    asked = PlanRequest(config, options, tensors, cache, store, folder, gpu, bundled, worker_count(options), baseline, budget,
                  beside_weights.rank, reads_of(draft))
    chunk = max(PAGE, options.chunk // PAGE * PAGE)
    asked, fits, (tokens, placement) = _planned_with(draft, asked, chunk, folder, notices)
    if draft is not None and not fits:
        draft.store.close()
        options, draft = replace(options, draft=None), None
    own_nbytes = None
    if wants_own_layer(options, config, draft, gpu is not None):
        asked, (tokens, placement), own_nbytes = _with_own_layer(asked, chunk, container, (tokens, placement))
    gpu_layers = placement.devices.count("cuda")
    own, cuts = asked.beneath(gpu_layers), asked.cuts(gpu_layers)
    placement = replace(placement, disk_layers=cuts.disk_layers(placement, own))
    streams = cuts.streams(placement, own, store)
    shape = cache.shape(placement.ctx, tokens)
    options = kv_spill.resolve_kv_read(options, placement, config, cache.shape(placement.ctx, chunk).pages, notices)
    notices += streams.notices if isinstance(streams, PagedExperts) else ()
    notices += _without_effect(options, predictors is not None, placement, container, cache.unpacked(shape, placement.ctx))
    notices += devices.not_free(placement, options.load == "mmap")
    speculating, remarks = decide(options, config, placement, draft, own_nbytes)
    made = Prepared(folder, config, store, placement, shape, options, (*notices, *placement.notes, *remarks), container, cache.codecs,
                    streams, cache.shape(placement.ctx, chunk).chunk, speculating, gpu,
                    predictors if placement.slots else None, cache.window, beside_weights, modalities)
    if options.strict and not rehearsal:
        refuse_fallbacks(made.notices)
    if placement.slots and is_lossy(container) and not (options.force or rehearsal):
        from .planning.forecast import refuse_slower

        refuse_slower(made)
    return made


def table_notices(config: ModelConfig, outer: Mapping[str, ModelTensor]) -> list[str]:
    """Notices about embedding tables that are not loaded because a token reads only a few rows."""
    nbytes = away_nbytes(outer)
    if not nbytes:
        return []
    rows = config.ngrams.tables * len(config.ngrams.layers)
    return [f"a table of n-grams ({format_size(nbytes)}) stays in its files, where a token reads {rows} rows of it: from a fast disk"]


def _planned_with(draft: Prepared | None, asked: PlanRequest, chunk: int, folder: Path | None,
                  notices: list[str]) -> tuple[PlanRequest, bool, tuple[int, Placement]]:
    """`_planned` beside a draft model, or without one from a preset that leaves too little memory: (what was planned, whether the draft
    is part of it)."""
    try:
        return asked, True, _planned(asked, chunk, folder)
    except DoesNotFit:
        if draft is None or "draft" not in asked.options.preset:
            raise
        asked = replace(asked, baseline=asked.baseline - SpeculationPlan(draft=draft).draft_nbytes, reads=reads_of(None))
        planned = _planned(asked, chunk, folder)
        notices.append(Fallback(f"the draft model {asked.options.draft} leaves too little memory: ignored, since it is a setting for all "
                                "models"))
        return asked, False, planned


def _without_effect(options: EngineOptions, is_predicting: bool, placement: Placement, container: Container | None,
                    unpacked: str) -> Iterator[Fallback]:
    """Notices about options that change nothing in this plan. `unpacked`: why the cache packs no page, empty if it does."""
    if is_predicting and not placement.slots:
        yield Fallback("--predict-neurons has no effect: no neurons come from the disk")
    if options.kernel == "lut" and "kernel" not in options.preset and not (container is not None and container.is_low_bit):
        yield Fallback("--kernel lut has no effect: this model has no low-bit weights")
    if unpacked:
        yield Fallback(f"--kv {options.kv}: {unpacked}")


def _budget(options: EngineOptions, gpu: Device | None, notices: list[str], beside: int) -> Budget:
    """Memory budget of this process: as requested, else what is free; with a GPU `beside` less."""
    ram = parse_size(options.ram) if options.ram else max(0, hardware.memory_available() + hardware.rss() - RESERVE)
    return Budget(ram=ram, vram=0 if gpu is None else max(0, devices.vram(options, gpu, notices) - beside))


def refuse_beyond_machine(prepared: Prepared) -> None:
    """Raises DoesNotFit for a plan larger than this process could ever have: the kernel would kill it without a message. Memory-mapped
    files do not count."""
    needed, most = prepared.placement.total_bytes - hardware.rss_files(), hardware.memory_total()
    if needed > most and prepared.options.load == "ram":
        prepared.store.close()
        raise DoesNotFit(f"{format_size(prepared.placement.total_bytes)} of memory are planned, this process can have {format_size(most)}",
                         "leave --ram out: what does not fit comes from the disk")


def _planned(asked: PlanRequest, chunk: int, folder: Path | None) -> tuple[int, Placement]:
    """(tokens of a prefill pass, the plan). Raises DoesNotFit, with the reason why weights cannot stream from disk."""
    try:
        return (chunk, asked.plan(chunk)) if asked.cache.kv.is_packed else widest(asked.plan, chunk)
    except DoesNotFit as refused:
        error = asked.with_shorter(refused, chunk)
        if asked.options.load == "mmap":
            try:
                _planned(replace(asked, options=replace(asked.options, load="ram")), chunk, folder)
            except DoesNotFit:
                raise error from None
            raise DoesNotFit(error.message, f"{error.hint}; without --load mmap what does not fit is read from the disk") from None
        parts, of_memory = asked.cuts().parts, isinstance(error, MemoryTooSmall)
        raise unstreamed(error, parts, folder, asked.budget.ram) if of_memory and parts is not None and parts.kept_for else error from None


def _with_own_layer(asked: PlanRequest, chunk: int, container: Container | None,
                    planned: tuple[int, Placement]) -> tuple[PlanRequest, tuple[int, Placement], int | None]:
    """The request and plan including the MTP layer, with its bytes and those of its cache. Unchanged, and None, if there is none, if it
    would push weights to the disk, if nothing is drafted, or if the context would become shorter than usual; unless it was requested,
    also where a token would read far more from disk."""
    before = planned[1]
    picks = asked.options.kv_read == "sparse" and before.kv_pages is not None
    if before.slots or before.expert_slots is not None or picks or (asked.config.mixture is not None and before.residency is not None):
        return asked, planned, None
    tensors = with_own_layer(asked.config, asked.store, container)
    nbytes = sum(tensor.nbytes for role, tensor in tensors["outer"].items() if role.startswith(MTP))
    if not nbytes:
        return asked, planned, None
    cache = own_cache_nbytes(asked.config, asked.options.ctx or before.ctx)
    more = replace(asked, tensors=tensors, baseline=asked.baseline + cache, _cuts={})
    try:
        found = _planned(more, chunk, asked.folder)
    except DoesNotFit:
        return asked, planned, None
    after = found[1]
    away = after.residency is not None and before.residency is None or after.slots or after.expert_slots is not None
    away = away or asked.options.spec != "mtp" and after.streamed_bytes > DEARER * before.streamed_bytes
    return (asked, planned, None) if away or after.ctx < min(before.ctx, AUTO_CTX) else (more, found, nbytes + cache)


def unstreamed(error: MemoryTooSmall, parts: StreamLayout, folder: Path | None, ram: int) -> DoesNotFit:
    """The error with the reason why weights cannot stream from disk, and what can, if `ram` holds the rest of the plan."""
    hint = error.hint
    if parts.kept_for and folder is not None and error.least - parts.always_nbytes <= ram:
        hint += f"; effllm quantize {typed(folder)} -o DIR --bits 4 makes a folder that runs from the disk"
    return DoesNotFit(f"{error.message}; {parts.kept_for}", hint)


def worker_count(options: EngineOptions) -> int:
    """Threads of the pool: as requested, else one per core; at most what the pool supports."""
    return min(MAX_WORKERS, options.threads or hardware.cpu_threads())


def too_many_threads(threads: int | None) -> list[Fallback]:
    """The message for more threads than the pool supports."""
    return [Fallback(f"{said} (the limit of the thread pool; fewer already saturate the memory)")
            for said in thread_limit_notice(threads)]
