"""Whether a run drafts tokens and verifies several in one pass, decided with the plan, before a byte of weights is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..offload.notes import Fallback

if TYPE_CHECKING:
    from ..offload.plan import Placement
    from .config import ModelConfig
    from .prepare import EngineOptions, Prepared

ON = "weights come from the disk: tokens that the text makes likely are drafted, and a pass verifies several (--spec off)"
ON_GPU = "no speculation: on the GPU the numbers of a token depend on how many are run with it"
PICKED = "no speculation: --kv-read sparse picks pages for one token at a time"
MIXTURE = "no speculation: from the disk, every token of a draft would read experts of its own"
NO_DRAFT = "--draft changes nothing beside a GPU that may take layers: drafts come from the text alone (--device cpu)"
NEURONS = "no speculation: from the disk, every token of a draft would read neurons of its own"


@dataclass(frozen=True)
class Speculating:
    """`lookup`: drafts from the text; `recycles`: and from past passes; `draft`: a plan for a model that drafts. `waits`: for weights from
    the disk, which a pass of several tokens takes no more of."""

    lookup: bool = False
    draft: Prepared | None = None
    recycles: bool = False
    waits: bool = False

    @property
    def draft_nbytes(self) -> int:
        """Memory that the model that drafts takes, beside what the program has anyway."""
        return 0 if self.draft is None else self.draft.placement.total_bytes - self.draft.placement.baseline_bytes

    def __bool__(self) -> bool:
        return self.lookup or self.draft is not None


def decide(options: EngineOptions, config: ModelConfig, placement: Placement, draft: Prepared | None) -> tuple[Speculating, Sequence[str]]:
    """What was asked for, else by where the weights lie, with what there is to say about it. In memory only the text is a guess worth its
    time, and only where it repeats."""
    asked = options.spec == "lookup" or options.draft is not None
    away = placement.residency or placement.expert_slots
    refused = (ON_GPU if "cuda" in placement.devices else MIXTURE if config.mixture is not None and away
               else NEURONS if placement.slots
               else PICKED if placement.kv_pages is not None and options.kv_read == "sparse" else "")
    if refused and draft is not None:
        draft.store.close()
    if refused:
        return Speculating(), (refused,) if asked else ()
    waits = placement.streamed_bytes > 0
    if options.spec == "off":
        return Speculating(), ()
    lost = options.draft is not None and draft is None
    return Speculating(True, draft, asked or waits, waits), (Fallback(NO_DRAFT),) if lost else (ON,) if waits and not asked else ()
