"""Packed pages of two codecs in one layer: pages to which a policy assigns more bits are stored in an extent of their own.

A block table has 1 for a page of the first codec and 2 for one of the second, with the page's index in its own extent. The kernels handle
one codec at a time: its partials are computed with its own argument block, from a table in which the other codec's pages are not marked as
sealed. Partials are stored by row and merge in page order as usual; both codecs share one basis, so they are rotated back together. Prefill
goes through the table in several calls, one per run of pages of one codec.
"""

from __future__ import annotations

import numpy as np

from ...layout import PageLayout
from ...workspace import address
from .. import attention, attention_decode
from ..ops import FEW_TOKENS, CpuOps
from . import arguments
from .decode import attend_packed_decode
from .pages import Codec, PackedPages

FIRST_KIND, SECOND_KIND = 1, 2


class MixedPages(PackedPages):
    """`sealed` and `better` are the extents of `codec`'s pages and of `second`'s, which have the same basis."""

    def __init__(self, ops: CpuOps, layout: PageLayout, exact: np.ndarray, sealed: np.ndarray, scale: float, window: int | None,
                 softcap: float | None, codec: Codec, better: np.ndarray, second: Codec) -> None:
        """Raises ValueError if the codecs have different bases."""
        if any(not np.array_equal(getattr(codec.basis, side), getattr(second.basis, side)) for side in ("k_matrix", "v_matrix", "k_scale")):
            raise ValueError("the codecs of a layer must share a basis")
        super().__init__(ops, layout, exact, sealed, scale, window, softcap, codec)
        self.second = PackedPages(ops, layout, exact, better, scale, window, softcap, second)
        # pages adjacent in memory are not adjacent in position
        self._attend[self.by_page_slot] = self.second._attend[self.by_page_slot] = 1
        self._first = self._attend.copy()
        self._tables: tuple[np.ndarray | None, tuple[np.ndarray, ...]] = (None, ())

    def reader(self, ops: CpuOps | None = None, window: int | None = None) -> MixedPages:
        copied = super().reader(ops, window)
        copied.second, copied._first, copied._tables = self.second.reader(ops, window), self._first.copy(), (None, ())
        for slots in (slice(attention.SCRATCH, attention.PARTIALS + 1), attention.WINDOW):
            copied._first[slots] = copied._attend[slots]
        return copied

    def seal(self, slot: int, page: int, layer: int, first_token: int, codec: object) -> None:
        """Seal a slot into place `page` of the codec's own extent."""
        if codec is self.second.codec:
            self.second.seal(slot, page, layer, first_token, codec)
        else:
            super().seal(slot, page, layer, first_token, codec)

    def sides(self, sealed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.second.sides(1, index) if sealed == SECOND_KIND else super().sides(sealed, index)

    def compiled(self, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, out: np.ndarray) -> None:
        if not (blocks[:, attention.SEALED] == SECOND_KIND).any():
            super().compiled(q, position, blocks, sinks, out)
            return
        self._attend[attention.SINKS] = address(sinks)
        if len(q) > FEW_TOKENS:
            self._many_of_both(q, position, blocks, out)
        else:
            self._few_of_both(q, position, blocks, out)

    def _few_of_both(self, q: np.ndarray, position: int, blocks: np.ndarray, out: np.ndarray) -> None:
        tables = self._tables_of(blocks)
        for table_of_kind in tables:
            self.ops.keep_alive(table_of_kind)
        own = self.ops.addresses_of_step(blocks, blocks)[0]
        calls, *kinds = (self.calls_by_group(block, q, position, blocks, table, out) for block, table in
                         zip((self._attend, self._first, self.second._attend), (own, *map(address, tables)), strict=True))
        for call, *packed in zip(calls, *kinds, strict=True):
            self.run_few([(attention_decode.attend_decode, call), *((attend_packed_decode, table_of_kind) for table_of_kind in packed),
                          (self.merge_kernel, call)],
                         q.shape[1] * len(blocks))

    def _many_of_both(self, q: np.ndarray, position: int, blocks: np.ndarray, out: np.ndarray) -> None:
        table = self.ops.addresses_of_step(blocks, blocks)[0]
        (call,) = self.calls(q, position, blocks, table, out)
        other = call.copy()
        other[arguments.PACKED : arguments.K_ROTATION] = self.second._attend[arguments.PACKED : arguments.K_ROTATION]
        kinds = blocks[:, attention.SEALED]
        begin = 0
        while begin < len(blocks):
            packed = kinds[begin:][kinds[begin:] > 0]
            first_kind = packed[0] if len(packed) else FIRST_KIND
            ends = np.flatnonzero((kinds[begin:] > 0) & (kinds[begin:] != first_kind))
            end = begin + int(ends[0]) if len(ends) else len(blocks)
            self.enqueue_rows([other if first_kind == SECOND_KIND else call], begin, end)
            begin = end

    def _tables_of(self, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
        """The block table as seen by each codec's kernel. When a step updates a table in place, only exact rows change."""
        cached_blocks, tables = self._tables
        if cached_blocks is not blocks:
            tables = tuple(blocks.copy() for _ in (FIRST_KIND, SECOND_KIND))
            for kind, table in zip((FIRST_KIND, SECOND_KIND), tables, strict=True):
                table[table[:, attention.SEALED] != kind, attention.SEALED] = 0
            self._tables = blocks, tables
        return tables
