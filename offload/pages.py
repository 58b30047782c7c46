"""The memory of sealed KV pages: one extent per layer, pages in position order, in anonymous memory that the system fills on touch.

An extent is reserved whole for the context that was planned, but costs nothing until a page is written, so a short chat in a
long context stays small. The pool never learns what a page holds.
"""

from __future__ import annotations

import numpy as np

from .memory import anonymous


class PagePool:
    """`pages` slots of `page_nbytes` in each of `layers` extents."""

    def __init__(self, layers: int, pages: int, page_nbytes: int) -> None:
        self.page_nbytes, self.pages = page_nbytes, pages
        self._extents = [anonymous(pages * page_nbytes) for _ in range(layers)]

    def extent(self, layer: int) -> np.ndarray:
        """The memory of a layer's pages, uint8 `[pages * page_nbytes]`."""
        return self._extents[layer]

    def page(self, layer: int, index: int) -> np.ndarray:
        return self._extents[layer][index * self.page_nbytes : (index + 1) * self.page_nbytes]
