"""Time estimate of a conversion, measured on a sample: some rows are read, quantized and packed, but not written.

A method without calibration costs the same per weight. One that searches codes against calibration statistics visits the inputs of a
block of rows one by one, so a block costs something per input however many rows it has, besides the cost per weight; a second, smaller
sample separates the two. Its matrix products are counted. Statistics are factored once for all tensors that read the same inputs, at
cubic cost. One window of the calibration text is timed through one layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

import numpy as np

from ...quant import methods
from ...quant.codes import Codes
from ...quant.error import squared_error
from ...quant.pack import pack
from ...quant.spec import QuantSpec
from ...quant.stats import Stats
from ..calibrate import READS, SHORTEST, WINDOW, text_costs
from ..families import base_role, expert_of
from ..planning.timing import median_times
from .convert_plan import ConversionPlan, Job
from .convert_stream import BLOCK_NBYTES, Block, read_rows, widen

SAMPLE_WEIGHTS, FEW_ROWS = 1 << 20, 8  # and of few rows an eighth
TEXT_S = 0.5  # of the text, at the rate of a product, that is run to see what it takes
WIDER = 2  # how much faster a product is in float32 than in float64
TAPS = {role: tap for tap, roles in READS.items() for role in roles}
Quantize = Callable[[Job, np.ndarray, Stats | None], Codes]


@dataclass(frozen=True)
class Costs:
    """What was measured on rows of `depth` inputs, in seconds: a block's for each input, a weight's (products with `depth` inputs among
    it), factoring what a text showed of `depth` inputs; a weight's where no text showed anything. `rate`: operations a second of a product
    in float32, multiplications and additions."""

    depth: int
    input_s: float
    weight_s: float
    factor_s: float
    plain_s: float
    rate: float

    def searched(self, shape: Sequence[int], products: float) -> float:
        """Seconds for a tensor [N, K] of which each weight takes part in `products` * K multiplications in float64."""
        rows, depth = shape
        blocks = ceil(rows / max(16, BLOCK_NBYTES // 4 // depth))
        further = 2 * products * max(0, depth - self.depth) / (self.rate / WIDER)
        return blocks * depth * self.input_s + rows * depth * (self.weight_s + further)

    def factored(self, depth: int) -> float:
        """Seconds for what a text showed of so many inputs."""
        return self.factor_s * (depth / self.depth) ** 3


def estimate(plan: ConversionPlan, todo: Sequence[Job], method: str, quantize: Quantize, ids: Sequence[int],
             threads: int | None = None) -> float:
    """Seconds for `todo`. `ids`: tokens of the text that runs before on so many threads, none for a method that needs none."""
    low = [job for job in todo if job.quantized]
    if not low:
        return 0.0
    weights: dict[QuantSpec, int] = {}
    for job in low:
        weights[job.spec] = weights.get(job.spec, 0) + prod(job.shape)
    spec = max(weights, key=weights.get)
    alike = [job for job in low if job.spec == spec]
    if ids:
        unseen = [job for job in low if not _seen(plan, job)]
        sample = min([job for job in alike if _seen(plan, job)] or alike, key=lambda job: (job.shape[1], -job.shape[0]))
        costs = _measured(plan, sample, quantize, bool(unseen))
        return total(plan, low, method, costs, _text_s(plan, ids, threads, costs.rate))
    sample = min(alike, key=lambda job: job.shape[1])
    n = _rows(sample)
    _seconds(plan, sample, n, quantize, None)  # compiling and loading are no part of the work
    (seconds,) = median_times(lambda: (_seconds(plan, sample, n, quantize, None),))
    return seconds * sum(weights.values()) / (n * sample.shape[1])


def total(plan: ConversionPlan, low: Sequence[Job], method: str, costs: Costs, text_s: float) -> float:
    """Seconds for tensors with a text that takes `text_s`."""
    seen, own = [job for job in low if _seen(plan, job)], methods.get(method)
    seconds = costs.plain_s * sum(prod(job.shape) for job in low if not _seen(plan, job))
    seconds += sum(costs.searched(job.shape, own.PRODUCTS) for job in seen)
    seconds += sum(costs.factored(depth) for depth in {_inputs(job): job.shape[1] for job in seen}.values())
    # the embedding and the head belong to no layer, whose tensors are changed together
    seconds += sum(own.equalise_s(job.shape, costs.weight_s, costs.rate) for job in seen if job.key != "outer")
    return seconds + text_s


def _text_s(plan: ConversionPlan, ids: Sequence[int], threads: int | None, rate: float) -> float:
    """Seconds for a text, by a window of it through a layer; shorter where one would take long at `rate`, operations a second."""
    layers = plan.config.num_hidden_layers
    most = max(SHORTEST, int(TEXT_S * rate * layers / text_operations(plan)))
    found = text_costs(plan.folder, plan.config, ids, threads, most)
    return found.seconds(layers, len(ids)) + len(ids) * visit_operations(plan) / rate


def text_operations(plan: ConversionPlan) -> float:
    """Multiplications and additions of a token of the text: matrices of layers, attention within a window, half of a product of the inputs
    with themselves wherever they are read."""
    config, matrices = plan.config, [job for job in plan.jobs if base_role(job.role) in TAPS and len(job.shape) == 2]
    inputs = {_inputs(job): _visited(plan, job) * job.shape[1] ** 2 for job in matrices}
    heads = sum(map(config.query_heads_of, range(config.num_hidden_layers)))
    attention = 2 * heads * config.head_dim * min(WINDOW, config.context_length)
    return sum(2 * _visited(plan, job) * prod(job.shape) for job in matrices) + sum(inputs.values()) + attention + config.hidden_size ** 2


def visit_operations(plan: ConversionPlan) -> float:
    """Of those, the products of what experts read, which are made when the expert is quantized and not while the text runs."""
    matrices = [job for job in plan.jobs if expert_of(job.role) is not None and len(job.shape) == 2]  # some experts have biases
    return sum({_inputs(job): _visited(plan, job) * job.shape[1] ** 2 for job in matrices}.values())


def _seen(plan: ConversionPlan, job: Job) -> bool:
    """Does the text show a tensor's inputs? An embedding's where it is the head too, and none of what stands before o."""
    return base_role(job.role) != "o_in" and job.role != "embed" or all(other.role != "head" for other in plan.jobs)


def _inputs(job: Job) -> tuple[object, ...]:
    """What tensors that read the same inputs have in common."""
    return job.key, expert_of(job.role), TAPS.get(base_role(job.role), job.role)


def _visited(plan: ConversionPlan, job: Job) -> float:
    """The share of tokens that read a tensor."""
    return 1.0 if expert_of(job.role) is None else plan.config.moe.visit_rate


def _rows(sample: Job) -> int:
    n, depth = sample.shape
    return min(n, max(16, SAMPLE_WEIGHTS // depth // 16 * 16))


def _measured(plan: ConversionPlan, sample: Job, quantize: Quantize, plainly: bool) -> Costs:
    """`Costs` by rows of `sample`; `plainly`: of what no text shows as well."""
    depth, n = sample.shape[1], _rows(sample)
    few = max(1, n // FEW_ROWS)
    stats = synthetic_stats(depth)
    _seconds(plan, sample, few, quantize, stats)  # compiling and loading are no part of the work, nor is factoring, which comes once
    apart, every = median_times(lambda: tuple(_seconds(plan, sample, rows, quantize, stats) for rows in (few, n)))
    row_s = max(0.0, every - apart) / (n - few) if n > few else every / n
    (factor_s,) = median_times(lambda: (_factored_s(stats),))
    (plain_s,) = median_times(lambda: (_seconds(plan, sample, n, quantize, None),)) if plainly else (0.0,)
    return Costs(depth, max(0.0, every - n * row_s) / depth, row_s / depth, factor_s, plain_s / (n * depth), _multiplications(depth))


def synthetic_stats(depth: int) -> Stats:
    """Statistics of no text at all, for which a method works as hard as for real ones."""
    values = np.random.default_rng(0).standard_normal((2 * depth, depth), np.float32)
    hessian = values.T @ values / np.float32(len(values))
    return Stats(len(values), hessian, hessian.diagonal().copy())


def _seconds(plan: ConversionPlan, job: Job, n: int, quantize: Quantize, stats: Stats | None) -> float:
    begun = time.monotonic()
    rows = widen(read_rows(plan.store, Block(job, 0, n, False)), job)
    made = quantize(job, rows, stats)
    squared_error(rows, made, job.spec)
    pack(made, job.spec)
    return time.monotonic() - begun


def _factored_s(stats: Stats) -> float:
    """Seconds for the factor of what a text showed; none where the method, which has just had these statistics, did not ask for it."""
    if "feedback" not in vars(stats):
        return 0.0
    begun = time.monotonic()
    _ = replace(stats).feedback  # a copy has not made it yet
    return time.monotonic() - begun


def _multiplications(depth: int) -> float:
    """Of a matrix product, per second and both operations of each counted. A narrow one, or the first, would measure how threads start."""
    values = np.ones((512, max(1024, min(depth, 4096))), np.float32)

    def product() -> tuple[float]:
        begun = time.monotonic()
        np.dot(values.T, values)
        return (time.monotonic() - begun,)

    product()
    (seconds,) = median_times(product)
    return 2 * 512 * values.shape[1] ** 2 / max(1e-9, seconds)


def human_time(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
