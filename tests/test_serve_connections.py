"""Half-closed connections, and clients that do not read: whoever still waits gets the answer, whoever left is noticed."""

import asyncio
import ctypes
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable

import pytest
from server_process import MINUTE, wait_until

from effllm.cli.server import http_server
from effllm.cli.server.answer_queue import AnswerQueue
from effllm.offload import hardware

GET = b"GET /%s HTTP/%s\r\nHost: localhost\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Slow:
    """An application that answers `/slow` when it is let, `/stream` too behind its first byte, `/large` without an end, others at once.
    `gone` are the paths whose clients went before."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.asked: list[str] = []
        self.may_answer = threading.Event()

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        self.asked.append(path := scope["path"])
        working, leaving = asyncio.ensure_future(self._answer(path, send)), asyncio.ensure_future(self._left(receive))
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            self.gone.append(path)
        for each in (working, leaving):
            each.cancel()

    async def _left(self, receive: Callable) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    async def _answer(self, path: str, send: Callable) -> None:
        if path == "/slow":
            await self._until_let()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/stream":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await self._until_let()
        while path == "/large":
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            await asyncio.sleep(0)  # nothing is waited for with who has gone
        await send({"type": "http.response.body", "body": b"answered"})

    async def _until_let(self) -> None:
        while not self.may_answer.is_set():
            await asyncio.sleep(0.01)


@pytest.fixture
def listened(answer_queue: AnswerQueue, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Slow, Callable], None]], None]:
    """Runs a test's client, which is given the application and what opens a connection, beside a server in the main thread."""
    monkeypatch.setattr(http_server, "PROBE_S", 0.2)
    monkeypatch.setattr(http_server, "HTTP10_WAIT_S", 0.2)

    def run(client: Callable[[Slow, Callable], None]) -> None:
        said: list[object] = []
        with http_server.bind_socket("127.0.0.1", 0) as bound:
            def connected() -> socket.socket:
                return socket.create_connection(bound.getsockname()[:2], MINUTE)

            def asking() -> None:
                try:
                    client(application, connected)
                    said.append("done")
                except BaseException as error:
                    said.append(error)
                finally:
                    os.kill(os.getpid(), signal.SIGTERM)

            application, thread = Slow(), threading.Thread(target=asking)
            http_server.serve_http(application, bound, answer_queue, thread.start, said.append)
            thread.join(MINUTE)
        assert said == ["done"], said

    return run


def sent(connection: socket.socket, *requests: bytes) -> socket.socket:
    """Everything that a client has to say."""
    connection.sendall(b"".join(requests))
    connection.shutdown(socket.SHUT_WR)
    return connection


def rest(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_who_says_no_more_is_answered(listened: Callable) -> None:
    def client(application: Slow, connected: Callable) -> None:
        for version in (b"1.1", b"1.0"):
            quick = rest(sent(connected(), GET % (b"quick", version)))
            assert quick.startswith(b"HTTP/1.1 200") and quick.endswith(b"answered" if version == b"1.0" else b"0\r\n\r\n")
        assert rest(sent(connected(), *[GET % (b"quick", b"1.1")] * 3)).count(b"200 OK") == 3
        slow, stream = (sent(connected(), GET % (path, b"1.1")) for path in (b"slow", b"stream"))
        assert slow.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
        assert slow.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE, "asked again, as it may go later"
        application.may_answer.set()
        assert b"answered" in rest(slow).rpartition(CONTINUE)[2]
        assert b"first" in (all_of_it := rest(stream)) and b"answered" in all_of_it

    listened(client)


def test_who_says_no_more_and_goes_is_noticed(listened: Callable) -> None:
    def client(application: Slow, connected: Callable) -> None:
        sent(connected(), GET % (b"slow", b"1.1")).close()
        wait_until(lambda: application.gone == ["/slow"])
        waits = sent(connected(), GET % (b"slow", b"1.1"))
        waits.recv(len(CONTINUE), socket.MSG_WAITALL)
        assert application.gone == ["/slow"]
        waits.close()
        wait_until(lambda: application.gone == ["/slow"] * 2)
        assert rest(sent(connected(), GET % (b"slow", b"1.0"))) == b""
        wait_until(lambda: application.gone == ["/slow"] * 3)
        part = sent(connected(), b"POST /slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf")
        assert rest(part) == b"", "what was not asked whole is not answered"
        wait_until(lambda: application.gone == ["/slow"] * 4)

    listened(client)


def test_who_stops_reading_is_left(listened: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.4)

    def client(application: Slow, connected: Callable) -> None:
        with connected() as unread, connected() as slowly:
            for each in (unread, slowly):
                each.sendall(GET % (b"large", b"1.1"))
            while not application.gone:
                slowly.recv(1 << 22)
            assert application.gone == ["/large"]
            assert len(slowly.recv(1 << 16)) > 0, "one that reads is not"
        wait_until(lambda: application.gone == ["/large"] * 2)

    listened(client)


class Litter(Exception):
    """An error that knows what came, through its frames, and is known by one of them."""

    there = 0

    def __init__(self) -> None:
        Litter.there += 1

    def __del__(self) -> None:
        Litter.there -= 1


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library keeps nothing, or says not how to give it back")
def test_memory_that_is_free_between_things_in_use_is_given_back() -> None:
    bodies = [b"\1" * 60_000 for _ in range(3000)]  # each too small for a mapping of its own
    last, held = bodies[::100], hardware.rss()
    del bodies
    http_server.collect_garbage()
    assert held - hardware.rss() > 100 << 20 and len(last) == 30


def test_what_refused_requests_leave_behind_is_swept_by_its_bytes(answer_queue: AnswerQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "GC_INTERVAL_NBYTES", 1 << 20)
    seen: list[int] = []

    async def application(scope: dict, receive: Callable, send: Callable) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        try:
            raise Litter
        except Litter as error:
            known = error
        seen.append(Litter.there)
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": type(known).__name__.encode()})

    with http_server.bind_socket("127.0.0.1", 0) as bound:
        def asking() -> None:
            try:
                for _ in range(40):
                    with socket.create_connection(bound.getsockname()[:2], MINUTE) as client:
                        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000))
                        client.recv(100)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        gc.disable()
        try:
            http_server.serve_http(application, bound, answer_queue, lambda: threading.Thread(target=asking).start(), print)
        finally:
            gc.enable()
    assert len(seen) == 40 and max(seen) <= 8, seen
    assert gc.get_freeze_count() == 0, "what was there before is looked through again"
