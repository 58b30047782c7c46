"""MCP's stdio transport: a server process with one JSON message per line.

The process has a session of its own, so Ctrl-C at the terminal cancels an answer and not the server. Only a few environment variables are
passed on: others may hold API keys. The last lines of its stderr are kept for the message that reports its exit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from queue import SimpleQueue

from .configuration import ServerEntry
from .jsonrpc import LARGEST, ConnectionLost, Inbox, Message, short

HANDED_ON = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG", "LANGUAGE", "TMPDIR", "TZ", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
             "XDG_DATA_HOME", "SSL_CERT_FILE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
ENDS_WITHIN_S = 1.0  # behind the end of its input, then behind SIGTERM
LAST_WORDS = 20  # lines of stderr


class StdioTransport:
    """One server process."""

    def __init__(self, entry: ServerEntry, env: Mapping[str, str]) -> None:
        self.entry, self.inbox, self.version = entry, Inbox(), ""
        self._env = {name: value for name, value in env.items() if name in HANDED_ON or name.startswith("LC_")} | dict(entry.env)
        self._process: subprocess.Popen[bytes] | None = None
        self._said: deque[str] = deque(maxlen=LAST_WORDS)
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()

    def open(self) -> None:
        """Start the process and the threads for its pipes. Raises ConnectionLost."""
        entry = self.entry
        try:
            self._process = subprocess.Popen([entry.command, *entry.args], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=subprocess.PIPE, env=self._env, cwd=entry.cwd, start_new_session=True)
        except OSError as error:
            what = entry.cwd if entry.cwd and error.filename == entry.cwd else entry.command
            raise ConnectionLost(f"cannot be started: {what}: {error.strerror or error}", f"check {entry.place}") from error
        except ValueError as error:  # a name of a variable that is none
            raise ConnectionLost(f"cannot be started: {error}", f"check {entry.place}") from error
        self._writer, self._listener, self._overhearer = (
            threading.Thread(target=each, daemon=True) for each in (self._write, self._read, self._overhear))
        for each in (self._writer, self._listener, self._overhearer):
            each.start()

    def send(self, message: Message) -> None:
        """From a thread: a server that does not read must not block an answer."""
        self._outgoing.put(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def _write(self) -> None:
        with suppress(OSError, ValueError), self._process.stdin as pipe:  # the reader tells of a server that has ended
            while (data := self._outgoing.get()) is not None:
                pipe.write(data)
                pipe.flush()

    def give_up(self) -> None:
        """Nothing to do: the pipes serve further requests."""

    def _read(self) -> None:
        with self._process.stdout as pipe:
            while line := pipe.readline(LARGEST):
                if not line.endswith(b"\n") and len(line) == LARGEST:
                    self.inbox.end(ConnectionLost(f"wrote more than {LARGEST >> 20} MiB in one message", "ask it for less"))
                    return
                self.inbox.put(line)
                if self.inbox.is_full:
                    return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_WITHIN_S)
        self._overhearer.join(ENDS_WITHIN_S)
        self.inbox.end(ConnectionLost(self._ending()))

    def _overhear(self) -> None:
        with self._process.stderr as pipe:
            while line := pipe.readline(1 << 16):
                if text := line.decode(errors="replace").strip():
                    self._said.append(text)

    def _ending(self) -> str:
        code = self._process.poll()
        how = "closed its output" if code is None else f"ended by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"{how}{f': {short(self._said[-1])}' if self._said else ''}"

    def close(self) -> None:
        """Close its stdin and wait ENDS_WITHIN_S; then SIGTERM, then SIGKILL, to its process group."""
        process = self._process
        if process is None:
            return
        self._outgoing.put(None)
        for end in (None, signal.SIGTERM, signal.SIGKILL):
            if end is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, end)
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_WITHIN_S)
                break
        with suppress(ProcessLookupError, PermissionError):  # what it started itself
            os.killpg(process.pid, signal.SIGTERM)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
