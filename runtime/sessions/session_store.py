"""The session store on disk, and the rules that keep it consistent.

    <state>/sessions/NAME.json            one session: its conversation, and which pages its cache is made of
    <state>/sessions/pages/<..>/*.kv      pages, shared by sessions with a common prefix

A session is saved by writing its missing pages, then its own file, which is renamed into place: until then the previous version stays,
whatever happens to the process or the disk. Writers and readers share a lock; removing pages takes it exclusively, so no page disappears
that a session about to be written needs. The lock ends with its process.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ... import EffllmError, UsageError, ls, not_written, typed
from ...offload.page_file import on_disk, sync_folder
from ...offload.size import format_size
from ..files.bounded_read import IrregularFile, read_bounded
from .session_format import MAX_FILE_NBYTES, Malformed, OtherVersion, SavedSession, parse_saved
from .session_name import check_name, is_valid_name, rm_command
from .session_pages import SessionPages

SUFFIX = ".json"
DEFAULT_BUDGET = "4G"  # for the pages of all sessions
TRIAL_NBYTES = 16 << 10
MIN_AGE_S = 3600.0  # below this age, sessions are ranked only by what they save


class NoSession(UsageError):
    """There is no session of that name."""


class DamagedSession(EffllmError):
    """A session file is truncated or altered."""


@dataclass(frozen=True)
class SessionInfo:
    """A session as `effllm session list` shows it."""

    name: str
    model: str = ""
    saved: float = 0.0  # seconds since the epoch
    messages: int = 0
    tokens: int = 0
    kv: str = ""  # the format of its cache
    nbytes: int = 0  # of its pages
    own_nbytes: int = 0  # of pages that no other session uses
    problem: str = ""  # why its file cannot be read, "" if it can
    begins: str = ""  # its first words


class SessionStore(SessionPages):
    """The sessions in one folder, which need not exist yet."""

    def __init__(self, folder: Path, lasting: bool = True) -> None:
        """`lasting`: as in `SessionPages`."""
        super().__init__(folder, lasting)
        # Parsed sessions by name, without page sizes, and their page names: a server that caches thousands of prompts would otherwise read
        # all of them for each one it saves.
        self._infos: dict[str, tuple[tuple[int, int] | None, SessionInfo, frozenset[str]]] = {}

    def names(self) -> list[str]:
        """Names of all files that are valid session names. Raises EffllmError if the folder is not readable."""
        try:
            filenames = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._closed(error) from error
        return sorted(name.removesuffix(SUFFIX) for name in filenames if name.endswith(SUFFIX) and is_valid_name(name.removesuffix(SUFFIX)))

    def newest(self) -> list[str]:
        """`names`, most recently saved first."""
        def saved(name: str) -> float:
            try:
                return self.path(name).stat().st_mtime
            except OSError:
                return 0.0

        return sorted(self.names(), key=saved, reverse=True)

    def path(self, name: str) -> Path:
        return self.folder / f"{check_name(name)}{SUFFIX}"

    def has(self, name: str) -> bool:
        """Whether it exists, readable or not. Raises EffllmError if the folder is not readable."""
        try:
            self.path(name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._closed(error) from error
        return True

    def _closed(self, error: OSError) -> EffllmError:
        return EffllmError(f"the sessions in {self.folder} cannot be read: {error.strerror}",
                           f"check the folder: {ls(self.folder)}")

    def version(self, name: str) -> tuple[int, int] | None:
        """Identifies the current version of a session's file: each save makes a new file. None if there is none."""
        try:
            status = self.path(name).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def read(self, name: str, mentions: str = "") -> SavedSession | None:
        """Read a session. Returns None, without parsing, for a file that does not contain `mentions`. Raises NoSession, UsageError for
        another version, EffllmError for a damaged or unreadable file."""
        path = self.path(name)
        try:
            data = read_bounded(path, MAX_FILE_NBYTES)
        except IrregularFile as error:
            raise _damaged(name, path, f"it is {error.strerror}") from None
        except FileNotFoundError as error:
            if path.is_symlink():
                raise EffllmError(f"session {name}: {path} is a dangling link", "restore its target (an unmounted disk?), use"
                                  f" another --session NAME, or {rm_command(name)}") from error
            names = self.names()
            raise NoSession(f"there is no session {name!r}", f"there are: {', '.join(names)}" if names else "none is saved yet") from error
        except OSError as error:
            raise EffllmError(f"session {name}: {path} cannot be read: {error.strerror}",
                              f"check it: ls -l {typed(path)}, or another --session NAME") from error
        if mentions.encode() not in data:
            return None
        try:
            return parse_saved(data, name)
        except OtherVersion as error:
            raise UsageError(f"session {name} is of version {error.args[0]!r:.40}, which this effllm does not read",
                             f"the effllm that wrote it, another --session NAME, or {rm_command(name)}") from None
        except Malformed as error:
            raise _damaged(name, path, error) from None

    # -- changes ---------------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """A context for saving a session: the folder exists, no page is removed meanwhile, and a disk error becomes one line about this
        session."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.pages.mkdir(exist_ok=True, mode=0o700)
            with self._locked(fcntl.LOCK_SH):
                yield
        except OSError as error:
            with suppress(OSError, EffllmError), self._locked(fcntl.LOCK_EX) as alone:
                if alone:
                    self._collect()  # pages of an unsaved session would occupy the space that it lacked
            raise not_written(error, f"session {name} cannot be saved", f"check its folder: {ls(self.folder)}",
                              "effllm session list shows what takes space; the session is unchanged") from error

    def try_out(self, name: str) -> None:
        """Raises what saving under a name would, as far as a small trial file tells."""
        with self.writing(name):
            path = self.folder / f".{name}.{os.getpid()}.new"
            try:
                path.write_bytes(bytes(TRIAL_NBYTES))
            finally:
                path.unlink(missing_ok=True)

    def write(self, session: SavedSession) -> None:
        """Replace the session's file, after its pages. Raises OSError."""
        subfolders = {file.name[:2] for file in session.cache.files} if session.cache and self.lasting else set()
        for folder in (*(self.pages / name for name in sorted(subfolders)), *([self.pages] if subfolders else ())):
            sync_folder(folder)
        path = self.path(session.name)
        unfinished = path.with_name(f".{session.name}.{os.getpid()}.new")
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as out:
                out.write(session.to_json().encode())
                if self.lasting:
                    on_disk(out)
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        if self.lasting:
            sync_folder(self.folder)

    def remove(self, names: Sequence[str], cache_only: bool = False) -> int:
        """Remove sessions, or only their caches, rewriting the conversations. Returns the bytes of disk space freed. Raises NoSession,
        EffllmError if the folder or the disk refuses."""
        self.demand(names)
        try:
            with self._locked(fcntl.LOCK_EX) as alone:
                freed = 0
                for name in names:
                    freed += self._strip(name) if cache_only else self._unlink(self.path(name))
                return freed + (self._collect() if alone else 0)
        except OSError as error:
            what = f"the cache of session {names[0]}" if cache_only else f"session {names[0]}"
            raise not_written(error, f"{what} cannot be removed", f"check its folder: {ls(self.folder)}") from error

    def demand(self, names: Sequence[str]) -> None:
        """Raises NoSession for the first name that does not exist."""
        for name in names:
            if not self.has(name):
                self.read(name)  # raises the reason

    def make_room(self, budget: int, spare: str) -> list[str]:
        """Remove unreferenced pages; then, while more than `budget` bytes remain, the cache of the least valuable session. Conversations
        stay, if there are any. Returns the names of sessions that lost their cache; `spare` goes last. Does nothing if the folder cannot be
        written or locked, or if a session is `unread`: caches would be lost without freeing a byte."""
        try:
            with self._locked(fcntl.LOCK_EX) as alone:
                if not alone or self.unread():
                    return []
                self._collect()
                stripped: list[str] = []
                while self.nbytes() > budget:
                    candidates = [session for session in self.listed() if session.nbytes]
                    if not candidates:
                        break
                    victim = min(candidates, key=lambda session: (session.name == spare, retention_value(session))).name
                    if self.read(victim).conversation.get("messages"):
                        self._strip(victim)
                        stripped.append(victim)
                    else:  # a server's cached prompt is nothing but its cache
                        self._unlink(self.path(victim))
                    self._collect()
                return stripped
        except OSError:
            return []

    def unread(self) -> list[str]:
        """Sessions of another version, or not readable by this user: any page may be theirs, so none is removed."""
        names = []
        for name in self.names():
            try:
                self._info(name)
            except (DamagedSession, NoSession):
                continue
            except EffllmError:
                names.append(name)
        return names

    def stuck(self, budget: int) -> list[str]:
        """Those of `unread` that keep the pages above `budget` bytes; empty if the budget holds."""
        try:
            return self.unread() if self.nbytes() > budget else []
        except OSError:
            return []

    def _strip(self, name: str) -> int:
        """Remove a session's cache and keep its conversation."""
        session = self.read(name)
        before = self.path(name).stat().st_size
        self.write(replace(session, cache=None))
        return before - self.path(name).stat().st_size

    def _collect(self) -> int:
        """Remove unreferenced pages and leftovers of killed processes. Does nothing if a session is `unread`."""
        used: set[str] = set()
        names = self.names()
        for name in names:
            try:
                used |= self._info(name)[1]
            except DamagedSession:
                continue
            except EffllmError:
                return 0
        self._verified &= used
        self._infos = {name: self._infos[name] for name in names if name in self._infos}
        unused = [self.pages / name for name in self._sizes() if name not in used]
        return sum(map(self._unlink, [*unused, *self.folder.glob(".*.new")]))

    # -- listing -----------------------------------------------------------------------------------------------------------------

    def listed(self) -> list[SessionInfo]:
        """All sessions, newest first. Raises EffllmError if the folder is not readable."""
        try:
            names, sizes = self.names(), self._sizes()
        except OSError as error:
            raise self._closed(error) from error
        readable: list[tuple[SessionInfo, frozenset[str]]] = []
        listed: list[SessionInfo] = []
        users: Counter[str] = Counter()
        for name in names:
            try:
                readable.append(self._info(name))
                users.update(readable[-1][1])
            except NoSession:  # removed meanwhile
                continue
            except EffllmError as error:
                listed.append(SessionInfo(name, problem=error.message))
        for session, files in readable:
            listed.append(replace(session, nbytes=sum(sizes.get(name, 0) for name in files),
                                  own_nbytes=sum(sizes.get(name, 0) for name in files if users[name] == 1)))
        return sorted(listed, key=lambda session: (-session.saved, session.name))

    def _info(self, name: str) -> tuple[SessionInfo, frozenset[str]]:
        """A session, without page sizes, and its page names; cached while its file is unchanged. Raises as `read`."""
        version = self.version(name)
        if version is None or self._infos.get(name, (None,))[0] != version:
            session = self.read(name)
            cache = session.cache
            info = SessionInfo(name, session.model, session.saved, len(session.messages), len(cache.tokens) if cache else 0,
                               str(cache.identity.get("kv", "")) if cache else "", begins=session.begins)
            self._infos[name] = version, info, frozenset(file.name for file in cache.files) if cache else frozenset()
        return self._infos[name][1:]


def _damaged(name: str, path: Path, why: object) -> DamagedSession:
    return DamagedSession(f"session {name} is damaged: {why} ({path})", f"{rm_command(name)}, or another --session NAME")


def retention_value(session: SessionInfo) -> float:
    """Tokens saved per byte freed, divided by age: the lowest value is evicted first."""
    age = max(MIN_AGE_S, time.time() - session.saved)
    return session.tokens / max(1, session.own_nbytes) / age


def lost_note(names: Sequence[str], budget: int) -> str:
    """The message about sessions that lost their cache."""
    return f"--session-disk {format_size(budget)} is full: kept only the text of {', '.join(names)}; their caches are recomputed"


def stuck_note(names: Sequence[str], budget: int) -> str:
    """The message when caches exceed their budget and none can be removed."""
    verb = "is" if len(names) == 1 else "are"
    return (f"--session-disk {format_size(budget)} is full, and no cache can be removed: session {', '.join(names)} "
            f"{verb} unreadable here and may use any page ({rm_command(*names)})")
