"""Saves the session of a run or chat under a name (--session, /save). The name is checked before the weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .. import EffllmError
from .loading import final_result, show_progress
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from ..runtime.session import Session
    from ..runtime.sessions.session_format import SavedSession
    from .options import SessionFlags


class SessionSaver:
    """Loads and saves the sessions of a run or chat. `name`: the session that is saved automatically; None if no --session was given, or
    if another conversation was loaded since."""

    def __init__(self, screen: Screen, ref: ModelRef, flags: SessionFlags, strict: bool = False) -> None:
        """Raises EffllmError if the session cannot be used with this model."""
        from ..offload.size import parse_size
        from ..runtime.sessions.saved_sessions import SavedSessions
        from ..runtime.sessions.session_name import check_name
        from ..runtime.sessions.session_store import DEFAULT_BUDGET, SessionStore

        self.screen, self.name = screen, flags.session
        self.store = SessionStore(screen.environment.sessions_folder)
        self.sessions = SavedSessions(self.store, ref.text, parse_size(flags.session_disk or DEFAULT_BUDGET))
        self._saves_automatically = self.name is not None
        self._saved: tuple[object, ...] = ()  # `state` at the last save
        # Session name -> (version of its file, its messages) when this process last saved or loaded it.
        self._known_versions: dict[str, tuple[tuple[int, int] | None, list[object]]] = {}
        self.other_sessions: set[str] = set()  # names of saved sessions that this conversation does not continue
        self.cleared_since_save = False  # /clear removed messages since the last save or load
        if self.name is not None:
            check_name(self.name)
            self.sessions.check(self.name, ref.folder, strict)
            self._check_writable()

    def _check_writable(self) -> None:
        """Report early that saving will fail; after a long answer is too late."""
        try:
            self.store.try_out(self.name)
        except EffllmError as error:
            self.screen.note(f"{error.message}; this conversation is not saved ({error.hint})")

    def begin(self, session: Session) -> None:
        """Load the session, if it exists. A system prompt from the command line takes precedence over the saved one."""
        if self.name is None:
            return
        system = session.system
        version = self.store.version(self.name)  # taken before reading, so that saves of other processes in between are noticed
        if version is not None or self.store.has(self.name):
            self.load(session, self.name, settings=False)
            session.system = session.system if system is None else system
        else:
            self.screen.note(f"session {self.name} is new")
            self._saved = state(session)
            self._record_version(session, self.name, version)
        self.sessions.reuse_prefixes(session.engine)

    def load(self, session: Session, name: str, settings: bool = True) -> None:
        version = self.store.version(name)
        for _ in show_progress(self.sessions.load(session, name, settings), self.screen, type(None)):
            continue
        self._saved, self.cleared_since_save = state(session), False
        self._record_version(session, name, version)

    def save(self, session: Session, name: str) -> SavedSession:
        with self.sessions.save_lock():
            return self._save(session, name)

    def _save(self, session: Session, name: str) -> SavedSession:
        """`save` while holding the lock."""
        from ..runtime.sessions.session_format import SavedSession

        saved = final_result(self.sessions.save(session, name), self.screen, SavedSession)
        self.other_sessions.discard(name)
        self.cleared_since_save = False
        if self.name is None:
            self.continue_as(name)
        if name == self.name:
            self._saved = state(session)
        self._record_version(session, name, self.store.version(name))
        return saved

    def keep(self, session: Session, undone: bool = False) -> None:
        """Save under the session's name, if there is one and anything has changed.

        An empty conversation does not overwrite a saved one, unless all of its messages were `undone`. A conversation started by /clear is
        saved under another name, as is one whose session another process has changed.
        """
        if self.name is None or state(session) == self._saved:
            return
        if session.messages or undone or (session.system and not self.store.has(self.name)):
            with self.sessions.save_lock():
                if self.changed_by_other_process(self.name):
                    self._switch_to_free_name("another process saved session {} in the meantime: this conversation is saved as {}")
                elif self.cleared_since_save and self.store.has(self.name):
                    self._switch_to_free_name("session {} stays as it was before /clear: the new conversation is saved as {}")
                self._save(session, self.name)

    def changed_by_other_process(self, name: str) -> bool:
        """Whether another process has saved a different conversation under this name since it was last saved or loaded here."""
        from ..runtime.sessions.conversation_file import parse_conversation

        known_version, messages = self._known_versions.get(name, (None, []))
        if self.store.version(name) in (None, known_version):
            return False
        try:
            return parse_conversation(self.store.read(name).conversation, f"session {name}").messages != messages
        except EffllmError:  # a damaged file is no conversation to protect
            return False

    def _record_version(self, session: Session, name: str, version: tuple[int, int] | None) -> None:
        """Record that `version` of the session's file has the current messages."""
        self._known_versions[name] = version, list(session.messages)

    def _switch_to_free_name(self, message: str) -> None:
        """Save under a free name (NAME-2) from now on, and note it: the session of the current name is another conversation. `message`: a
        format for the old and the new name."""
        from itertools import count

        from ..runtime.sessions.session_name import MAX_NAME_NBYTES

        previous = self.name
        self.other_sessions.add(previous)
        stem = previous.encode()[: MAX_NAME_NBYTES - len("-999")].decode(errors="ignore")
        self.name = next(name for number in count(2) if not self.store.has(name := f"{stem}-{number}"))
        self.screen.note(message.format(previous, self.name))

    def detach(self) -> str | None:
        """Stop saving automatically, as another conversation was loaded. Returns the session's name, None if there was none."""
        name, self.name = self.name, None
        return name

    def continue_as(self, name: str) -> None:
        """Save under this name from now on, also after `detach`, if the run was started with --session."""
        if self._saves_automatically:
            self.name = name

    @property
    def folder(self) -> Path:
        return self.store.folder


def state(session: Session) -> tuple[object, ...]:
    """The saved state of a conversation, for comparison."""
    return list(session.messages), session.system, session.settings
