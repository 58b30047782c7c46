"""Prefix reuse across sessions: prompts that share a prefix with any saved session restore its pages instead of prefilling them.

The names of the page files are the index: each begins with the key of all tokens up to the page's end, so finding the length of the known
prefix takes one directory lookup per page, and a miss opens no file. Then the session that the pages belong to is searched, newest first;
a session file that does not mention the key is not parsed.

Only what prefilling again would produce is reused: pages of a prompt, computed by the same kernels on the same devices
(`SavedCache.num_fresh_tokens`). Pages of an answer were computed one token at a time, which rounds differently, as may a pass too short to
copy layers to a GPU.

With an unpacked cache, logits are then bit-identical to those of a full prefill. With packed pages, the newest common tokens are prefilled
again, a window of them and up to a page more, with everything before them packed. That is the state after `KVCache.truncate` drops sealed
pages, so results are those of a process that prefilled the session's prompt and then had to truncate. A process without need to truncate
has exact tokens up to the end of the common prefix, which a session cannot provide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from ... import EffllmError
from ...kernels.layout import PAGE
from ...offload.direct_io import Interrupted
from ...offload.page_file import DamagedPage
from ..engine import Engine
from ..prefill_chunks import common_prefix, resumes_alike
from .saved_cache import kernel_identity, page_keys, put_exact, put_page
from .session_format import SavedCache, SavedSession
from .session_name import rm_command
from .session_store import SessionStore


def restore_prefix(engine: Engine, store: SessionStore, identity: Mapping[str, object], ids: Sequence[int],
                   num_cached: int) -> tuple[int, list[str]]:
    """Restore the longest prefix of `ids` that a session with this identity has, if longer than the `num_cached` tokens in the engine's
    cache. Returns the number of tokens then in the cache, and messages. From a damaged page on, the prompt is prefilled."""
    sinks, max_pages = engine.cache.shape.sinks, restorable_pages(engine, ids, len(ids))
    if engine.cache.states is not None:  # sessions have no states at page ends
        return num_cached, []
    if max_pages < 1 or sinks + PAGE * max_pages <= num_cached:
        return num_cached, []
    keys = page_keys(identity, ids, sinks, max_pages)
    try:
        with store.reading():
            num_found = sum(1 for _ in takewhile(store.has_page, keys[1:]))
            session, pages = _find_longest(engine, store, identity, ids, keys[: num_found + 1])
            if session is None or sinks + PAGE * pages <= num_cached:
                return num_cached, []
            return _restore(engine, store, session, ids, pages)
    except OSError:  # a folder that cannot be read provides nothing
        return min(num_cached, engine.cache.n), []


def restorable_pages(engine: Engine, ids: Sequence[int], common: int, max_pages: int | None = None) -> int:
    """The number of pages of a prompt that can come from a session with the same first `common` tokens, at most `max_pages`. At least one
    token is left to prefill."""
    shape, packed = engine.cache.shape, engine.cache.is_packed
    pages = max(0, (min(common, len(ids) - 1) - shape.sinks - shape.window * packed) // PAGE)
    pages = pages if max_pages is None else min(pages, max_pages)
    while pages and not packed and not resumes_alike(shape.sinks + PAGE * pages, len(ids), shape.sinks, engine.prepared.chunk,
                                                     engine.model.copied_from):
        pages -= 1
    return pages


def _find_longest(engine: Engine, store: SessionStore, identity: Mapping[str, object], ids: Sequence[int],
                  keys: Sequence[str]) -> tuple[SavedSession | None, int]:
    """The session that provides most pages of these `keys`, of which the first is the sinks', and the number of pages."""
    best, most_pages, kernels = None, 0, kernel_identity(engine)
    for name in store.newest() if len(keys) > 1 else ():
        if most_pages + 1 == len(keys):
            break
        try:
            session = store.read(name, mentions=keys[most_pages + 1])
        except EffllmError:  # reported when it is loaded by name
            continue
        if session is None or session.cache is None or session.cache.identity != identity or session.cache.kernel_identity != kernels:
            continue
        if (pages := _num_reusable_pages(engine, session.cache, ids, keys)) > most_pages:
            best, most_pages = session, pages
    return best, most_pages


def _num_reusable_pages(engine: Engine, cache: SavedCache, ids: Sequence[int], keys: Sequence[str]) -> int:
    """The number of pages that a session provides to a prompt with these page keys."""
    common, sinks = common_prefix(cache.tokens, ids), engine.cache.shape.sinks
    if sinks and (cache.sinks is None or cache.sinks.key != keys[0]):
        return 0
    num_matching = sum(1 for _ in takewhile(lambda pair: pair[0].key == pair[1], zip(cache.pages, keys[1:])))
    return restorable_pages(engine, ids, common, min(num_matching, max(0, cache.num_fresh_tokens - sinks) // PAGE))


def _restore(engine: Engine, store: SessionStore, session: SavedSession, ids: Sequence[int], pages: int) -> tuple[int, list[str]]:
    """Restore a session's first pages, up to the first damaged one. On failure the cache is empty."""
    notices: list[str] = []
    try:
        while pages > 0:
            tokens = engine.cache.shape.sinks + PAGE * pages
            num_valid, damage = _load_pages(engine, store, session.cache, tokens, pages)
            if num_valid == pages:
                engine.set_tokens(ids[:tokens], num_fresh_tokens=tokens)
                return tokens, [*notices, f"{tokens} tokens of the prompt restored from session {session.name}"]
            notices = [f"session {session.name} is damaged: {damage}; the prompt is recomputed from there on"
                       f" ({rm_command(session.name, more='--cache')})"]
            pages = restorable_pages(engine, ids, len(ids), num_valid)
    except (EffllmError, Interrupted):  # the prefill meets the same error and reports it
        pages = 0
    except BaseException:
        engine.reset()
        raise
    engine.reset()
    return 0, notices


def _load_pages(engine: Engine, store: SessionStore, saved: SavedCache, tokens: int, pages: int) -> tuple[int, str]:
    """Load pages into an empty cache. Returns the number of valid pages, and what is wrong with the next one; 0 pages if the sinks are
    damaged. Unpacked pages that reach into the window are exact there, as after a prefill."""
    page, cache = 0, engine.cache
    engine.reset()
    cache.adopt(tokens, pages if cache.is_packed else cache.shape.sealed_at(tokens))
    try:
        put_exact(engine, store, saved.sinks, [block for block in cache.exact_blocks() if block[0] < 0])
        for page in range(pages):
            put_page(engine, store, saved.pages[page], page)
    except DamagedPage as error:
        return page, error.message
    return pages, ""
