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

FEW = ROWS  # passes of at most this many tokens may use decode kernels
MAX_READ_FACTOR = 1.1  # how much more weights may be read per token so that a long prompt takes fewer passes
PASS_MULTIPLES = (8, 4, 2)
MIN_SHIFT_CTX = 4  # the shortest context for which --overflow shift works
COMPARED_TOKENS = 4096  # per comparison of two slices


def context_overflow(count: int, n_ctx: int, model_limit: int) -> ContextOverflow:
    """The error for a prompt of `count` tokens in a context of `n_ctx`; `model_limit`: the longest context of the model."""
    raise_hint = "" if n_ctx >= model_limit else " raise -c,"
    return ContextOverflow(f"the prompt has {count} token{'' if count == 1 else 's'} and the context holds {n_ctx}",
                           f"shorten it,{raise_hint} or --overflow shift to drop the middle")


def chunk_lengths(at: int, end: int, sinks: int, span: int) -> Iterator[int]:
    """Lengths of the chunks for tokens `at` to `end`. All but the last end on a fixed grid of page boundaries, `span` tokens apart."""
    offset = (sinks - PAGE) % span
    while at < end:
        stop = min(end, at + span - (at - offset) % span)
        yield stop - at
        at = stop


def join_chunks(chunks: Iterable[int], max_tokens: int) -> Iterator[int]:
    """Lengths of the passes for a prompt split into `chunks`, at most `max_tokens` tokens each."""
    joined = 0
    for tokens in chunks:
        if joined and (tokens <= FEW or joined + tokens > max_tokens):
            yield joined
            joined = 0
        if tokens <= FEW:
            yield tokens
        else:
            joined += tokens
    if joined:
        yield joined


def is_boundary(tokens: int, sinks: int, chunk: int) -> bool:
    """Is this a chunk boundary of the prefill grid?"""
    return tokens == 0 or (tokens - (sinks - PAGE)) % chunk == 0


def same_as_uncached(cache: KVCache, tokens: int, chunk: int, copied_from: int | None = None) -> bool:
    """Does prefilling `tokens` more on top of `cache` give the same result as prefilling the whole prompt from its first token?

    A short pass uses other kernels, and one shorter than `copied_from` computes host layers on another device. With packed pages it also
    matters which pages are packed at the time."""
    sinks = cache.shape.sinks
    return (tokens > FEW and _same_kernels_as_whole_chunks(cache.n, cache.n + tokens, tokens, sinks, chunk, copied_from)
            # exactly the pages that are packed when an uncached prefill begins this chunk
            and (not cache.is_packed or cache.sealed == cache.shape.sealed_at(_chunk_begin(cache.n, sinks, chunk))))


def _chunk_begin(at: int, sinks: int, chunk: int) -> int:
    """Where the chunk begins that contains token `at`."""
    return max(0, at - (at - (sinks - PAGE)) % chunk)


def _same_kernels_as_whole_chunks(begin: int, end: int, tokens: int, sinks: int, chunk: int, copied_from: int | None) -> bool:
    """Do [begin, end), in a pass of `tokens`, use the same kernels and device as the whole chunks they belong to?"""
    at, offset = begin, (sinks - PAGE) % chunk
    while copied_from is not None and at < end:
        stop = at + chunk - (at - offset) % chunk
        if (tokens >= copied_from) != (stop - max(0, stop - chunk) >= copied_from):
            return False
        at = stop
    return True


def resumes_alike(held: int, tokens: int, sinks: int, chunk: int, copied_from: int | None) -> bool:
    """Does resuming at `held` of `tokens`, with an unpacked cache cut from a longer prompt, give the same result as prefilling all of them?

    The last tokens may use another kernel, and either part another device, than the whole chunk it belongs to."""
    if tokens - held <= FEW and not is_boundary(held, sinks, chunk):
        return False
    if copied_from is None:
        return True
    whole, rest = (list(_pass_spans(at, tokens, sinks, chunk)) for at in (0, held))
    return (all(_same_kernels_as_whole_chunks(begin, min(end, held), end - begin, sinks, chunk, copied_from) for begin, end in whole)
            and all((end - begin >= copied_from) == (stop - start >= copied_from)
                    for begin, end in rest for start, stop in whole if start < end and begin < stop))


def reusable_tokens(cache: KVCache, held: Sequence[int], ids: Sequence[int], num_fresh: int, chunk: int) -> int:
    """How many tokens of the prompt `ids` can be reused from a cache that holds `held`; at least one is left to run.

    The first `num_fresh` of `held` come from one prefill. If the reused tokens are among them, the rest is run with the same kernels as
    an uncached prefill would use: a few tokens at the end of a long chunk would otherwise get the decode kernels, whose rounding differs,
    with low-bit weights so much that a repeated prompt got another answer. A few tokens at the beginning of a chunk are re-run if it is
    unknown which kernel they used, or if the whole chunk is short."""
    common, sinks = min(common_prefix(held, ids), len(ids) - 1, cache.resumable), cache.shape.sinks
    begin, end = _chunk_begin(common, sinks, chunk), common + next(chunk_lengths(common, len(ids), sinks, chunk))
    if common <= num_fresh and end - begin > FEW:
        reused = min(common, max(begin, end - FEW - 1))
    else:
        reused = begin if begin <= num_fresh and common - begin <= FEW else common
    return reused if cache.reachable_length(reused) == reused else common


def _pass_spans(at: int, end: int, sinks: int, chunk: int) -> Iterator[tuple[int, int]]:
    """The passes over tokens `at` to `end`."""
    for tokens in join_chunks(chunk_lengths(at, end, sinks, chunk), chunk):
        yield at, at + tokens
        at += tokens


def widest_prefill(plan_for: Callable[[int], Placement], chunk: int) -> tuple[int, Placement]:
    """(tokens of a prefill pass, the plan for it): the largest multiple of `chunk` that slows decoding little.

    `plan_for` takes the tokens of a pass and returns a plan with workspace for them. Raises what it raises for `chunk`.
    """
    base = plan_for(chunk)
    if not base.expert_slots and (base.residency is None or not base.residency.streamed):
        return chunk, base
    for multiple in PASS_MULTIPLES:
        if multiple * chunk > -(-base.ctx // PAGE) * PAGE:
            continue
        try:
            wider = plan_for(multiple * chunk)
        except DoesNotFit:
            continue
        if base.expert_slots:
            is_slower = base.expert_slots > MAX_READ_FACTOR * wider.expert_slots
        else:
            base_reads, wider_reads = (placement.streamed_bytes + placement.kv_disk_bytes for placement in (base, wider))
            is_slower = wider_reads > MAX_READ_FACTOR * base_reads
        if wider.ctx == base.ctx and not is_slower:
            return multiple * chunk, wider
    return chunk, base


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix. Slices are compared, since this runs several times per request with 100,000 tokens."""
    for begin in range(0, min(len(a), len(b)), COMPARED_TOKENS):
        x, y = a[begin : begin + COMPARED_TOKENS], b[begin : begin + COMPARED_TOKENS]
        if type(x) is not type(y):
            x, y = [*x], [*y]
        if x != y:
            return begin + next((i for i, (one, other) in enumerate(zip(x, y)) if one != other), min(len(x), len(y)))
    return min(len(a), len(b))
