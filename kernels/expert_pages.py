"""What the backends ask of experts that are not all in memory: which slot an expert lies in, and a visit that brings those that are needed.

An expert in memory fills one slot, its matrices at places that are the same in every slot; so what a kernel reads of it is made once
and moved by the distance of two slots. The implementation reads files and is the caller's (`runtime/weights/paged_experts.py`).
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
    """The experts of one pass through a layer: `slots` of all of them, `ready` those that are in memory.

    `coming` are the others; `wait(expert)` returns when one of them is there, in this order. By then the products of all before must have
    run: a slot may be filled anew.
    """

    slots: Mapping[int, int]
    ready: Sequence[int]
    coming: Sequence[int]
    wait: Callable[[int], None]


class ExpertPages(Protocol):
    """The experts of a layer. `slots_begin`: the address of the first slot; `slot_nbytes`: the distance of two."""

    slots_begin: int
    slot_nbytes: int

    def __len__(self) -> int:
        """How many experts the layer has, wherever they lie."""

    def expert(self, number: int, slot: int) -> Expert:
        """An expert's matrices as they are, or would be, in a slot."""

    def kind(self, number: int) -> object:
        """Equal for experts whose records differ by slot and biases alone."""

    def biases(self, number: int) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """Of gate, up and down; they stay in memory."""

    def visit(self, needed: Sequence[int], tokens: np.ndarray | None = None) -> Visit:
        """Have `needed`, in rising order, brought in. `tokens` [E]: how many tokens of a chunk go to each; None: one token's experts.

        What earlier visits brought may be given up now: their products must have run.
        """

    def next_routers(self) -> Sequence[tuple[Norm, Linear]]:
        """The norms and routers of the next layers with experts, at most MOST_AHEAD, as far as guessing their choice from this layer's
        state is worth it."""

    def look_ahead(self, logits: Sequence[np.ndarray]) -> None:
        """What those routers make of this layer's state, [E] each: what they favour may be read while the disk idles."""
