"""Interface of experts that are not all in memory: the slot of each expert, and visits that load the experts needed.

An expert in memory occupies one slot, with its matrices at the same offsets in every slot; a kernel's record of an expert is built once and
shifted by the distance between slots. The implementation reads files and belongs to the caller (`runtime/weights/paged_experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from ..quant.weight import Expert, Linear, Norm

MAX_LOOKAHEAD_LAYERS = 2  # layers


@dataclass(frozen=True)
class Visit:
    """The experts of one pass through a layer.

    `wait(expert)`, called in the order of `coming`, returns when that expert is loaded. All products of the experts before it must have
    run by then: their slots may be overwritten.
    """

    slots: Mapping[int, int]  # of all experts of the visit
    ready: Sequence[int]  # experts already in memory
    coming: Sequence[int]  # experts being loaded
    wait: Callable[[int], None]


class ExpertPages(Protocol):
    """The experts of one layer. `slots_begin`: address of the first slot; `slot_nbytes`: distance between slots."""

    slots_begin: int
    slot_nbytes: int

    def __len__(self) -> int:
        """Number of experts in the layer, in memory or not."""

    def expert(self, number: int, slot: int) -> Expert:
        """An expert's matrices at their addresses in a slot, loaded or not."""

    def kind(self, number: int) -> object:
        """Equal for experts whose records differ in slot and biases only."""

    def biases(self, number: int) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """Biases of gate, up and down; these stay in memory."""

    def visit(self, needed: Sequence[int], tokens: np.ndarray | None = None) -> Visit:
        """Load the experts in `needed`, in rising order. `tokens` [E]: tokens of a chunk routed to each expert; None for one token.

        Experts of earlier visits may be evicted now: their products must have run.
        """

    def next_routers(self) -> Sequence[tuple[Norm, Linear]]:
        """The norms and routers of up to MAX_LOOKAHEAD_LAYERS following layers with experts, if predicting their choice from this layer's
        state is worthwhile."""

    def look_ahead(self, logits: Sequence[np.ndarray]) -> None:
        """Prefetch experts of following layers while the disk is idle. `logits`: [E] of each of `next_routers` for this layer's state."""
