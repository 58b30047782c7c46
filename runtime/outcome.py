"""After an answer: what was predicted against what came, and why they differ where they do by a quarter.

A reason is looked for, not guessed: the memory is read again (the weights themselves, so it takes none), the system is asked how many
programs wait for the cores, the answer for its length, the engine for what sampling took. What none of them explains is said to be so.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..offload.predict import decode, prompt
from . import forecast, roofs
from .paged_experts import PagedExperts
from .weight_tiers import weight_tiers

if TYPE_CHECKING:
    from .engine import Engine
    from .speculate import Counts

MISS = 0.25  # a difference that is worth an explanation
FEW_TOKENS = 16
BUSY = 0.8  # of the memory's usual rate when it was measured
LEAST_NBYTES, MOST_NBYTES = 64 << 20, 1 << 30  # less than this of weights may lie in a cache


@dataclass(frozen=True)
class Outcome:
    """Tokens a second and seconds of the prompt, predicted and measured; None where nothing was. `miss` says why they differ, `reason` why
    there is no prediction."""

    predicted_tps: float | None
    measured_tps: float | None
    error: float | None
    predicted_prompt_s: float | None
    measured_prompt_s: float | None
    miss: str = ""
    reason: str = ""

    def to_json(self) -> dict[str, object]:
        return {"predicted_tps": self.predicted_tps, "measured_tps": self.measured_tps, "error": self.error,
                "predicted_prompt_s": self.predicted_prompt_s, "measured_prompt_s": self.measured_prompt_s,
                "miss": self.miss or None, "reason": self.reason or None}


def outcome(engine: Engine, prompt_tokens: int, cached: int, made: int, prefill_s: float, decode_s: float, sampling_s: float,
            drafted: Counts | None = None) -> Outcome:
    """Hold an answer of `made` tokens, after `prompt_tokens` of which `cached` were held already, against the prediction for it: that of a
    pass, times the tokens of a pass where some were drafted."""
    steps = made - 1  # the first token comes out of the prompt's pass
    measured = steps / decode_s if steps > 0 and decode_s else None
    waited = prefill_s if prefill_s and not cached else None
    known = roofs.known(forecast.wanted(engine.prepared, engine.model.tensors))
    rates = known.rates
    asked = forecast.work(engine.prepared, engine.model.tensors)
    on_gpu = "cuda" in engine.placement.devices
    picks = engine.options.kv_read == "sparse"
    predicted = decode(asked, rates, prompt_tokens + made // 2) if rates and not on_gpu and not picks else None
    if predicted is None:
        reason = (forecast.ON_GPU if on_gpu else forecast.PICKED if picks else forecast.NO_ROOFS if rates is None
                  else forecast.SLOW_DISK)
        return Outcome(None, measured, None, None, waited, reason=reason)
    first = prompt(asked, rates, prompt_tokens) if waited else None
    expected = predicted.tokens_per_s * (drafted.tokens_per_pass if drafted and drafted.passes else 1)
    miss = ""
    if measured is not None and abs(measured / expected - 1) > MISS:
        miss = explain(engine, known.machine, measured / expected, steps, decode_s, sampling_s)
    return Outcome(expected, measured, predicted.error, first and first.seconds, waited, miss)


def placed(engine: Engine, found: Outcome) -> dict[str, object]:
    """Where a model lay and how well that was foreseen, for `Stats.placement`."""
    plan, streams = engine.placement, engine.prepared.streams
    made = {"layers": {device: plan.devices.count(device) for device in dict.fromkeys(plan.devices)},
            "pinned_bytes": plan.pinned_bytes, "streamed_bytes": plan.streamed_bytes,
            "tensor_bytes": weight_tiers(engine.prepared, engine.model.tensors).to_json(), **found.to_json()}
    if isinstance(streams, PagedExperts):
        made["pinned_bytes"] = engine.model.pager.nbytes
        made["experts"] = {**streams.to_json(), **engine.model.pager.tally.to_json()}
    if engine.cache.pool.picks:
        slots = engine.cache.pool.stream.slots
        made["kv_read"] = {name: sum(getattr(each, name) for each in slots) for name in ("among", "asked", "found")}
    return made


def explain(engine: Engine, machine: roofs.MachineRoofs, ratio: float, steps: int, decode_s: float, sampling_s: float) -> str:
    """The likeliest cause of a miss, from what can be looked at now."""
    if steps < FEW_TOKENS:
        return "one token is too few to tell" if steps == 1 else f"{steps} tokens are too few to tell"
    now = memory_now(engine)
    if now is not None and (now < BUSY * machine.memory_usual if ratio < 1 else now > machine.memory_usual / BUSY):
        who = "other programs use it" if ratio < 1 else "others used it then"
        then = f"{machine.memory_usual / 1e9:.1f} when it was measured ({machine.date})"
        return f"memory reads at {now / 1e9:.1f} GB/s now and at {then}: {who}"
    waiting, cores = os.getloadavg()[0], engine.backends["cpu"].pool.workers
    if ratio < 1 and waiting > cores + 1:
        return f"{waiting:.0f} programs want the {cores} cores that this one uses"
    if ratio < 1 and engine.options.load == "mmap":
        return "the weights are mapped: what the system had not in memory was read from the file while the answer was written"
    if ratio < 1 and sampling_s > MISS * decode_s:
        return f"choosing tokens took {100 * sampling_s / decode_s:.0f}% of the time, which a prediction leaves out"
    return f"no cause was found: effllm doctor --probe measures this machine again (last {machine.date})"


def memory_now(engine: Engine) -> float | None:
    """Bytes a second at which the weights that lie in memory are read now; None where they are too few for that."""
    from ..kernels.cpu.roof import BLOCK, read_bandwidth

    pool, nbytes, seconds = engine.backends["cpu"].pool, 0, 0.0
    for array in engine.model.pager.resident_arrays():
        if array.nbytes < BLOCK or nbytes >= MOST_NBYTES:
            continue
        part = array.nbytes // BLOCK * BLOCK
        started = time.perf_counter()
        read_bandwidth(pool, np.asarray(array[:part]), passes=1)
        seconds, nbytes = seconds + time.perf_counter() - started, nbytes + part
    return nbytes / seconds if nbytes >= LEAST_NBYTES else None
