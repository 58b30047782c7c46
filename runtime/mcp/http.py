"""A server at an address, by the protocol's streamable HTTP: every message is a POST, answered by one message or by a stream of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress

from ... import __version__
from ...offload.connection import ConnectionFailed, Network, Response, Url
from .configuration import ServerEntry
from .wire import LARGEST, Inbox, Lost, Message, short

SESSION = "Mcp-Session-Id"
PIECE = 1 << 16
NOTIFIED_WITHIN_S = 2.0
FINE, GONE = (200, 202, 204), 404
WANTS_A_KEY = (401, 403)
ENVELOPE_VERSION = "io.modelcontextprotocol/protocolVersion"  # in every request, of the versions of the protocol that have no handshake


class Posts:
    """The way to one address. A request that waits has a thread and a connection of its own."""

    def __init__(self, entry: ServerEntry, env: Mapping[str, str]) -> None:
        self.entry, self.inbox, self.version = entry, Inbox(), ""
        self._network = Network(env, f"effllm/{__version__}", entry.patience_s)
        self._session = ""

    def open(self) -> None:
        try:
            self._url = Url.parse(self.entry.url)
        except ConnectionFailed as error:
            raise Lost(f"cannot be reached: {error.reason}", f"check the url of {self.entry.place}") from None

    def send(self, message: Message) -> None:
        """A notification is there before what is asked behind it."""
        sending = threading.Thread(target=self._post, args=(message,), daemon=True)
        sending.start()
        if "id" not in message:
            sending.join(NOTIFIED_WITHIN_S)

    def _post(self, message: Message) -> None:
        try:
            response = self._network.request("POST", self._url, self._headers(message), json.dumps(message).encode())
        except ConnectionFailed as error:
            self.inbox.end(Lost(f"cannot be reached: {error.reason}", error.step or f"start it, or check the url of {self.entry.place}"))
            return
        with suppress(ConnectionFailed):  # a stream that breaks off: whoever waits sees that nothing comes
            try:
                self._take(response, "id" in message and "method" in message)
            finally:
                response.close()

    def _headers(self, message: Message) -> dict[str, str]:
        params = message.get("params") or {}
        version = self.version or params.get("_meta", {}).get(ENVELOPE_VERSION, "")
        own = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Connection": "close"}
        own |= {SESSION: self._session} if self._session else {}
        own |= {"MCP-Protocol-Version": version} if version else {}
        if ENVELOPE_VERSION in params.get("_meta", {}):  # by which such servers find their way without reading the message
            own |= {"Mcp-Method": message["method"]} | ({"Mcp-Name": params["name"]} if "name" in params else {})
        return {**own, **self.entry.headers}

    def _take(self, response: Response, asked: bool) -> None:
        """The messages of an answer. One who was asked and has none to say says so by its status."""
        self._session = self._session or response.header(SESSION) or ""
        kind = (response.header("Content-Type") or "").partition(";")[0].strip().lower()
        if kind == "text/event-stream" and response.status == 200:
            self._stream(response)
            return
        body = response.read(LARGEST)
        if kind == "application/json" and body.lstrip()[:1] in (b"{", b"["):
            self.inbox.put(body)
        elif response.status in WANTS_A_KEY:
            self.inbox.end(Lost(f"wants to know who asks (HTTP {response.status})",
                                f'give its key as "headers": {{"Authorization": "Bearer …"}} of {self.entry.place}'))
        elif response.status == GONE and self._session:
            self.inbox.end(Lost("has ended its session"))
        elif response.status not in FINE:
            said = short(body[:1000].decode(errors="replace"))
            why = f"answers with HTTP {response.status}{f': {said}' if said else ''}"
            self.inbox.end(Lost(why, f"check the url of {self.entry.place}"))
        elif asked:
            self.inbox.put(body or "an empty answer")

    def _stream(self, response: Response) -> None:
        """Events as they come, the data of each a message."""
        piece, rest, data, length = memoryview(bytearray(PIECE)), b"", [], 0
        while count := response.readinto(piece):
            *lines, rest = (rest + bytes(piece[:count])).split(b"\n")
            for line in lines:
                line = line.removesuffix(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                elif not line and data:
                    self.inbox.put(b"\n".join(data))
                    data, length = [], 0
            length += count
            if length > LARGEST:
                self.inbox.end(Lost(f"wrote more than {LARGEST >> 20} MiB in one message", "ask it for less"))
                return

    def give_up(self) -> None:
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
