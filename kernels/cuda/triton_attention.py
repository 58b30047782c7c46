"""Decode attention over raw pages in two Triton kernels: a partial per page as `attention.py` defines it, read in place, and a merge of all
of them."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..layout import F32, HEADER_NBYTES, PAGE, PageLayout
from .attention import MAX_EXPONENT

ROWS, CHANNELS = 16, 32  # tile sizes of products
PAGES_AT_ONCE = 16  # pages merged at once

_PAGE, _MOST_EXPONENT = tl.constexpr(PAGE), tl.constexpr(MAX_EXPONENT)
_NOTHING = tl.constexpr(float("-inf"))
_VARYING = ("tokens", "window", "pages")


@triton.jit
def _side(at, mask, HALVES: tl.constexpr):
    if HALVES:
        values = tl.load(at.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)
    else:
        values = tl.load(at.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    return values


@triton.jit(do_not_specialize=_VARYING)
def _partials(q, table, positions, exact, sealed, out, maxima_at, total, tokens, window, scale, cap, kv_heads, depth, nbytes, record_nbytes,
              header, side, GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, HALVES: tl.constexpr, CAPPED: tl.constexpr,
              PRECISION: tl.constexpr):
    """A page, a KV head and R of its queries: out [P, KVH, tokens * GROUP, depth], maxima_at and total [P, KVH, tokens * GROUP]."""
    page, head = tl.program_id(0), tl.program_id(1)
    # A row of the table: sealed, index, first position, count.
    is_sealed, index = tl.load(table + page * 4), tl.load(table + page * 4 + 1).to(tl.int64)
    first, count = tl.load(table + page * 4 + 2), tl.load(table + page * 4 + 3)
    item = 2 if HALVES else 4
    memory = exact
    if is_sealed != 0:
        memory = sealed
    record = memory + index * nbytes + head * record_nbytes + header
    row, channel, key = tl.program_id(2) * R + tl.arange(0, R), tl.arange(0, C), tl.arange(0, _PAGE)
    real, is_held = row < tokens * GROUP, key < count
    of_query = ((row // GROUP) * kv_heads + head) * GROUP + row % GROUP
    scores = tl.zeros([R, _PAGE], tl.float32)
    for begin in range(0, depth, C):
        at = begin + channel
        query = tl.load(q + of_query[:, None] * depth + at[None, :], mask=real[:, None] & (at < depth)[None, :], other=0.0)
        keys = _side(record + (at[:, None] * _PAGE + key[None, :]) * item, (at < depth)[:, None] & is_held[None, :], HALVES)
        scores = tl.dot(query * scale, keys, scores, input_precision=PRECISION)
    if CAPPED:
        scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
    position, there = tl.load(positions + row // GROUP, mask=real, other=0), first + key
    hidden = (there[None, :] > position[:, None]) | ~is_held[None, :] | ((window > 0) & (there[None, :] <= position[:, None] - window))
    scores = tl.where(hidden, _NOTHING, scores)
    m = tl.max(scores, 1)
    weights = tl.exp(scores - tl.where(m == _NOTHING, 0.0, m)[:, None])
    to = (page * kv_heads + head) * tokens * GROUP + row
    for begin in range(0, depth, C):
        at = begin + channel
        values = _side(record + side + (key[:, None] * depth + at[None, :]) * item, is_held[:, None] & (at < depth)[None, :], HALVES)
        o = tl.dot(weights, values, input_precision=PRECISION)
        tl.store(out + to.to(tl.int64)[:, None] * depth + at[None, :], o, mask=real[:, None] & (at < depth)[None, :])
    tl.store(maxima_at + to, m, mask=real)
    tl.store(total + to, tl.sum(weights, 1), mask=real)


@triton.jit(do_not_specialize=_VARYING)
def _merge(parts, maxima_at, total, sinks, out, pages, tokens, kv_heads, depth, GROUP: tl.constexpr, D: tl.constexpr,
           PAGES_AT_ONCE: tl.constexpr,
           SINKS: tl.constexpr):
    """One query: pages in order, then the attention sink; out [tokens, KVH * GROUP * depth]."""
    head, row, channel = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    rows, within = tokens * GROUP, channel < depth
    o = tl.zeros([D], tl.float32)
    l = 0.0  # noqa: E741
    top = _NOTHING
    for begin in range(0, pages, PAGES_AT_ONCE):
        page = begin + tl.arange(0, PAGES_AT_ONCE)
        real, at = page < pages, (page * kv_heads + head) * rows + row
        m = tl.load(maxima_at + at, mask=real, other=_NOTHING)
        then = tl.maximum(top, tl.max(m, 0))
        finite = tl.where(then == _NOTHING, 0.0, then)
        share, before = tl.exp(m - finite), tl.exp(top - finite)
        some = tl.load(parts + at.to(tl.int64)[:, None] * depth + channel[None, :], mask=real[:, None] & within[None, :], other=0.0)
        o = o * before + tl.sum(some * share[:, None], 0)
        l = l * before + tl.sum(tl.load(total + at, mask=real, other=0.0) * share, 0)  # noqa: E741
        top = then
    query = head * GROUP + row % GROUP
    if SINKS:
        l += tl.exp(tl.minimum(tl.load(sinks + query) - top, _MOST_EXPONENT))  # noqa: E741
    tl.store(out + ((row // GROUP) * kv_heads * GROUP + query) * depth + channel, o / l, mask=within)


@lru_cache
def precision(device: torch.device) -> str:
    """How float32 products keep float32 accuracy: as three TF32 products where the GPU supports it."""
    return "tf32x3" if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8 else "ieee"


def attend(q: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, exact: torch.Tensor, sealed: torch.Tensor, layout: PageLayout,
           scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """q [T, H * D] at `positions` int64 [T] over the pages of `table` int64 [P, 4], in uint8 memory with one part per page -> [T, H * D].
    """
    tokens, pages, heads, depth = len(q), len(table), layout.kv_heads, layout.head_dim
    group = q.shape[1] // (heads * depth)
    parts = torch.empty(pages, heads, tokens * group, depth, device=q.device)
    maxima, total = (torch.empty(pages, heads, tokens * group, device=q.device) for _ in range(2))
    _partials[pages, heads, triton.cdiv(tokens * group, ROWS)](
        q.contiguous(), table, positions, exact, sealed, parts, maxima, total, tokens, window or 0, scale, softcap or 0.0, heads, depth,
        layout.layer_page_nbytes, layout.record_nbytes, HEADER_NBYTES, layout.side_nbytes, GROUP=group, R=ROWS, C=CHANNELS,
        HALVES=layout.stored != F32, CAPPED=bool(softcap), PRECISION=precision(q.device), num_warps=4)
    out = torch.empty_like(q)
    _merge[heads, tokens * group](parts, maxima, total, q if sinks is None else sinks, out, pages, tokens, heads, depth, GROUP=group,
                                  D=triton.next_power_of_2(depth), PAGES_AT_ONCE=PAGES_AT_ONCE, SINKS=sinks is not None, num_warps=1)
    return out
