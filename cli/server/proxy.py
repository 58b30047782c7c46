"""A request proxied to a worker on the loopback, and its response, chunk by chunk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import h11

from .ollama_requests import WAITED_HEADER

ADDRESS = "127.0.0.1"
READ_NBYTES = 1 << 16  # bytes read at once
# Hop-by-hop headers, and what each side sets itself.
HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"date"))
# Request headers that the router has checked, or replaces.
REPLACED = frozenset((b"host", b"origin", b"authorization", b"x-api-key", b"x-goog-api-key", b"content-length", b"expect",
                      b"sec-fetch-site", b"sec-fetch-mode", WAITED_HEADER.encode()))
Headers = Iterable[tuple[bytes, bytes]]


class UpstreamLost(Exception):
    """The connection to the worker failed, or ended before the response did."""


@dataclass(frozen=True)
class UpstreamResponse:
    """The status, headers and body of a worker's response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    chunks: AsyncIterator[bytes]


@contextlib.asynccontextmanager
async def proxied(port: int, key: str, method: str, target: bytes, headers: Headers, body: bytes,
                  waited_ns: int) -> AsyncIterator[UpstreamResponse]:
    """Send a request to a worker and yield its response, which is aborted when the context ends. `waited_ns`: how long the request waited
    for its model. Raises UpstreamLost."""
    try:
        reader, writer = await asyncio.open_connection(ADDRESS, port)
    except OSError as error:
        raise UpstreamLost from error
    connection = h11.Connection(h11.CLIENT)
    try:
        added = [(b"host", f"{ADDRESS}:{port}".encode()), (b"authorization", f"Bearer {key}".encode()), (b"connection", b"close"),
               (b"content-length", str(len(body)).encode()), (WAITED_HEADER.encode(), str(waited_ns).encode())]
        forwarded = [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP | REPLACED]
        for event in (h11.Request(method=method, target=target, headers=added + forwarded), h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(event))
        try:
            await writer.drain()
            head = await _next(connection, reader)
            while isinstance(head, h11.InformationalResponse):
                head = await _next(connection, reader)
        except OSError as error:
            raise UpstreamLost from error
        yield UpstreamResponse(head.status_code, [(name, value) for name, value in head.headers if name not in HOP_BY_HOP],
                               _chunks(connection, reader))
    finally:
        writer.transport.abort()


async def _chunks(connection: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The chunks of the response body. Raises UpstreamLost."""
    while not isinstance(event := await _next(connection, reader), h11.EndOfMessage):
        yield bytes(event.data)


async def _next(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Event:
    """The next event of the response. Raises UpstreamLost."""
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_NBYTES))
    except (h11.RemoteProtocolError, OSError) as error:
        raise UpstreamLost from error
    if not isinstance(event, h11.Response | h11.InformationalResponse | h11.Data | h11.EndOfMessage):  # it closed the connection
        raise UpstreamLost
    return event
