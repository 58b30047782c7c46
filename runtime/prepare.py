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
from .prefill_chunks import widest_prefill
from .source import check_mapping, open_weights
from .sparse.activation_predictors import Predictors
from .sparse.neuron_bundles import is_bundled, is_lossy
from .speculation import draft_model
from .speculation.mtp import mtp_cache_nbytes
from .speculation.mtp_tensors import MTP
from .speculation.speculation_plan import SpeculationPlan, decide, draft_inputs, require_mtp, wants_mtp
from .stores.container import Container
from .stores.unused_tensors import unused_tensor_notices
from .tensors import check_tensors, with_own_layer
from .weights.paged_experts import PagedExperts
from .weights.stream_layout import StreamLayout
from .weights.streamed_weights import StreamingPlan

if TYPE_CHECKING:
    from ..kernels.cuda.device import Device
    from .tensors import ModelTensor

TEXT_ONLY_WARNING = " too: effllm reads its text part"  # part of the warning for a config whose text model alone is run
# How much more may be read from disk per token to make room for the MTP layer: its accepted drafts, at published rates, save more.
MTP_READ_FACTOR = 1.25
SYSTEM_RESERVE = 64 << 20  # bytes left to the system when no memory budget is given


@dataclass(frozen=True)
class EngineOptions:
    """How to run a model. Sizes are strings such as "6G". Unknown choices and contradictory options raise UsageError."""

    # Where it runs.
    device: str = "auto"  # auto, cpu or cuda
    threads: int | None = None  # None: one per core
    ram: str | None = None  # memory budget of the process; None: what is free
    vram: str | None = None
    gpu_layers: int | None = None
    load: str = "ram"  # ram, or mmap: map the files instead of reading them
    # The context and its KV cache.
    ctx: int | None = None  # None: the model's context length, or what fits
    overflow: str = "error"  # when the context is full: error, or shift (drop the middle)
    chunk: int = 512  # tokens of a prefill pass
    kv: str = "16bit"  # precision of the cache
    cache_k: str | None = None  # llama.cpp's type names; with cache_v another way to set kv
    cache_v: str | None = None
    kv_sink: int | None = None  # first tokens that a packed cache keeps exact; None: from the model's profile, or 64
    kv_window: int | None = None  # newest tokens that it keeps exact; None: from the profile, or 128
    kv_ram: str | None = None  # memory for the cache; further pages go to a file in spill_dir
    disk: str | None = None  # limit of that file
    spill_dir: str | None = None
    kv_read: str = "exact"  # pages on disk per token: exact reads all, sparse reads the best few and estimates the rest
    parallel: int = 1  # sequences at once, each with a cache of its own
    # Computation.
    kernel: str = "auto"  # for low-bit weights and one token: dot products or table lookup (lut)
    exact: bool = False  # multiply by float32 activations
    predict_neurons: bool = False  # start reading neurons from disk before it is certain that they are active
    spec: str = "auto"  # speculative decoding: auto, off, lookup or mtp
    draft: str | None = None  # folder of a draft model
    lora: tuple[str, ...] = ()  # adapters: FOLDER or FOLDER:SCALE
    encoder_path: str | None = None  # folder or GGUF file of the vision or audio encoder to keep memory free for; None: text only
    mmproj: str | None = None  # the encoder's file, if one was named
    # How strictly.
    strict: bool = False  # fallbacks are errors
    force: bool = False
    reserved_nbytes: int = 0  # memory that the process will allocate besides
    from_settings: frozenset[str] = frozenset()  # options from the settings file: dropped with a notice where a model lacks support

    def __post_init__(self) -> None:
        choices = {"device": ("auto", "cpu", "cuda"), "load": ("ram", "mmap"), "overflow": ("error", "shift"),
                   "kernel": ("auto", "dot", "lut"), "spec": ("auto", "off", "lookup", "mtp"), "kv_read": ("exact", "sparse")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)!r} is not known", f"use {' or '.join(allowed)}")
        minimums = {"threads": 1, "ctx": 1, "kv_sink": 0, "kv_window": 0, "gpu_layers": 0, "chunk": 1, "parallel": 1}
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                default = "; leave it out for the model's default" if name == "ctx" else ""
                flag = "ctx-size" if name == "ctx" else name.replace("_", "-")
                raise UsageError(f"--{flag} {value} is too small", f"at least {minimum}{default}")
        if self.ram is not None and self.ram.strip().isdigit() and parse_size(self.ram) < SPARE:
            number = self.ram.strip().lstrip("0")
            raise UsageError(f"--ram {self.ram} is {self.ram} bytes",
                             f"with its unit: --ram {number}G, or M" if number else "such as 6G or 512M, or leave it out")
        if self.draft and self.spec == "off":
            raise UsageError("--draft gives a model to speculate with, --spec off forbids it", "drop one of them")
        if self.draft and self.spec == "mtp":
            raise UsageError("--draft lets another model draft, --spec mtp a layer of this one", "drop one of them")
        if self.exact and self.kernel == "lut":
            raise UsageError("--exact multiplies in float32, --kernel lut uses table lookup", "give one of them")
        if self.exact:
            object.__setattr__(self, "kernel", "dot")  # the exact product reads weights in their stored order
        if self.kv.isdecimal():  # as --bits takes it
            object.__setattr__(self, "kv", f"{self.kv}bit")
        if self.cache_k or self.cache_v:
            self._resolve_cache_types()
        if self.kv != AUTO:
            check_policy(codec(self.kv, POLICIES).policy)

    def _resolve_cache_types(self) -> None:
        """Set `kv` from `cache_k` and `cache_v`, which llama.cpp's flags give."""
        if self.kv != "16bit":
            raise UsageError("--kv and -ctk or -ctv say the same thing", "give one of them")
        object.__setattr__(self, "kv", of_types(self.cache_k or "f16", self.cache_v or "f16"))
        if {name for name in ("cache_k", "cache_v") if getattr(self, name)} <= self.from_settings:
            object.__setattr__(self, "from_settings", self.from_settings | {"kv"})
        object.__setattr__(self, "cache_k", None)
        object.__setattr__(self, "cache_v", None)


@dataclass(frozen=True)
class Prepared:
    """What is known of a run before a byte of weights is read: the opened files, the plan and the resolved options."""

    folder: Path | None
    config: ModelConfig
    store: TensorStore
    placement: Placement
    shape: CacheShape
    options: EngineOptions
    notices: tuple[str, ...]
    container: Container | None = None
    codecs: tuple[RawCodec | PackedCodec, ...] | None = None  # of the layers that have pages
    streaming: StreamingPlan | PagedExperts | None = None  # weights read from disk during a run; None if all fit
    chunk: int = PAGE  # the grid on which prefill chunks end; a pass may take several (`shape.chunk` tokens)
    speculation: SpeculationPlan = SpeculationPlan()
    gpu: Device | None = None  # the GPU that the run may use
    predictors: Predictors | None = None  # of neurons on disk that become active
    window: int = CacheShape.window  # newest tokens kept exact, before `shape` cuts it to the context
    adapters: LoadedAdapters = NO_ADAPTERS
    media_nbytes: Mapping[Modality, int] = field(default_factory=dict)  # memory of vision and audio encoders, part of the baseline


def prepare(folder: Path, options: EngineOptions, extra_nbytes: int = 0, dry_run: bool = False) -> Prepared:
    """Read headers, check them against the config, plan.

    `extra_nbytes` and `dry_run`: see `prepare_with`. Raises DoesNotFit with the numbers if no plan exists, and with `strict` UsageError
    for a plan with fallbacks.
    """
    config = read_config(folder, strict=options.strict)
    if options.load == "mmap" and "load" not in options.from_settings:
        check_mapping(folder)
    store, container = open_weights(folder)
    with ExitStack() as on_failure:
        on_failure.callback(store.close)
        prepared = prepare_with(folder, config, store, options, container, extra_nbytes, None, on_failure, dry_run)
        on_failure.pop_all()
    return prepared


def prepare_with(folder: Path | None, config: ModelConfig, store: TensorStore, options: EngineOptions,
                 container: Container | None = None, extra_nbytes: int = 0, program: process_memory.Program | None = None,
                 on_failure: ExitStack | None = None, dry_run: bool = False) -> Prepared:
    """`prepare` for a config and a store that are already open.

    `extra_nbytes`: memory that the process will allocate besides. `program`: the measured size of the process; None: measure it now.
    `on_failure`: takes callbacks that close what is opened here. `dry_run`: plan without refusing fallbacks or a slow plan.
    """
    notices: list[str] = []
    config, options = resolve_sparse_attention(config, single_pass_options(config, options), notices)
    tensors = check_tensors(config, store, container)
    media_nbytes = encoder_nbytes(options.encoder_path, config, options.mmproj, options.threads)
    notices += [warning for warning in config.warnings if not (media_nbytes and TEXT_ONLY_WARNING in warning)]
    notices += [*store.notices, *too_many_threads(options.threads), *unused_tensor_notices(config, store, tensors),
                *table_notices(config, tensors["outer"])]
    options = drop_unsupported(parallel.check_options(options, notices), folder, config, store, notices, container)
    if options.spec == "mtp":
        require_mtp(config, store, container)
    gpu = devices.gpu(options, notices)
    options, cache = cache_layout(options, folder, config, store, notices.append)
    image_keys_nbytes = cross_attention_nbytes(config, cache.kv, options.parallel)  # not 0 only for models with a single modality
    media_nbytes = {modality: nbytes + image_keys_nbytes for modality, nbytes in media_nbytes.items()}
    if cache.kv.policy and gpu is not None:
        raise UsageError(f"--kv {options.kv}: policies see attention only on the CPU",
                         f"--device cpu, or no +{cache.kv.policy}")
    check_context(options, config)
    options, draft = draft_model.draft_or_without(folder, config, container, options, notices) if gpu is None else (options, None)
    if draft is not None and on_failure is not None:
        on_failure.callback(draft.store.close)
    # These are part of the process, so they are loaded before its memory is measured.
    bundled, adapters = is_bundled(container), load_adapters(options.lora, config, tensors)
    budget = _budget(options, gpu, notices, adapters.nbytes)
    extra_nbytes += (options.reserved_nbytes + SpeculationPlan(draft=draft).draft_nbytes + parallel.drafts_nbytes(options.parallel)
                     + sum(media_nbytes.values()))
    predictors = predictors_of(options, folder, config)
    kinds = kinds_of(config, store, container, options)
    baseline = process_memory.baseline(kinds) + extra_nbytes if program is None else program.with_kinds(kinds)
    request = PlanRequest(config, options, tensors, cache, store, folder, gpu, bundled, worker_count(options), baseline, budget,
                          adapters.rank, draft_inputs(draft))
    chunk = max(PAGE, options.chunk // PAGE * PAGE)
    request, has_draft, (pass_tokens, placement) = _plan_with_draft(draft, request, chunk, folder, notices)
    if draft is not None and not has_draft:
        draft.store.close()
        options, draft = replace(options, draft=None), None
    mtp_nbytes = None
    if wants_mtp(options, config, draft, gpu is not None):
        request, (pass_tokens, placement), mtp_nbytes = _with_mtp_layer(request, chunk, container, (pass_tokens, placement))
    gpu_layers = placement.devices.count("cuda")
    host_tensors, layouts = request.host_tensors(gpu_layers), request.layouts(gpu_layers)
    placement = replace(placement, disk_layers=layouts.disk_layers(placement, host_tensors))
    streaming = layouts.streaming(placement, host_tensors, store)
    shape, chunk_shape = cache.shape(placement.ctx, pass_tokens), cache.shape(placement.ctx, chunk)
    options = kv_spill.resolve_kv_read(options, placement, config, chunk_shape.pages, notices)
    notices += streaming.notices if isinstance(streaming, PagedExperts) else ()
    notices += _no_effect_notices(options, predictors is not None, placement, container, cache.unpacked(shape, placement.ctx))
    notices += devices.not_free(placement, options.load == "mmap")
    speculation, draft_notices = decide(options, config, placement, draft, mtp_nbytes)
    prepared = Prepared(folder, config, store, placement, shape, options, (*notices, *placement.notes, *draft_notices), container,
                        cache.codecs, streaming, chunk_shape.chunk, speculation, gpu, predictors if placement.slots else None,
                        cache.window, adapters, media_nbytes)
    if options.strict and not dry_run:
        refuse_fallbacks(prepared.notices)
    if placement.slots and is_lossy(container) and not (options.force or dry_run):
        from .planning.forecast import refuse_slower

        refuse_slower(prepared)
    return prepared


def table_notices(config: ModelConfig, outer: Mapping[str, ModelTensor]) -> list[str]:
    """Notices about embedding tables that are not loaded because a token reads only a few rows."""
    nbytes = away_nbytes(outer)
    if not nbytes:
        return []
    rows = config.ngrams.tables * len(config.ngrams.layers)
    return [f"a table of n-grams ({format_size(nbytes)}) stays in its files, where a token reads {rows} rows of it: from a fast disk"]


def _plan_with_draft(draft: Prepared | None, request: PlanRequest, chunk: int, folder: Path | None,
                     notices: list[str]) -> tuple[PlanRequest, bool, tuple[int, Placement]]:
    """`_plan` beside a draft model. One from the settings file that leaves too little memory is dropped, with a notice.

    Returns the request that was planned, whether the draft model is part of it, and the result of `_plan`.
    """
    try:
        return request, True, _plan(request, chunk, folder)
    except DoesNotFit:
        if draft is None or "draft" not in request.options.from_settings:
            raise
    request = replace(request, baseline=request.baseline - SpeculationPlan(draft=draft).draft_nbytes, draft_inputs=draft_inputs(None))
    planned = _plan(request, chunk, folder)
    notices.append(Fallback(f"the draft model {request.options.draft} leaves too little memory: ignored, since it is a setting for all "
                            "models"))
    return request, False, planned


def _no_effect_notices(options: EngineOptions, has_predictors: bool, placement: Placement, container: Container | None,
                       unpacked: str) -> Iterator[Fallback]:
    """Notices about options that change nothing in this plan. `unpacked`: why the cache packs no page, empty if it does."""
    if has_predictors and not placement.slots:
        yield Fallback("--predict-neurons has no effect: no neurons come from the disk")
    if options.kernel == "lut" and "kernel" not in options.from_settings and not (container is not None and container.is_low_bit):
        yield Fallback("--kernel lut has no effect: this model has no low-bit weights")
    if unpacked:
        yield Fallback(f"--kv {options.kv}: {unpacked}")


def _budget(options: EngineOptions, gpu: Device | None, notices: list[str], adapter_nbytes: int) -> Budget:
    """The memory budget as requested, else what is free. On a GPU, adapters come out of it."""
    ram = parse_size(options.ram) if options.ram else max(0, hardware.memory_available() + hardware.rss() - SYSTEM_RESERVE)
    return Budget(ram=ram, vram=0 if gpu is None else max(0, devices.vram(options, gpu, notices) - adapter_nbytes))


def refuse_beyond_machine(prepared: Prepared) -> None:
    """Raises DoesNotFit for a plan larger than this process could ever have: the kernel would kill it without a message. Memory-mapped
    files do not count."""
    needed, limit = prepared.placement.total_bytes - hardware.rss_files(), hardware.memory_total()
    if needed > limit and prepared.options.load == "ram":
        prepared.store.close()
        raise DoesNotFit(f"{format_size(prepared.placement.total_bytes)} of memory are planned, this process can have {format_size(limit)}",
                         "leave --ram out: what does not fit comes from the disk")


def _plan(request: PlanRequest, chunk: int, folder: Path | None) -> tuple[int, Placement]:
    """(tokens of a prefill pass, the plan). Raises DoesNotFit, with the reason why weights cannot stream from disk."""
    try:
        return (chunk, request.plan(chunk)) if request.cache.kv.is_packed else widest_prefill(request.plan, chunk)
    except DoesNotFit as refused:
        error = request.with_shorter(refused, chunk)
    if request.options.load == "mmap":
        try:
            _plan(replace(request, options=replace(request.options, load="ram")), chunk, folder)
        except DoesNotFit:
            raise error from None
        raise DoesNotFit(error.message, f"{error.hint}; without --load mmap what does not fit is read from the disk") from None
    parts = request.layouts().parts
    if isinstance(error, MemoryTooSmall) and parts is not None and parts.kept_for:
        raise unstreamed(error, parts, folder, request.budget.ram)
    raise error


def _with_mtp_layer(request: PlanRequest, chunk: int, container: Container | None,
                    planned: tuple[int, Placement]) -> tuple[PlanRequest, tuple[int, Placement], int | None]:
    """The request and plan with the MTP layer, and the bytes of that layer and its cache.

    Both are returned unchanged, with None for the bytes, if the model has no such layer, if it would push weights to disk or make the
    context shorter than usual, or if nothing is drafted under this plan. With --spec mtp, weights that stream anyway may be read far
    more."""
    before = planned[1]
    unchanged = request, planned, None
    is_sparse = request.options.kv_read == "sparse" and before.kv_pages is not None
    is_streamed_mixture = request.config.moe is not None and before.residency is not None
    if before.slots or before.expert_slots is not None or is_sparse or is_streamed_mixture:
        return unchanged
    tensors = with_own_layer(request.config, request.store, container)
    nbytes = sum(tensor.nbytes for role, tensor in tensors["outer"].items() if role.startswith(MTP))
    if not nbytes:
        return unchanged
    cache_nbytes = mtp_cache_nbytes(request.config, request.options.ctx or before.ctx)
    extended = replace(request, tensors=tensors, baseline=request.baseline + cache_nbytes, _layouts={})
    try:
        planned_with = _plan(extended, chunk, request.folder)
    except DoesNotFit:
        return unchanged
    after = planned_with[1]
    reads_more = after.residency is not None and before.residency is None or after.slots or after.expert_slots is not None
    reads_more = reads_more or request.options.spec != "mtp" and after.streamed_bytes > MTP_READ_FACTOR * before.streamed_bytes
    if reads_more or after.ctx < min(before.ctx, AUTO_CTX):
        return unchanged
    return extended, planned_with, nbytes + cache_nbytes


def unstreamed(error: MemoryTooSmall, parts: StreamLayout, folder: Path | None, ram: int) -> DoesNotFit:
    """The error with the reason why weights cannot stream from disk, and what can, if `ram` holds the rest of the plan."""
    hint = error.hint
    if parts.kept_for and folder is not None and error.required_nbytes - parts.always_nbytes <= ram:
        hint += f"; effllm quantize {typed(folder)} -o DIR --bits 4 makes a folder that runs from the disk"
    return DoesNotFit(f"{error.message}; {parts.kept_for}", hint)


def worker_count(options: EngineOptions) -> int:
    """Threads of the pool: as requested, else one per core; at most what the pool supports."""
    return min(MAX_WORKERS, options.threads or hardware.cpu_threads())


def too_many_threads(threads: int | None) -> list[Fallback]:
    """The message for more threads than the pool supports."""
    return [Fallback(f"{notice} (the limit of the thread pool; fewer already saturate the memory)")
            for notice in thread_limit_notice(threads)]
