"""`--target 4.25bpw`: mixed-precision search that picks a format per tensor by the KL divergence that quantizing it alone causes.

Each unit (a tensor or, in deep models, one role over neighbouring layers) is quantized at one width with the rest unquantized, and the
KL divergence from the original model is measured on a short text. At other widths it is extrapolated by the ratio of squared weight
errors, which it follows closely (within 15% over 35 dB on the reference model). `quant/recipe.py` then allocates the byte budget.
Measurements are saved as they come (`bit_search_cache.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ... import DoesNotFit, UsageError
from ...offload.size import plural
from ...quant.codes import dequantize
from ...quant.methods import rtn
from ...quant.recipe import Choice, Recipe, allocate
from ...quant.spec import QuantSpec
from ...quant.weight import from_f32, to_f32
from ..engine import Engine
from ..events import Notice, Progress
from ..measuring.evaluate import log_softmax
from ..ngrams import is_table
from ..speculation.mtp_tensors import MTP
from . import bit_search_cache
from .bit_search_cache import Errors
from .convert_estimate import human_time
from .convert_plan import ConversionPlan, Job
from .convert_stream import require_finite

WIDTHS = ("2bit", "3bit", "4bit", "5bit", "6bit", "8bit")
MEASURED = "3bit"  # coarse enough to be far above rounding noise, fine enough that divergences still add up
MAX_UNITS = 64
SAMPLE_TOKENS, SAMPLE_NBYTES, WINDOW = 2048, 256 << 20, 512  # tokens of text; bytes of the reference's log-probabilities; tokens a window
CHUNK_NBYTES = 16 << 20  # float32 rows that are rounded at once
SAMPLE_ROWS = 256  # of a tensor, for its error at other widths
ESTIMATE_AFTER_S = 1.0  # of measuring, before the remaining time is announced


@dataclass(frozen=True)
class Unit:
    """Tensors whose damage is measured together."""

    name: str
    jobs: tuple[Job, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(job.name for job in self.jobs)


@dataclass(frozen=True)
class BitAllocation:
    """The recipe that meets a target."""

    recipe: Recipe
    bits_per_weight: float
    damage: Mapping[str, float]  # by tensor, the expected divergence in nats per token at its format


def search(plan: ConversionPlan, engine: Engine, ids: Sequence[int], target: float,
           base: Recipe) -> Iterator[Progress | Notice | BitAllocation]:
    """Find the recipe for `target` bits per weight; the result comes last. `engine` runs the unquantized model of `plan` on the CPU.

    Tensors that a rule of `base` names keep its format. Those of the MTP layer, which do not change answers, and n-gram tables, which are
    not in memory, have the formats of the plan. Raises UsageError, naming the smallest possible size, for a target that cannot be met.
    """
    budget = int(target * plan.weights / 8)
    free = [job for job in plan.jobs if job.spec != job.source and base.ruled(job.name) is None
            and not job.role.startswith(MTP) and not is_table(job.role)]
    names = {job.name for job in free}  # a set: MoE models have some ten thousand
    fixed = sum((base.ruled(job.name) or job.spec).nbytes(job.shape) for job in plan.jobs if job.name not in names)
    specs = {width: QuantSpec.parse(width, base.short) for width in WIDTHS}
    smallest = fixed + sum(specs[WIDTHS[0]].nbytes(job.shape) for job in free)
    if smallest > budget:
        raise UsageError(f"{target:g} bits per weight cannot be met: the smallest formats take {8 * smallest / plan.weights:.2f}",
                         f"--target {8 * smallest / plan.weights + 0.005:.2f}bpw or more")
    measured = units(free)
    per_unit: dict[str, float] = {}
    errors: Errors = {}
    for event in measure_units(plan, engine, ids, measured, specs):
        if isinstance(event, Progress | Notice):
            yield event
        else:
            per_unit[event[0]], errors = event[1], errors | event[2]
    choices = {job.name: [Choice(spec, spec.nbytes(job.shape), per_unit[unit.name] * share * errors[job.name][width]
                                 / errors[job.name][MEASURED]) for width, spec in specs.items()]
               for unit in measured for job, share in _shares(unit, errors)}
    formats = allocate(choices, budget - fixed)
    damage = {name: next(option.damage for option in choices[name] if option.spec == spec) for name, spec in formats.items()}
    nbytes = fixed + sum(formats[job.name].nbytes(job.shape) for job in free)
    yield BitAllocation(replace(base, names={**base.names, **formats}), 8 * nbytes / plan.weights, damage)


def units(jobs: Sequence[Job]) -> list[Unit]:
    """At most about MAX_UNITS of them: tensors, or each role's tensors in bands of neighbouring layers."""
    if len(jobs) <= MAX_UNITS:
        return [Unit(job.name, (job,)) for job in jobs]
    roles = sorted({job.group for job in jobs if isinstance(job.key, int)})
    layers = 1 + max(job.key for job in jobs if isinstance(job.key, int))
    band = -(-layers * len(roles) // MAX_UNITS)
    groups: dict[tuple[str, int | str], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.group, job.key // band if isinstance(job.key, int) else job.key), []).append(job)
    return [Unit(members[0].name, tuple(members)) for members in groups.values()]


def measure_units(plan: ConversionPlan, engine: Engine, ids: Sequence[int], measured: Sequence[Unit],
                  specs: Mapping[str, QuantSpec]) -> Iterator[Progress | Notice | tuple[str, float, Errors]]:
    """Yields for each unit (name, divergence at MEASURED, squared errors of its tensors by width, relative to their squares), those of an
    earlier search first; and a notice of how long it will take."""
    tokens = max(2, min(SAMPLE_TOKENS, len(ids), SAMPLE_NBYTES // 4 // engine.config.vocab_size))
    width = min(WINDOW, tokens, engine.n_ctx)
    sample = [list(ids[start : start + width]) for start in range(0, tokens - width + 1, width)]
    key = bit_search_cache.key_of(plan.store, sample, specs)
    cached = bit_search_cache.load_measurements(key, list(specs))
    left = [unit for unit in measured if unit.names not in cached]
    for unit in measured:
        if unit.names in cached:
            yield unit.name, *cached[unit.names]
    if len(left) < len(measured):
        yield Notice(f"tensor sensitivity was measured before, {len(measured) - len(left)} of {plural(len(measured), 'run')}")
    if not left:
        return
    yield Progress("measuring tensors", 0, len(left), "runs")
    reference: list[np.ndarray] = []
    started, has_announced = time.monotonic(), False
    for window in sample:
        reference.append(_log_probabilities(engine, window))
        _divergence(reference[-1], reference[-1])  # as in every later run, so that the time includes it
        elapsed = time.monotonic() - started
        if not has_announced and (elapsed > ESTIMATE_AFTER_S or len(reference) == len(sample)):
            has_announced = True
            seconds = elapsed / len(reference) * len(sample) * (len(left) + 1)
            runs = f"{plural(len(left), 'run')} of {sum(map(len, sample))} tokens"
            yield Notice(f"measuring tensor sensitivity first: {runs} take about {human_time(seconds)}")
    for done, unit in enumerate(left):
        yield Progress("measuring tensors", done, len(left), "runs")
        errors: Errors = {}
        with temporarily_rounded(engine, unit.jobs, specs, errors):
            total = sum(_divergence(original, _log_probabilities(engine, window)) for original, window in zip(reference, sample))
        damage = total / sum(map(len, sample))
        bit_search_cache.save_measurement(key, damage, errors)
        yield unit.name, damage, errors
    yield Progress("measuring tensors", len(left), len(left), "runs")


@contextmanager
def temporarily_rounded(engine: Engine, jobs: Sequence[Job], specs: Mapping[str, QuantSpec], errors: Errors) -> Iterator[None]:
    """The engine with `jobs` rounded at MEASURED, in the memory of its weights, which are restored at exit. Fills `errors`."""
    originals: list[tuple[np.ndarray, np.ndarray]] = []
    try:
        for job in jobs:
            with engine.model.pager.lease(job.key) as raw:
                if job.name not in raw:
                    raise DoesNotFit("--target needs the whole model in memory, and it does not fit", "more --ram, or --bits")
                data = raw[job.name]
            originals.append((data, data.copy()))
            errors[job.name] = _round_in_place(data, job, specs, engine)
        yield
    finally:
        for data, original in originals:
            data[:] = original
        engine.reset()


def _round_in_place(data: np.ndarray, job: Job, specs: Mapping[str, QuantSpec], engine: Engine) -> dict[str, float]:
    """Round a tensor's bytes at MEASURED. Returns its relative squared error at every width, from some of its rows."""
    typed = data.view(np.float32 if job.source.scheme == "f32" else np.uint16).reshape(job.shape)
    pool = engine.backends["cpu"].pool

    def round_to(values: np.ndarray, width: str) -> np.ndarray:
        require_finite(job, values)
        spec = specs[width]
        return dequantize(rtn.quantize(values, spec, None, pool), spec)

    sample = to_f32(np.ascontiguousarray(typed[:: max(1, job.shape[0] // SAMPLE_ROWS)]), job.source.scheme)
    squares = float(np.square(sample, dtype=np.float64).sum()) or 1.0
    errors = {width: max(float(np.square(sample - round_to(sample, width), dtype=np.float64).sum()) / squares, 1e-12) for width in specs}
    step = max(16, CHUNK_NBYTES // 4 // job.shape[1] // 16 * 16)
    for begin in range(0, job.shape[0], step):
        part = typed[begin : begin + step]
        part[:] = from_f32(round_to(to_f32(part, job.source.scheme), MEASURED), job.source.scheme)
    return errors


def _shares(unit: Unit, errors: Errors) -> Iterator[tuple[Job, float]]:
    """Each tensor's share of its unit's divergence, by size and error."""
    weights = [prod(job.shape) * errors[job.name][MEASURED] for job in unit.jobs]
    total = sum(weights)
    yield from ((job, weight / total) for job, weight in zip(unit.jobs, weights, strict=True))


def _log_probabilities(engine: Engine, window: Sequence[int]) -> np.ndarray:
    """Log-probabilities of all tokens, float32 [T, V]."""
    return np.concatenate([log_softmax(logits).astype(np.float32) for _, logits in engine.score(window)])


def _divergence(reference: np.ndarray, actual: np.ndarray) -> float:
    """KL divergence, summed over tokens."""
    return float((np.exp(reference) * (reference - actual)).sum(dtype=np.float64))
