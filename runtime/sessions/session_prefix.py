"""Prefix reuse across sessions: prompts that share a prefix with any saved session restore its pages instead of prefilling them.

The names of the page files are the index: each begins with the key of all tokens up to the page's end, so the length of the known prefix
takes one directory lookup per page and opens nothing on a miss. Then the session files tell whose pages they are, newest first; a file that
does not mention the key is not parsed.

Only what prefilling again would produce is reused: pages of a prompt, computed by the same kernels on the same devices
(`SavedCache.num_fresh_tokens`). Pages of an answer were computed one token at a time, which rounds differently, as may a pass too short to
copy layers to a GPU.

With an unpacked cache, logits are then bit-identical to those of a full prefill. With packed pages, as many of the newest common tokens as
the window holds are prefilled again, and up to a page more, with everything before them packed. That is the state after `KVCache.truncate`
drops sealed pages, so results are those of a process that prefilled the session's prompt and then had to truncate. A process that need not
truncate keeps exact tokens up to the end of the common prefix, which a session cannot provide.
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


def restore_prefix(engine: Engine, store: SessionStore, own: Mapping[str, object], ids: Sequence[int], held: int) -> tuple[int, list[str]]:
    """Restore the longest prefix of `ids` that a session of identity `own` has, if longer than the `held` tokens in the engine's cache.
    Returns the tokens then held, and a message. From a damaged page on, the prompt is prefilled."""
    sinks, most = engine.cache.shape.sinks, restorable_pages(engine, ids, len(ids))
    if engine.cache.states is not None:  # sessions have no states at page ends
        return held, []
    if most < 1 or sinks + PAGE * most <= held:
        return held, []
    keys = page_keys(own, ids, sinks, most)
    try:
        with store.reading():
            there = sum(1 for _ in takewhile(store.has_page, keys[1:]))
            session, pages = _longest(engine, store, own, ids, keys[: there + 1])
            if session is None or sinks + PAGE * pages <= held:
                return held, []
            return _restore(engine, store, session, ids, pages)
    except OSError:  # a folder that cannot be read provides nothing
        return min(held, engine.cache.n), []


def restorable_pages(engine: Engine, ids: Sequence[int], common: int, most: int | None = None) -> int:
    """How many pages of a prompt, at most `most`, can come from a session that shares its first `common` tokens. At least one token is left
    to prefill."""
    shape, packed = engine.cache.shape, engine.cache.is_packed
    pages = max(0, (min(common, len(ids) - 1) - shape.sinks - shape.window * packed) // PAGE)
    pages = pages if most is None else min(pages, most)
    while pages and not packed and not resumes_alike(shape.sinks + PAGE * pages, len(ids), shape.sinks, engine.prepared.chunk,
                                                     engine.model.copied_from):
        pages -= 1
    return pages


def _longest(engine: Engine, store: SessionStore, own: Mapping[str, object], ids: Sequence[int],
             keys: Sequence[str]) -> tuple[SavedSession | None, int]:
    """The session that provides most pages of these `keys` (the first is that of the sinks), and how many."""
    best, most, by = None, 0, kernel_identity(engine)
    for name in store.newest() if len(keys) > 1 else ():
        if most + 1 == len(keys):
            break
        try:
            session = store.read(name, mentions=keys[most + 1])
        except EffllmError:  # reported when it is loaded by name
            continue
        if session is None or session.cache is None or session.cache.identity != own or session.cache.kernel_identity != by:
            continue
        if (pages := _pages_lent(engine, session.cache, ids, keys)) > most:
            best, most = session, pages
    return best, most


def _pages_lent(engine: Engine, cache: SavedCache, ids: Sequence[int], keys: Sequence[str]) -> int:
    common, sinks = common_prefix(cache.tokens, ids), engine.cache.shape.sinks
    if sinks and (cache.sinks is None or cache.sinks.key != keys[0]):
        return 0
    same = sum(1 for _ in takewhile(lambda pair: pair[0].key == pair[1], zip(cache.pages, keys[1:])))
    return restorable_pages(engine, ids, common, min(same, max(0, cache.num_fresh_tokens - sinks) // PAGE))


def _restore(engine: Engine, store: SessionStore, session: SavedSession, ids: Sequence[int], pages: int) -> tuple[int, list[str]]:
    """Restore a session's first pages, up to the first damaged one. On failure the cache is empty."""
    said: list[str] = []
    try:
        while pages > 0:
            tokens = engine.cache.shape.sinks + PAGE * pages
            whole, damage = _put(engine, store, session.cache, tokens, pages)
            if whole == pages:
                engine.set_tokens(ids[:tokens], num_fresh_tokens=tokens)
                return tokens, [*said, f"{tokens} tokens of the prompt restored from session {session.name}"]
            said = [f"session {session.name} is damaged: {damage}; the prompt is recomputed from there on"
                    f" ({rm_command(session.name, more='--cache')})"]
            pages = restorable_pages(engine, ids, len(ids), whole)
    except (EffllmError, Interrupted):  # the prefill meets the same error and reports it
        pages = 0
    except BaseException:
        engine.reset()
        raise
    engine.reset()
    return 0, said


def _put(engine: Engine, store: SessionStore, saved: SavedCache, tokens: int, pages: int) -> tuple[int, str]:
    """Load pages into an empty cache: returns how many are valid, and what is wrong with the next; 0 if the exact tokens before them are
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
