"""Named sessions: a conversation and its KV cache, saved and restored together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ... import EffllmError
from ...offload.page_stream import PagesLost
from ...offload.size import format_size
from ..adapters.adapter_selection import AdapterScales
from ..engine import Engine
from ..events import Notice, Progress
from ..files.atomic_write import file_lock
from ..session import Session
from .conversation_file import parse_conversation
from .saved_cache import folder_identity, identity, refuse_other, restore_cache, save_cache
from .session_format import SavedCache, SavedSession, TokenizedText
from .session_name import rm_command
from .session_prefix import restore_prefix
from .session_store import SessionStore, lost_note, stuck_note

LOCK = ".saving.lock"  # not a valid session name


class SavedSessions:
    """The sessions of one folder, for one run.

    model: its name in messages
    budget: bytes for the pages of all sessions
    """

    def __init__(self, store: SessionStore, model: str, budget: int) -> None:
        self.store, self.model, self.budget = store, model, budget
        self._identities: dict[AdapterScales, dict[str, object]] = {}

    def check(self, name: str, folder: Path, strict: bool = False) -> None:
        """Before the weights are read: raises what `load` would raise, as far as the model's files tell. A new name is fine."""
        if self.store.has(name):
            refuse_other(self.store.read(name), folder_identity(folder, strict))

    def load(self, session: Session, name: str, settings: bool = True) -> Iterator[Progress | Notice]:
        """Resume a saved session, with or without its sampling `settings`. Raises NoSession, UsageError if it does not match this run,
        EffllmError if it is damaged; the conversation is then unchanged."""
        saved, engine = self.store.read(name), session.engine
        history = parse_conversation(saved.conversation, f"session {name}", f"{rm_command(name)}, or another --session NAME")
        refuse_other(saved, self.identity(engine))
        if saved.cache is None:
            engine.reset()
        else:
            with self.store.reading():
                yield from restore_cache(engine, self.store, saved)
        session.restore(history.messages, history.system, saved.cache and saved.cache.tokenized_text)
        if settings:
            session.settings = history.settings
        outcome = f"{len(engine.tokens)} tokens restored" if saved.cache else "its text is recomputed"
        yield Notice(f"session {name}: {len(session.messages)} messages, {outcome}")

    @contextmanager
    def save_lock(self) -> Iterator[None]:
        """A lock around reading what is saved under a name and saving based on it. If the folder refuses, saving reports it."""
        with ExitStack() as locks:
            with suppress(OSError):
                self.store.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                locks.enter_context(file_lock(self.store.folder / LOCK, 0o600))
            yield

    def save(self, session: Session, name: str) -> Iterator[Progress | Notice | SavedSession]:
        """`keep` a conversation with its engine's cache."""
        yield from self.keep(session.engine, name, session.tokenized_text, session.history.to_json())

    def keep(self, engine: Engine, name: str, tokenized_text: TokenizedText | None,
             conversation: Mapping[str, object]) -> Iterator[Progress | Notice | SavedSession]:
        """Save under a name; yields the saved session last. If pages of the cache are lost, what precedes them is saved, or the session's
        previous cache if that has more. Raises EffllmError if the disk is full or the folder is not writable: what was saved before
        stays."""
        cache, tokens = None, engine.tokens
        self.store.path(name)
        nbytes, is_approximate = engine.cache.read_nbytes, engine.cache.pool.picks
        if is_approximate:  # later tokens were computed from approximate attention: no other run may reuse them
            yield Notice(f"session {name}: only the text is saved, since --kv-read sparse leaves an approximate cache")
        elif nbytes > self.budget:
            yield Notice(f"session {name}: its cache of {format_size(nbytes)} exceeds --session-disk {format_size(self.budget)}, only the"
                         " text is saved")
        with self.store.writing(name):
            saves_cache = nbytes <= self.budget and not is_approximate
            try:
                for event in save_cache(engine, self.store, self.identity(engine), tokenized_text) if saves_cache else ():
                    if isinstance(event, SavedCache):
                        cache = event
                    else:
                        yield event
            except PagesLost as error:
                previous = self._previous_cache(name, tokens, tokenized_text, self.identity(engine))
                cache = max(cache, previous, key=lambda candidate: len(candidate.tokens) if candidate else 0)
                outcome = f"{len(cache.tokens)} of {len(tokens)} tokens are saved, the rest" if cache else "only the text is saved, and"
                yield Notice(f"session {name}: {outcome} is recomputed: {error.message}")
            saved = SavedSession(name, self.model, time.time(), conversation, cache)
            self.store.write(saved)
        if stripped := self.store.make_room(self.budget, name):
            yield Notice(lost_note(stripped, self.budget))
        elif unread := self.store.stuck(self.budget):
            yield Notice(stuck_note(unread, self.budget))
        yield saved

    def _previous_cache(self, name: str, tokens: Sequence[int], tokenized_text: TokenizedText | None,
                        identity: Mapping[str, object]) -> SavedCache | None:
        """The cache previously saved under a name, with the current text, if these tokens continue it."""
        try:
            cache = self.store.read(name).cache
        except EffllmError:
            return None
        if cache is None or cache.identity != identity or tuple(tokens[: len(cache.tokens)]) != cache.tokens:
            return None
        return replace(cache, tokenized_text=tokenized_text) if all(self.store.has_page(file.key) for file in cache.files) else None

    def identity(self, engine: Engine) -> dict[str, object]:
        """What the bytes of the engine's cache depend on besides tokens."""
        if engine.adapter_scales not in self._identities:
            self._identities[engine.adapter_scales] = identity(engine)
        return self._identities[engine.adapter_scales]

    def reuse_prefixes(self, engine: Engine) -> None:
        """From now on, prompts that share a prefix with a saved session reuse its pages, with a notice."""
        engine.extend_prefix = lambda ids, held: restore_prefix(engine, self.store, self.identity(engine), ids, held)
