"""One server, asked: it is greeted, tells its tools, and is called, one request at a time. A caller that lets go is told to the server.

Versions of the protocol up to 2025-11-25 begin with a handshake. Servers that have left it behind (2026-07-28) say so when they are
greeted, and then every request says by itself what the handshake said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from ... import EffllmError, __version__, typed
from ..events import Progress
from .configuration import ServerEntry
from .results import Returned, returned
from .wire import METHOD_NOT_FOUND, Lost, Message, Refused, Transport, notification, reply, request, result_of, short

HANDSHAKE, ENVELOPE = "2025-11-25", "2026-07-28"
OTHER_VERSION = -32022
META = "io.modelcontextprotocol/"
TICK_S = 0.1  # between looks at whether anybody still waits
PING_S = 2.0  # that a server has to show that it is there
PAGES = 100  # of a list of tools
CLIENT = {"name": "effllm", "version": __version__}


class ServerFailed(EffllmError):
    """A server cannot be reached, ended, or did not answer in time."""


class LetGo(Exception):
    """Nobody waits for the answer any more."""


class Client:
    """`tools`: what the server offers, as it says, once it is connected. A server that was lost is begun anew when it is asked next."""

    def __init__(self, entry: ServerEntry, env: Mapping[str, str]) -> None:
        self.entry, self._env = entry, env
        self.tools: list[Mapping[str, Any]] = []
        self._transport: Transport | None = None
        self._numbers, self._has_envelope, self._is_connected = count(1), False, False
        self._is_doubted = False  # it was let go amid a call, and may be at that still

    @property
    def is_begun(self) -> bool:
        return self._transport is not None

    def start(self) -> None:
        """Begin to reach it, and wait for nothing. Raises ServerFailed."""
        if self.entry.url:
            from .http import Posts as Way
        else:
            from .stdio import Pipes as Way
        self._transport, self._has_envelope, self._is_connected = Way(self.entry, self._env), False, False
        try:
            self._transport.open()
        except Lost as lost:
            self.close()
            raise self._failed(lost) from lost

    def connect(self, cancelled: Callable[[], bool]) -> Iterator[Progress]:
        """Greet it and learn its tools. Raises ServerFailed, LetGo."""
        if self._transport is None:
            self.start()
        asking = f"waiting for server {self.entry.name}"
        try:
            yield from self._greet(asking, cancelled)
            tools, cursor = [], {}
            for _ in range(PAGES):
                page = yield from self._asked("tools/list", cursor, asking, cancelled)
                tools += [tool for tool in page.get("tools") or () if isinstance(tool, Mapping) and isinstance(tool.get("name"), str)]
                if not isinstance(page.get("nextCursor"), str):
                    break
                cursor = {"cursor": page["nextCursor"]}
        except Refused as refused:
            if refused.code != METHOD_NOT_FOUND or not self._is_connected:
                self.close()
                raise ServerFailed(f"server {self.entry.name} refuses to be used: {refused.said}", f"check {self.entry.place}") from refused
        self.tools = tools

    def _greet(self, asking: str, cancelled: Callable[[], bool]) -> Generator[Progress, None, None]:
        greeting = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": CLIENT}
        try:
            told = yield from self._asked("initialize", greeting, asking, cancelled)
        except Refused as refused:
            if refused.code not in (OTHER_VERSION, METHOD_NOT_FOUND):
                raise
            self._has_envelope = True
        else:
            version = told.get("protocolVersion")
            self._transport.version = version if isinstance(version, str) else HANDSHAKE
            self._transport.send(notification("notifications/initialized"))
        self._is_connected = True

    def call(self, tool: str, arguments: Mapping[str, Any], cancelled: Callable[[], bool]) -> Iterator[Progress | Returned]:
        """Call a tool; yields what it gave back last. Raises ServerFailed, LetGo."""
        phase = f"calling {tool}"
        if self._is_doubted and self.is_begun:
            with suppress(Refused, ServerFailed):  # refused, by versions without it, is an answer too
                yield from self._asked("ping", {}, phase, cancelled, PING_S)
        if not self.is_begun:
            yield from self.connect(cancelled)
        params = {"name": tool, "arguments": dict(arguments)}
        try:
            result = yield from self._asked("tools/call", params, phase, cancelled)
        except Refused as refused:
            result = {"content": [{"type": "text", "text": refused.said}], "isError": True}
        if result.get("resultType", "complete") != "complete":  # it asks back, which this client did not offer
            result = {"content": [{"type": "text", "text": "the tool wants to be told more than it was called with"}], "isError": True}
        yield returned(result)

    def _asked(self, method: str, params: Mapping[str, Any], phase: str, cancelled: Callable[[], bool],
               patience: float | None = None) -> Generator[Progress, None, dict]:
        """The result of a request, within the patience that the server has. Raises Refused, ServerFailed, LetGo."""
        transport, number, patience = self._transport, next(self._numbers), patience or self.entry.patience_s
        meta: dict[str, Any] = {"progressToken": number}
        if self._has_envelope:
            meta |= {f"{META}protocolVersion": ENVELOPE, f"{META}clientInfo": CLIENT, f"{META}clientCapabilities": {}}
        since, detail = time.monotonic(), ""
        try:
            transport.send(request(number, method, {**params, "_meta": meta} if method != "initialize" else params))
            while True:
                message = transport.inbox.take(TICK_S)
                if message is not None and "method" not in message and message.get("id") == number:
                    self._is_doubted = False
                    return result_of(message)
                if message is not None and (moved := self._heed(message, number)) is not None:
                    since, detail = time.monotonic(), moved  # it is at work
                if cancelled():
                    self._let_go(number, method)
                    raise LetGo
                waited = time.monotonic() - since
                if waited > patience:
                    self._let_go(number, method)
                    self.close()  # what hangs would keep the next call waiting too
                    raise self._failed(Lost(_silence(transport, patience), f'"timeout" of {self.entry.place} gives it more time'))
                yield Progress(phase, int(waited), int(patience), "s", detail)
        except Lost as lost:
            self.close()
            raise self._failed(lost) from lost

    def _let_go(self, number: int, method: str) -> None:
        """The server need not go on; one that was never greeted is left."""
        if method == "initialize":
            self.close()
            return
        self._is_doubted = True
        self._transport.give_up()
        self._transport.send(notification("notifications/cancelled", {"requestId": number, "reason": "nobody waits any more"}))

    def _heed(self, message: Message, number: int) -> str | None:
        """Answer what a server asks meanwhile; how far it is, where it tells of the request of this number."""
        if (answer := reply(message)) is not None:
            self._transport.send(answer)
        params = message.get("params")
        if message.get("method") != "notifications/progress" or not isinstance(params, dict) or params.get("progressToken") != number:
            return None
        done, total = params.get("progress"), params.get("total")
        share = f"{done:g} of {total:g}" if isinstance(done, int | float) and isinstance(total, int | float) else ""
        return " ".join(filter(None, (share, short(str(params.get("message") or "")))))

    def _failed(self, lost: Lost) -> ServerFailed:
        by_hand = "" if self.entry.url else "; by hand: " + " ".join(map(typed, (self.entry.command, *self.entry.args)))
        return ServerFailed(f"server {self.entry.name} {lost.reason}", lost.step or f"check {self.entry.place}{by_hand}")

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


def _silence(transport: Transport, patience: float) -> str:
    garbage = transport.inbox.garbage
    return f"gave no answer within {patience:g} s" + (f"; it wrote what is no message: {garbage[-1]}" if garbage else "")
