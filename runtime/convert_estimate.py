"""How long a conversion will take, measured before it starts: a sample of rows goes through reading, method and packing, unwritten.

A method without calibration costs the same for every weight. One with it costs in proportion to a row's length as well, and to the cube of
it once per tensor for factoring what the text showed; running the text itself is counted by its multiplications.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from ..quant.codes import Codes
from ..quant.error import squared_error
from ..quant.pack import pack
from ..quant.spec import QuantSpec
from ..quant.stats import Stats
from .convert_plan import ConversionPlan, Job
from .convert_stream import Block, read_rows, widened
from .families import expert_of

SAMPLE_WEIGHTS = 1 << 20
Quantize = Callable[[Job, np.ndarray, Stats | None], Codes]


def estimate(plan: ConversionPlan, todo: Sequence[Job], quantize: Quantize, calibration_tokens: int) -> float:
    """Seconds for `todo`. `calibration_tokens`: of the text that runs before, 0 for a method that needs none."""
    low = [job for job in todo if job.quantized]
    if not low:
        return 0.0
    weights: dict[QuantSpec, int] = {}
    for job in low:
        weights[job.spec] = weights.get(job.spec, 0) + prod(job.shape)
    spec = max(weights, key=weights.get)
    sample = min((job for job in low if job.spec == spec), key=lambda job: job.shape[1])
    n, depth = sample.shape
    n = min(n, max(16, SAMPLE_WEIGHTS // depth // 16 * 16))
    _seconds(plan, sample, n, quantize, made_up(depth) if calibration_tokens else None)  # compiling and loading are no part of the work
    stats = made_up(depth) if calibration_tokens else None
    first = _seconds(plan, sample, n, quantize, stats)
    if not calibration_tokens:
        return first * sum(weights.values()) / (n * depth)
    again = _seconds(plan, sample, n, quantize, stats)  # with what the text showed factored already
    factoring = max(0.0, first - again) * sum((other.shape[1] / depth) ** 3 for other in low)
    return again * sum(prod(other.shape) * other.shape[1] / depth for other in low) / (n * depth) + factoring \
        + calibration_tokens * 2 * sum(_visited(plan, other) * (prod(other.shape) + other.shape[1] ** 2) for other in low) \
        / _multiplications(depth)


def _visited(plan: ConversionPlan, job: Job) -> float:
    """The share of tokens that read a tensor."""
    return 1.0 if expert_of(job.role) is None else plan.config.mixture.per_token / plan.config.mixture.experts


def made_up(depth: int) -> Stats:
    """Statistics of no text at all, for which a method works as hard as for real ones."""
    values = np.random.default_rng(0).standard_normal((2 * depth, depth), np.float32)
    hessian = values.T @ values / np.float32(len(values))
    return Stats(len(values), hessian, hessian.diagonal().copy(), np.abs(values).max(0))


def _seconds(plan: ConversionPlan, job: Job, n: int, quantize: Quantize, stats: Stats | None) -> float:
    begun = time.monotonic()
    rows = widened(read_rows(plan.store, Block(job, 0, n, False)), job)
    made = quantize(job, rows, stats)
    squared_error(rows, made, job.spec)
    pack(made, job.spec)
    return time.monotonic() - begun


def _multiplications(depth: int) -> float:
    """Of a matrix product, per second and both operations of each counted. A narrow one, or the first, would measure how threads start."""
    values = np.ones((512, max(1024, min(depth, 4096))), np.float32)
    np.dot(values.T, values)
    begun = time.monotonic()
    np.dot(values.T, values)
    return 2 * 512 * values.shape[1] ** 2 / max(1e-9, time.monotonic() - begun)


def about(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
