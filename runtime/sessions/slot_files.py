"""Saving and restoring server slots to files named by the client (llama.cpp's `--slot-save-path`).

Each is a session without messages (`session_store.py`); slots with a common prefix share pages. Saving never evicts other files: they stay
until the user removes them, and a save that does not fit is refused.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ... import ContextOverflow, EffllmError, UsageError, typed
from ...offload.size import format_size
from ..adapters.adapter_selection import check_scales
from ..events import Event, SlotDone
from .prompt_cache import NO_TEXT, known_tokenization, refuse_inexact_cache
from .saved_cache import ADAPTERS, refuse_other, restore_cache
from .saved_sessions import SavedSessions
from .session_format import SavedSession
from .session_name import check_name
from .session_store import SessionStore

if TYPE_CHECKING:
    from ..adapters.adapter_selection import AdapterScales
    from ..engine import Engine
    from ..generation.slot import Slot
    from ..prepare import EngineOptions

FLAG = "--slot-save-path"
TRIAL = "trial"
ADAPTER_SCALES = "adapters"  # where adapter scales are stored, beside an empty conversation


class SlotFiles:
    """The saved slots of one folder.

    model: its name in messages
    budget: bytes for the pages in `folder`
    default_scales: adapter scales of files that state none
    """

    def __init__(self, folder: Path, model: str, budget: int, default_scales: AdapterScales) -> None:
        self.store, self.budget, self._default_scales = SessionStore(folder), budget, default_scales
        self.sessions = SavedSessions(self.store, model, sys.maxsize)

    def save(self, slot: Slot, name: str) -> Iterator[Event]:
        """Save a slot's cache. Raises UsageError for an invalid name or a cache that does not fit, EffllmError if the disk refuses."""
        started, engine = time.perf_counter(), slot.engine
        before = self._read(name) if self.store.has(check_name(name)) else None
        if before is not None and before.messages:
            raise UsageError(f"{name!r} is a session with a conversation", "save under another name")
        freed = sum(file.stored_nbytes for file in before.cache.files) if before is not None and before.cache is not None else 0
        needed = engine.cache.read_nbytes + self.store.nbytes() - freed
        if needed > self.budget:
            raise UsageError(f"it would take the folder of {FLAG} to {format_size(needed)}, and --session-disk is "
                             f"{format_size(self.budget)}", "remove files there, or serve with a larger --session-disk")
        saved, scales = None, {ADAPTER_SCALES: list(engine.adapter_scales)} if engine.adapter_scales else {}
        for event in self.sessions.keep(engine, name, known_tokenization(engine.tokens, *slot.prompts.cached), {**NO_TEXT, **scales}):
            if isinstance(event, SavedSession):
                saved = event
            else:
                yield event
        yield self._done(saved, started)

    def restore(self, slot: Slot, name: str) -> Iterator[Event]:
        """Restore a slot; its previous contents go to the prompt cache. Raises UsageError if `name` does not exist or does not match this
        model; the slot is then unchanged, or empty if a file is damaged."""
        started, engine = time.perf_counter(), slot.engine
        if not self.store.has(check_name(name)):
            names = self.store.names()
            raise UsageError(f"nothing is saved as {name!r}", f"there is: {', '.join(names[:20])}" if names else "nothing is saved yet")
        saved = self._read(name)
        cache = saved.cache
        scales = self._adapter_scales(saved, engine)
        digest = engine.prepared.adapters.digest_of(scales)
        identity = {part: value for part, value in self.sessions.identity(engine).items() if part != ADAPTERS}
        with _naming_file(name):
            refuse_other(saved, {**identity, **({ADAPTERS: digest} if digest else {})})
        if cache is not None and len(cache.tokens) > engine.n_ctx:  # before the current cache is dropped
            raise ContextOverflow(f"{name!r} holds {len(cache.tokens)} tokens and the context {engine.n_ctx}",
                                  f"serve with -c {len(cache.tokens) + 1} or more")
        if slot.prompt_cache is not None:
            yield from slot.prompt_cache.switch_to(None, [], slot.prompts, choice=scales)
        engine.choose(scales)
        slot.prompts.cached, slot.prompt_tokens = ("", []), 0
        if cache is None:
            engine.reset()
        else:
            with _naming_file(name), self.store.reading():
                yield from restore_cache(engine, self.store, saved)
            slot.prompt_tokens = len(cache.tokens)
            if cache.tokenized_text is not None:
                slot.prompts.cached = cache.tokenized_text.text, list(cache.tokenized_text.ids)
        yield self._done(saved, started)

    def _adapter_scales(self, saved: SavedSession, engine: Engine) -> AdapterScales:
        """The adapter scales that a saved cache was computed with, which `refuse_other` checks."""
        stored = saved.conversation.get(ADAPTER_SCALES)
        try:
            scales = tuple(map(float, stored)) if isinstance(stored, list) else self._default_scales
            check_scales(scales, engine.prepared.adapters.names)
        except (UsageError, TypeError, ValueError):
            return self._default_scales
        return scales

    def _read(self, name: str) -> SavedSession:
        with _naming_file(name):
            return self.store.read(name)

    def _done(self, saved: SavedSession, started: float) -> SlotDone:
        files = () if saved.cache is None else saved.cache.files
        nbytes = self.store.path(saved.name).stat().st_size + sum(file.stored_nbytes for file in files)
        return SlotDone(0 if saved.cache is None else len(saved.cache.tokens), nbytes, time.perf_counter() - started)


@contextmanager
def _naming_file(name: str) -> Iterator[None]:
    """Rephrase a session error in terms of the file name that the client knows, with the next step it has."""
    try:
        yield
    except EffllmError as error:
        raise UsageError(error.message.replace(f"session {name} ", f"{name!r} ", 1), "save it again, or use another") from error


def erase(slot: Slot) -> Iterator[Event]:
    """Clear a slot; what was saved of it stays."""
    tokens = len(slot.engine.tokens)
    slot.engine.reset()
    slot.prompts.cached, slot.prompt_tokens = ("", []), 0
    yield SlotDone(tokens)


def slot_folder(text: str, options: EngineOptions) -> Path:
    """The folder of `--slot-save-path`, checked to be writable; created if only its last component is missing (more than that is taken for
    a typo). Raises UsageError for that and for a cache that cannot be restored, EffllmError if the folder is not writable."""
    refuse_inexact_cache(options, FLAG)
    try:
        folder = Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{FLAG} {text}: there is no such user", "give the path without ~") from error
    if not os.path.exists(folder) and not os.path.isdir(parent := folder.absolute().parent):
        raise UsageError(f"{FLAG} {text}: there is no folder {parent}", f"correct the path, or make it: mkdir -p {typed(parent)}")
    try:
        SessionStore(folder).try_out(TRIAL)
    except EffllmError as error:
        why = error.message.partition(": ")[2]
        raise EffllmError(f"{FLAG} {text} is not writable: {why}", "choose a folder that you can write to") from error
    return folder
