"""MCP's streamable HTTP transport: every message is a POST, answered by one message or an event stream."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urljoin

from ... import __version__
from ...offload.connection import ConnectionFailed, Network, Response, Url
from .configuration import ServerEntry
from .jsonrpc import MAX_MESSAGE_NBYTES, ConnectionLost, Inbox, Message, short

SESSION_HEADER = "Mcp-Session-Id"
READ_NBYTES = 1 << 16
NOTIFICATION_TIMEOUT_S = 2.0
OK_STATUSES = (200, 202, 204)
REDIRECTS_KEEPING_METHOD = (307, 308)
REDIRECTS = (301, 302, 303, *REDIRECTS_KEEPING_METHOD)
SESSION_EXPIRED_STATUSES = (400, 404)  # restarted servers answer 400, though the protocol says 404
MAX_REDIRECTS = 3
UNAUTHORIZED_STATUSES = (401, 403)
STATELESS_VERSION_KEY = "io.modelcontextprotocol/protocolVersion"  # in every request, where the protocol version has no handshake


class HttpTransport:
    """Messages to one URL. Each pending request has a thread and a connection of its own."""

    def __init__(self, entry: ServerEntry, env: Mapping[str, str]) -> None:
        self.entry, self.inbox, self.version = entry, Inbox(), ""
        self._network = Network(env, f"effllm/{__version__}", entry.timeout_s)
        self._session = ""
        self._num_aborts = 0

    def open(self) -> None:
        try:
            self._url = Url.parse(self.entry.url)
        except ConnectionFailed as error:
            raise ConnectionLost(f"cannot be reached: {error.reason}", f"check the url of {self.entry.location}") from None

    def send(self, message: Message) -> None:
        thread = threading.Thread(target=self._post, args=(message,), daemon=True)
        thread.start()
        if "id" not in message:  # a notification must arrive before later requests
            thread.join(NOTIFICATION_TIMEOUT_S)

    def _post(self, message: Message) -> None:
        num_aborts, request_id = self._num_aborts, message.get("id") if "method" in message else None
        try:
            response = self._send_following_redirects(json.dumps(message).encode(), self._headers(message))
        except ConnectionFailed as error:
            if num_aborts == self._num_aborts:
                hint = error.step or f"start it, or check the url of {self.entry.location}"
                self.inbox.fail(ConnectionLost(f"cannot be reached: {error.reason}", hint))
            return
        try:
            self._read_response(response, request_id)
        except ConnectionFailed as error:
            if request_id is not None and num_aborts == self._num_aborts:
                self.inbox.fail(ConnectionLost(f"closed the connection mid-response: {error.reason}"))
        finally:
            response.close()

    def _send_following_redirects(self, body: bytes, headers: Mapping[str, str]) -> Response:
        """The response to a POST, following redirects within the same server. Raises ConnectionFailed."""
        response = self._network.request("POST", self._url, headers, body)
        for _ in range(MAX_REDIRECTS):
            try:
                target = Url.parse(self._redirect_url(response)) if response.status in REDIRECTS_KEEPING_METHOD else None
            except (ConnectionFailed, ValueError):  # an invalid address
                break
            if target is None or target.origin != self._url.origin:  # another server must not see the message
                break
            response.close()
            self._url = target
            response = self._network.request("POST", target, headers, body)
        return response

    def _redirect_url(self, response: Response) -> str:
        return urljoin(f"{self._url.scheme}://{self._url.authority}{self._url.target}", response.header("Location") or "")

    def _headers(self, message: Message) -> dict[str, str]:
        params = message.get("params") or {}
        version = self.version or params.get("_meta", {}).get(STATELESS_VERSION_KEY, "")
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Connection": "close"}
        headers |= {SESSION_HEADER: self._session} if self._session else {}
        headers |= {"MCP-Protocol-Version": version} if version else {}
        if STATELESS_VERSION_KEY in params.get("_meta", {}):  # such servers route by these, without reading the message
            headers |= {"Mcp-Method": message["method"]} | ({"Mcp-Name": header_value(params["name"])} if "name" in params else {})
        return {**headers, **self.entry.headers}

    def _read_response(self, response: Response, request_id: int | None) -> None:
        """Read the messages of a response; a status that is an error ends the connection. Raises ConnectionFailed."""
        self._session = self._session or response.header(SESSION_HEADER) or ""
        content_type = (response.header("Content-Type") or "").partition(";")[0].strip().lower()
        if content_type == "text/event-stream" and response.status == 200:
            if not self._read_event_stream(response, request_id) and request_id is not None:
                raise ConnectionFailed("it ended without one")
            return
        body = response.read(MAX_MESSAGE_NBYTES)
        text = short(body[:1000].decode(errors="replace"))
        answered_ids = self.inbox.put(body) if content_type == "application/json" and body.lstrip()[:1] in (b"{", b"[") else []
        if request_id in answered_ids:
            return
        if response.status in UNAUTHORIZED_STATUSES:
            self.inbox.fail(ConnectionLost(f"requires authentication (HTTP {response.status})",
                                          f'give its key as "headers": {{"Authorization": "Bearer …"}} of {self.entry.location}'))
        elif response.status in SESSION_EXPIRED_STATUSES and self._session:
            self.inbox.fail(ConnectionLost("has ended its session", is_session_expired=True))
        elif response.status in REDIRECTS:
            where = short(response.header("Location") or "nowhere")
            self.inbox.fail(ConnectionLost(f"has moved to {where}", f"if that is right, give it as the url of {self.entry.location}"))
        elif response.status not in OK_STATUSES:
            reason = f"answers with HTTP {response.status}{f': {text}' if text else ''}"
            self.inbox.fail(ConnectionLost(reason, f"check the url of {self.entry.location}"))
        elif request_id is not None:
            self.inbox.fail(ConnectionLost(f"sent an invalid response: {text or 'nothing'}", f"check the url of {self.entry.location}"))

    def _read_event_stream(self, response: Response, request_id: int | None) -> bool:
        """Read an event stream, a message per event. Returns whether the request was answered, or cannot be any more."""
        buffer, partial_line, data, length, is_answered = memoryview(bytearray(READ_NBYTES)), [], [], 0, False
        while count := response.readinto(buffer):
            *lines, last = bytes(buffer[:count]).split(b"\n")
            if lines:
                lines[0], partial_line = b"".join((*partial_line, lines[0])), []
            partial_line.append(last)
            for line in lines:
                line = line.removesuffix(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                elif not line and data:
                    is_answered |= request_id in self.inbox.put(b"\n".join(data))
                    data, length = [], 0
            length += count
            if length > MAX_MESSAGE_NBYTES:
                self.inbox.fail(ConnectionLost(f"wrote more than {MAX_MESSAGE_NBYTES >> 20} MiB in one message", "ask it for less"))
            if length > MAX_MESSAGE_NBYTES or self.inbox.is_full:
                return True
        return is_answered

    def abort_request(self) -> None:
        self._num_aborts += 1
        self._network.cut()

    def close(self) -> None:
        self.abort_request()
        if self._session:  # in a thread: a server that does not answer must not delay the exit
            thread = threading.Thread(target=self._end_session, daemon=True)
            thread.start()
            thread.join(1.0)

    def _end_session(self) -> None:
        with suppress(ConnectionFailed):
            self._network.request("DELETE", self._url, self._headers({})).close()


def header_value(text: str) -> str:
    """A text as a header's value, encoded as the protocol specifies if it is not plain ASCII."""
    if text.isascii() and text.isprintable() and text == text.strip() and not text.startswith("=?base64?"):
        return text
    return f"=?base64?{base64.b64encode(text.encode(errors='replace')).decode()}?="
