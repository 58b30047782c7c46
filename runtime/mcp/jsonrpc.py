"""MCP messages: JSON-RPC 2.0, the interface of transports, and the inbox that rejects malformed messages."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Any, Protocol

Message = dict[str, Any]
MAX_MESSAGE_NBYTES = 64 << 20  # also of all messages that nobody has read yet
MAX_MESSAGE_ITEMS = 4_000_000  # JSON values of a message
MESSAGE_OVERHEAD_NBYTES = 1 << 10  # counted per message
MAX_SHOWN_LENGTH = 200  # characters of a server's text in our messages
METHOD_NOT_FOUND = -32601
TOOLS_CHANGED, PROGRESS = "notifications/tools/list_changed", "notifications/progress"


class ConnectionLost(Exception):
    """The server is gone, or was never reached.

    `reason`: continues a line that begins with the server's name
    `hint`: what the user can do
    `is_session_expired`: the server answers, but no longer knows the session
    """

    def __init__(self, reason: str, hint: str = "", is_session_expired: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.hint, self.is_session_expired = reason, hint, is_session_expired


class JsonRpcError(Exception):
    """The server answered a request with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Transport(Protocol):
    """A connection to a server. Threads fill `inbox`; `version` is the protocol's, once known."""

    inbox: Inbox
    version: str

    def open(self) -> None:
        """Start connecting without waiting. Raises ConnectionLost."""

    def send(self, message: Message) -> None:
        """Raises ConnectionLost."""

    def abort_request(self) -> None:
        """The pending request was cancelled."""

    def close(self) -> None:
        """Close it in any state; returns within seconds."""


class Inbox:
    """Received responses, requests and progress; or why no more will come.

    `invalid_lines`: the last line that was no message
    `is_changed`: the server announced a changed tool list
    `is_full`: it kept writing while no request was pending
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Message | ConnectionLost, int]] = SimpleQueue()
        self._queued_nbytes, self._lock = 0, threading.Lock()
        self.invalid_lines: deque[str] = deque(maxlen=1)
        self.is_changed = self.is_full = False

    def put(self, data: bytes | str) -> list[Any]:
        """Take a message. Returns the ids of the requests that it answers."""
        data = data.encode(errors="replace") if isinstance(data, str) else data
        if sum(map(data.count, b"[{,")) > MAX_MESSAGE_ITEMS:  # parsed, each takes many times its bytes
            self.is_full = True
            self.fail(ConnectionLost(f"wrote a message of more than {MAX_MESSAGE_ITEMS:,} parts", "ask it for less"))
            return []
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict | list):
            batch = message if isinstance(message, list) else [message]  # one version of the protocol has batches
            messages = [item for item in batch if isinstance(item, dict)]
            for index, item in enumerate(messages):
                self._enqueue(item, MESSAGE_OVERHEAD_NBYTES + (0 if index else len(data)))
            return [item.get("id") for item in messages if "method" not in item]
        if text := short(data[: 4 * MAX_SHOWN_LENGTH].decode(errors="replace")):
            self.invalid_lines.append(text)
        return []

    def _enqueue(self, message: Message, nbytes: int) -> None:
        """Queue a response, a request or progress; drop other notifications."""
        if "id" not in message and message.get("method") != PROGRESS:
            self.is_changed |= message.get("method") == TOOLS_CHANGED
            return
        with self._lock:
            if self.is_full:
                return
            self._queued_nbytes += nbytes
            self.is_full = self._queued_nbytes > MAX_MESSAGE_NBYTES + nbytes  # an empty queue takes a message of any length
        if self.is_full:
            self.fail(ConnectionLost(f"wrote more than {MAX_MESSAGE_NBYTES >> 20} MiB without being asked"))
        else:
            self._queue.put((message, nbytes))

    def fail(self, lost: ConnectionLost) -> None:
        self._queue.put((lost, 0))

    def take(self, seconds: float) -> Message | None:
        """The next message, None after `seconds`. Raises ConnectionLost."""
        try:
            message, nbytes = self._queue.get(timeout=seconds)
        except Empty:
            return None
        with self._lock:
            self._queued_nbytes -= nbytes
        if isinstance(message, ConnectionLost):
            self._queue.put((message, 0))  # for the next caller too
            raise message
        return message


def short(text: str) -> str:
    """A server's text, on one line and no longer than MAX_SHOWN_LENGTH."""
    line = " ".join(text[: 100 * MAX_SHOWN_LENGTH].split())
    return line if len(line) <= MAX_SHOWN_LENGTH else f"{line[: MAX_SHOWN_LENGTH - 1]}…"


def request(number: int, method: str, params: Mapping[str, Any]) -> Message:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)}


def notification(method: str, params: Mapping[str, Any] | None = None) -> Message:
    return {"jsonrpc": "2.0", "method": method} | ({} if params is None else {"params": dict(params)})


def reply(to: Message) -> Message | None:
    """The response to a server's request: ping is answered, everything else refused. None for a notification."""
    if "method" not in to or not isinstance(to.get("id"), int | str) or isinstance(to["id"], bool):
        return None
    if to["method"] == "ping":
        return {"jsonrpc": "2.0", "id": to["id"], "result": {}}
    return {"jsonrpc": "2.0", "id": to["id"], "error": {"code": METHOD_NOT_FOUND, "message": "not supported by this client"}}


def result_of(message: Message) -> dict[str, Any]:
    """The result of a response. Raises JsonRpcError."""
    error = message.get("error")
    if error is not None:
        code, text = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
        raise JsonRpcError(code if isinstance(code, int) else 0, short(text) if text and isinstance(text, str) else "no reason was given")
    result = message.get("result")
    return result if isinstance(result, dict) else {}
