"""Estimate of memory and speed of a run on this machine, before any weights are downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ... import DoesNotFit

if TYPE_CHECKING:
    from ...offload.predict import Prediction
    from ..config import ModelConfig
    from ..planning.expected_store import ExpectedStore
    from ..planning.forecast import Forecast
    from ..planning.roofs import Roofs, RoofsWanted
    from ..prepare import EngineOptions, Prepared

NOT_MEASURED = "doctor was not run: effllm doctor measures this machine"


@dataclass(frozen=True)
class MemoryFit:
    """Whether a run would fit here now, as `effllm plan` computes it. Bytes are those of memory unless noted."""

    fits: bool
    total_bytes: int = 0
    budget_bytes: int = 0
    context: int = 0
    reason: str = ""  # why it does not fit
    weights_bytes: int = 0  # of the total
    kv_bytes: int = 0  # of the total
    streamed_bytes: int = 0  # of weights that every token reads from the disk
    layers: tuple[str, ...] = ()  # of each layer: gpu, memory or disk
    hint: str = ""  # what would help if it does not fit

    def to_json(self) -> Mapping[str, object]:
        return {"fits": self.fits, "total_bytes": self.total_bytes, "budget_bytes": self.budget_bytes, "context": self.context,
                "reason": self.reason or None, "weights_bytes": self.weights_bytes, "kv_bytes": self.kv_bytes,
                "streamed_bytes": self.streamed_bytes, "layers": list(self.layers)}


@dataclass(frozen=True)
class RunEstimate:
    """Memory and speed of a run of the finished model, as it is planned now."""

    memory: MemoryFit | None = None  # None if unknown
    prepared: Prepared | None = None
    forecast: Forecast | None = None
    known: Roofs | None = None
    unknown: str = ""  # why there is no speed
    rough: Prediction | None = None  # a speed from memory bandwidth alone, if nothing else was measured

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.unknown or self.forecast is None else self.forecast.start.tokens_per_s

    @property
    def error(self) -> float | None:
        """Relative error of the speed."""
        return None if self.tokens_per_s is None else self.forecast.start.error


def estimate_run(config: ModelConfig, store: ExpectedStore, options: EngineOptions, folder: Path, extra_nbytes: int) -> RunEstimate:
    """The plan of a run of the tensors in `store` from `folder`. `extra_nbytes`: other memory of the process. Raises UsageError for
    options that this model cannot have."""
    from ..planning import roofs
    from ..planning.forecast import wanted
    from ..prepare import prepare_with

    options = replace(options, draft=None, predict_neurons=False)  # their files are not downloaded
    try:
        prepared = prepare_with(None, config, store, options, store.container, extra_nbytes=extra_nbytes)
    except DoesNotFit as error:
        return RunEstimate(MemoryFit(False, reason=error.message, hint=error.hint), unknown="it does not fit")
    placement = prepared.placement
    memory = MemoryFit(True, placement.total_bytes, placement.budget.ram, placement.ctx, "", placement.weights_bytes, placement.kv_bytes,
                    placement.streamed_bytes, placement.tiers)
    return with_roofs(RunEstimate(memory, prepared), roofs.known(replace(wanted(prepared), file=nearest(folder))))


def with_roofs(run: RunEstimate, known: Roofs) -> RunEstimate:
    """The same with the speed that follows from `known` measurements of the machine."""
    from ..planning.forecast import forecast, no_roofs

    result = forecast(run.prepared, known)
    unknown = "" if result.start is not None else NOT_MEASURED if result.reason == no_roofs(run.prepared.options) else result.reason
    return replace(run, forecast=result, known=known, unknown=unknown)


def missing_measurement(run: RunEstimate) -> RoofsWanted | None:
    """What to measure for a speed: memory bandwidth, and the kinds of weights with most bytes. None if that would not give one, or if
    kernels have to be compiled first, which takes longer than anybody wants to wait for an estimate."""
    from ..planning import roofs
    from ..planning.forecast import wanted

    if run.prepared is None or run.unknown != NOT_MEASURED:
        return None
    parts = run.forecast.work.parts
    kinds = {part.kind for part in parts if 2 * part.nbytes >= max(other.nbytes for other in parts)}
    measurements = replace(wanted(run.prepared), kinds=tuple(sorted(kinds)), kv=(), file=None)
    return None if roofs.is_cold(measurements) else measurements


def rough_estimate(run: RunEstimate) -> RunEstimate:
    """The same with a speed from memory bandwidth alone, measured in a third of a second, for a machine without measurements. It needs no
    compiled kernels and is not stored."""
    from ...offload.memory import read_rate
    from ...offload.predict import Rates, decode
    from ..prepare import worker_count

    if run.prepared is None or run.unknown != NOT_MEASURED:
        return run
    return replace(run, rough=decode(run.forecast.work, Rates(read_rate(worker_count(run.prepared.options)), 0.0, 0.0)))


def nearest(folder: Path) -> Path:
    """The folder or its nearest existing ancestor, which is on the same disk."""
    return next(ancestor for ancestor in (folder, *folder.parents) if ancestor.is_dir())
