"""Prefix sharing between sequences of one run: pages of a common prefix are copied in memory, under the same rules as for saved sessions
(`session_prefix.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...kernels.layout import PAGE
from ..prefill_chunks import common_prefix
from .session_prefix import restorable_pages

if TYPE_CHECKING:
    from ..engine import Engine

WORTH = 2 * PAGE  # tokens worth waiting for: fewer are quickly computed twice


def copy_prefix(engine: Engine, others: Sequence[Engine], ids: Sequence[int], held: int) -> tuple[int, list[str]]:
    """Copy the longest prefix of `ids` that another sequence has prefilled, if longer than the `held` tokens in the engine's cache. Returns
    the tokens then held, and an empty message."""
    cache, lender, most = engine.cache, None, 0
    if not _lends(engine):
        return held, []
    for other in others:
        if (pages := _pages(engine, other, ids)) > most:
            lender, most = other, pages
    tokens = cache.shape.sinks + PAGE * most
    if lender is None or tokens <= held:
        return held, []
    try:
        engine.reset()
        cache.adopt(tokens, most if cache.is_packed else cache.shape.sealed_at(tokens))
        for page in [*(page for page, _ in cache.exact_blocks()), *range(cache.sealed)]:
            cache.write(page, lender.cache.read(page))
    except BaseException:
        engine.reset()
        raise
    engine.set_tokens(ids[:tokens], num_fresh_tokens=tokens)
    return tokens, []


def _lends(engine: Engine) -> bool:
    """Whether pages can be shared: recurrent states exist only after the last token, and a policy's choice of upgraded pages is not
    copied."""
    return engine.may_share_prefix and engine.cache.states is None and not engine.cache.upgraded_codecs


def _pages(engine: Engine, other: Engine, ids: Sequence[int]) -> int:
    """How many pages of a prompt another sequence can provide."""
    if other.adapter_scales != engine.adapter_scales:
        return 0
    cache, common = engine.cache, common_prefix(other.tokens, ids)
    pages = restorable_pages(engine, ids, common, max(0, min(common, other.num_fresh_tokens) - cache.shape.sinks) // PAGE)
    while pages and (pages if cache.is_packed else cache.shape.sealed_at(cache.shape.sinks + PAGE * pages)) > other.cache.sealed:
        pages -= 1
    return pages


def is_being_prefilled(engine: Engine, others: Sequence[Engine], ids: Sequence[int]) -> bool:
    """Whether another sequence is about to prefill this prompt's prefix, so that waiting for it is faster than doing it too."""
    if not _lends(engine):
        return False
    known = common_prefix(engine.tokens, ids)
    alike = [other for other in others if other.pending_prompt and other.adapter_scales == engine.adapter_scales]
    return any(common_prefix(other.pending_prompt, ids) - max(known, len(other.tokens)) >= WORTH for other in alike)
