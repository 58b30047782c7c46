"""Attention over a table of page blocks on torch tensors: the definition of `kernels/cpu/attention.py`, many pages at once.

Each page yields a partial (o, m, l) per query row, m being the page's own maximum and l the sum of exp(s - m), all in float32. Partials
merge by exp(m - max), pages in order. The pages of a group are computed and merged together, group after group; the group size depends on
the shape alone, so results are a function of positions and device, not of where bytes are stored.

Shapes: P pages of 128 tokens, T queries, H heads in KVH groups of G, D head size; rows R = T * G within a KV head, token-major.
"""

from __future__ import annotations

import torch

from ..device_memory import MAX_SCORES
from ..layout import PAGE

MAX_EXPONENT = 88.0  # exp of a larger float32 overflows

Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # o [P, KVH, R, D], m [P, KVH, R, 1], l [P, KVH, R, 1]


def pages_at_once(heads: int, tokens: int) -> int:
    """Pages per group."""
    return max(1, MAX_SCORES // (heads * tokens * PAGE))


def hidden_keys(first: torch.Tensor, counts: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Mask, bool [P, T, 128]: keys that a query does not see, being unwritten, later than the query, or outside its window."""
    row = torch.arange(PAGE, device=first.device)
    at = (first[:, None] + row)[:, None]
    query = positions[None, :, None]
    hidden = (at > query) | (row >= counts[:, None])[:, None]
    return hidden | (at <= query - window) if window else hidden


def page_partials(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, scale: float,
                  softcap: float | None) -> Partial:
    """q [KVH, R, D] (or per page, [P, KVH, R, D]), keys and values [P, KVH, 128, D] float32, hidden [P, T, 128] -> a partial per page."""
    scores = torch.matmul(q * scale, keys.transpose(-1, -2))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    pages, tokens, _ = hidden.shape
    scores = scores.unflatten(2, (tokens, -1)).masked_fill_(hidden[:, None, :, None], -torch.inf).flatten(2, 3)
    m = scores.amax(-1, keepdim=True)
    # A page without visible keys has m = -inf and no weight; subtracting -inf from itself would give NaN.
    weights = torch.exp(scores - m.masked_fill(m == -torch.inf, 0.0))
    return torch.matmul(weights, values), m, weights.sum(-1, keepdim=True)


def merge(partial: Partial) -> Partial:
    """Merge pages along the first axis, in order, into one partial."""
    o, m, l = partial
    top = m.amax(0, keepdim=True)
    share = torch.exp(m - top.masked_fill(top == -torch.inf, 0.0))
    return (o * share).sum(0, keepdim=True), top, (l * share).sum(0, keepdim=True)


def rows_of(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """q [T, H, D] -> [KVH, R, D]."""
    tokens, heads, depth = q.shape
    return q.unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 0, 2, 3).reshape(kv_heads, -1, depth)


def block_partial(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: torch.Tensor, counts: torch.Tensor,
                  positions: torch.Tensor, scale: float, window: int | None, softcap: float | None) -> Partial:
    """A group's pages merged into one partial, [1, KVH, R, .]; rows beyond a page's count may hold anything, NaN included."""
    unwritten = torch.arange(PAGE, device=rows.device) >= counts[:, None]
    clean = values.float().masked_fill(unwritten[:, None, :, None], 0.0)
    return merge(page_partials(rows, keys.float(), clean, hidden_keys(first, counts, positions, window), scale, softcap))


def fold(merged: Partial | None, part: Partial) -> Partial:
    """Merge the next group into what was merged so far."""
    return part if merged is None else merge(tuple(torch.cat(pair) for pair in zip(merged, part)))


def finish(merged: Partial, tokens: int, kv_heads: int, sinks: torch.Tensor | None) -> torch.Tensor:
    """The output [T, H * D]; `sinks` [H]: logits that join the softmax after the last page and have no value."""
    o, m, l = merged
    group = o.shape[2] // tokens
    if sinks is not None:
        of_row = sinks.view(1, kv_heads, 1, group).expand(1, kv_heads, tokens, group).reshape(1, kv_heads, tokens * group, 1)
        l = l + torch.exp((of_row - m).clamp(max=MAX_EXPONENT))
    return (o / l)[0].unflatten(1, (tokens, group)).permute(1, 0, 2, 3).reshape(tokens, -1)


def merged_blocks(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: torch.Tensor, counts: torch.Tensor,
                  positions: torch.Tensor, scale: float, window: int | None, softcap: float | None) -> Partial:
    """q [T, H, D] at `positions` [T] over pages keys, values [P, KVH, 128, D] that hold `counts` [P] tokens from `first` [P], as one
    partial. Pages are in position order and may be 16-bit."""
    tokens, heads, _ = q.shape
    rows, step, merged = rows_of(q, keys.shape[1]), pages_at_once(heads, tokens), None
    for begin in range(0, len(keys), step):
        page = slice(begin, begin + step)
        part = block_partial(rows, keys[page], values[page], first[page], counts[page], positions, scale, window, softcap)
        merged = fold(merged, part)
    return merged


def closed_keys(positions: torch.Tensor, rate: int, first: int, end: int) -> torch.Tensor:
    """bool [T, end - first]: which compressed keys [first, end), of `rate` tokens each, are complete at each of these positions."""
    return torch.arange(first, end, device=positions.device) < ((positions + 1) // rate)[:, None]


def with_keys(merged: Partial, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, rate: int, scale: float,
              visible: torch.Tensor | None) -> Partial:
    """Merge into a one-head partial the compressed keys of `rate` tokens, keys [n, D], which double as values: the complete ones,
    restricted by `visible` bool [T, n] if given."""
    rows, step = rows_of(q, 1), PAGE * pages_at_once(q.shape[1], len(q))
    for begin in range(0, len(keys), step):
        keys_of_step = keys[begin : begin + step].float()[None, None]
        end = begin + keys_of_step.shape[2]
        hidden = ~closed_keys(positions, rate, begin, end)
        if visible is not None:
            hidden |= ~visible[:, begin:end]
        merged = fold(merged, page_partials(rows, keys_of_step, keys_of_step, hidden[None], scale, None))
    return merged


def attend_blocks(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: torch.Tensor, counts: torch.Tensor,
                  positions: torch.Tensor, scale: float, window: int | None, softcap: float | None,
                  sinks: torch.Tensor | None = None) -> torch.Tensor:
    """The output [T, H * D] of `merged_blocks`; `sinks` as for `finish`."""
    return finish(merged_blocks(q, keys, values, first, counts, positions, scale, window, softcap), len(q), keys.shape[1], sinks)
