"""Forecast against measurement: after an answer, explain a speed that differs by a quarter or more, and by more than the stated error.

Causes are measured, not guessed: disk reads were counted and timed, memory bandwidth is measured again (on the weights themselves, so it
takes no memory), CPU use of other programs and the run queue come from the system, and the engine knows the answer's length and the time
between its passes. If none of them explains it, the message says so.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.threads import ThreadPool
from ...offload import hardware
from ...offload.direct_io import ReadStats
from ...offload.hardware import CpuTime
from ...offload.predict import Prediction, Work, decode, is_predictable, prompt
from ...offload.size import format_size
from ..weights.paged_experts import PagedExperts
from ..weights.weight_tiers import weight_tiers
from . import forecast, roofs

if TYPE_CHECKING:
    from ..engine import Engine
    from ..speculate import Counts

MISS_SHARE = 0.25  # relative difference worth explaining
MIN_TOKENS = 16  # an answer of fewer, or of less decoding time, is too short to tell: speeds vary by half between runs
MIN_DECODE_S = 0.1
CAUSE_SHARE = 0.5  # a cause must account for this share of the extra time
SCARCE_IDLE = 0.25  # idle share of the cores' time below which CPU is scarce
SIMILAR = 0.8  # rates and byte counts that differ by no more than this factor count as equal
# If all threads together read at less than this many times a single thread's rate, they obstruct each other (docs/measured.md, Machines).
SHARED_CHANNEL = 1.3
NO_READS, NO_CPU_TIME = ReadStats(), CpuTime(0.0, 0.0, 0.0)
MIN_NBYTES, MAX_NBYTES = 64 << 20, 1 << 30  # of weights to measure bandwidth on; fewer may be cached


@dataclass(frozen=True)
class Outcome:
    """Predicted and measured speed; None if not available."""

    predicted_tps: float | None  # tokens per second
    measured_tps: float | None
    error: float | None  # the prediction's stated relative error
    predicted_prompt_s: float | None
    measured_prompt_s: float | None
    miss: str = ""  # why prediction and measurement differ
    reason: str = ""  # why there is no prediction

    def to_json(self) -> dict[str, object]:
        return {"predicted_tps": self.predicted_tps, "measured_tps": self.measured_tps, "error": self.error,
                "predicted_prompt_s": self.predicted_prompt_s, "measured_prompt_s": self.measured_prompt_s,
                "miss": self.miss or None, "reason": self.reason or None}


def outcome(engine: Engine, prompt_tokens: int, cached: int, num_generated: int, prefill_s: float, decode_s: float, passes_s: float,
            drafted: Counts | None = None, reads: ReadStats = NO_READS, cpu_use: CpuTime = NO_CPU_TIME,
            explain_miss: bool = True) -> Outcome:
    """Compare the speed of an answer with its prediction: one token per pass, times the gain of drafting.

    cached:         prompt tokens that were in the cache
    num_generated:  tokens of the answer
    passes_s:       the part of `decode_s` spent in passes
    reads, cpu_use: disk and CPU use meanwhile
    explain_miss:   whether to find the cause of a miss, which takes as long as reading the weights"""
    steps = num_generated - 1  # the first token comes from the prompt's pass
    measured = steps / decode_s if steps > 0 and decode_s else None
    prefill_measured = prefill_s if prefill_s and prompt_tokens and not cached else None  # nothing was read if it was stopped at once
    known = roofs.known(forecast.wanted(engine.prepared, engine.model.tensors))
    rates = known.rates
    work = forecast.work(engine.prepared, engine.model.tensors)
    uses_gpu = "cuda" in engine.placement.devices
    depth = prompt_tokens + num_generated // 2
    if uses_gpu:
        reason = forecast.ON_GPU
    elif engine.options.kv_read == "sparse":
        reason = forecast.SPARSE_READS
    else:
        reason = forecast.why_unmeasured(engine.options, work, rates)
    predicted, reason = (None, reason) if reason else (decode(work, rates, depth), forecast.UNMEASURED_DISK)
    if predicted is None:
        return Outcome(None, measured, None, None, prefill_measured, reason=reason)
    prompt_prediction = prompt(work, rates, prompt_tokens) if prefill_measured and is_predictable(prompt_tokens) else None
    # Drafts that cost more than they gained were not predicted.
    expected = predicted.tokens_per_s * max(1.0, drafted.gain if drafted else 1.0)
    miss = ""
    if explain_miss and measured is not None and is_a_miss(measured / expected, predicted):
        passes = drafted.passes if drafted and drafted.passes else steps
        ratio = measured / expected
        miss = explain_disk(work, depth, predicted, known.disk.date, ratio, passes, decode_s, reads) if known.disk else ""
        if not miss or reads.busy_s < (1 - MISS_SHARE) * decode_s:  # not all of the time
            miss = explain(engine, known.machine, ratio, steps, decode_s, passes_s, miss, cpu_use)
    return Outcome(expected, measured, predicted.error, prompt_prediction and prompt_prediction.seconds, prefill_measured, miss)


def engine_costs(engine: Engine, outcome: Outcome) -> dict[str, object]:
    """The fields of `Stats` that an engine knows once an answer has ended."""
    cache = engine.cache
    return {"cached_tokens": engine.num_cached_tokens, "read_tokens": engine.num_prefilled_tokens,
            "load_s": engine.load_s, "peak_rss_bytes": hardware.peak_rss(),
            "planned_bytes": engine.placement.total_bytes, "weights_bytes": engine.model.nbytes, "kv_bytes": cache.allocated_nbytes,
            "kv_bits_per_value": cache.bits_per_value, "packed_bits": cache.packed_bits, "kv_packed": cache.is_packed,
            "exact_tokens": cache.exact_tokens, "packed_tokens": len(engine.tokens) - cache.exact_tokens,
            "disk_bytes_read": engine.disk_nbytes, "disk_wait_s": engine.disk_wait_s, "placement": placed(engine, outcome),
            "context_used": len(engine.tokens), "context_max": engine.n_ctx, "truncated": engine.truncated}


def is_a_miss(ratio: float, predicted: Prediction) -> bool:
    """Whether measured over predicted deserves an explanation; a difference within the stated error does not."""
    low, high = (each / predicted.tokens_per_s for each in predicted.range)
    return abs(ratio - 1) > MISS_SHARE and not low <= ratio <= high


def placed(engine: Engine, outcome: Outcome) -> dict[str, object]:
    """Where a model's weights were and how well its speed was predicted, for `Stats.placement`."""
    placement, streaming = engine.placement, engine.prepared.streaming
    fields = {"layers": {device: placement.devices.count(device) for device in dict.fromkeys(placement.devices)},
              "pinned_bytes": placement.pinned_bytes, "streamed_bytes": placement.streamed_bytes,
              "tensor_bytes": weight_tiers(engine.prepared, engine.model.tensors).to_json(), **outcome.to_json()}
    if isinstance(streaming, PagedExperts):
        fields["pinned_bytes"] = engine.model.pager.nbytes
        fields["experts"] = {**streaming.to_json(), "slots": engine.model.pager.slots, **engine.model.pager.stats.to_json()}
    if engine.cache.pool.picks:
        slots = engine.cache.pool.stream.slots
        fields["kv_read"] = {"among": sum(layer.num_candidates for layer in slots), "asked": sum(layer.num_requested for layer in slots),
                             "found": sum(layer.num_hits for layer in slots)}
    return fields


def explain_disk(work: Work, depth: int, predicted: Prediction, probe_date: str, ratio: float, passes: int, decode_s: float,
                 reads: ReadStats) -> str:
    """The part of a miss due to the disk: its rate, or how much was read in `passes`; "" if nobody waited for it, or if it performed as
    expected."""
    if reads.nbytes < MIN_NBYTES or not reads.busy_s:
        return ""
    if reads.wait_s < MISS_SHARE * decode_s if ratio < 1 else predicted.limit != "disk":
        return ""
    expected, measured = work.streamed + work.missed_bytes + work.kv_disk_bytes(depth), reads.nbytes / passes
    rate = reads.nbytes / min(reads.busy_s, decode_s)  # weights and cache pages may have been read concurrently
    predicted_rate = expected / predicted.disk_s if predicted.disk_s else rate
    reasons = []
    if measured > expected / SIMILAR if ratio < 1 else measured < expected * SIMILAR:
        guess = ": which neurons are active was a guess, effllm calibrate-sparsity measures it" if work.is_sparsity_assumed else ""
        reasons.append(f"a token read {format_size(round(measured))} from the disk, {format_size(round(expected))} were expected{guess}")
    if rate < predicted_rate * SIMILAR if ratio < 1 else rate > predicted_rate / SIMILAR:
        reasons.append(f"the disk gave {rate / 1e9:.2g} GB/s, and {predicted_rate / 1e9:.2g} for such reads when it was probed "
                       f"({probe_date})")
    return "; ".join(reasons)


def explain(engine: Engine, machine: roofs.MachineRoofs, ratio: float, steps: int, decode_s: float, passes_s: float,
            disk_reason: str = "", cpu_use: CpuTime = NO_CPU_TIME) -> str:
    """The likeliest cause of a miss, from what can be measured now, after what the disk explains of it."""
    if steps < MIN_TOKENS:
        return disk_reason or ("one token is too few to tell" if steps == 1 else f"{steps} tokens are too few to tell")
    reasons = disk_reason, _explain_without_disk(engine, machine, ratio, steps, decode_s, passes_s, cpu_use)
    reason = "; ".join(filter(None, reasons))
    command = forecast.doctor(engine.options, "--probe")
    if not reason and decode_s < MIN_DECODE_S:
        return f"{decode_s:.2f} s are too short to tell why, a longer answer tells more"
    return reason or f"for no reason that could be measured: {command} measures this machine again (last {machine.date})"


def _explain_without_disk(engine: Engine, machine: roofs.MachineRoofs, ratio: float, steps: int, decode_s: float, passes_s: float,
                     cores: CpuTime) -> str:
    extra_s = decode_s * (1 - ratio)
    disturbed = machine.disturbed_of(forecast.wanted(engine.prepared, engine.model.tensors)) if ratio > 1 and machine.disturbed else {}
    if disturbed:
        share = round(100 * max(disturbed.values()))
        command = forecast.doctor(engine.options, "--probe")
        return (f"other programs had {share}% of the cores' time when this machine was measured ({machine.date}): once they are done, "
                f"{command} measures it again")
    if ratio < 1 and cores.idle <= SCARCE_IDLE * cores.all and cores.others + cores.stolen > extra_s * CAUSE_SHARE:
        pool = engine.backends["cpu"].pool
        fewer = f", so {pool.active_workers} of {pool.workers} threads worked at its end" if pool.active_workers < pool.workers else ""
        return describe_cpu_use(cores) + fewer
    now = memory_now(engine)
    if now is not None and (now < SIMILAR * machine.memory_usual if ratio < 1 else now > machine.memory_usual / SIMILAR):
        before = f"{machine.memory_usual / 1e9:.1f} when it was measured ({machine.date})"
        return f"memory reads at {now / 1e9:.1f} GB/s now and at {before}: {_memory_cause(engine, machine, ratio, now)}"
    waiting, cores = os.getloadavg()[0], max(engine.backends["cpu"].pool.workers, hardware.cpu_threads())
    # With a share of the cores, the prediction takes this many times as long; the rest has another cause.
    if ratio < 1 and waiting > cores + 1 and ratio * (waiting / cores - 1) >= CAUSE_SHARE * (1 - ratio):
        return f"{waiting:.0f} programs want the {'one core' if cores == 1 else f'{cores} cores'} of this machine"
    if ratio < 1 and engine.options.load == "mmap":
        return "the weights are mapped: pages that were not in memory were read from the file meanwhile"
    between_passes_s = decode_s - passes_s
    if ratio < 1 and machine.choice_s is not None and between_passes_s - steps * machine.choice_s > extra_s * CAUSE_SHARE:
        foreseen = 100 * steps * machine.choice_s / decode_s
        return f"sampling and drafting took {100 * between_passes_s / decode_s:.0f}% of the time, where {foreseen:.0f}% were foreseen"
    return ""


def describe_cpu_use(cpu_use: CpuTime) -> str:
    """Which other programs used the cores, and how much of their time."""
    who = "other programs" if cpu_use.others > cpu_use.stolen else "this virtual machine's host, for others,"
    return f"{who} had {100 * max(cpu_use.others, cpu_use.stolen) / cpu_use.all:.0f}% of the cores' time meanwhile"


def _memory_cause(engine: Engine, machine: roofs.MachineRoofs, ratio: float, now: float) -> str:
    """Why memory bandwidth changed. If one thread reads as fast as before and all of them hardly faster than one, it is not the memory: a
    hypervisor places virtual CPUs on one die or on several, each with its own memory channel; or other programs compute."""
    alone = machine.memory_alone
    if alone is None or engine.backends["cpu"].pool.workers == 1:
        return "other programs use it" if ratio < 1 else "others used it then"
    if ratio >= 1:
        shared_before = machine.memory_usual < SHARED_CHANNEL * alone < now
        return "the threads shared a core or a memory channel then" if shared_before else "others used it then"
    if now < SHARED_CHANNEL * alone < machine.memory_usual and (one := memory_now(engine, 1)) is not None and one > SIMILAR * alone:
        return f"one thread alone reads at {one / 1e9:.1f} as it did then, so threads share a memory channel, or cores with other programs"
    return "other programs use it"


def memory_now(engine: Engine, threads: int | None = None) -> float | None:
    """The bandwidth in bytes per second at which resident weights are read now, with all or this many threads; None if there are too few of
    them."""
    pool = engine.backends["cpu"].pool if threads is None else ThreadPool(threads)
    try:
        return _measure_bandwidth(engine, pool)
    finally:
        if threads is not None:
            pool.close()


def _measure_bandwidth(engine: Engine, pool: ThreadPool) -> float | None:
    from ...kernels.cpu.memory_bandwidth import BLOCK, read_bandwidth

    nbytes, seconds = 0, 0.0
    for array in engine.model.pager.resident_arrays():
        if array.nbytes < BLOCK or nbytes >= MAX_NBYTES:
            continue
        part = array.nbytes // BLOCK * BLOCK
        started = time.perf_counter()
        read_bandwidth(pool, np.asarray(array[:part]), passes=1)
        seconds, nbytes = seconds + time.perf_counter() - started, nbytes + part
    return nbytes / seconds if nbytes >= MIN_NBYTES else None
