"""Decides whether and how a run speculates, with the plan, before a byte of weights is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import UsageError
from ...offload.notes import Fallback
from ..tensors import check_tensors
from .mtp_tensors import held_rules, mtp_rules
from .trained_draft import DraftInputs, TrainedDraft

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ...offload.placement import Placement
    from ..config import ModelConfig
    from ..prepare import EngineOptions, Prepared
    from ..stores.container import Container

ON = "weights come from the disk: tokens that the text makes likely are drafted, and a pass verifies several (--spec off)"
ON_OWN = "weights come from the disk: the model's own layer drafts tokens, and a pass verifies several (--spec off)"
ON_GPU = "no speculation: on the GPU the results for a token depend on the batch size"
PICKED = "no speculation: --kv-read sparse picks pages for one token at a time"
MIXTURE = "no speculation: with weights on disk, every drafted token would read its own experts"
NO_DRAFT = "--draft has no effect with a GPU that may take layers: drafts come from the text alone (--device cpu)"
REPLACED = "no speculation: a new token overwrites one that the token before it attends to"
NEURONS = "no speculation: with weights on disk, every drafted token would read its own neurons"
BESIDE_GPU = "--spec mtp has no effect with a GPU that may take layers: drafts come from the text alone (--device cpu)"
NO_ROOM = "the model's own layer for drafts leaves too little memory: drafts come from the text alone (more --ram, a shorter -c)"


@dataclass(frozen=True)
class SpeculationPlan:
    """`lookup`: drafts from the text; `recycles`: and from past passes; `draft`: the plan of a draft model. `waits`: weights stream from
    disk, which a pass of several tokens reads no more of. `mtp`: drafts by the model's own layer, which takes `mtp_nbytes`."""

    lookup: bool = False
    draft: Prepared | TrainedDraft | None = None
    recycles: bool = False
    waits: bool = False
    mtp: bool = False
    mtp_nbytes: int = 0

    @property
    def draft_nbytes(self) -> int:
        """Memory of the draft model."""
        if isinstance(self.draft, TrainedDraft):
            return self.draft.nbytes
        return 0 if self.draft is None else self.draft.placement.total_bytes - self.draft.placement.baseline_bytes

    @property
    def draft_bits(self) -> int:
        """Bits to which it is quantized on load, 0 if as stored."""
        return self.draft.bits if isinstance(self.draft, TrainedDraft) else 0

    @property
    def reads(self) -> DraftInputs:
        """Which of the target's states drafts need."""
        return reads_of(self.draft)

    def __bool__(self) -> bool:
        return self.lookup or self.draft is not None


def reads_of(draft: Prepared | TrainedDraft | None) -> DraftInputs:
    """Which of the target's states a draft needs: none, unless it was trained for the target."""
    return draft.reads if isinstance(draft, TrainedDraft) else DraftInputs()


def wants_own_layer(options: EngineOptions, config: ModelConfig, draft: Prepared | TrainedDraft | None, uses_gpu: bool) -> bool:
    """Should the run use the model's own MTP layer, if stored and if it fits? For MoE models only on request: every drafted token reads
    experts of its own. Not with parallel answers: it follows one sequence."""
    asked = options.spec == "mtp" or options.spec == "auto" and draft is None and config.moe is None
    return asked and not uses_gpu and options.parallel == 1


def demand_own_layer(config: ModelConfig, store: TensorStore, container: Container | None) -> None:
    """Raises UsageError for a model without MTP layer, CheckpointError for one in an unsupported form."""
    if not mtp_rules(config):
        why = "has one that this version does not run" if config.mtp_layers else "has none"
        raise UsageError(f"--spec mtp drafts by a model's own layer for multi-token prediction, and this model ({config.family}) {why}",
                         "leave it out; --spec lookup drafts from the text, --draft by a smaller model")
    if not held_rules(config, store):
        raise UsageError("--spec mtp: the layer for multi-token prediction was left out of these weights",
                         "use the checkpoint as it was published, or quantize that again; --spec lookup drafts from the text")
    check_tensors(config, store, container, mtp=True)


def decide(options: EngineOptions, config: ModelConfig, placement: Placement, draft: Prepared | TrainedDraft | None,
           own_nbytes: int | None = None) -> tuple[SpeculationPlan, Sequence[str]]:
    """As requested, else by where the weights are; with notices. In memory the model's own layer pays, and the text where it repeats.
    `own_nbytes`: what that layer takes in the plan, None if it is not part of it."""
    asked = options.spec in ("lookup", "mtp") or options.draft is not None
    away = placement.residency or placement.expert_slots
    refused = (ON_GPU if "cuda" in placement.devices else MIXTURE if config.moe is not None and away
               else NEURONS if placement.slots else REPLACED if config.answer_window is not None
               else PICKED if placement.kv_pages is not None and options.kv_read == "sparse" else "")
    if refused and draft is not None:
        draft.store.close()
    if refused:
        return SpeculationPlan(), (refused,) if asked else ()
    waits = placement.streamed_bytes > 0
    if options.spec == "off":
        return SpeculationPlan(), ()
    lost = options.draft is not None and draft is None
    own = {} if own_nbytes is None else {"mtp": True, "mtp_nbytes": own_nbytes}
    said = (Fallback(NO_DRAFT),) if lost else (ON if own_nbytes is None else ON_OWN,) if waits and not asked else ()
    if options.spec == "mtp" and own_nbytes is None:
        said = (Fallback(BESIDE_GPU if placement.budget.vram else NO_ROOM),)
    return SpeculationPlan(True, draft, options.spec == "lookup" or options.draft is not None or waits, waits, **own), said
