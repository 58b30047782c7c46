"""The memory of sealed KV pages: one extent per layer, pages in position order, in anonymous memory that the system fills on touch.

An extent is reserved whole for the context that was planned, but costs nothing until a page is written, so a short chat in a
long context stays small. The pool never learns what a page holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .memory import anonymous


class PagePool:
    """An extent of `pages` pages for each layer; `page_nbytes` are the bytes of a page, by layer."""

    def __init__(self, pages: int, page_nbytes: Sequence[int]) -> None:
        self.page_nbytes, self.pages = tuple(page_nbytes), pages
        self._extents = [anonymous(pages * nbytes) for nbytes in page_nbytes]

    def extent(self, layer: int) -> np.ndarray:
        """The memory of a layer's pages, uint8 `[pages * page_nbytes]`."""
        return self._extents[layer]

    def page(self, layer: int, index: int) -> np.ndarray:
        nbytes = self.page_nbytes[layer]
        return self._extents[layer][index * nbytes : (index + 1) * nbytes]
