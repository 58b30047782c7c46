"""What the backends require of experts that are not all in memory: the slot of each expert, and visits that bring in those needed.

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

MOST_AHEAD = 2  # layers


@dataclass(frozen=True)
class Visit:
    """The experts of one pass through a layer: `slots` of all of them, `ready` for those already in memory.

    `coming` are the others; `wait(expert)`, called in that order, returns when one of them is loaded. All products of the experts before
    must have run by then: a slot may be overwritten.
    """

    slots: Mapping[int, int]
    ready: Sequence[int]
    coming: Sequence[int]
    wait: Callable[[int], None]


class ExpertPages(Protocol):
    """The experts of one layer. `slots_begin`: address of the first slot; `slot_nbytes`: distance between slots."""

    slots_begin: int
    slot_nbytes: int

    def __len__(self) -> int:
        """Number of experts in the layer, in memory or not."""

    def expert(self, number: int, slot: int) -> Expert:
        """An expert's matrices as they are, or would be, in a slot."""

    def kind(self, number: int) -> object:
        """Equal for experts whose records differ in slot and biases only."""

    def biases(self, number: int) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """Biases of gate, up and down; these stay in memory."""

    def visit(self, needed: Sequence[int], tokens: np.ndarray | None = None) -> Visit:
        """Have `needed`, in rising order, brought in. `tokens` [E]: how many tokens of a chunk go to each; None: one token's experts.

        What earlier visits brought may be given up now: their products must have run.
        """

    def next_routers(self) -> Sequence[tuple[Norm, Linear]]:
        """The norms and routers of the next layers with experts, at most MOST_AHEAD, as far as guessing their choice from this layer's
        state is worth it."""

    def look_ahead(self, logits: Sequence[np.ndarray]) -> None:
        """What those routers make of this layer's state, [E] each: what they favour may be read while the disk idles."""
