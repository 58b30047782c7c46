"""Hostile clients: connections whose requests never complete, and small bodies that expand to large ones."""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from server_process import MINUTE, ServerProcess, serving, wait_until
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Mount

from effllm.cli.server import bodies, guard, http_server
from effllm.cli.server.answer_queue import AnswerQueue
from effllm.cli.server.problems import Problem
from effllm.cli.server.single_model import on_problem


def test_a_second_request_whose_bytes_drip_in_does_not_keep_a_connection(
        answer_queue: AnswerQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.5)
    got: list[bytes] = []

    async def application(scope: dict, receive: Callable, send: Callable) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    with http_server.bind_socket("127.0.0.1", 0) as bound:
        def dripping() -> None:
            try:
                with socket.create_connection(bound.getsockname()[:2], MINUTE) as client:
                    for _ in range(2):  # who asks again and again is kept
                        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                        got.append(b"")
                        while not got[-1].endswith(b"ok"):
                            got[-1] += client.recv(1000)
                        time.sleep(0.3)
                    client.settimeout(0.1)
                    client.sendall(b"GET / HTTP/1.1\r\nX: ")
                    with suppress(ConnectionError):
                        for _ in range(100):
                            with suppress(TimeoutError):
                                if client.recv(1) == b"":
                                    break
                            client.sendall(b"a")
                        else:
                            got.append(b"still there")
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        http_server.serve_http(application, bound, answer_queue, lambda: threading.Thread(target=dripping).start(), got.append)
    assert len(got) == 2 and all(each.endswith(b"ok") for each in got)


def test_a_body_of_very_many_values_is_not_taken_apart() -> None:
    text = b'{"prompt": "' + b'a, [b], {c}, \\", ' * 100_000 + b'"}'
    bodies.check_value_count(text)
    bodies.check_value_count(b"[" + b"7," * (bodies.MAX_VALUES - 2) + b"7]")
    more = bodies.MAX_VALUES + 1
    for many in (b"[" + b"7," * more + b"7]", b'{"a":' * more, b'["\\"", ' + b"{}," * more, b"[" + b'"a,",' * more + b"1]"):
        with pytest.raises(Problem, match="more than 1,048,576 values"):
            bodies.check_value_count(many)
    began = time.process_time()
    bodies.check_value_count(b'"' + b'\\",' * (2 << 20))  # a text without an end, of marks that would each begin another
    assert time.process_time() - began < 5


def test_bodies_under_way_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_BODIES_NBYTES", 2000)
    said, sent, held = [], [], asyncio.Event()

    async def application(scope: dict, receive: Callable, send: Callable) -> None:
        came = await receive()
        if scope["path"] == "/held":
            await held.wait()
        await Response(came["body"][:1])(scope, receive, send)

    app = guard.Guard(Starlette(routes=[Mount("/", application)], exception_handlers={Problem: on_problem}), guard.AccessRules(False),
                      lambda method, path, status, record: said.append((path, status)))

    async def asked(path: str, nbytes: int) -> None:
        async def receive() -> dict:
            return {"type": "http.request", "body": b"x" * nbytes, "more_body": False}

        async def send(message: dict) -> None:
            sent.append(message)

        await app({"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
                   "headers": []}, receive, send)

    async def test() -> None:
        first = asyncio.create_task(asked("/held", 1500))
        await asyncio.sleep(0)
        await asked("/more", 1000)
        assert b"bodies_full" in sent[-1]["body"] and (b"retry-after", b"1") in sent[-2]["headers"]
        await asked("/few", 100)
        held.set()
        await first
        await asked("/more", 1000)

    asyncio.run(test())
    assert said == [("/more", 503), ("/few", 200), ("/held", 200), ("/more", 200)]


def of_text(body: bytes, length: int | None = None) -> bytes:
    """A request for a text, which says that its body has so many bytes."""
    return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (length or len(body), body)


def peak(server: ServerProcess) -> int:
    """Bytes of memory, the most that a server has had."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are Linux's to tell")
def test_memory_has_a_bound_whatever_is_sent() -> None:
    with serving("--queue", "64", "-t", "1") as server:
        plain, before = server.chat().json["choices"], peak(server)
        for bomb in (b'{"prompt":[' + b"[]," * 10_000_000 + b"[]]}", b'{"messages":[' + b"{}," * 10_000_000 + b"{}]}",
                     b"{" + b",".join(b'"%d":0' % number for number in range(1_500_000)) + b"}",
                     b'{"prompt":[' + b"1," * 15_000_000 + b"1]}"):
            reply = server.request("POST", "/v1/completions", bomb)
            assert reply.status == 413 and reply.error["code"] == "body_too_large"
        assert peak(server) - before < 200 << 20
        unfinished, flooding = b'{"prompt":"' + b"a" * (bodies.MAX_BODY_NBYTES - 100), []

        def flood() -> None:
            with suppress(OSError):
                flooding.append(socket.create_connection(("127.0.0.1", server.port), MINUTE))
                flooding[-1].sendall(of_text(unfinished, bodies.MAX_BODY_NBYTES))

        floods = [threading.Thread(target=flood) for _ in range(40)]
        for each in floods:
            each.start()
        for each in floods:
            each.join(MINUTE)
        wait_until(lambda: "request bodies of 512 MiB are in progress" in server.err)
        for each in flooding:
            each.close()
        assert peak(server) - before < guard.MAX_BODIES_NBYTES + (512 << 20)
        wait_until(lambda: server.chat().status == 200)
        assert server.chat().json["choices"] == plain


@pytest.mark.slow
def test_hundreds_of_clients_that_vanish_leave_nothing() -> None:
    asked = of_text(json.dumps({"prompt": "Once", "ignore_eos": True, "max_tokens": 500, "stream": True}).encode())
    with serving("--queue", "64", "-t", "1", "--spec", "off") as server:
        process, seen, plain = psutil.Process(server.process.pid), [], server.chat().json["choices"]
        for _ in range(3):
            for number in range(150):
                with socket.create_connection(("127.0.0.1", server.port), MINUTE) as client:
                    client.sendall(asked if number % 3 else asked[: number - 170])
                    if number % 3:
                        client.recv(100 + number)
                    if number % 2:  # closed by a reset
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            assert server.chat().json["choices"] == plain
            seen.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
        assert seen[-1][0] - seen[0][0] < 8 << 20 and seen[-1][1] <= seen[0][1] + 4 and seen[-1][2] <= seen[0][2] + 2, seen
        assert server.request("GET", "/slots").json[0]["is_processing"] is False
