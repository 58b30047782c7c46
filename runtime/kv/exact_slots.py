"""Where exact tokens lie: in slots, one for each page that is still open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...offload.memory import discard

if TYPE_CHECKING:
    import numpy as np

    from ...kernels.layout import PageLayout
    from .cache_shape import CacheShape


class ExactSlots:
    """`of`: the slot of each open page; that of the sinks, page -1, is the last, which may have fewer parts than the others. `free`: those
    without a page. `used`: how many parts of a slot hold tokens, or held some and were not given back. `memory`: bytes of all slots of a
    layer, as `layouts` say, none where they are on a device."""

    def __init__(self, shape: CacheShape, layouts: Sequence[PageLayout], memory: Sequence[np.ndarray]) -> None:
        self._shape, self._layouts, self.memory = shape, layouts, memory
        self.used: dict[int, int] = {}
        self.clear()

    def clear(self) -> None:
        """No page is open but the sinks'; memory stays allocated."""
        self.of = {-1: self._shape.slots - 1}
        self.free = list(range(self._shape.slots - 2, -1, -1))

    def take(self, page: int) -> int:
        """Open a page."""
        slot = self.of[page] = self.free.pop()
        return slot

    def use(self, page: int, end: int) -> None:
        """The slot of `page` holds tokens up to `end`."""
        slot = self.of[page]
        self.used[slot] = max(self.used.get(slot, 0), self._layouts[0].parts_of(self._shape.tokens_in(page, end)))

    def release(self, slot: int) -> None:
        """A slot is free: its memory goes back, since a chunk of a prompt takes more slots than an answer after it."""
        self.free.append(slot)
        self.used.pop(slot, None)
        self._forget(slot)

    def release_behind(self, last: int) -> None:
        """Slots of the pages behind `last` are free."""
        for page in [page for page in self.of if page > last]:
            self.release(self.of.pop(page))

    def forget_all(self) -> None:
        """Give back the memory of every open page."""
        for slot in self.of.values():
            self._forget(slot)
        self.used.clear()
        self.clear()

    def _forget(self, slot: int) -> None:
        for memory, layout in zip(self.memory, self._layouts):
            discard(memory[slot * layout.layer_page_nbytes : (slot + 1) * layout.layer_page_nbytes])
