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

HANDSHAKE_VERSION = "2025-11-25"  # the newest protocol version with a handshake
STATELESS_VERSION = "2026-07-28"  # the version without one
UNSUPPORTED_VERSION = -32022  # error code
VERSION_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)  # a protocol version; it goes into a header
META_PREFIX = "io.modelcontextprotocol/"
POLL_S = 0.1  # how often cancellation is checked
PING_TIMEOUT_S = 2.0
MAX_TOOLS, MAX_PAGES = 500, 100  # of a server's list: all definitions are in every prompt
CLIENT = {"name": "effllm", "version": __version__}


class ServerFailed(EffllmError):
    """A server is unreachable, exited, or did not answer in time."""


class SessionExpired(ServerFailed):
    """The server no longer knows the session; it may be initialized again."""


class Cancelled(Exception):
    """The caller no longer waits for the answer."""


class Client:
    """A connection to one server. A lost server is started again at the next request.

    `tools`: the definitions that the server lists, once connected
    `has_more`: it lists more than MAX_TOOLS
    """

    def __init__(self, entry: ServerEntry, env: Mapping[str, str]) -> None:
        self.entry, self._env = entry, env
        self.tools: list[Mapping[str, Any]] = []
        self.has_more = False
        self._is_changed_by_restart = False  # it lists other tools than before it was restarted
        self._transport: Transport | None = None
        self._request_ids, self._is_stateless = count(1), False
        self._may_be_busy = False  # a request was cancelled, which the server may still be processing

    @property
    def is_started(self) -> bool:
        return self._transport is not None

    @property
    def is_changed(self) -> bool:
        """The server announced a changed tool list."""
        return self._is_changed_by_restart or self._transport is not None and self._transport.inbox.is_changed

    def start(self) -> None:
        """Start connecting without waiting. Raises ServerFailed."""
        if self.entry.url:
            from .http import HttpTransport as TransportClass
        else:
            from .stdio import StdioTransport as TransportClass
        self._transport, self._is_stateless = TransportClass(self.entry, self._env), False
        try:
            self._transport.open()
        except ConnectionLost as error:
            self.close()
            raise self._failure(error) from error

    def connect(self, cancelled: Callable[[], bool]) -> Iterator[Progress]:
        """Initialize, and list the tools. Raises ServerFailed, Cancelled."""
        if self._transport is None:
            self.start()
        phase, tools_before = f"waiting for server {self.entry.name}", self.tools
        try:
            yield from self._initialize(phase, cancelled)
            yield from self._list(phase, cancelled)
        except JsonRpcError as error:
            self.close()
            message = f"server {self.entry.name} refused the connection: {error.message}"
            raise ServerFailed(message, f"check {self.entry.location}") from error
        self._is_changed_by_restart |= bool(tools_before) and _differ(tools_before, self.tools)

    def refresh(self, cancelled: Callable[[], bool]) -> Iterator[Progress]:
        """List the tools again. Raises ServerFailed, Cancelled."""
        self._is_changed_by_restart = False
        if self._transport is None:
            return  # the next call starts it and lists its tools
        try:
            yield from self._list(f"asking server {self.entry.name} for its tools", cancelled)
        except JsonRpcError as error:
            raise ServerFailed(f"server {self.entry.name} failed to list its tools again: {error.message}", "") from error

    def _list(self, phase: str, cancelled: Callable[[], bool]) -> Generator[Progress, None, None]:
        """Read all pages of the tool list. Raises JsonRpcError, ServerFailed, Cancelled."""
        self._transport.inbox.is_changed = False
        tools: list[Mapping[str, Any]] = []
        cursors: list[str] = []
        while len(cursors) < MAX_PAGES and len(tools) <= MAX_TOOLS:
            try:
                page = yield from self._request("tools/list", {"cursor": cursors[-1]} if cursors else {}, phase, cancelled)
            except JsonRpcError as error:
                if error.code != METHOD_NOT_FOUND:
                    raise
                break  # a server without tools
            listed = page.get("tools")
            listed = listed if isinstance(listed, list) else ()
            tools += [tool for tool in listed if isinstance(tool, Mapping) and isinstance(tool.get("name"), str)]
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or cursor in cursors:
                break
            cursors.append(cursor)
        self.tools, self.has_more = tools[:MAX_TOOLS], len(tools) > MAX_TOOLS

    def _initialize(self, phase: str, cancelled: Callable[[], bool]) -> Generator[Progress, None, None]:
        """The handshake; a server that has none is used without state. Raises JsonRpcError, ServerFailed, Cancelled."""
        params = {"protocolVersion": HANDSHAKE_VERSION, "capabilities": {}, "clientInfo": CLIENT}
        try:
            result = yield from self._request("initialize", params, phase, cancelled)
        except JsonRpcError as error:
            if error.code not in (UNSUPPORTED_VERSION, METHOD_NOT_FOUND):
                raise
            self._is_stateless = True
        else:
            version = result.get("protocolVersion")
            self._transport.version = version if isinstance(version, str) and VERSION_DATE.fullmatch(version) else HANDSHAKE_VERSION
            self._transport.send(notification("notifications/initialized"))

    def call(self, tool: str, arguments: Mapping[str, Any], cancelled: Callable[[], bool]) -> Iterator[Progress | ToolResult]:
        """Call a tool; yields progress, the result last. Raises ServerFailed, Cancelled."""
        phase = f"calling {tool}"
        if self._may_be_busy and self.is_started:
            with suppress(JsonRpcError, ServerFailed):  # an error, from servers without ping, is a sign of life too
                yield from self._request("ping", {}, phase, cancelled, PING_TIMEOUT_S)
        if not self.is_started:
            yield from self.connect(cancelled)
        params = {"name": tool, "arguments": dict(arguments)}
        try:
            try:
                result = yield from self._request("tools/call", params, phase, cancelled)
            except SessionExpired:  # the tool was not called
                yield from self.connect(cancelled)
                result = yield from self._request("tools/call", params, phase, cancelled)
        except JsonRpcError as error:
            result = {"content": [{"type": "text", "text": error.message}], "isError": True}
        if result.get("resultType", "complete") != "complete":  # a request for input, which this client does not offer
            result = {"content": [{"type": "text", "text": "the tool asks for more input than it was called with"}], "isError": True}
        yield parse_result(result)

    def _request(self, method: str, params: Mapping[str, Any], phase: str, cancelled: Callable[[], bool],
                 timeout_s: float | None = None) -> Generator[Progress, None, dict]:
        """The result of a request. `timeout_s`: None for the server's; progress starts it anew. Raises JsonRpcError, ServerFailed,
        Cancelled."""
        transport, request_id, timeout_s = self._transport, next(self._request_ids), timeout_s or self.entry.timeout_s
        meta: dict[str, Any] = {"progressToken": request_id}
        if self._is_stateless:
            meta |= {f"{META_PREFIX}protocolVersion": STATELESS_VERSION, f"{META_PREFIX}clientInfo": CLIENT,
                     f"{META_PREFIX}clientCapabilities": {}}
        last_sign_s, detail = time.monotonic(), ""
        try:
            transport.send(request(request_id, method, {**params, "_meta": meta} if method != "initialize" else params))
            while True:
                message = transport.inbox.take(POLL_S)
                if message is not None and "method" not in message and message.get("id") == request_id:
                    self._may_be_busy = False
                    return result_of(message)
                if message is not None and (progress := self._handle(message, request_id)) is not None:
                    last_sign_s, detail = time.monotonic(), progress
                if cancelled():
                    self._cancel_request(request_id, method)
                    raise Cancelled
                waited_s = time.monotonic() - last_sign_s
                if waited_s > timeout_s:
                    self._cancel_request(request_id, method)
                    self.close()  # a server that hangs would block the next call too
                    hint = f'"timeout" of {self.entry.location} gives it more time'
                    raise self._failure(ConnectionLost(_timeout_reason(transport, timeout_s), hint))
                yield Progress(phase, int(waited_s), int(timeout_s), "s", detail)
        except ConnectionLost as error:
            self.close()
            raise self._failure(error) from error

    def _cancel_request(self, request_id: int, method: str) -> None:
        """Cancel a request; a server that was never initialized is closed."""
        if method == "initialize":
            self.close()
            return
        self._may_be_busy = True
        self._transport.abort_request()
        self._transport.send(notification("notifications/cancelled", {"requestId": request_id, "reason": "nobody waits any more"}))

    def _handle(self, message: Message, request_id: int) -> str | None:
        """Answer a request of the server, or return the progress of our request `request_id`; None for any other message."""
        if (response := reply(message)) is not None:
            self._transport.send(response)
        params = message.get("params")
        if message.get("method") != PROGRESS or not isinstance(params, dict) or params.get("progressToken") != request_id:
            return None
        done, total = params.get("progress"), params.get("total")
        share = f"{done:g} of {total:g}" if _is_number(done) and _is_number(total) else ""
        text = params.get("message")
        return " ".join(filter(None, (share, short(text) if isinstance(text, str) else "")))

    def _failure(self, error: ConnectionLost) -> ServerFailed:
        by_hand = "" if self.entry.url else "; by hand: " + " ".join(map(typed, (self.entry.command, *self.entry.args)))
        error_class = SessionExpired if error.is_session_expired else ServerFailed
        return error_class(f"server {self.entry.name} {error.reason}", error.hint or f"check {self.entry.location}{by_hand}")

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


def _differ(one: list[Mapping[str, Any]], other: list[Mapping[str, Any]]) -> bool:
    """Whether two tool lists differ, or are nested too deeply to compare."""
    try:
        return one != other
    except RecursionError:
        return True


def _is_number(value: Any) -> bool:
    """Whether it is a number that fits on a line: JSON integers have any length."""
    return isinstance(value, int | float) and abs(value) < 1e300


def _timeout_reason(transport: Transport, timeout_s: float) -> str:
    invalid_lines = transport.inbox.invalid_lines
    return f"gave no answer within {timeout_s:g} s" + (f"; it wrote an invalid message: {invalid_lines[-1]}" if invalid_lines else "")
