"""The session that a run or chat saves under a name: checked before the weights are read, loaded, saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .. import EffllmError
from .loading import follow, last
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from ..runtime.session import Session
    from ..runtime.sessions.session_format import SavedSession
    from .options import SessionFlags


class SessionSaver:
    """`name` is None if nothing is saved automatically: no --session was given, or another conversation was loaded since."""

    def __init__(self, screen: Screen, ref: ModelRef, flags: SessionFlags, strict: bool = False) -> None:
        """Raises what can be known now to be wrong with a session of that name."""
        from ..offload.size import parse_size
        from ..runtime.sessions.saved_sessions import SavedSessions
        from ..runtime.sessions.session_name import check_name
        from ..runtime.sessions.session_store import DISK, SessionStore

        self.screen, self.name = screen, flags.session
        self.store = SessionStore(screen.environment.sessions_folder)
        self.sessions = SavedSessions(self.store, ref.text, parse_size(flags.session_disk or DISK))
        self._keeps = self.name is not None
        self._saved: tuple[object, ...] = ()
        # Of each session saved or loaded here: its file and its messages, as this process knows them.
        self._there: dict[str, tuple[tuple[int, int] | None, list[object]]] = {}
        self.others: set[str] = set()  # names of saved sessions that this conversation does not continue
        self.was_emptied = False  # by /clear, since it was saved or taken up
        if self.name is not None:
            check_name(self.name)
            self.sessions.check(self.name, ref.folder, strict)
            self._try_out()

    def _try_out(self) -> None:
        """Report early that saving will fail: after a long answer is too late."""
        try:
            self.store.try_out(self.name)
        except EffllmError as error:
            self.screen.note(f"{error.message}; this conversation is not saved ({error.hint})")

    def begin(self, session: Session) -> None:
        """Load the session of the given name, if it exists; a given system prompt takes precedence."""
        if self.name is None:
            return
        given = session.system
        found = self.store.version(self.name)  # before anything is read, so that later saves of other processes are noticed
        if found is not None or self.store.has(self.name):
            self.load(session, self.name, settings=False)
            session.system = session.system if given is None else given
        else:
            self.screen.note(f"session {self.name} is new")
            self._saved = state(session)
            self._know(session, self.name, found)
        self.sessions.reuse_prefixes(session.engine)

    def load(self, session: Session, name: str, settings: bool = True) -> None:
        found = self.store.version(name)
        for _ in follow(self.sessions.load(session, name, settings), self.screen, type(None)):
            continue
        self._saved, self.was_emptied = state(session), False
        self._know(session, name, found)

    def save(self, session: Session, name: str) -> SavedSession:
        with self.sessions.save_lock():
            return self._save(session, name)

    def _save(self, session: Session, name: str) -> SavedSession:
        """Under the lock of the session."""
        from ..runtime.sessions.session_format import SavedSession

        saved = last(follow(self.sessions.save(session, name), self.screen, SavedSession))
        self.others.discard(name)
        self.was_emptied = False
        if self.name is None:
            self.go_on_as(name)
        if name == self.name:
            self._saved = state(session)
        self._know(session, name, self.store.version(name))
        return saved

    def keep(self, session: Session, taken_back: bool = False) -> None:
        """Save under the given name if anything has changed. A cleared conversation does not overwrite a saved one, unless all of it was
        undone; nor does what follows /clear."""
        if self.name is None or state(session) == self._saved:
            return
        if session.messages or taken_back or (session.system and not self.store.has(self.name)):
            with self.sessions.save_lock():
                if self.is_anothers(self.name):
                    self._make_way("another process saved session {} in the meantime: this conversation is saved as {}")
                elif self.was_emptied and self.store.has(self.name):
                    self._make_way("session {} stays as it was before /clear: the new conversation is saved as {}")
                self._save(session, self.name)

    def is_anothers(self, name: str) -> bool:
        """Whether another process has saved another conversation there since."""
        from ..runtime.sessions.conversation_file import parse_conversation

        known, messages = self._there.get(name, (None, []))
        if self.store.version(name) in (None, known):
            return False
        try:
            return parse_conversation(self.store.read(name).conversation, f"session {name}").messages != messages
        except EffllmError:  # damaged: nobody's
            return False

    def _know(self, session: Session, name: str, version: tuple[int, int] | None) -> None:
        """Record that this state is saved under the name, in that version of the file."""
        self._there[name] = version, list(session.messages)

    def _make_way(self, why: str) -> None:
        """Continue under a free name, with a note: what is saved under this one is another conversation."""
        from itertools import count

        from ..runtime.sessions.session_name import LONGEST_NAME

        before = self.name
        self.others.add(before)
        stem = before.encode()[: LONGEST_NAME - len("-999")].decode(errors="ignore")
        self.name = next(name for number in count(2) if not self.store.has(name := f"{stem}-{number}"))
        self.screen.note(why.format(before, self.name))

    def leave(self) -> str | None:
        """Stop saving automatically: the conversation is another one now. Returns the name that was used, if any."""
        name, self.name = self.name, None
        return name

    def go_on_as(self, name: str) -> None:
        """Save under this name from now on, also after `leave`, in a run that saves automatically."""
        if self._keeps:
            self.name = name

    @property
    def folder(self) -> Path:
        return self.store.folder


def state(session: Session) -> tuple[object, ...]:
    """The saved state of a conversation, for comparison."""
    return list(session.messages), session.system, session.settings
