"""An MCP client for one server: initialization, listing and calling tools, one request at a time. Cancellations are sent to the server.

Protocol versions up to 2025-11-25 begin with a handshake. Servers of 2026-07-28 answer that they have none; every request then carries what
the handshake used to say.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from ... import EffllmError, __version__, typed
from ..events import Progress
from .configuration import ServerEntry
from .jsonrpc import (
    METHOD_NOT_FOUND,
    PROGRESS,
    ConnectionLost,
    JsonRpcError,
    Message,
    Transport,
    notification,
    reply,
    request,
    result_of,
    short,
)
from .results import ToolResult, parse_result

HANDSHAKE, ENVELOPE = "2025-11-25", "2026-07-28"
OTHER_VERSION = -32022
DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)  # what versions are; it goes into a header
META = "io.modelcontextprotocol/"
TICK_S = 0.1  # between looks at whether anybody still waits
PING_S = 2.0  # that a server has to show that it is there
MOST_TOOLS, PAGES = 500, 100  # of a list; what a model is told of all of them is in every prompt
CLIENT = {"name": "effllm", "version": __version__}


class ServerFailed(EffllmError):
    """A server is unreachable, exited, or did not answer in time."""


class SessionExpired(ServerFailed):
    """The server no longer knows the session; it may be initialized again."""


class Cancelled(Exception):
    """The caller no longer waits for the answer."""


class Client:
    """`tools`: what the server lists once connected; `has_more`: it lists more than are used. A lost server is started again at the next
    request."""

    def __init__(self, entry: ServerEntry, env: Mapping[str, str]) -> None:
        self.entry, self._env = entry, env
        self.tools: list[Mapping[str, Any]] = []
        self.has_more = False
        self._has_others = False  # than before it was begun anew
        self._transport: Transport | None = None
        self._numbers, self._has_envelope = count(1), False
        self._is_doubted = False  # it was let go amid a call, and may be at that still

    @property
    def is_begun(self) -> bool:
        return self._transport is not None

    @property
    def is_changed(self) -> bool:
        """The server announced a changed tool list."""
        return self._has_others or self._transport is not None and self._transport.inbox.is_changed

    def start(self) -> None:
        """Start connecting without waiting. Raises ServerFailed."""
        if self.entry.url:
            from .http import HttpTransport as Way
        else:
            from .stdio import StdioTransport as Way
        self._transport, self._has_envelope = Way(self.entry, self._env), False
        try:
            self._transport.open()
        except ConnectionLost as lost:
            self.close()
            raise self._failed(lost) from lost

    def connect(self, cancelled: Callable[[], bool]) -> Iterator[Progress]:
        """Initialize, and list the tools. Raises ServerFailed, Cancelled."""
        if self._transport is None:
            self.start()
        asking, before = f"waiting for server {self.entry.name}", self.tools
        try:
            yield from self._greet(asking, cancelled)
            yield from self._list(asking, cancelled)
        except JsonRpcError as refused:
            self.close()
            raise ServerFailed(f"server {self.entry.name} refused the connection: {refused.said}", f"check {self.entry.place}") from refused
        self._has_others |= bool(before) and _differ(before, self.tools)

    def renew(self, cancelled: Callable[[], bool]) -> Iterator[Progress]:
        """List the tools again. Raises ServerFailed, Cancelled."""
        self._has_others = False
        if self._transport is None:
            return  # it is begun, and its tools are learned, when it is called
        try:
            yield from self._list(f"asking server {self.entry.name} for its tools", cancelled)
        except JsonRpcError as refused:
            raise ServerFailed(f"server {self.entry.name} failed to list its tools again: {refused.said}", "") from refused

    def _list(self, asking: str, cancelled: Callable[[], bool]) -> Generator[Progress, None, None]:
        """Raises JsonRpcError, ServerFailed, Cancelled."""
        self._transport.inbox.is_changed = False
        tools: list[Mapping[str, Any]] = []
        cursors: list[str] = []
        while len(cursors) < PAGES and len(tools) <= MOST_TOOLS:
            try:
                page = yield from self._asked("tools/list", {"cursor": cursors[-1]} if cursors else {}, asking, cancelled)
            except JsonRpcError as refused:
                if refused.code != METHOD_NOT_FOUND:
                    raise
                break  # it has none
            told = page.get("tools")
            told = told if isinstance(told, list) else ()
            tools += [tool for tool in told if isinstance(tool, Mapping) and isinstance(tool.get("name"), str)]
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or cursor in cursors:
                break
            cursors.append(cursor)
        self.tools, self.has_more = tools[:MOST_TOOLS], len(tools) > MOST_TOOLS

    def _greet(self, asking: str, cancelled: Callable[[], bool]) -> Generator[Progress, None, None]:
        greeting = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": CLIENT}
        try:
            told = yield from self._asked("initialize", greeting, asking, cancelled)
        except JsonRpcError as refused:
            if refused.code not in (OTHER_VERSION, METHOD_NOT_FOUND):
                raise
            self._has_envelope = True
        else:
            version = told.get("protocolVersion")
            self._transport.version = version if isinstance(version, str) and DATE.fullmatch(version) else HANDSHAKE
            self._transport.send(notification("notifications/initialized"))

    def call(self, tool: str, arguments: Mapping[str, Any], cancelled: Callable[[], bool]) -> Iterator[Progress | ToolResult]:
        """Call a tool; yields progress, the result last. Raises ServerFailed, Cancelled."""
        phase = f"calling {tool}"
        if self._is_doubted and self.is_begun:
            with suppress(JsonRpcError, ServerFailed):  # refused, by versions without it, is an answer too
                yield from self._asked("ping", {}, phase, cancelled, PING_S)
        if not self.is_begun:
            yield from self.connect(cancelled)
        params = {"name": tool, "arguments": dict(arguments)}
        try:
            try:
                result = yield from self._asked("tools/call", params, phase, cancelled)
            except SessionExpired:  # its session was over: nothing was called
                yield from self.connect(cancelled)
                result = yield from self._asked("tools/call", params, phase, cancelled)
        except JsonRpcError as refused:
            result = {"content": [{"type": "text", "text": refused.said}], "isError": True}
        if result.get("resultType", "complete") != "complete":  # it asks back, which this client did not offer
            result = {"content": [{"type": "text", "text": "the tool asks for more input than it was called with"}], "isError": True}
        yield parse_result(result)

    def _asked(self, method: str, params: Mapping[str, Any], phase: str, cancelled: Callable[[], bool],
               patience: float | None = None) -> Generator[Progress, None, dict]:
        """The result of a request, within the server's timeout. Raises JsonRpcError, ServerFailed, Cancelled."""
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
                    raise Cancelled
                waited = time.monotonic() - since
                if waited > patience:
                    self._let_go(number, method)
                    self.close()  # what hangs would keep the next call waiting too
                    raise self._failed(ConnectionLost(_silence(transport, patience), f'"timeout" of {self.entry.place} gives it more time'))
                yield Progress(phase, int(waited), int(patience), "s", detail)
        except ConnectionLost as lost:
            self.close()
            raise self._failed(lost) from lost

    def _let_go(self, number: int, method: str) -> None:
        """Cancel a request; a server that was never initialized is closed."""
        if method == "initialize":
            self.close()
            return
        self._is_doubted = True
        self._transport.give_up()
        self._transport.send(notification("notifications/cancelled", {"requestId": number, "reason": "nobody waits any more"}))

    def _heed(self, message: Message, number: int) -> str | None:
        """Answer a request of the server; report progress on our request `number`."""
        if (answer := reply(message)) is not None:
            self._transport.send(answer)
        params = message.get("params")
        if message.get("method") != PROGRESS or not isinstance(params, dict) or params.get("progressToken") != number:
            return None
        done, total = params.get("progress"), params.get("total")
        share = f"{done:g} of {total:g}" if _is_number(done) and _is_number(total) else ""
        said = params.get("message")
        return " ".join(filter(None, (share, short(said) if isinstance(said, str) else "")))

    def _failed(self, lost: ConnectionLost) -> ServerFailed:
        by_hand = "" if self.entry.url else "; by hand: " + " ".join(map(typed, (self.entry.command, *self.entry.args)))
        kind = SessionExpired if lost.is_forgotten else ServerFailed
        return kind(f"server {self.entry.name} {lost.reason}", lost.step or f"check {self.entry.place}{by_hand}")

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


def _differ(one: list[Mapping[str, Any]], other: list[Mapping[str, Any]]) -> bool:
    """Also if they are nested too deeply to compare."""
    try:
        return one != other
    except RecursionError:
        return True


def _is_number(value: Any) -> bool:
    """A number that fits on a line: JSON integers have any length."""
    return isinstance(value, int | float) and abs(value) < 1e300


def _silence(transport: Transport, patience: float) -> str:
    garbage = transport.inbox.garbage
    return f"gave no answer within {patience:g} s" + (f"; it wrote an invalid message: {garbage[-1]}" if garbage else "")
