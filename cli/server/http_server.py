"""Binds an address and runs uvicorn there until a signal ends it."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ... import EffllmError, UsageError

GRACE_S = 0.5  # for cancelled answers to send their last event
KEEP_ALIVE_S = 75  # keep-alive of an idle connection
PROBE_S, HTTP10_WAIT_S = 5.0, 1.0  # between questions whether a client that says no more still listens; that one of HTTP/1.0 is waited for
GC_INTERVAL_NBYTES = 64 << 20  # that may have come since memory was last swept
RESET_WAIT_S = 0.2  # in which the machine of one that has gone says so
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises UsageError, and EffllmError where the system refuses."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is not a port", "1 to 65535, or 0 for one that is free")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a valid host name"
        raise UsageError(f"--host {host}: {reason}", "127.0.0.1 for this machine alone, 0.0.0.0 for all that reach it") from None
    family, kind, protocol, _, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)  # IPv4 first, as most clients do
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise in_use(host, port) from None
        hint = "a port above 1023" if error.errno in (errno.EACCES, errno.EPERM) else "127.0.0.1 for this machine alone"
        raise EffllmError(f"--host {host} --port {port}: {error.strerror}", hint) from None
    return bound


def in_use(host: str, port: int) -> EffllmError:
    return EffllmError(f"port {port} of {host} is in use", f"--port {port + 1 if port < 65535 else 0}, or --port 0 for one that is free")


def url_of(listening: socket.socket) -> str:
    host, port, *_ = listening.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


class Closable(Protocol):
    """What answers requests and has to know when the server ends."""

    def close(self) -> None:
        """Accept no more requests, and cancel those in progress."""


class Server(uvicorn.Server):
    """Calls `ready` once it listens, and leaves signal handling to its caller."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            host, port, *_ = sockets[0].getsockname()  # another server bound it at the same time
            raise in_use(host, port) from None
        self._ready()

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()


def collect_garbage() -> None:
    """Collect cycles and return free memory to the system: glibc keeps free blocks that lie between used ones, which after bodies of
    megabytes in several threads was more than a small model takes."""
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))


class Connection(H11Protocol):
    """Closes connections without a complete request, and those whose client does not read: uvicorn waits without a limit for the first
    request, for the rest of one, however slowly it arrives, and for a client that stops reading, and each connection is an open file.

    A client that closes its sending side may be waiting for the answer or be gone; TCP reports the same for both. They differ only when
    something is sent, so before an answer begins 100 (Continue) is sent, which HTTP/1.1 clients ignore; streams send keep-alives anyway. In
    HTTP/1.0 there is nothing harmless to send: without an answer within a second the connection is closed.

    Refused request bodies stay in reference cycles, since an exception holds its frames. Python's collector counts objects, not bytes, and
    would let gigabytes accumulate: so it is called by bytes received."""

    uncollected_nbytes = 0  # bytes received by all connections since the last collection

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._idle_timer = self.loop.call_later(KEEP_ALIVE_S, self._close_unused, self, 0)
        self._is_half_closed, self._probe_timer = False, None

    def data_received(self, data: bytes) -> None:
        Connection.uncollected_nbytes += len(data)
        super().data_received(data)
        if Connection.uncollected_nbytes > GC_INTERVAL_NBYTES:
            Connection.uncollected_nbytes = 0
            collect_garbage()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle_timer.cancel()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    def _close_unused(self, previous_idle: object, previous_unread: int) -> None:
        """Called every KEEP_ALIVE_S seconds with the state of the last call. `previous_idle`: the cycle that was complete then, None if a
        request was in progress; `previous_unread`: bytes that the client had left unread, 0 if there was room for more."""
        idle = self if self.cycle is None else self.cycle if self.cycle.response_complete else None
        unread = self.transport.get_write_buffer_size() if self.flow.write_paused else 0
        if idle is not None and idle is previous_idle or unread and unread == previous_unread:
            self.transport.abort()
        else:
            self._idle_timer = self.loop.call_later(KEEP_ALIVE_S, self._close_unused, idle, unread)

    def eof_received(self) -> bool:
        """Whether the connection stays open: until a complete request has been answered."""
        has_request = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if has_request and not self._is_half_closed:
            self._is_half_closed = True
            self.loop.call_soon(self._probe)  # a response that is ready is sent first
        return has_request

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and (self.cycle.response_complete or self.cycle.more_body):
            self.transport.close()

    def _probe(self) -> None:
        if self.transport.is_closing() or self.cycle.response_started:
            return
        if self.scope["http_version"] == "1.1":
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue")))
            self._probe_timer = self.loop.call_later(RESET_WAIT_S, self._check_reset)
        else:
            self._probe_timer = self.loop.call_later(HTTP10_WAIT_S, self._give_up)

    def _check_reset(self) -> None:
        """The transport no longer reads, so only this notices a reset."""
        if not self.transport.is_closing() and self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._probe_timer = self.loop.call_later(PROBE_S, self._probe)

    def _give_up(self) -> None:
        if not self.cycle.response_started:
            self.transport.abort()


def serve_http(application: ASGIApp, listening: socket.socket, answer_queue: Closable, ready: Callable[[], None],
               note: Callable[[str], None],
           closed: Callable[[], Awaitable[None]] | None = None, grace_s: float = GRACE_S) -> None:
    """Serve until a signal; running answers are then cancelled and have `grace_s` seconds to end. `ready` is called once requests are
    accepted, `note` with errors outside of requests; `closed` is awaited at the end."""
    config = uvicorn.Config(application, loop="asyncio", http=Connection, ws="none", lifespan="off", log_config=None, log_level="critical",
                            access_log=False, server_header=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=grace_s)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every write to a disconnected client, which is logged already
    server = Server(config, ready)

    def stop() -> None:
        server.should_exit = True
        answer_queue.close()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: note(loop_error(context)))
        for each in STOP_SIGNALS:
            if signal.getsignal(each) is not signal.SIG_IGN:  # as `nohup` has it
                loop.add_signal_handler(each, stop)
        gc.collect()
        gc.freeze()  # what exists now stays: scanning it takes a tenth of a second each time
        try:
            await server.serve([listening])
        finally:
            gc.unfreeze()
        if closed is not None:
            await closed()

    asyncio.run(serve())


def loop_error(context: Mapping[str, Any]) -> str:
    """An error of the event loop as one line: refused connections come by the hundred."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"cannot accept more connections: {error.strerror} (`ulimit -n` allows more)"
    return f"{context['message']}: {type(error).__name__}: {error}" if error else context["message"]


def exit_now() -> None:
    """End the process without cleaning up: the engine may be in a pass of several seconds, and what it reads must not be freed under it."""
    os._exit(0)
