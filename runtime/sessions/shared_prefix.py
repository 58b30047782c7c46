"""Prompts that begin as one does which another sequence of the same run has read: its pages are copied, as those of a saved session would
be restored (`session_prefix.py`, which says what may be lent, and with which bits). That is as quick as memory is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...kernels.layout import PAGE
from ..prefill_chunks import common_prefix
from .session_prefix import restorable_pages

if TYPE_CHECKING:
    from ..engine import Engine

WORTH = 2 * PAGE  # tokens that are waited for: fewer are soon read twice


def copy_prefix(engine: Engine, others: Sequence[Engine], ids: Sequence[int], held: int) -> tuple[int, list[str]]:
    """Put the longest beginning of `ids` that one of the others has read into the engine's cache, if that is more than the `held` tokens
    which it has. Returns how many tokens it holds then, and nothing to be told."""
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
    engine.hold(ids[:tokens], anew=tokens)
    return tokens, []


def _lends(engine: Engine) -> bool:
    """States stand behind the last token alone, and which pages a policy gave more bits is not copied."""
    return engine.borrows and engine.cache.states is None and not engine.cache.better


def _pages(engine: Engine, other: Engine, ids: Sequence[int]) -> int:
    """Pages of a prompt that another sequence can lend."""
    if other.choice != engine.choice:
        return 0
    cache, common = engine.cache, common_prefix(other.tokens, ids)
    pages = restorable_pages(engine, ids, common, max(0, min(common, other.anew) - cache.shape.sinks) // PAGE)
    while pages and (pages if cache.is_packed else cache.shape.sealed_at(cache.shape.sinks + PAGE * pages)) > other.cache.sealed:
        pages -= 1
    return pages


def is_being_prefilled(engine: Engine, others: Sequence[Engine], ids: Sequence[int]) -> bool:
    """Is one of the others about to read what this prompt begins with, so that waiting for it is quicker than reading it too?"""
    if not _lends(engine):
        return False
    known = common_prefix(engine.tokens, ids)
    alike = [other for other in others if other.reading and other.choice == engine.choice]
    return any(common_prefix(other.reading, ids) - max(known, len(other.tokens)) >= WORTH for other in alike)
