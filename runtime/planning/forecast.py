"""Speed forecast before a model is loaded: a plan's work divided by the machine's measured rates.

`work` counts bytes and products from headers; `offload/predict.py` does the arithmetic; `suggest` repeats the prediction with one flag
changed and names the most effective. `forecast_outcome.py` compares a prediction with the measured result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ... import EffllmError, UsageError
from ...kernels.layout import PAGE
from ...offload import hardware
from ...offload.checkpoint import TensorStore
from ...offload.predict import (
    RAW_KIND,
    STATE_TRAFFIC,
    Prediction,
    Rates,
    WeightCost,
    Work,
    decode,
    is_predictable,
    load_seconds,
    prompt,
    window_gain,
)
from ...offload.safetensors_header import is_gguf
from ...offload.size import format_size, parse_size, ram_argument
from ...quant.kv import codec
from ...quant.spec import QuantSpec
from ..config import ModelConfig, read_config
from ..families import VISION_PREFIX, expert_of
from ..kv.cache_shape import index_type, page_sizes
from ..last_layers import KEPT, attending_alone, spares
from ..ngrams import is_table
from ..prepare import EngineOptions, Prepared, prepare_with, refuse_beyond_machine, worker_count
from ..sparse.neuron_bundles import ROLE as BUNDLES
from ..sparse.neuron_bundles import is_bundled
from ..sparse.sparsity_file import Sparsity
from ..sparse.sparsity_file import load as load_sparsity
from ..speculation.mtp_tensors import MTP
from ..stores.container import Container
from ..tensors import ModelTensor, check_tensors
from ..weights.paged_experts import PagedExperts
from ..weights.shared_block_weights import BLOCKS, uses
from ..weights.stream_layout import TABLES
from .expected_store import ExpectedStore
from .process_memory import program_of
from .roofs import Roofs, RoofsWanted, largest_file
from .roofs import known as roofs_known

Tensors = Mapping[int | str, Mapping[str, ModelTensor]]
PROMPT = 512
EXACT = " exact"  # suffix of a low-bit kind that is multiplied exactly
WORTH = 1.05  # a flag that gains less is not suggested
ACTIVE = 0.1  # default share of active neurons of a sparse model
ON_GPU = "the speed of layers on the GPU is not predicted in this version"
NO_EXACT = "--exact was not measured here: effllm plan with the same flags does that"
SLOW_DISK = "the disk was not measured: effllm doctor"
PICKED = "how many pages of the cache a token picks (--kv-read sparse) is not predicted in this version"


def no_roofs(options: EngineOptions) -> str:
    """The message if the machine was not measured with this number of threads."""
    threads = worker_count(options)
    with_them = "" if options.threads is None else f" with {threads} thread{'' if threads == 1 else 's'}"
    return f"this machine was not measured{with_them}: {doctor(options)}"


def doctor(options: EngineOptions, *flags: str) -> str:
    """The command that measures the machine with the threads of a run."""
    return " ".join(("effllm doctor", *flags, *(() if options.threads is None else ("-t", str(worker_count(options))))))


@dataclass(frozen=True)
class Forecast:
    """Predictions for a plan: a token with an empty context, with a full one, and the time for a prompt of `prompt_tokens`. All None if
    `reason` is set. `begun_s`: start-up time before weights are loaded, None if not measured."""

    work: Work
    prompt_tokens: int
    start: Prediction | None = None
    full: Prediction | None = None
    prompt: Prediction | None = None
    load_s: float | None = None
    begun_s: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Suggestion:
    """One flag, and the tokens per second with it; `gain` is the factor. `full`: with a full context, else with an empty one."""

    flag: str
    tokens_per_s: float
    gain: float
    full: bool = False


def kind_of_weight(spec: QuantSpec, exact: bool = False) -> str:
    """The name under which a format's rates are measured; outliers cost too little to be a kind of their own."""
    return RAW_KIND if spec.is_raw else str(replace(spec, outliers=0.0)) + (EXACT if exact else "")


def work(prepared: Prepared, tensors: Tensors) -> Work:
    """What one token asks of this machine."""
    config, options, placement = prepared.config, prepared.options, prepared.placement
    own, outer = config.moe, tensors["outer"]
    nbytes: dict[tuple[str, bool, bool], float] = defaultdict(float)
    products: dict[tuple[str, bool, bool], float] = defaultdict(float)
    ends: dict[tuple[str, bool, bool], float] = defaultdict(float)
    head = "head" if "head" in outer else "embed"
    sparsity = load_sparsity(prepared.folder, config.num_hidden_layers) if is_bundled(prepared.container) else None
    active = _usual(prepared) if sparsity is None else sum(sparsity.active) / len(sparsity.active)
    spared: dict[tuple[str, bool, bool], float] = defaultdict(float)
    for key, roles in tensors.items():
        for role, tensor in roles.items():
            if key == "outer" and (role.startswith(MTP) or is_table(role) or role in ("positions", *TABLES) and role != head):
                continue  # used by drafts, or read row by row
            if role.startswith(VISION_PREFIX):
                continue  # only rows of images use them
            routed = expert_of(role) is not None
            lent = role.startswith(BLOCKS)
            kind = kind_of_weight(tensor.spec, options.exact), key == "outer" and not lent, routed
            share = own.visit_rate if own and routed else 1.0
            share = active if role == BUNDLES else uses(config, role) if lent else share
            nbytes[kind] += share * tensor.nbytes
            if len(tensor.shape) == 2:
                products[kind] += share * prod(tensor.shape)
                ends[kind] += share * sum(tensor.shape)
                spared[kind] += share * prod(tensor.shape) * (key != "outer" and spares(config, key, role))
    if any(prepared.adapters.scales):
        beside = RAW_KIND, False, False
        nbytes[beside] += prepared.adapters.nbytes_of(prepared.adapters.scales)
        products[beside] += prepared.adapters.products_of(prepared.adapters.scales)
    paged = prepared.streaming.work if isinstance(prepared.streaming, PagedExperts) else None
    window = {} if paged else window_work(prepared, sparsity)
    return Work(
        parts=tuple(WeightCost(each[0], round(nbytes[each]), round(products[each]), *each[1:], round(ends[each]),
                         spared[each] / max(1.0, products[each])) for each in nbytes), kept=KEPT, alone=attending_alone(config),
        **attention_work(prepared), kv=options.kv, stateful=sum(not config.has_attention(layer) for layer in config.recurrent_layers),
        state_bytes=0 if config.recurrent is None else STATE_TRAFFIC * config.recurrent.state_floats * len(config.recurrent_layers),
        streamed=placement.streamed_bytes if paged is None else round(paged.nbytes(1)),
        # Streamed bytes include alignment: if everything streams, that is more than the weights.
        load=max(0, placement.weights_bytes - placement.streamed_bytes - round(window.get("neurons", 0))) if paged is None
        else prepared.streaming.load_nbytes, chunk=prepared.shape.chunk, mixture=own is not None, paged=paged, **window,
        kv_held=None if placement.kv_pages is None else placement.kv_pages * PAGE + prepared.shape.sinks + prepared.shape.window)


def attention_work(prepared: Prepared) -> dict[str, object]:
    """Attention's contribution to `Work`: layers listed individually where they differ, those that re-read another layer's keys and values
    included; an indexer counts as one more layer, which sees all tokens."""
    config, every = prepared.config, prepared.placement.kv_bytes_per_token // prepared.options.parallel  # per sequence
    attending = [layer for layer in range(config.num_hidden_layers) if config.has_attention(layer)]
    widths = tuple(2 * config.query_heads_of(layer) * config.kv_heads_of(layer)[1] for layer in attending)
    found = {"attention_width": max(widths, default=0), "windows": tuple(config.windows[layer] for layer in attending), "kv_bytes": every}
    if config.compressed_attention is not None:
        kv = codec(prepared.options.kv)
        pages = page_sizes(prepared.codecs, [kv.layout(*heads) for heads in config.cache_kv_heads])
        return found | _compressed_work(config, widths, [page // PAGE for page in pages], index_type(kv))
    if config.indexer is not None:
        return found | _chosen_work(config, attending, widths, every, index_type(codec(prepared.options.kv)))
    if not config.layer_kv_heads and not config.kv_sources and not config.layer_query_heads:
        return found
    pages = page_sizes(prepared.codecs, [codec(prepared.options.kv).layout(*heads) for heads in config.cache_kv_heads])
    own = {layer: round(every * page / sum(pages)) for layer, page in zip(config.attention_layers, pages, strict=True)}
    kept = tuple(own[config.kv_sources[layer] if config.kv_sources else layer] for layer in attending)
    return {**found, "kv_bytes": sum(kept), "kv_layers": kept, "widths": widths}


def _chosen_work(config: ModelConfig, attending: Sequence[int], widths: tuple[int, ...], every: int,
                 stored: int) -> dict[str, object]:
    """Of sparse-attention layers and their indexers."""
    own, shape = config.indexer, config.indexer.shape
    choose = [layer for layer in attending if own.shape_of(layer) is not None]
    index = shape.scored_nbytes(stored)
    each = (every - shape.token_nbytes(stored) * len(choose)) // len(attending)
    windows = tuple(config.windows[layer] if own.source_layers[layer] is None else shape.dense_tokens for layer in attending)
    return {"windows": windows + (None,) * len(choose), "kv_layers": (each,) * len(attending) + (index,) * len(choose),
            "widths": widths + (shape.heads * shape.width,) * len(choose)}


def _compressed_work(config: ModelConfig, widths: tuple[int, ...], tokens: Sequence[int], stored: int) -> dict[str, object]:
    """Of layers with compressed keys beside a window (`tokens`: bytes of their tokens): compressed keys count as one more layer, of as many
    tokens as are attended to, and their indexer as another, which sees all."""
    windows, kept, wide = list(config.windows), list(tokens), list(widths)
    for layer, shape in enumerate(config.compressed_attention.shapes):
        index = None if config.indexer is None else config.indexer.shape_of(layer)
        if shape is not None:
            windows.append(None if index is None else index.dense_tokens)
            kept.append(shape.token_nbytes(stored))
            wide.append(widths[layer] // shape.tokens_per_key)
        if index is not None:
            windows.append(None)
            kept.append(index.token_nbytes(stored))
            wide.append(index.heads * index.width // index.tokens_per_key)
    return {"windows": tuple(windows), "kv_layers": tuple(kept), "widths": tuple(wide), "kv_bytes": sum(kept)}


def window_work(prepared: Prepared, sparsity: Sparsity | None) -> dict[str, float]:
    """What on-demand neurons add to `Work`; nothing without any."""
    if prepared.streaming is None or prepared.streaming.windows is None:
        return {}
    places, slots = prepared.streaming.windows.places, prepared.streaming.windows.slots
    whole = sum(place.nbytes for place in places)
    share = sum(slots) / sum(place.units for place in places)
    # As if all neurons were equally likely: an upper bound for lossy sparsity, and far off for natural sparsity, which the notice says.
    shares = [own / place.units for own, place in zip(slots, places, strict=True)]
    missed = (_usual(prepared) * (1 - share) if sparsity is None else sparsity.missed_with(shares)) * whole
    window = sum(own * place.unit for own, place in zip(slots, places, strict=True))
    return {"missed": missed, "read_bytes": places[0].unit, "neurons": whole, "window": window, "assumed": sparsity is None}


def _usual(prepared: Prepared) -> float:
    """The default share of active neurons, if it was not measured."""
    left_out = None if prepared.container is None else prepared.container.method.get("gate_sparsity")
    return 1 - left_out if isinstance(left_out, float) and 0 <= left_out <= 1 else ACTIVE


def refuse_slower(prepared: Prepared) -> None:
    """Raises UsageError if lossy sparsity would be slower than reading whole matrices, as far as the disk's rates are known."""
    known = roofs_known(wanted(prepared))
    gain = None if known.rates is None else window_gain(work(prepared, check_tensors(prepared.config, prepared.store, prepared.container)),
                                                        known.rates)
    if gain is not None and gain < 1:
        raise UsageError(f"skipping neurons is slower here: reading the others one by one takes {1 / gain:.1f} times the disk's time "
                         "of whole matrices", "run the original, more --ram, or --force")


def describe_neurons(work: Work, roofs: Roofs) -> str | None:
    """The plan's line about neurons on disk; None without any."""
    if not work.neurons:
        return None
    gain = None if roofs.rates is None else window_gain(work, roofs.rates)
    known = "the share of active neurons is a guess: effllm calibrate-sparsity measures it" if work.assumed else "as was measured"
    said = (f"{format_size(work.window)} of {format_size(work.neurons)} in memory, a token reads about {format_size(round(work.missed))} "
            f"({known})")
    if gain is None:
        return said
    if gain < 1:
        return f"{said}; that does not pay here: whole matrices would take {1 / gain:.1f} times less of the disk's time, run the original"
    return f"{said}; whole matrices would take {gain:.1f} times the disk's time"


def wanted(prepared: Prepared, tensors: Tensors | None = None) -> RoofsWanted:
    """The measurements needed to forecast this plan, and the same with low-bit weights."""
    tensors = tensors or check_tensors(prepared.config, prepared.store, prepared.container)
    every = [tensor for roles in tensors.values() for tensor in roles.values()]
    kinds = {kind_of_weight(tensor.spec, prepared.options.exact): None for tensor in every if len(tensor.shape) == 2}
    if _is_wide(prepared):
        kinds |= {kind_of_weight(QuantSpec.parse(spec)): None for spec in ("4bit", "6bit")}
    file = largest_file([*dict.fromkeys(tensor.info.file for tensor in every), *_weights_in(prepared.folder)])
    return RoofsWanted(worker_count(prepared.options), tuple(kinds), (prepared.options.kv,), file)


def prepare_quantized(folder: Path, spec: str, options: EngineOptions) -> Prepared:
    """The plan for a model as if quantized to `spec`, from its config."""
    return prepare_config(read_config(folder, strict=options.strict), spec, options, folder)


def check_plan(folder: Path, spec: str, options: EngineOptions) -> None:
    """Before quantizing to `spec` for a run: raises what planning that run would raise."""
    prepared = prepare_quantized(folder, spec, options)
    if prepared.speculation.draft is not None:
        prepared.speculation.draft.store.close()
    refuse_beyond_machine(prepared)


def prepare_config(config: ModelConfig, spec: str, options: EngineOptions, folder: Path | None = None) -> Prepared:
    """`prepare_quantized` for a config, of a model that need not be here."""
    store = ExpectedStore(config, QuantSpec.parse(spec), of_codes=folder is not None and is_gguf(folder))
    return prepare_with(folder, config, store, options, store.container)


def forecast(prepared: Prepared, roofs: Roofs, prompt_tokens: int | None = None) -> Forecast:
    """Predictions for a plan from known rates; for a prompt of PROMPT tokens, or as many as the context takes."""
    placement = prepared.placement
    prompt_tokens = prompt_tokens or max(1, min(PROMPT, placement.ctx - 1))
    asked = work(prepared, check_tensors(prepared.config, prepared.store, prepared.container))
    made, rates = Forecast(asked, prompt_tokens), roofs.rates
    if "cuda" in placement.devices:
        return replace(made, reason=ON_GPU)
    if prepared.options.kv_read == "sparse":
        return replace(made, reason=PICKED)
    if (reason := why_unmeasured(prepared.options, asked, rates)) or rates is None:
        return replace(made, reason=reason)
    start, full = decode(asked, rates), decode(asked, rates, placement.ctx - 1)
    if start is None or full is None:
        return replace(made, reason=SLOW_DISK)
    return replace(made, start=start, full=full, prompt=prompt(asked, rates, prompt_tokens) if is_predictable(prompt_tokens) else None,
                   load_s=load_seconds(asked, rates))


def why_unmeasured(options: EngineOptions, work: Work, rates: Rates | None) -> str:
    """Why these rates allow no prediction; "" if they do. A share of the memory's rate stands in for an unmeasured kind, but float32
    products are far from it: one prediction was 30 times too fast."""
    if rates is None:
        return no_roofs(options)
    return NO_EXACT if any(part.kind.endswith(EXACT) and part.kind not in rates.kinds for part in work.parts) else ""


def suggest(prepared: Prepared, roofs: Roofs) -> Suggestion | None:
    """The one flag that speeds up generation most, None if no gain is worth mentioning."""
    rates, now = roofs.rates, forecast(prepared, roofs)
    if rates is None or now.start is None or now.full is None:
        return None
    found = []
    for flag, other in _alternatives(prepared):
        then = forecast(other, roofs)
        # An assumption is no basis for advice.
        known = all(part.kind in rates.kinds for part in then.work.parts) and then.work.kv in rates.attention
        if known and then.start is not None and then.full is not None:
            found.append(Suggestion(flag, then.start.tokens_per_s, now.start.seconds / then.start.seconds))
            if flag.startswith("--kv") or now.work.kv_held is not None:  # costs nothing with an empty context
                found[-1] = Suggestion(flag, then.full.tokens_per_s, now.full.seconds / then.full.seconds, True)
    best = max(found, key=lambda each: each.gain, default=None)
    return best if best is not None and best.gain >= WORTH else None


def _weights_in(folder: Path | None) -> list[Path]:
    """Files to probe a disk with, for a model that is planned but not opened."""
    return [] if folder is None else [folder] if folder.is_file() else [*folder.glob("*.safetensors")]


def _is_wide(prepared: Prepared) -> bool:
    """Whether --bits could make these weights smaller: unquantized ones on the CPU."""
    return prepared.container is None and "cuda" not in prepared.placement.devices


def _alternatives(prepared: Prepared) -> Iterator[tuple[str, Prepared]]:
    """Plans with one flag changed, the same context, and the process memory of the original plan."""
    config, own, options, placement = prepared.config, prepared.store, prepared.options, prepared.placement
    program = program_of(prepared)

    def tried(flag: str, store: TensorStore = own, container: Container | None = prepared.container,
              **changed: object) -> Iterator[tuple[str, Prepared]]:
        """The plan, if there is one."""
        with suppress(EffllmError):
            yield flag, prepare_with(prepared.folder, config, store, replace(options, **changed), container, program=program)

    if _is_wide(prepared):
        for bits in (8, 4):
            smaller = ExpectedStore(config, QuantSpec.parse(f"{bits}bit"))
            yield from tried(f"--bits {bits}", smaller, smaller.container, ctx=placement.ctx)
    for kv in ("8bit", "4bit"):
        if options.kv != kv:
            for flag, other in tried(f"--kv {kv}", kv=kv, ctx=placement.ctx):
                if other.options.kv == kv:  # a precision that is not packed for this model stays as it was
                    yield flag, other
    missing = _missing(prepared)
    if placement.kv_disk_bytes and options.kv_ram is not None:
        text = ram_argument(placement.kv_bytes + placement.kv_disk_bytes)
        yield from tried(f"--kv-ram {text}", kv_ram=text, ctx=placement.ctx)
    elif placement.kv_disk_bytes and not missing:
        text = ram_argument((placement.total_bytes + placement.kv_disk_bytes) * 105 // 100)
        if parse_size(text) < hardware.memory_total() * 9 // 10:
            yield from tried(f"--ram {text}", ram=text, ctx=placement.ctx)
    if not missing:
        return
    for ctx in sorted({placement.ctx // 4, placement.ctx // 2}):
        if ctx >= 256:
            yield from tried(f"-c {ctx}", ctx=ctx)
    most = min(hardware.memory_total() * 9 // 10, (placement.total_bytes + missing) * 105 // 100)
    if most > placement.budget.ram:
        text = f"{most // 2**20}Mi"
        yield from tried(f"--ram {text}", ram=text, ctx=placement.ctx)


def _missing(prepared: Prepared) -> int:
    """Additional memory that would hold all weights which a run re-reads from disk; 0 if it reads none."""
    streams, placement = prepared.streaming, prepared.placement
    if isinstance(streams, PagedExperts):
        return streams.away_nbytes
    if placement.residency is None:
        return 0
    window = window_work(prepared, None)
    return placement.streamed_bytes - placement.residency.ring_nbytes + round(window.get("neurons", 0) - window.get("window", 0))
