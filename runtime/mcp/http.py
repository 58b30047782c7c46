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
from .jsonrpc import LARGEST, ConnectionLost, Inbox, Message, short

SESSION = "Mcp-Session-Id"
PIECE = 1 << 16
NOTIFIED_WITHIN_S = 2.0
FINE, MOVED, FORGETS = (200, 202, 204), (307, 308), (400, 404)  # 400: of servers that were begun anew, though the protocol says 404
ELSEWHERE = (301, 302, 303, *MOVED)
MOST_MOVES = 3
WANTS_A_KEY = (401, 403)
ENVELOPE_VERSION = "io.modelcontextprotocol/protocolVersion"  # in every request, of the versions of the protocol that have no handshake


class HttpTransport:
    """Messages to one URL. Each pending request has a thread and a connection of its own."""

    def __init__(self, entry: ServerEntry, env: Mapping[str, str]) -> None:
        self.entry, self.inbox, self.version = entry, Inbox(), ""
        self._network = Network(env, f"effllm/{__version__}", entry.patience_s)
        self._session = ""
        self._given_up = 0  # times

    def open(self) -> None:
        try:
            self._url = Url.parse(self.entry.url)
        except ConnectionFailed as error:
            raise ConnectionLost(f"cannot be reached: {error.reason}", f"check the url of {self.entry.place}") from None

    def send(self, message: Message) -> None:
        """A notification arrives before later requests."""
        sending = threading.Thread(target=self._post, args=(message,), daemon=True)
        sending.start()
        if "id" not in message:
            sending.join(NOTIFIED_WITHIN_S)

    def _post(self, message: Message) -> None:
        given_up, asked = self._given_up, message.get("id") if "method" in message else None
        try:
            response = self._reached(json.dumps(message).encode(), self._headers(message))
        except ConnectionFailed as error:
            if given_up == self._given_up:
                step = error.step or f"start it, or check the url of {self.entry.place}"
                self.inbox.end(ConnectionLost(f"cannot be reached: {error.reason}", step))
            return
        try:
            self._take(response, asked)
        except ConnectionFailed as error:
            if asked is not None and given_up == self._given_up:
                self.inbox.end(ConnectionLost(f"closed the connection mid-response: {error.reason}"))
        finally:
            response.close()

    def _reached(self, body: bytes, headers: Mapping[str, str]) -> Response:
        """The response to a POST, following redirects within the same server. Raises ConnectionFailed."""
        response = self._network.request("POST", self._url, headers, body)
        for _ in range(MOST_MOVES):
            try:
                moved = Url.parse(self._elsewhere(response)) if response.status in MOVED else None
            except (ConnectionFailed, ValueError):  # it names no address
                break
            if moved is None or moved.origin != self._url.origin:  # what is told to one server is no other's business
                break
            response.close()
            self._url = moved
            response = self._network.request("POST", moved, headers, body)
        return response

    def _elsewhere(self, response: Response) -> str:
        return urljoin(f"{self._url.scheme}://{self._url.authority}{self._url.target}", response.header("Location") or "")

    def _headers(self, message: Message) -> dict[str, str]:
        params = message.get("params") or {}
        version = self.version or params.get("_meta", {}).get(ENVELOPE_VERSION, "")
        own = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Connection": "close"}
        own |= {SESSION: self._session} if self._session else {}
        own |= {"MCP-Protocol-Version": version} if version else {}
        if ENVELOPE_VERSION in params.get("_meta", {}):  # by which such servers find their way without reading the message
            own |= {"Mcp-Method": message["method"]} | ({"Mcp-Name": in_header(params["name"])} if "name" in params else {})
        return {**own, **self.entry.headers}

    def _take(self, response: Response, asked: int | None) -> None:
        """Read the messages of a response. An error without a message is in the status. Raises ConnectionFailed."""
        self._session = self._session or response.header(SESSION) or ""
        kind = (response.header("Content-Type") or "").partition(";")[0].strip().lower()
        if kind == "text/event-stream" and response.status == 200:
            if not self._stream(response, asked) and asked is not None:
                raise ConnectionFailed("it ended without one")
            return
        body = response.read(LARGEST)
        said = short(body[:1000].decode(errors="replace"))
        answers = self.inbox.put(body) if kind == "application/json" and body.lstrip()[:1] in (b"{", b"[") else []
        if asked in answers:
            return
        if response.status in WANTS_A_KEY:
            self.inbox.end(ConnectionLost(f"requires authentication (HTTP {response.status})",
                                          f'give its key as "headers": {{"Authorization": "Bearer …"}} of {self.entry.place}'))
        elif response.status in FORGETS and self._session:
            self.inbox.end(ConnectionLost("has ended its session", is_forgotten=True))
        elif response.status in ELSEWHERE:
            where = short(response.header("Location") or "nowhere")
            self.inbox.end(ConnectionLost(f"has moved to {where}", f"if that is right, give it as the url of {self.entry.place}"))
        elif response.status not in FINE:
            why = f"answers with HTTP {response.status}{f': {said}' if said else ''}"
            self.inbox.end(ConnectionLost(why, f"check the url of {self.entry.place}"))
        elif asked is not None:
            self.inbox.end(ConnectionLost(f"sent an invalid response: {said or 'nothing'}", f"check the url of {self.entry.place}"))

    def _stream(self, response: Response, asked: int | None) -> bool:
        """Read an event stream, a message per event. Returns whether the request is answered, or never will be."""
        piece, rest, data, length, is_answered = memoryview(bytearray(PIECE)), [], [], 0, False
        while count := response.readinto(piece):
            *lines, last = bytes(piece[:count]).split(b"\n")
            if lines:
                lines[0], rest = b"".join((*rest, lines[0])), []
            rest.append(last)
            for line in lines:
                line = line.removesuffix(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                elif not line and data:
                    is_answered |= asked in self.inbox.put(b"\n".join(data))
                    data, length = [], 0
            length += count
            if length > LARGEST:
                self.inbox.end(ConnectionLost(f"wrote more than {LARGEST >> 20} MiB in one message", "ask it for less"))
            if length > LARGEST or self.inbox.is_full:
                return True
        return is_answered

    def give_up(self) -> None:
        self._given_up += 1
        self._network.cut()

    def close(self) -> None:
        self.give_up()
        if self._session:  # in a thread: a server that does not answer keeps nobody from leaving
            leaving = threading.Thread(target=self._leave, daemon=True)
            leaving.start()
            leaving.join(1.0)

    def _leave(self) -> None:
        with suppress(ConnectionFailed):
            self._network.request("DELETE", self._url, self._headers({})).close()


def in_header(text: str) -> str:
    """A text encoded for a header as the protocol specifies, if it needs that."""
    if text.isascii() and text.isprintable() and text == text.strip() and not text.startswith("=?base64?"):
        return text
    return f"=?base64?{base64.b64encode(text.encode(errors='replace')).decode()}?="
