"""Attention for one token that reads few of the pages on the disk and estimates the others.

Every page that goes to the disk leaves an abstract in memory. A token first gives every such page the partial that its abstract promises
(`kv_estimate.py`); what share of the attention each then has says which are worth reading, and those get their true partials. The rest
stays as estimated, so nothing is dropped. Pages that a prompt's chunk sees are all read, and those of a layer with a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from ..layout import PAGE
from ..workspace import address
from . import kv_estimate
from .inner_loops import TILE_COLUMNS
from .kv_estimate import CHUNK, CHUNKS

if TYPE_CHECKING:
    from .pages import LayerPages, SomePages

LEFT = 0.002  # of a head's attention: when the pages not read have no more than this between them, no more are read
FARTHEST = 255
# Of the distance at which scores are right in the mean. The mean of their exponentials is then too large, by the half of what they err
# squared; at 2 / pi, the nearest point, keys that are looked up stand out too little.
NEARER = 0.8


def abstract_nbytes(kv_heads: int, head_dim: int) -> int:
    """Memory for the abstract of a page of one layer."""
    return kv_heads * ((kv_estimate.SIDE_NBYTES + 1 + CHUNKS) * head_dim + PAGE + 4 * kv_estimate.STEP_SLOTS)


def basis_nbytes(head_dim: int) -> int:
    """Memory for the basis of keys, which all layers share."""
    return 4 * head_dim * (head_dim + -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS)


@cache
def key_basis(head_dim: int) -> np.ndarray:
    """float32 [D, D], orthogonal: every direction of it mixes all channels, so that no few of them decide on which side a key lies."""
    normal = np.random.default_rng(0).standard_normal((head_dim, head_dim))
    return np.linalg.qr(normal)[0].astype(np.float32)


@cache
def _turning(head_dim: int) -> np.ndarray:
    """The basis with rows as wide as the kernels' tiles ask for."""
    return np.pad(key_basis(head_dim), ((0, 0), (0, -head_dim % TILE_COLUMNS)))


class Selective:
    """One layer's abstracts, in `memory` for pages from `first` on: uint8 `[pages * abstract_nbytes]` that begins on a cache line.
    `turn` [KVH, D, D] brings values into the basis in which the layer's pages are merged; None where that is their own."""

    def __init__(self, pages: LayerPages, memory: np.ndarray, first: int, turn: np.ndarray | None) -> None:
        self._pages, self._first, self._turn = pages, first, turn
        heads, dim = pages.layout.kv_heads, pages.layout.head_dim
        count, at = len(memory) // abstract_nbytes(heads, dim), 0
        parts = []
        for shape, kind in (((kv_estimate.STEP_SLOTS,), np.float32), ((dim, kv_estimate.SIDE_NBYTES), np.uint8), ((PAGE,), np.uint8),
                            ((dim,), np.int8), ((CHUNKS, dim), np.int8)):
            nbytes = count * heads * int(np.prod(shape)) * np.dtype(kind).itemsize
            parts.append(memory[at : at + nbytes].view(kind).reshape(count, heads, *shape))
            at += nbytes
        self._steps, self._sides, self._far, self._means, self._values = parts
        self._basis = key_basis(dim)
        block = self._block = np.zeros(kv_estimate.ESTIMATE_SLOTS, np.int64)
        block[kv_estimate.E_KV_HEADS : kv_estimate.E_FIRST + 1] = heads, dim, first
        block[kv_estimate.E_PARTIALS : kv_estimate.E_TURN + 1] = (
            pages.ops.partials, address(self._sides), address(self._far), address(self._means), address(self._values),
            address(self._steps), address(_turning(dim)))
        block[kv_estimate.E_SCRATCH : kv_estimate.E_SCRATCH_STRIDE + 1] = pages.ops.scratch, pages.ops.scratch_stride
        block.view(np.float64)[[kv_estimate.E_SCALE, kv_estimate.E_SOFTCAP]] = pages.scale, pages.softcap or 0.0

    def note(self, page: int, k: np.ndarray, v: np.ndarray) -> None:
        """Make the abstract of a page from its keys and values, [PAGE, KVH, D]."""
        k, v = (side.astype(np.float32).swapaxes(0, 1) for side in (k, v))
        v = v if self._turn is None else v @ self._turn
        heads, _, dim = k.shape
        k = k @ self._basis
        place, steps = page - self._first, self._steps[page - self._first]
        means = self._means[place]
        step = steps[:, kv_estimate.MEAN_STEP] = _rounded(k.mean(1), means)
        k -= step[:, None, None] * means[:, None]
        self._sides[place] = np.packbits(k.swapaxes(1, 2) >= 0, axis=-1, bitorder="little")
        sides = np.abs(k).sum(-1)
        far = NEARER * np.square(k).sum(-1) / np.where(sides > 0, sides, 1)  # without NEARER, a key times what stands for it is its square
        step = steps[:, kv_estimate.FAR_STEP] = far.max(-1) / FARTHEST
        np.copyto(self._far[place], np.rint(far / np.where(step > 0, step, 1)[:, None]), casting="unsafe")
        steps[:, kv_estimate.VALUE_STEPS :] = _rounded(v.reshape(heads, CHUNKS, CHUNK, dim).mean(2), self._values[place])

    def attend(self, q: np.ndarray, position: int, blocks: np.ndarray, table: int, out: np.ndarray, end: int) -> None:
        """`LayerPages.compiled` for one token; pages [first, end) are on the disk. What depends on the estimates is done anew when a
        recorded pass comes again."""
        pages, ops, block = self._pages, self._pages.ops, self._block.copy()
        lead, group = pages.spilled.lead, q.shape[1] // pages.layout.head_dim // pages.layout.kv_heads
        calls = pages.calls(q, position, blocks, table, out)
        if pages.by_page is not None:
            calls[0][pages.by_page] = 1
        block[: kv_estimate.E_TO + 1] = ops.at(q), pages.layout.kv_heads * group, len(blocks), self._first, end
        block[kv_estimate.E_LEAD] = lead
        ops.run(kv_estimate.estimate_pages, address(block), True, block)
        partials = ops.workspace.take("partials", pages.layout.kv_heads, len(blocks), group, pages.layout.head_dim + 2)
        step = _Step(partials, slice(lead + self._first, lead + end), pages.some(calls[0], blocks))
        pages.turn(calls, 0, lead + self._first)
        pages.turn(calls, lead + end, len(blocks))
        ops.between(partial(self._read, step))
        pages.merged(calls)

    def _read(self, step: _Step) -> None:
        share = shares(step.partials)[step.disk]
        wanted, likely = choose(share, self._pages.spilled.most, LEFT)
        for come in self._pages.spilled.fetch([self._first + each for each in wanted], len(share)):
            step.some.note(come)
            self._pages.ops.flush()  # while others come
        self._pages.spilled.prefetch([self._first + each for each in likely], [self._first + each for each in wanted])


@dataclass(frozen=True)
class _Step:
    """What a token, and those after it that see the same blocks, do in a layer: `partials` float32 [KVH, blocks, rows, D + 2], which blocks
    are on the `disk`, and what attends to `some` of those."""

    partials: np.ndarray
    disk: slice
    some: SomePages


def shares(partials: np.ndarray) -> np.ndarray:
    """Of every row's attention, what each of the blocks has, [blocks, KVH * rows], from partials [KVH, blocks, rows, ... and (m, l)]."""
    m, l = (partials[..., at].swapaxes(0, 1).reshape(partials.shape[1], -1) for at in (-2, -1))
    with np.errstate(divide="ignore"):
        mass = m + np.log(l)
    share = np.exp(mass - mass.max(0))
    return share / share.sum(0)


def choose(share: np.ndarray, most: int, left: float) -> tuple[list[int], list[int]]:
    """Which blocks to read, and which come next: of shares [blocks, rows] those with the largest sums of roots (what many rows see a little
    of counts beside what one sees alone), until no row has more than `left` in the others; at most `most` of them."""
    total, order = share.sum(0), np.argsort(-np.sqrt(share).sum(1), kind="stable")[:most]
    if total.max() <= left:
        count = 0
    else:
        rest = total - np.cumsum(share[order], 0)  # after so many more
        enough = np.nonzero(rest.max(1) <= left)[0]
        count = int(enough[0]) + 1 if len(enough) else len(order)
    return order[:count].tolist(), order[count : count + max(0, min(most - count, most // 4))].tolist()


def _rounded(values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """float32 [..., D] as int8 in `out`; returns what they count in."""
    step = np.abs(values).max(-1) / 127
    np.copyto(out, np.rint(values / np.where(step > 0, step, 1)[..., None]), casting="unsafe")
    return step
