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
from .jsonrpc import MAX_MESSAGE_NBYTES, ConnectionLost, Inbox, Message, short

PASSED_VARIABLES = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG", "LANGUAGE", "TMPDIR", "TZ", "XDG_CACHE_HOME",
                    "XDG_CONFIG_HOME", "XDG_DATA_HOME", "SSL_CERT_FILE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy",
                    "https_proxy", "no_proxy")
EXIT_TIMEOUT_S = 1.0  # after its stdin was closed, then after SIGTERM
MAX_STDERR_LINES = 20


class StdioTransport:
    """One server process."""

    def __init__(self, entry: ServerEntry, env: Mapping[str, str]) -> None:
        self.entry, self.inbox, self.version = entry, Inbox(), ""
        self._env = {name: value for name, value in env.items() if name in PASSED_VARIABLES or name.startswith("LC_")} | dict(entry.env)
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr_lines: deque[str] = deque(maxlen=MAX_STDERR_LINES)
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()

    def open(self) -> None:
        """Start the process and the threads for its pipes. Raises ConnectionLost."""
        entry = self.entry
        try:
            self._process = subprocess.Popen([entry.command, *entry.args], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=subprocess.PIPE, env=self._env, cwd=entry.cwd, start_new_session=True)
        except OSError as error:
            path = entry.cwd if entry.cwd and error.filename == entry.cwd else entry.command
            raise ConnectionLost(f"cannot be started: {path}: {error.strerror or error}", f"check {entry.location}") from error
        except ValueError as error:  # an invalid variable name
            raise ConnectionLost(f"cannot be started: {error}", f"check {entry.location}") from error
        self._stderr_thread = threading.Thread(target=self._read_stderr, daemon=True)
        for thread in (self._stderr_thread, *(threading.Thread(target=target, daemon=True) for target in (self._write, self._read))):
            thread.start()

    def send(self, message: Message) -> None:
        """Queue a message for the writer thread: a server that does not read must not block an answer."""
        self._outgoing.put(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def _write(self) -> None:
        with suppress(OSError, ValueError), self._process.stdin as pipe:  # `_read` reports a server that has exited
            while (data := self._outgoing.get()) is not None:
                pipe.write(data)
                pipe.flush()

    def abort_request(self) -> None:
        """Nothing to do: the pipes serve further requests."""

    def _read(self) -> None:
        with self._process.stdout as pipe:
            while line := pipe.readline(MAX_MESSAGE_NBYTES):
                if not line.endswith(b"\n") and len(line) == MAX_MESSAGE_NBYTES:
                    self.inbox.fail(ConnectionLost(f"wrote more than {MAX_MESSAGE_NBYTES >> 20} MiB in one message", "ask it for less"))
                    return
                self.inbox.put(line)
                if self.inbox.is_full:
                    return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)
        self._stderr_thread.join(EXIT_TIMEOUT_S)
        self.inbox.fail(ConnectionLost(self._exit_description()))

    def _read_stderr(self) -> None:
        with self._process.stderr as pipe:
            while line := pipe.readline(1 << 16):
                if text := line.decode(errors="replace").strip():
                    self._stderr_lines.append(text)

    def _exit_description(self) -> str:
        code = self._process.poll()
        if code is None:
            reason = "closed its output"
        else:
            reason = f"ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"{reason}{f': {short(self._stderr_lines[-1])}' if self._stderr_lines else ''}"

    def close(self) -> None:
        """Close its stdin and wait EXIT_TIMEOUT_S; then SIGTERM, then SIGKILL, to its process group."""
        process = self._process
        if process is None:
            return
        self._outgoing.put(None)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_TIMEOUT_S)
                break
        with suppress(ProcessLookupError, PermissionError):  # its child processes
            os.killpg(process.pid, signal.SIGTERM)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
