"""Prefix sharing between sequences of one run: pages of a common prefix are copied in memory, by the rules of `session_prefix.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...kernels.layout import PAGE
from ..prefill_chunks import common_prefix
from .session_prefix import restorable_pages

if TYPE_CHECKING:
    from ..engine import Engine

MIN_SHARED_TOKENS = 2 * PAGE  # minimum worth waiting for: fewer are prefilled twice in no time


def copy_prefix(engine: Engine, others: Sequence[Engine], ids: Sequence[int], num_cached: int) -> tuple[int, list[str]]:
    """Copy the longest prefix of `ids` that another sequence has prefilled, if longer than the `num_cached` tokens in the engine's cache.
    Returns the number of tokens then in the cache, and no messages."""
    cache, source, most_pages = engine.cache, None, 0
    if not _can_share(engine):
        return num_cached, []
    for other in others:
        if (pages := _num_shared_pages(engine, other, ids)) > most_pages:
            source, most_pages = other, pages
    tokens = cache.shape.sinks + PAGE * most_pages
    if source is None or tokens <= num_cached:
        return num_cached, []
    try:
        engine.reset()
        cache.adopt(tokens, most_pages if cache.is_packed else cache.shape.sealed_at(tokens))
        for page in [*(page for page, _ in cache.exact_blocks()), *range(cache.sealed)]:
            cache.write(page, source.cache.read(page))
    except BaseException:
        engine.reset()
        raise
    engine.set_tokens(ids[:tokens], num_fresh_tokens=tokens)
    return tokens, []


def _can_share(engine: Engine) -> bool:
    """Whether pages can be shared: recurrent states exist only after the last token, and a policy's choice of upgraded pages is not
    copied."""
    return engine.may_share_prefix and engine.cache.states is None and not engine.cache.upgraded_codecs


def _num_shared_pages(engine: Engine, other: Engine, ids: Sequence[int]) -> int:
    """The number of pages of a prompt that another sequence can provide."""
    if other.adapter_scales != engine.adapter_scales:
        return 0
    cache, common = engine.cache, common_prefix(other.tokens, ids)
    pages = restorable_pages(engine, ids, common, max(0, min(common, other.num_fresh_tokens) - cache.shape.sinks) // PAGE)
    while pages and (pages if cache.is_packed else cache.shape.sealed_at(cache.shape.sinks + PAGE * pages)) > other.cache.sealed:
        pages -= 1
    return pages


def is_being_prefilled(engine: Engine, others: Sequence[Engine], ids: Sequence[int]) -> bool:
    """Whether another sequence is about to prefill this prompt's prefix, so that waiting for it is faster than doing it too."""
    if not _can_share(engine):
        return False
    num_known = common_prefix(engine.tokens, ids)
    prefilling = [other for other in others if other.pending_prompt and other.adapter_scales == engine.adapter_scales]
    return any(common_prefix(other.pending_prompt, ids) - max(num_known, len(other.tokens)) >= MIN_SHARED_TOKENS for other in prefilling)
