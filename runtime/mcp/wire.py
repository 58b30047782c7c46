"""What passes between a client and a server of the Model Context Protocol: messages of JSON-RPC 2.0, and how one that is broken is told."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Any, Protocol

Message = dict[str, Any]
LARGEST = 64 << 20  # bytes of a message
SHOWN = 200  # letters of what a server says of itself
METHOD_NOT_FOUND = -32601


class Lost(Exception):
    """The server is not there any more, or was never reached. `reason` continues a line that began with its name; `step`: what helps."""

    def __init__(self, reason: str, step: str = "") -> None:
        super().__init__(reason)
        self.reason, self.step = reason, step


class Refused(Exception):
    """The server answered a request with an error."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code, self.said = code, said


class Transport(Protocol):
    """A way to a server. `inbox` is filled by threads; `version` is that of the protocol, once it is known."""

    inbox: Inbox
    version: str

    def open(self) -> None:
        """Begin to reach it; waits for nothing. Raises Lost."""

    def send(self, message: Message) -> None:
        """Raises Lost."""

    def give_up(self) -> None:
        """Nobody waits for what was asked any more."""

    def close(self) -> None:
        """End it, whatever it does; returns within seconds."""


class Inbox:
    """Messages as they come, and in the end why no more do. `garbage`: the newest of what was no message."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Message | Lost] = SimpleQueue()
        self.garbage: deque[str] = deque(maxlen=1)

    def put(self, data: bytes | str) -> None:
        """What a server wrote as one message."""
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict):
            self._queue.put(message)
        elif isinstance(message, list):  # a batch, as one version of the protocol had
            for each in message:
                if isinstance(each, dict):
                    self._queue.put(each)
        elif text := short(data if isinstance(data, str) else data[: 4 * SHOWN].decode(errors="replace")):
            self.garbage.append(text)

    def end(self, lost: Lost) -> None:
        self._queue.put(lost)

    def take(self, seconds: float) -> Message | None:
        """The next message, None where none comes in this time. Raises Lost."""
        try:
            found = self._queue.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(found, Lost):
            self._queue.put(found)  # also for whoever asks next
            raise found
        return found


def short(text: str) -> str:
    """Words of a server in one line of a message."""
    said = " ".join(text.split())
    return said if len(said) <= SHOWN else f"{said[: SHOWN - 1]}…"


def request(number: int, method: str, params: Mapping[str, Any]) -> Message:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)}


def notification(method: str, params: Mapping[str, Any] | None = None) -> Message:
    return {"jsonrpc": "2.0", "method": method} | ({} if params is None else {"params": dict(params)})


def reply(to: Message) -> Message | None:
    """What a server is answered that asks: it may see whether anybody is there, and nothing else. None for what is no question."""
    if "method" not in to or not isinstance(to.get("id"), int | str) or isinstance(to["id"], bool):
        return None
    if to["method"] == "ping":
        return {"jsonrpc": "2.0", "id": to["id"], "result": {}}
    return {"jsonrpc": "2.0", "id": to["id"], "error": {"code": METHOD_NOT_FOUND, "message": "not supported by this client"}}


def result_of(message: Message) -> dict[str, Any]:
    """What an answer brings. Raises Refused."""
    error = message.get("error")
    if error is not None:
        code, said = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
        raise Refused(code if isinstance(code, int) else 0, short(str(said or "no reason was given")))
    result = message.get("result")
    return result if isinstance(result, dict) else {}
