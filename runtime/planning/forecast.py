"""Speed forecast before a model is loaded: a plan's work divided by the machine's measured rates.

`work` counts bytes and products from headers; `offload/predict.py` does the arithmetic; `suggest` repeats the prediction with one flag
changed and names the most effective. `forecast_outcome.py` compares a prediction with the measured result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ... import EffllmError, UsageError
from ...kernels.layout import PAGE
from ...offload import hardware
from ...offload.checkpoint import TensorStore
from ...offload.predict import (
    RAW_FLOAT32_KIND,
    RAW_KIND,
    STATE_TRAFFIC,
    Prediction,
    Rates,
    WeightCost,
    Work,
    are_measured,
    decode,
    is_predictable,
    load_seconds,
    prompt,
    window_gain,
)
from ...offload.safetensors_header import is_gguf
from ...offload.size import format_size, parse_size, ram_argument
from ...quant.spec import QuantSpec
from ..config import ModelConfig, read_config
from ..families import VISION_PREFIX, expert_of
from ..last_layers import MIN_LAST_TOKENS, num_last_token_attention_layers, runs_on_last_tokens
from ..ngrams import is_table
from ..prepare import EngineOptions, Prepared, prepare_with, refuse_beyond_machine, worker_count
from ..sparse.neuron_bundles import ROLE as BUNDLES
from ..sparse.neuron_bundles import SPARSE, is_bundled
from ..sparse.sparsity_file import Sparsity
from ..sparse.sparsity_file import load as load_sparsity
from ..speculation.mtp_tensors import MTP
from ..stores.container import Container
from ..tensors import ModelTensor, check_tensors
from ..weights.paged_experts import PagedExperts
from ..weights.shared_block_weights import BLOCKS, uses
from ..weights.stream_layout import TABLES
from .attention_cost import attention_work
from .expected_store import ExpectedStore
from .process_memory import program_of
from .roofs import Roofs, RoofsWanted, largest_file
from .roofs import known as roofs_known

Tensors = Mapping[int | str, Mapping[str, ModelTensor]]
PROMPT = 512
EXACT = " exact"  # suffix of a low-bit kind that is multiplied exactly
MIN_GAIN = 1.05  # a flag that gains less is not suggested
DEFAULT_ACTIVE = 0.1  # share of active neurons of a sparse model that was not measured
ON_GPU = "the speed of layers on the GPU is not predicted in this version"
UNMEASURED_EXACT = "--exact was not measured here: effllm plan with the same flags does that"
UNMEASURED_DISK = "the disk was not measured yet (run effllm doctor once)"
SPARSE_READS = "how many pages of the cache a token picks (--kv-read sparse) is not predicted in this version"


def no_roofs(options: EngineOptions) -> str:
    """The message if the machine was not measured with this number of threads."""
    threads = worker_count(options)
    with_threads = "" if options.threads is None else f" with {threads} thread{'' if threads == 1 else 's'}"
    return f"this machine was not measured{with_threads} yet (run {doctor(options)} once)"


def doctor(options: EngineOptions, *flags: str) -> str:
    """The command that measures the machine with the threads of a run."""
    return " ".join(("effllm doctor", *flags, *(() if options.threads is None else ("-t", str(worker_count(options))))))


@dataclass(frozen=True)
class Forecast:
    """Predictions for a plan; all None if `reason` is set."""

    work: Work
    prompt_tokens: int
    start: Prediction | None = None  # a token with an empty context
    full: Prediction | None = None  # a token with a full context
    prompt: Prediction | None = None  # a prompt of `prompt_tokens` tokens
    load_s: float | None = None  # seconds to read the weights from disk
    startup_s: float | None = None  # seconds before weights are loaded, None if not measured
    reason: str = ""  # why nothing is predicted


@dataclass(frozen=True)
class Suggestion:
    """One flag that makes generation faster."""

    flag: str
    tokens_per_s: float  # with the flag
    gain: float  # factor
    full: bool = False  # both figures are for a full context, else for an empty one


def kind_of_weight(spec: QuantSpec, exact: bool = False, by_neuron: bool = False) -> str:
    """The name under which a format's rates are measured; outliers cost too little to be a kind of their own. `exact` and `by_neuron` as in
    `kernels.cpu.candidates.default_registry`."""
    from ...kernels.cpu.bf16_pairs import HAS_PAIRS, rounds_activations  # asks the compiler for the processor

    if not spec.is_raw:
        return str(replace(spec, outliers=0.0)) + (EXACT if exact else "")
    return RAW_KIND if not HAS_PAIRS or rounds_activations(spec.scheme, exact, by_neuron) else RAW_FLOAT32_KIND


def _kind_in(prepared: Prepared, tensor: ModelTensor) -> str:
    """`kind_of_weight` of a model's tensor under a plan."""
    return kind_of_weight(tensor.spec, prepared.options.exact, prepared.config.hidden_act in SPARSE)


Kind = tuple[str, bool, bool]  # (format, computed once per prompt, belongs to an expert): the first and the flags of a WeightCost


def work(prepared: Prepared, tensors: Tensors) -> Work:
    """What one token costs under a plan."""
    config, options, placement = prepared.config, prepared.options, prepared.placement
    sparsity = load_sparsity(prepared.folder, config.num_hidden_layers) if is_bundled(prepared.container) else None
    paged = prepared.streaming.work if isinstance(prepared.streaming, PagedExperts) else None
    neurons = {} if paged else neuron_work(prepared, sparsity)
    # Streamed bytes include alignment: if everything streams, that is more than the weights.
    load = (max(0, placement.weights_bytes - placement.streamed_bytes - round(neurons.get("neuron_bytes", 0))) if paged is None
            else prepared.streaming.load_nbytes)
    return Work(
        parts=_weight_costs(prepared, tensors, sparsity), num_last_tokens=MIN_LAST_TOKENS,
        num_last_token_layers=num_last_token_attention_layers(config), **attention_work(prepared), kv=options.kv,
        num_recurrent_layers=sum(not config.has_attention(layer) for layer in config.recurrent_layers),
        state_bytes=0 if config.recurrent is None else STATE_TRAFFIC * config.recurrent.state_floats * len(config.recurrent_layers),
        streamed=placement.streamed_bytes if paged is None else round(paged.nbytes(1)), load=load,
        chunk=prepared.shape.chunk, is_moe=config.moe is not None, paged=paged, **neurons,
        resident_kv_tokens=None if placement.kv_pages is None
        else placement.kv_pages * PAGE + prepared.shape.sinks + prepared.shape.window)


def _weight_costs(prepared: Prepared, tensors: Tensors, sparsity: Sparsity | None) -> tuple[WeightCost, ...]:
    """What the weights cost a token, by format and use."""
    config = prepared.config
    head = "head" if "head" in tensors["outer"] else "embed"
    active = _default_active(prepared) if sparsity is None else sum(sparsity.active) / len(sparsity.active)
    nbytes: dict[Kind, float] = defaultdict(float)
    products: dict[Kind, float] = defaultdict(float)
    features: dict[Kind, float] = defaultdict(float)
    last_tokens_products: dict[Kind, float] = defaultdict(float)
    for key, roles in tensors.items():
        for role, tensor in roles.items():
            if key == "outer" and (role.startswith(MTP) or is_table(role) or role in ("positions", *TABLES) and role != head):
                continue  # used by drafts, or read row by row
            if role.startswith(VISION_PREFIX):
                continue  # only rows of images use them
            is_expert, is_shared_block = expert_of(role) is not None, role.startswith(BLOCKS)
            kind = _kind_in(prepared, tensor), key == "outer" and not is_shared_block, is_expert
            share = config.moe.visit_rate if config.moe and is_expert else 1.0
            share = active if role == BUNDLES else uses(config, role) if is_shared_block else share
            nbytes[kind] += share * tensor.nbytes
            if len(tensor.shape) == 2:
                products[kind] += share * prod(tensor.shape)
                features[kind] += share * sum(tensor.shape)
                last_tokens_products[kind] += share * prod(tensor.shape) * (key != "outer" and runs_on_last_tokens(config, key, role))
    if any(prepared.adapters.scales):
        adapters = RAW_KIND, False, False
        nbytes[adapters] += prepared.adapters.nbytes_of(prepared.adapters.scales)
        products[adapters] += prepared.adapters.products_of(prepared.adapters.scales)
    return tuple(WeightCost(name, round(nbytes[kind]), round(products[kind]), last_only, routed, round(features[kind]),
                            last_tokens_products[kind] / max(1.0, products[kind]))
                 for kind in nbytes for name, last_only, routed in [kind])


def neuron_work(prepared: Prepared, sparsity: Sparsity | None) -> dict[str, float]:
    """The fields of `Work` for neurons that are read on demand; empty if there are none."""
    if prepared.streaming is None or prepared.streaming.windows is None:
        return {}
    places, slots = prepared.streaming.windows.places, prepared.streaming.windows.slots
    total = sum(place.nbytes for place in places)
    share = sum(slots) / sum(place.units for place in places)
    # As if all neurons were equally likely: an upper bound for lossy sparsity, and far off for natural sparsity, which the notice says.
    shares = [count / place.units for count, place in zip(slots, places, strict=True)]
    missed = (_default_active(prepared) * (1 - share) if sparsity is None else sparsity.missed_with(shares)) * total
    resident = sum(count * place.unit for count, place in zip(slots, places, strict=True))
    return {"missed_bytes": missed, "neuron_read_bytes": places[0].unit, "neuron_bytes": total, "resident_neuron_bytes": resident,
            "is_sparsity_assumed": sparsity is None}


def _default_active(prepared: Prepared) -> float:
    """The share of active neurons if it was not measured: as the checkpoint declares it, else a default."""
    declared = None if prepared.container is None else prepared.container.method.get("gate_sparsity")
    return 1 - declared if isinstance(declared, float) and 0 <= declared <= 1 else DEFAULT_ACTIVE


def refuse_slower(prepared: Prepared) -> None:
    """Raises UsageError if lossy sparsity would be slower than reading whole matrices, as far as the disk's rates are known."""
    rates = roofs_known(wanted(prepared)).rates
    gain = None if rates is None else window_gain(work(prepared, check_tensors(prepared.config, prepared.store, prepared.container)), rates)
    if gain is not None and gain < 1:
        raise UsageError(f"skipping neurons is slower here: reading the others one by one takes {1 / gain:.1f} times the disk's time "
                         "of whole matrices", "run the original, more --ram, or --force")


def describe_neurons(work: Work, roofs: Roofs) -> str | None:
    """The plan's line about neurons on disk; None without any."""
    if not work.neuron_bytes:
        return None
    gain = None if roofs.rates is None else window_gain(work, roofs.rates)
    basis = ("the share of active neurons is a guess: effllm calibrate-sparsity measures it" if work.is_sparsity_assumed
             else "as was measured")
    line = (f"{format_size(work.resident_neuron_bytes)} of {format_size(work.neuron_bytes)} in memory, a token reads about "
            f"{format_size(round(work.missed_bytes))} ({basis})")
    if gain is None:
        return line
    if gain < 1:
        return f"{line}; that does not pay here: whole matrices would take {1 / gain:.1f} times less of the disk's time, run the original"
    return f"{line}; whole matrices would take {gain:.1f} times the disk's time"


def wanted(prepared: Prepared, tensors: Tensors | None = None) -> RoofsWanted:
    """The measurements needed to forecast this plan, and the same with low-bit weights."""
    tensors = tensors or check_tensors(prepared.config, prepared.store, prepared.container)
    all_tensors = [tensor for roles in tensors.values() for tensor in roles.values()]
    kinds = {_kind_in(prepared, tensor): None for tensor in all_tensors if len(tensor.shape) == 2}
    if _is_quantizable(prepared):
        kinds |= {kind_of_weight(QuantSpec.parse(spec)): None for spec in ("4bit", "6bit")}
    file = largest_file([*dict.fromkeys(tensor.info.file for tensor in all_tensors), *_weight_files(prepared.folder)])
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
    """Predictions for a plan from known rates. `prompt_tokens`: by default PROMPT, or as many as the context takes."""
    placement = prepared.placement
    prompt_tokens = prompt_tokens or max(1, min(PROMPT, placement.ctx - 1))
    cost = work(prepared, check_tensors(prepared.config, prepared.store, prepared.container))
    unknown, rates = Forecast(cost, prompt_tokens), roofs.rates
    if "cuda" in placement.devices:
        return replace(unknown, reason=ON_GPU)
    if prepared.options.kv_read == "sparse":
        return replace(unknown, reason=SPARSE_READS)
    if (reason := why_unmeasured(prepared.options, cost, rates)) or rates is None:
        return replace(unknown, reason=reason)
    start, full = decode(cost, rates), decode(cost, rates, placement.ctx - 1)
    if start is None or full is None:
        return replace(unknown, reason=UNMEASURED_DISK)
    return replace(unknown, start=start, full=full, prompt=prompt(cost, rates, prompt_tokens) if is_predictable(prompt_tokens) else None,
                   load_s=load_seconds(cost, rates))


def why_unmeasured(options: EngineOptions, work: Work, rates: Rates | None) -> str:
    """Why these rates allow no prediction; "" if they do. A share of the memory's rate stands in for an unmeasured kind, but float32
    products are far from it: one prediction was 30 times too fast."""
    if rates is None:
        return no_roofs(options)
    return UNMEASURED_EXACT if any(
        part.kind.endswith(EXACT) and part.kind != RAW_FLOAT32_KIND and part.kind not in rates.kinds for part in work.parts) else ""


def suggest(prepared: Prepared, roofs: Roofs) -> Suggestion | None:
    """The one flag that speeds up generation most, None if no gain is worth mentioning."""
    rates, current = roofs.rates, forecast(prepared, roofs)
    if rates is None or current.start is None or current.full is None:
        return None
    suggestions = []
    for flag, alternative in _alternatives(prepared):
        predicted = forecast(alternative, roofs)
        # An assumption is no basis for advice.
        if are_measured(predicted.work, rates) and predicted.start is not None and predicted.full is not None:
            suggestions.append(Suggestion(flag, predicted.start.tokens_per_s, current.start.seconds / predicted.start.seconds))
            if flag.startswith("--kv") or current.work.resident_kv_tokens is not None:  # costs nothing with an empty context
                suggestions[-1] = Suggestion(flag, predicted.full.tokens_per_s, current.full.seconds / predicted.full.seconds, True)
    best = max(suggestions, key=lambda suggestion: suggestion.gain, default=None)
    return best if best is not None and best.gain >= MIN_GAIN else None


def _weight_files(folder: Path | None) -> list[Path]:
    """Files to probe a disk with, for a model that is planned but not opened."""
    return [] if folder is None else [folder] if folder.is_file() else [*folder.glob("*.safetensors")]


def _is_quantizable(prepared: Prepared) -> bool:
    """Whether --bits could make these weights smaller: unquantized ones on the CPU."""
    return prepared.container is None and "cuda" not in prepared.placement.devices


def _alternatives(prepared: Prepared) -> Iterator[tuple[str, Prepared]]:
    """Plans with one flag changed, the same context, and the process memory of the original plan."""
    config, options, placement = prepared.config, prepared.options, prepared.placement
    program = program_of(prepared)

    def replan(flag: str, store: TensorStore = prepared.store, container: Container | None = prepared.container,
               **changed: object) -> Iterator[tuple[str, Prepared]]:
        """The plan with changed options, if it fits."""
        with suppress(EffllmError):
            yield flag, prepare_with(prepared.folder, config, store, replace(options, **changed), container, program=program)

    if _is_quantizable(prepared):
        for bits in (8, 4):
            smaller = ExpectedStore(config, QuantSpec.parse(f"{bits}bit"))
            yield from replan(f"--bits {bits}", smaller, smaller.container, ctx=placement.ctx)
    for kv in ("8bit", "4bit"):
        if options.kv != kv:
            for flag, alternative in replan(f"--kv {kv}", kv=kv, ctx=placement.ctx):
                if alternative.options.kv == kv:  # a precision that is not packed for this model stays as it was
                    yield flag, alternative
    missing = _reread_nbytes(prepared)
    if placement.kv_disk_bytes and options.kv_ram is not None:
        text = ram_argument(placement.kv_bytes + placement.kv_disk_bytes)
        yield from replan(f"--kv-ram {text}", kv_ram=text, ctx=placement.ctx)
    elif placement.kv_disk_bytes and not missing:
        text = ram_argument((placement.total_bytes + placement.kv_disk_bytes) * 105 // 100)
        if parse_size(text) < hardware.memory_total() * 9 // 10:
            yield from replan(f"--ram {text}", ram=text, ctx=placement.ctx)
    if not missing:
        return
    for ctx in sorted({placement.ctx // 4, placement.ctx // 2}):
        if ctx >= 256:
            yield from replan(f"-c {ctx}", ctx=ctx)
    ram = min(hardware.memory_total() * 9 // 10, (placement.total_bytes + missing) * 105 // 100)
    if ram > placement.budget.ram:
        text = f"{ram // 2**20}Mi"
        yield from replan(f"--ram {text}", ram=text, ctx=placement.ctx)


def _reread_nbytes(prepared: Prepared) -> int:
    """Additional memory that would hold all weights which a run re-reads from disk; 0 if it reads none."""
    streams, placement = prepared.streaming, prepared.placement
    if isinstance(streams, PagedExperts):
        return streams.away_nbytes
    if placement.residency is None:
        return 0
    neurons = neuron_work(prepared, None)
    on_disk = neurons.get("neuron_bytes", 0) - neurons.get("resident_neuron_bytes", 0)
    return placement.streamed_bytes - placement.residency.ring_nbytes + round(on_disk)
