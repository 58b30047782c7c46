"""Decides whether and how a run speculates, with the plan, before a byte of weights is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import UsageError
from ...offload.notes import Fallback
from ..tensors import check_tensors
from .mtp_tensors import mtp_rules, stored_mtp_rules
from .trained_draft import DraftInputs, TrainedDraft

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ...offload.placement import Placement
    from ..config import ModelConfig
    from ..prepare import EngineOptions, Prepared
    from ..stores.container import Container

ON_DISK = "weights come from the disk: tokens that the text makes likely are drafted, and a pass verifies several (--spec off)"
ON_DISK_MTP = "weights come from the disk: the model's own layer drafts tokens, and a pass verifies several (--spec off)"
ON_GPU = "no speculation: on the GPU the results for a token depend on the batch size"
SPARSE_KV = "no speculation: --kv-read sparse picks pages for one token at a time"
MIXTURE = "no speculation: with weights on disk, every drafted token would read its own experts"
NO_DRAFT = "--draft has no effect with a GPU that may take layers: drafts come from the text alone (--device cpu)"
OVERWRITTEN = "no speculation: a new token overwrites one that the token before it attends to"
NEURONS = "no speculation: with weights on disk, every drafted token would read its own neurons"
NO_MTP_ON_GPU = "--spec mtp has no effect with a GPU that may take layers: drafts come from the text alone (--device cpu)"
NO_MTP_MEMORY = "the model's own layer for drafts leaves too little memory: drafts come from the text alone (more --ram, a shorter -c)"


@dataclass(frozen=True)
class SpeculationPlan:
    """Whether and how a run speculates."""

    lookup: bool = False  # drafts from the text
    draft: Prepared | TrainedDraft | None = None  # the plan of a draft model
    recycles: bool = False  # drafts from the logits of past passes
    waits: bool = False  # weights stream from the disk: a pass of several tokens reads no more of them
    mtp: bool = False  # drafts by the model's own layer
    mtp_nbytes: int = 0  # of that layer

    @property
    def draft_nbytes(self) -> int:
        """Memory of the draft model."""
        if isinstance(self.draft, TrainedDraft):
            return self.draft.nbytes
        return 0 if self.draft is None else self.draft.placement.total_bytes - self.draft.placement.baseline_bytes

    @property
    def draft_bits(self) -> int:
        """Bits to which the draft model is quantized on load, 0 if it stays as stored."""
        return self.draft.bits if isinstance(self.draft, TrainedDraft) else 0

    @property
    def inputs(self) -> DraftInputs:
        """Which of the target's states drafts need."""
        return draft_inputs(self.draft)

    def __bool__(self) -> bool:
        return self.lookup or self.draft is not None


def draft_inputs(draft: Prepared | TrainedDraft | None) -> DraftInputs:
    """Which of the target's states a draft needs: none, unless it was trained for the target."""
    return draft.inputs if isinstance(draft, TrainedDraft) else DraftInputs()


def wants_mtp(options: EngineOptions, config: ModelConfig, draft: Prepared | TrainedDraft | None, has_gpu: bool) -> bool:
    """Whether the run should use the model's own MTP layer, if stored and if it fits. For MoE models only on request: every drafted token
    reads experts of its own. Not with parallel answers: it follows one sequence."""
    requested = options.spec == "mtp" or options.spec == "auto" and draft is None and config.moe is None
    return requested and not has_gpu and options.parallel == 1


def require_mtp(config: ModelConfig, store: TensorStore, container: Container | None) -> None:
    """Raises UsageError for a model without MTP layer, CheckpointError for one in an unsupported form."""
    if not mtp_rules(config):
        why = "has one that this version does not run" if config.mtp_layers else "has none"
        raise UsageError(f"--spec mtp drafts by a model's own layer for multi-token prediction, and this model ({config.family}) {why}",
                         "leave it out; --spec lookup drafts from the text, --draft by a smaller model")
    if not stored_mtp_rules(config, store):
        raise UsageError("--spec mtp: the layer for multi-token prediction was left out of these weights",
                         "use the checkpoint as it was published, or quantize that again; --spec lookup drafts from the text")
    check_tensors(config, store, container, mtp=True)


def decide(options: EngineOptions, config: ModelConfig, placement: Placement, draft: Prepared | TrainedDraft | None,
           mtp_nbytes: int | None = None) -> tuple[SpeculationPlan, Sequence[str]]:
    """(plan, notices): as requested, else by where the weights are. In memory the model's own layer pays, and the text where it repeats.

    mtp_nbytes: bytes of that layer in the placement, None if it is not part of it.
    """
    requested = options.spec in ("lookup", "mtp") or options.draft is not None
    if obstacle := _obstacle(options, config, placement):
        if draft is not None:
            draft.store.close()
        return SpeculationPlan(), (obstacle,) if requested else ()
    waits = placement.streamed_bytes > 0
    if options.spec == "off":
        return SpeculationPlan(), ()
    notices: Sequence[str] = ()
    if options.spec == "mtp" and mtp_nbytes is None:
        notices = (Fallback(NO_MTP_ON_GPU if placement.budget.vram else NO_MTP_MEMORY),)
    elif options.draft is not None and draft is None:
        notices = (Fallback(NO_DRAFT),)
    elif waits and not requested:
        notices = (ON_DISK if mtp_nbytes is None else ON_DISK_MTP,)
    recycles = options.spec == "lookup" or options.draft is not None or waits
    return SpeculationPlan(True, draft, recycles, waits, mtp_nbytes is not None, mtp_nbytes or 0), notices


def _obstacle(options: EngineOptions, config: ModelConfig, placement: Placement) -> str:
    """Why the run cannot speculate; empty if it can."""
    if "cuda" in placement.devices:
        return ON_GPU
    if config.moe is not None and (placement.residency or placement.expert_slots):
        return MIXTURE
    if placement.slots:
        return NEURONS
    if config.answer_window is not None:
        return OVERWRITTEN
    return SPARSE_KV if placement.kv_pages is not None and options.kv_read == "sparse" else ""
