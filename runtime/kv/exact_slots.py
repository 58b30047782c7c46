"""Storage of exact tokens: one slot per page that is still open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...offload.memory import discard

if TYPE_CHECKING:
    import numpy as np

    from ...kernels.layout import PageLayout
    from .cache_shape import CacheShape


class ExactSlots:
    """Slots of exact tokens, in every layer with pages.

    of: slot of each open page; the sinks are page -1, and their slot is the last one and may have fewer parts
    free: unused slots
    used: number of parts of a slot that hold tokens, or held some and have not been released since
    memory: bytes of all slots, by layer, laid out as in `layouts`; empty if they are on a GPU
    """

    def __init__(self, shape: CacheShape, layouts: Sequence[PageLayout], memory: Sequence[np.ndarray]) -> None:
        self._shape, self._layouts, self.memory = shape, layouts, memory
        self.used: dict[int, int] = {}
        self.clear()

    def clear(self) -> None:
        """Close all pages but the sinks'; memory stays allocated."""
        self.of = {-1: self._shape.slots - 1}
        self.free = list(range(self._shape.slots - 2, -1, -1))

    def take(self, page: int) -> int:
        """Open a page."""
        slot = self.of[page] = self.free.pop()
        return slot

    def use(self, page: int, end: int) -> None:
        """Mark the slot of `page` as holding tokens up to `end`."""
        slot = self.of[page]
        self.used[slot] = max(self.used.get(slot, 0), self._layouts[0].parts_of(self._shape.tokens_in(page, end)))

    def release(self, slot: int) -> None:
        """Free a slot and its memory, since a prefill chunk takes more slots than decoding."""
        self.free.append(slot)
        self.used.pop(slot, None)
        self._discard(slot)

    def release_after(self, last: int) -> None:
        """Free the slots of pages after `last`."""
        for page in [page for page in self.of if page > last]:
            self.release(self.of.pop(page))

    def discard_all(self) -> None:
        """Release the memory of every open page."""
        for slot in self.of.values():
            self._discard(slot)
        self.used.clear()
        self.clear()

    def _discard(self, slot: int) -> None:
        for memory, layout in zip(self.memory, self._layouts):
            discard(memory[slot * layout.layer_page_nbytes : (slot + 1) * layout.layer_page_nbytes])
