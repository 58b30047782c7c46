"""Sparse attention over on-disk pages for one token: few pages are read, the others are estimated.

Every page that moves to disk leaves a summary in memory. A token first computes an estimated partial for every such page
(`page_estimates.py`). The resulting attention shares determine which pages are worth reading (`page_selection.py`), and those get exact
partials. The others keep their estimates, so nothing is dropped. Prefill reads all pages it can see; layers with a window read all of
theirs.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from ...layout import PAGE
from ...workspace import address
from ..inner_loops import TILE_COLUMNS
from . import page_estimates
from .chunk_softmax import CHUNK, CHUNKS
from .page_selection import choose_blocks, room_floats
from .sign_products import PAIR

if TYPE_CHECKING:
    from ..pages import LayerPages, ScatteredPages

LEFT = 0.002  # stop reading pages when those not read have at most this share of a head's attention
MAX_DISTANCE = 255
# Fraction of the distance at which scores are unbiased. The mean of their exponentials is then too large, by half of the squared error; at
# 2 / pi, the nearest point, keys of a lookup stand out too little.
RECENCY_DECAY = 0.8


def abstract_nbytes(kv_heads: int, head_dim: int) -> int:
    """Bytes of the summary of one layer's page."""
    return kv_heads * ((-(-head_dim // PAIR) + 1) * PAGE + (1 + CHUNKS) * head_dim + 4 * page_estimates.STEP_SLOTS)


def basis_nbytes(head_dim: int) -> int:
    """Bytes of the key basis, which all layers share."""
    return 4 * head_dim * (head_dim + -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS)


@cache
def key_basis(head_dim: int) -> np.ndarray:
    """float32 [D, D], orthogonal; each direction mixes all channels, so that no few channels dominate a sign."""
    normal = np.random.default_rng(0).standard_normal((head_dim, head_dim))
    return np.linalg.qr(normal)[0].astype(np.float32)


@cache
def _turning(head_dim: int) -> np.ndarray:
    """The basis with rows padded to the kernels' tile width."""
    return np.pad(key_basis(head_dim), ((0, 0), (0, -head_dim % TILE_COLUMNS)))


class Selective:
    """One layer's page summaries, in `memory` for pages from `first` on: uint8 `[pages * abstract_nbytes]`, cache-line aligned. `turn`
    [KVH, D, D] rotates values into the basis in which the layer's pages are merged; None if that is their own."""

    def __init__(self, pages: LayerPages, memory: np.ndarray, first: int, rotation: np.ndarray | None) -> None:
        self._pages, self._first, self._rotation = pages, first, rotation
        heads, dim = pages.layout.kv_heads, pages.layout.head_dim
        count, at = len(memory) // abstract_nbytes(heads, dim), 0
        parts = []
        for shape, kind in (((page_estimates.STEP_SLOTS,), np.float32), ((-(-dim // PAIR), PAGE), np.uint8), ((PAGE,), np.uint8),
                            ((dim,), np.int8), ((CHUNKS, dim), np.int8)):
            nbytes = count * heads * int(np.prod(shape)) * np.dtype(kind).itemsize
            parts.append(memory[at : at + nbytes].view(kind).reshape(heads, count, *shape))
            at += nbytes
        self._steps, self._sides, self._far, self._means, self._values = parts
        self._basis = key_basis(dim)
        block = self._block = np.zeros(page_estimates.ESTIMATE_SLOTS, np.int64)
        block[page_estimates.E_KV_HEADS : page_estimates.E_COUNT + 1] = heads, dim, first, count
        block[page_estimates.E_PARTIALS : page_estimates.E_TURN + 1] = (
            pages.ops.partials, 0, address(self._sides), address(self._far), address(self._means), address(self._values),
            address(self._steps), address(_turning(dim)))
        block[page_estimates.E_SCRATCH : page_estimates.E_SCRATCH_STRIDE + 1] = pages.ops.scratch, pages.ops.scratch_stride
        block.view(np.float64)[[page_estimates.E_SCALE, page_estimates.E_SOFTCAP]] = pages.scale, pages.softcap or 0.0

    def reader(self, pages: LayerPages) -> Selective:
        """The same summaries for another layer that attends to these pages."""
        copied = copy(self)
        copied._pages = pages
        return copied

    def note(self, page: int, k: np.ndarray, v: np.ndarray) -> None:
        """Compute the summary of a page from its keys and values, [PAGE, KVH, D]."""
        k, v = (side.astype(np.float32).swapaxes(0, 1) for side in (k, v))
        v = v if self._rotation is None else v @ self._rotation
        heads, _, dim = k.shape
        k = k @ self._basis
        index = page - self._first
        steps, means = self._steps[:, index], self._means[:, index]
        step = steps[:, page_estimates.MEAN_STEP] = _rounded(k.mean(1), means)
        k -= step[:, None, None] * means[:, None]
        self._sides[:, index] = np.packbits(k >= 0, axis=-1, bitorder="little").swapaxes(1, 2)
        sides = np.abs(k).sum(-1)
        # without the factor, a key times its sign approximation is its squared norm
        far = RECENCY_DECAY * np.square(k).sum(-1) / np.where(sides > 0, sides, 1)
        step = steps[:, page_estimates.FAR_STEP] = far.max(-1) / MAX_DISTANCE
        np.copyto(self._far[:, index], np.rint(far / np.where(step > 0, step, 1)[:, None]), casting="unsafe")
        steps[:, page_estimates.VALUE_STEPS :] = _rounded(v.reshape(heads, CHUNKS, CHUNK, dim).mean(2), self._values[:, index])

    def attend(self, q: np.ndarray, position: int, blocks: np.ndarray, table: int, out: np.ndarray, end: int) -> None:
        """`LayerPages.compiled` for one token; pages [first, end) are on disk. The steps that depend on estimates run again when a recorded
        pass is replayed."""
        pages, ops, block = self._pages, self._pages.ops, self._block.copy()
        lead_rows, group = pages.spilled.lead, q.shape[1] // pages.layout.head_dim // pages.layout.kv_heads
        calls = pages.calls(q, position, blocks, table, out)
        if pages.by_page_slot is not None:
            calls[0][pages.by_page_slot] = 1
        picked = np.zeros(end - self._first, np.uint8)
        block[: page_estimates.E_TO + 1] = ops.address_of(q), pages.layout.kv_heads * group, len(blocks), self._first, end
        block[page_estimates.E_LEAD], block[page_estimates.E_PICKED] = lead_rows, address(picked)
        ops.keep_alive(block)
        ops.run(page_estimates.estimate_pages, address(block))
        pages.enqueue_rows(calls, 0, lead_rows, kernels=pages.decode_kernels[:1])
        pages.enqueue_rows(calls, lead_rows + end, len(blocks), kernels=pages.decode_kernels[:1])
        partials = ops.workspace.take("partials", pages.layout.kv_heads, len(blocks), group, pages.layout.head_dim + 2)
        ops.host_step(partial(self._read, _Step(partials, slice(lead_rows + self._first, lead_rows + end), lead_rows, picked, block,
                                              pages.rows_block(calls[0], lead_rows, lead_rows + self._first),
                                              pages.scattered(calls[0], blocks))))
        pages.enqueue_merge(calls)

    def _read(self, step: _Step) -> None:
        pages, run = self._pages, self._pages.ops.run
        chosen, likely = choose(step.partials, step.spilled_rows, min(pages.spilled.most, len(step.picked)), LEFT, step.lead_rows)
        step.picked[:] = 0
        step.picked[chosen] = 1
        read = [self._first + page for page in chosen]
        fetched = pages.spilled.fetch(read, len(step.picked))
        run(page_estimates.estimate_outputs, address(step.block))
        if self._first:
            run(pages.decode_kernels[-1], address(step.resident))
        pages.ops.flush()  # while the first pages are loaded
        for loaded in fetched:
            step.scattered.enqueue(loaded)
            pages.ops.flush()  # while further pages are loaded
        pages.spilled.prefetch([self._first + page for page in likely], read)


@dataclass(frozen=True)
class _Step:
    """One layer's work for a token, and for later tokens that see the same blocks."""

    partials: np.ndarray  # float32 [KVH, blocks, rows, D + 2]
    spilled_rows: slice  # rows of the block table whose pages are on disk
    lead_rows: int  # rows of the block table before page 0
    picked: np.ndarray  # uint8 per page on disk: is it read?
    block: np.ndarray  # argument block of the estimates
    resident: np.ndarray  # argument block of attention over pages in memory
    scattered: ScatteredPages  # attention over pages read from disk


def choose(partials: np.ndarray, disk: slice, limit: int, left: float, unknown: int) -> tuple[list[int], list[int]]:
    """(blocks of `disk` to read, at most `limit`, and those most likely needed next). Blocks from `unknown` up to `disk` are ignored, see
    `page_selection`. `partials`: float32 [KVH, blocks, rows, ... and (m, l)]."""
    kv_heads, blocks, rows, width = partials.shape
    order, scratch = np.empty(limit, np.int64), np.empty(room_floats(blocks, kv_heads * rows), np.float32)
    count = choose_blocks(address(partials), kv_heads, blocks, rows, width, unknown, disk.start, disk.stop, limit, left,
                          address(order), address(scratch))
    return order[:count].tolist(), order[count : count + max(0, min(limit - count, limit // 4))].tolist()


def _rounded(values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """float32 [..., D] as int8 in `out`; returns the scales."""
    step = np.abs(values).max(-1) / 127
    np.copyto(out, np.rint(values / np.where(step > 0, step, 1)[..., None]), casting="unsafe")
    return step
