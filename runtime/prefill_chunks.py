"""Chunked prefill: the fixed grid of chunks, and joining several chunks in one pass as far as the workspace allows, which is larger where
every pass streams weights from disk.

Chunks end on a fixed grid so that results depend on positions alone. Where sealing a page is lossless the grid does not matter, only which
kernel a chunk gets: a chunk of a few tokens uses the decode kernels. Such a chunk, at the beginning or the end of a prompt, keeps a pass of
its own; the others are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .. import ContextOverflow, DoesNotFit
from ..kernels.layout import PAGE
from ..kernels.tiles import ROWS
from ..offload.placement import Placement

if TYPE_CHECKING:
    from .cache import KVCache

FEW = ROWS  # most tokens that any kernel takes as tokens of an answer
DEARER = 1.1  # what may be streamed for every token so that a long prompt takes fewer passes
WIDTHS = (8, 4, 2)
SHORTEST = 4  # tokens of a context in which the middle of a prompt can be dropped
PIECE = 4096  # tokens that are compared at once


def context_overflow(count: int, n_ctx: int, most: int) -> ContextOverflow:
    """The ContextOverflow for a prompt of `count` tokens in a context of `n_ctx`, for a model with at most `most`."""
    more = "" if n_ctx >= most else " raise -c,"
    return ContextOverflow(f"the prompt has {count} token{'' if count == 1 else 's'} and the context holds {n_ctx}",
                           f"shorten it,{more} or --overflow shift to drop the middle")


def chunk_lengths(at: int, end: int, sinks: int, span: int) -> Iterator[int]:
    """Lengths of the chunks for tokens `at` to `end`. All but the last end on a fixed grid of page boundaries, `span` tokens apart."""
    offset = (sinks - PAGE) % span
    while at < end:
        stop = min(end, at + span - (at - offset) % span)
        yield stop - at
        at = stop


def join_chunks(chunks: Iterable[int], most: int) -> Iterator[int]:
    """Lengths of the passes for a prompt split into `chunks`, at most `most` tokens each."""
    waiting = 0
    for tokens in chunks:
        if waiting and (tokens <= FEW or waiting + tokens > most):
            yield waiting
            waiting = 0
        if tokens <= FEW:
            yield tokens
        else:
            waiting += tokens
    if waiting:
        yield waiting


def is_boundary(tokens: int, sinks: int, chunk: int) -> bool:
    """Is this a chunk boundary of the prefill grid?"""
    return tokens == 0 or (tokens - (sinks - PAGE)) % chunk == 0


def same_as_uncached(cache: KVCache, tokens: int, chunk: int, copied_from: int | None = None) -> bool:
    """Does prefilling `tokens` more on top of `cache` give the same result as prefilling a longer prompt from its first token? A short
    pass uses other kernels, and one shorter than `copied_from` another device for layers that are copied to it; with packed pages it
    matters which are packed."""
    sinks = cache.shape.sinks
    return (tokens > FEW and _as_long_chunks(cache.n, cache.n + tokens, tokens, sinks, chunk, copied_from)
            # no more is packed than where the chunk began
            and (not cache.is_packed or cache.sealed == cache.shape.sealed_at(_begin(cache.n, sinks, chunk))))


def _begin(at: int, sinks: int, chunk: int) -> int:
    """Where the chunk begins that contains token `at`."""
    return max(0, at - (at - (sinks - PAGE)) % chunk)


def _as_long_chunks(begin: int, end: int, tokens: int, sinks: int, chunk: int, copied_from: int | None) -> bool:
    """Do [begin, end), in a pass of `tokens`, use the same kernels and device as the whole chunks they belong to?"""
    at, offset = begin, (sinks - PAGE) % chunk
    while copied_from is not None and at < end:
        stop = at + chunk - (at - offset) % chunk
        if (tokens >= copied_from) != (stop - max(0, stop - chunk) >= copied_from):
            return False
        at = stop
    return True


def resumes_alike(held: int, tokens: int, sinks: int, chunk: int, copied_from: int | None) -> bool:
    """Does an unpacked cache with the first `held` of `tokens`, from a longer prompt, lead to the same result as prefilling all of them?
    Their end may use another kernel, and either part another device, than the chunk it is cut from."""
    if tokens - held <= FEW and not is_boundary(held, sinks, chunk):
        return False
    if copied_from is None:
        return True
    whole, rest = (list(_spans(at, tokens, sinks, chunk)) for at in (0, held))
    return (all(_as_long_chunks(begin, min(end, held), end - begin, sinks, chunk, copied_from) for begin, end in whole)
            and all((end - begin >= copied_from) == (stop - start >= copied_from)
                    for begin, end in rest for start, stop in whole if start < end and begin < stop))


def reusable_tokens(cache: KVCache, held: Sequence[int], ids: Sequence[int], anew: int, chunk: int) -> int:
    """How many tokens of the prompt `ids` can be reused from a cache that holds `held`; at least one is left to run. If the reused
    tokens come from one prefill (the first `anew`), the rest is run with the same kernels as an uncached prefill would: a few tokens at
    the end of a long chunk would use the decode kernels, whose rounding differs, with low-bit weights so much that a repeated prompt got
    another answer. A few tokens at the beginning of a chunk are re-run if it is unknown which kernel they used, or if the whole chunk is
    short."""
    known, sinks = min(common_prefix(held, ids), len(ids) - 1, cache.lasting), cache.shape.sinks
    begin, end = _begin(known, sinks, chunk), known + next(chunk_lengths(known, len(ids), sinks, chunk))
    if known <= anew and end - begin > FEW:
        back = min(known, max(begin, end - FEW - 1))
    else:
        back = begin if begin <= anew and known - begin <= FEW else known
    return back if cache.reach(back) == back else known


def _spans(at: int, end: int, sinks: int, chunk: int) -> Iterator[tuple[int, int]]:
    """The passes over tokens `at` to `end`."""
    for tokens in join_chunks(chunk_lengths(at, end, sinks, chunk), chunk):
        yield at, at + tokens
        at += tokens


def widest(plan_for: Callable[[int], Placement], chunk: int) -> tuple[int, Placement]:
    """(tokens of a prefill pass, the plan for it): `chunk`, or a multiple of it that slows decoding little.

    `plan_for` plans with a workspace for so many tokens. Raises what it raises for `chunk`.
    """
    base = plan_for(chunk)
    if not base.expert_slots and (base.residency is None or not base.residency.streamed):
        return chunk, base
    for times in WIDTHS:
        if times * chunk > -(-base.ctx // PAGE) * PAGE:
            continue
        try:
            wider = plan_for(times * chunk)
        except DoesNotFit:
            continue
        cost, wide = (each.streamed_bytes + each.kv_disk_bytes for each in (base, wider))
        dearer = base.expert_slots > DEARER * wider.expert_slots if base.expert_slots else wide > DEARER * cost
        if wider.ctx == base.ctx and not dearer:
            return times * chunk, wider
    return chunk, base


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix. It is asked several times per request for 100,000 tokens, so slices are compared."""
    for begin in range(0, min(len(a), len(b)), PIECE):
        x, y = a[begin : begin + PIECE], b[begin : begin + PIECE]
        if type(x) is not type(y):
            x, y = [*x], [*y]
        if x != y:
            return begin + next((i for i, (one, other) in enumerate(zip(x, y)) if one != other), min(len(x), len(y)))
    return min(len(a), len(b))
