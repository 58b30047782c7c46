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
    """Whether a run would fit here now, as `effllm plan` reckons; `reason` says why not, `hint` what would help. Bytes: `weights_bytes` and
    `kv_bytes` of the total, `streamed_bytes` of weights that every token reads from the disk. `layers`: gpu, memory or disk, of each."""

    fits: bool
    total_bytes: int = 0
    budget_bytes: int = 0
    context: int = 0
    reason: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    streamed_bytes: int = 0
    layers: tuple[str, ...] = ()
    hint: str = ""

    def to_json(self) -> Mapping[str, object]:
        return {"fits": self.fits, "total_bytes": self.total_bytes, "budget_bytes": self.budget_bytes, "context": self.context,
                "reason": self.reason or None, "weights_bytes": self.weights_bytes, "kv_bytes": self.kv_bytes,
                "streamed_bytes": self.streamed_bytes, "layers": list(self.layers)}


@dataclass(frozen=True)
class RunEstimate:
    """A run of the finished model as it is planned now. `memory` and `prepared` are None where nothing can be told; `unknown` says why
    there is no speed; `rough` is one by the memory's rate alone, where nothing else could be measured."""

    memory: MemoryFit | None = None
    prepared: Prepared | None = None
    forecast: Forecast | None = None
    known: Roofs | None = None
    unknown: str = ""
    rough: Prediction | None = None

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.unknown or self.forecast is None else self.forecast.start.tokens_per_s

    @property
    def error(self) -> float | None:
        """Of the speed, as a share."""
        return None if self.tokens_per_s is None else self.forecast.start.error


def estimate_run(config: ModelConfig, store: ExpectedStore, options: EngineOptions, folder: Path, beside: int) -> RunEstimate:
    """The plan of a run of what `store` expects in `folder`; `beside`: bytes that the process will hold besides. Raises UsageError for
    options that this model cannot have."""
    from ..planning import roofs
    from ..planning.forecast import wanted
    from ..prepare import prepare_with

    options = replace(options, draft=None, predict_neurons=False)  # of files that are not here
    try:
        prepared = prepare_with(None, config, store, options, store.container, extra_nbytes=beside)
    except DoesNotFit as error:
        return RunEstimate(MemoryFit(False, reason=error.message, hint=error.hint), unknown="it does not fit")
    placement = prepared.placement
    memory = MemoryFit(True, placement.total_bytes, placement.budget.ram, placement.ctx, "", placement.weights_bytes, placement.kv_bytes,
                    placement.streamed_bytes, placement.tiers)
    return with_roofs(RunEstimate(memory, prepared), roofs.known(replace(wanted(prepared), file=nearest(folder))))


def with_roofs(run: RunEstimate, known: Roofs) -> RunEstimate:
    """The same with the speed that follows from what is known of the machine."""
    from ..planning.forecast import forecast, no_roofs

    found = forecast(run.prepared, known)
    unknown = "" if found.start is not None else NOT_MEASURED if found.reason == no_roofs(run.prepared.options) else found.reason
    return replace(run, forecast=found, known=known, unknown=unknown)


def missing_measurement(run: RunEstimate) -> RoofsWanted | None:
    """What to measure for a speed, that of the memory and of the kinds of weights which most bytes are of; None where it would not tell, or
    where kernels have to be compiled first, which takes longer than anybody wants to wait for a question."""
    from ..planning import roofs
    from ..planning.forecast import wanted

    if run.prepared is None or run.unknown != NOT_MEASURED:
        return None
    parts = run.forecast.work.parts
    kinds = {part.kind for part in parts if 2 * part.nbytes >= max(each.nbytes for each in parts)}
    asked = replace(wanted(run.prepared), kinds=tuple(sorted(kinds)), kv=(), file=None)
    return None if roofs.is_cold(asked) else asked


def rough_estimate(run: RunEstimate) -> RunEstimate:
    """The same with what the memory's rate alone tells of a machine of which nothing is known: a third of a second, also where kernels
    have yet to be compiled. Nothing of it is kept."""
    from ...offload.memory import read_rate
    from ...offload.predict import Rates, decode
    from ..prepare import worker_count

    if run.prepared is None or run.unknown != NOT_MEASURED:
        return run
    return replace(run, rough=decode(run.forecast.work, Rates(read_rate(worker_count(run.prepared.options)), 0.0, 0.0)))


def nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there: what will be in it lies on the same disk."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())
