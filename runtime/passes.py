"""Several chunks of a prompt in one pass, as far as the working memory reaches; that is wider where every pass reads weights from the disk.

Chunks end on a fixed grid so that a result depends on positions alone. Where sealing a page changes no value, the grid is free, and what
is left of it is which kernel a chunk gets: a chunk of a few tokens is multiplied as tokens of an answer are. Such a chunk, at the
beginning or the end of a prompt, keeps a pass of its own; all others go together as far as the working memory reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from .. import DoesNotFit
from ..kernels.layout import PAGE
from ..kernels.tiles import ROWS
from ..offload.plan import Placement

if TYPE_CHECKING:
    from .cache import KVCache

FEW = ROWS  # most tokens that any kernel takes as tokens of an answer
DEARER = 1.1  # what may be streamed for every token so that a long prompt takes fewer passes
WIDTHS = (8, 4, 2)


def joined(chunks: Iterable[int], most: int) -> Iterator[int]:
    """Lengths of the passes for a prompt cut into `chunks`, at most `most` tokens each."""
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
    """Does a chunk of a prompt begin behind so many tokens, on the grid of chunks of `chunk` tokens?"""
    return tokens == 0 or (tokens - (sinks - PAGE)) % chunk == 0


def as_in_one_reading(cache: KVCache, tokens: int, chunk: int) -> bool:
    """Does a pass of `tokens` more, over what reading a prompt has left in `cache`, leave there what reading a longer prompt from its first
    token would? A few tokens go to another kernel; over packed pages it matters which ones are packed."""
    shape = cache.shape
    exact = cache.sealed == max(0, (cache.n - shape.window - shape.sinks) // PAGE)  # what is in the window is not packed yet
    return tokens > FEW and (not cache.is_packed or (exact and is_boundary(cache.n, shape.sinks, chunk)))


def widest(plan_for: Callable[[int], Placement], chunk: int) -> tuple[int, Placement]:
    """Tokens of a pass over a prompt, with the plan for it: `chunk`, or a multiple of it that costs an answer little.

    `plan_for` plans with working memory for so many tokens. Raises what it raises for `chunk`.
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
