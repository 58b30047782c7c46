"""Attention for one token that reads few of the pages on the disk and estimates the others.

Every page that goes to the disk leaves an abstract in memory. A token first gives every such page the partial that its abstract promises
(`kv_estimate.py`); what share of the attention each then has says which are worth reading, and those get their true partials. The rest
stays as estimated, so nothing is dropped. Pages that a prompt's chunk sees are all read, and those of a layer with a window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..workspace import address
from . import kv_estimate
from .kv_estimate import CHUNK, CHUNKS, STEP_SLOTS

if TYPE_CHECKING:
    from .pages import LayerPages

LEFT = 0.002  # of a head's attention: when the pages not read have no more than this between them, no more are read


def abstract_nbytes(kv_heads: int, head_dim: int) -> int:
    """Memory for the abstract of a page of one layer."""
    return kv_heads * ((2 * CHUNKS + 1) * head_dim + 4 * STEP_SLOTS)


class Selective:
    """One layer's abstracts, in `memory` for pages from `first` on: uint8 `[pages * abstract_nbytes]` that begins on a cache line.
    `turn` [KVH, D, D] brings values into the basis in which the layer's pages are merged; None where that is their own."""

    def __init__(self, pages: LayerPages, memory: np.ndarray, first: int, turn: np.ndarray | None) -> None:
        self._pages, self._first, self._turn = pages, first, turn
        heads, dim = pages.layout.kv_heads, pages.layout.head_dim
        count, at = len(memory) // abstract_nbytes(heads, dim), 0
        parts = []
        for shape, kind in (((STEP_SLOTS,), np.float32), ((CHUNKS, dim), np.int8), ((CHUNKS, dim), np.int8), ((dim,), np.int8)):
            nbytes = count * heads * int(np.prod(shape)) * np.dtype(kind).itemsize
            parts.append(memory[at : at + nbytes].view(kind).reshape(count, heads, *shape))
            at += nbytes
        self._steps, self._keys, self._values, self._spreads = parts
        block = self._block = np.zeros(kv_estimate.ESTIMATE_SLOTS, np.int64)
        block[kv_estimate.E_KV_HEADS : kv_estimate.E_FIRST + 1] = heads, dim, first
        block[kv_estimate.E_PARTIALS : kv_estimate.E_STEPS + 1] = (pages.ops.partials, address(self._keys), address(self._values),
                                                                  address(self._spreads), address(self._steps))
        block.view(np.float64)[[kv_estimate.E_SCALE, kv_estimate.E_SOFTCAP]] = pages.scale, pages.softcap or 0.0

    def note(self, page: int, k: np.ndarray, v: np.ndarray) -> None:
        """Make the abstract of a page from its keys and values, [PAGE, KVH, D]."""
        k, v = (side.astype(np.float32).swapaxes(0, 1) for side in (k, v))
        v = v if self._turn is None else v @ self._turn
        heads, _, dim = k.shape
        chunks = k.reshape(heads, CHUNKS, CHUNK, dim)
        keys, values = chunks.mean(2), v.reshape(heads, CHUNKS, CHUNK, dim).mean(2)
        spreads = np.sqrt(np.square(chunks - keys[:, :, None]).mean((1, 2)))
        place, steps = page - self._first, self._steps[page - self._first]
        steps[:, :CHUNKS] = _rounded(keys, self._keys[place])
        steps[:, CHUNKS : 2 * CHUNKS] = _rounded(values, self._values[place])
        steps[:, 2 * CHUNKS] = _rounded(spreads, self._spreads[place])

    def attend(self, q: np.ndarray, position: int, blocks: np.ndarray, table: int, out: np.ndarray, end: int) -> None:
        """`LayerPages.compiled` for one token; pages [first, end) are on the disk."""
        pages, ops, block = self._pages, self._pages.ops, self._block.copy()
        lead, stride, group = pages.spilled.lead, pages.stride, q.shape[1] // pages.layout.head_dim // pages.layout.kv_heads
        calls = pages.calls(q, position, blocks, table, out)
        if pages.by_page is not None:
            calls[0][pages.by_page] = 1
        pages.turn(calls, 0, lead + self._first)
        pages.turn(calls, lead + end, len(blocks))
        block[: kv_estimate.E_TO + 1] = ops.at(q), pages.layout.kv_heads * group, len(blocks), self._first, end
        block[kv_estimate.E_LEAD] = lead
        ops.run(kv_estimate.estimate_pages, address(block), True, block)
        ops.flush()
        partials = ops.workspace.take("partials", pages.layout.kv_heads, len(blocks), group, pages.layout.head_dim + 2)
        wanted, likely = choose(partials[..., -2], partials[..., -1], lead + self._first, lead + end, pages.spilled.most, LEFT)
        for page, where in pages.spilled.fetch([self._first + each for each in wanted], ops.flush):
            pages.turn(calls, lead + page, lead + page + 1, where - page * stride)
        pages.merged(calls)
        pages.spilled.prefetch([self._first + each for each in likely], [self._first + each for each in wanted])


def choose(m: np.ndarray, l: np.ndarray, begin: int, end: int, most: int, left: float) -> tuple[list[int], list[int]]:
    """Which of the blocks [begin, end) to read, counted from `begin`, and which come next: from maxima and sums [KVH, blocks, rows] of
    every block, those with the largest share in any row, until no row has more than `left` in the others; at most `most` of them."""
    with np.errstate(divide="ignore"):
        mass = m + np.log(l)
    share = np.exp(mass - mass.max(1, keepdims=True))
    share = (share / share.sum(1, keepdims=True))[:, begin:end]
    order = np.argsort(-share.max((0, 2)), kind="stable")
    rest = share.sum(1)[:, None] - np.cumsum(share[:, order], 1)  # after so many more
    enough = np.nonzero(rest.max((0, 2)) <= left)[0]
    count = min(most, int(enough[0]) + 1 if len(enough) else end - begin)
    if share.sum(1).max() <= left:
        count = 0
    return order[:count].tolist(), order[count : count + max(0, min(most - count, most // 4))].tolist()


def _rounded(values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """float32 [..., D] as int8 in `out`; returns what they count in."""
    step = np.abs(values).max(-1) / 127
    np.copyto(out, np.rint(values / np.where(step > 0, step, 1)[..., None]), casting="unsafe")
    return step
