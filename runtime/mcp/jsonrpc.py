"""MCP messages: JSON-RPC 2.0, the interface of transports, and the inbox that rejects malformed messages."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Any, Protocol

Message = dict[str, Any]
LARGEST = 64 << 20  # bytes of a message, and of those that nobody has read yet
MOST_PARTS = 4_000_000  # of a message
OVERHEAD = 1 << 10  # bytes that a short one takes
SHOWN = 200  # letters of what a server says of itself
METHOD_NOT_FOUND = -32601
CHANGED, PROGRESS = "notifications/tools/list_changed", "notifications/progress"


class ConnectionLost(Exception):
    """The server is gone, or was never reached. `reason` continues a line that begins with its name; `step`: the hint. `is_forgotten`:
    it answers, but the session has expired."""

    def __init__(self, reason: str, step: str = "", is_forgotten: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.step, self.is_forgotten = reason, step, is_forgotten


class JsonRpcError(Exception):
    """The server answered a request with an error."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code, self.said = code, said


class Transport(Protocol):
    """A connection to a server. Threads fill `inbox`; `version` is the protocol's, once known."""

    inbox: Inbox
    version: str

    def open(self) -> None:
        """Start connecting without waiting. Raises ConnectionLost."""

    def send(self, message: Message) -> None:
        """Raises ConnectionLost."""

    def give_up(self) -> None:
        """The pending request was cancelled."""

    def close(self) -> None:
        """Close it in any state; returns within seconds."""


class Inbox:
    """Received messages, and why no more will come. `garbage`: the last line that was no message. `is_changed`: the server announced a
    changed tool list; other notifications except progress are dropped. `is_full`: it kept writing while no request was pending."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Message | ConnectionLost, int]] = SimpleQueue()
        self._waiting, self._lock = 0, threading.Lock()  # bytes
        self.garbage: deque[str] = deque(maxlen=1)
        self.is_changed = self.is_full = False

    def put(self, data: bytes | str) -> list[Any]:
        """Take a message. Returns the ids of the requests that it answers."""
        data = data.encode(errors="replace") if isinstance(data, str) else data
        if sum(map(data.count, b"[{,")) > MOST_PARTS:  # each takes many times its bytes
            self.is_full = True
            self.end(ConnectionLost(f"wrote a message of more than {MOST_PARTS:,} parts", "ask it for less"))
            return []
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict | list):
            batch = [each for each in (message if isinstance(message, list) else [message])  # as one version of the protocol had
                     if isinstance(each, dict)]
            for number, each in enumerate(batch):
                self._sort(each, OVERHEAD + (0 if number else len(data)))
            return [each.get("id") for each in batch if "method" not in each]
        if text := short(data[: 4 * SHOWN].decode(errors="replace")):
            self.garbage.append(text)
        return []

    def _sort(self, message: Message, nbytes: int) -> None:
        """Keep responses and requests."""
        if "id" not in message and message.get("method") != PROGRESS:
            self.is_changed |= message.get("method") == CHANGED
            return
        with self._lock:
            if self.is_full:
                return
            self._waiting += nbytes
            self.is_full = self._waiting > LARGEST + nbytes  # one of any length has room
        if self.is_full:
            self.end(ConnectionLost(f"wrote more than {LARGEST >> 20} MiB without being asked"))
        else:
            self._queue.put((message, nbytes))

    def end(self, lost: ConnectionLost) -> None:
        self._queue.put((lost, 0))

    def take(self, seconds: float) -> Message | None:
        """The next message, None after `seconds`. Raises ConnectionLost."""
        try:
            found, nbytes = self._queue.get(timeout=seconds)
        except Empty:
            return None
        with self._lock:
            self._waiting -= nbytes
        if isinstance(found, ConnectionLost):
            self._queue.put((found, 0))  # also for whoever asks next
            raise found
        return found


def short(text: str) -> str:
    """A server's text on one line of a message."""
    said = " ".join(text[: 100 * SHOWN].split())
    return said if len(said) <= SHOWN else f"{said[: SHOWN - 1]}…"


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
        code, said = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
        raise JsonRpcError(code if isinstance(code, int) else 0, short(said) if said and isinstance(said, str) else "no reason was given")
    result = message.get("result")
    return result if isinstance(result, dict) else {}
