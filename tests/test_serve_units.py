"""Units of `effllm serve` that the packaged model is too fast for: waits, failures midway, and access control."""

import asyncio
import io
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_user import Terminal
from starlette.requests import Request

from effllm import ContextOverflow, EffllmError, UsageError
from effllm.cli.environment import Environment
from effllm.cli.screen import Screen
from effllm.cli.serve import public_name, start_log
from effllm.cli.server import http_server, streams
from effllm.cli.server.answer_queue import AnswerQueue
from effllm.cli.server.application import GenerationService
from effllm.cli.server.generation_options import Defaults, apply_reasoning, options_of
from effllm.cli.server.guard import AccessRules, is_loopback
from effllm.cli.server.llama_paths import LlamaPaths
from effllm.cli.server.openai_requests import UNSUPPORTED_FIELDS, ChatRequest, CompletionRequest, is_same, parse
from effllm.cli.server.problems import Problem, problem_of, without_paths
from effllm.cli.server.serializers import ChatSerializer
from effllm.cli.server.streams import EventReader, EventStream, RequestRecord, whole_response
from effllm.runtime.constraints.constraint import schema_constraint
from effllm.runtime.events import Done, Event, Notice, Progress, TextDelta
from effllm.runtime.generation.served_model import GenerationOptions
from effllm.runtime.sampler import SamplerSettings

STATS = SimpleNamespace(finish_reason="stop", token_ids=(1, 2), prompt_tokens=3, cached_tokens=1, read_tokens=2, reasoning_tokens=0,
                        prefill_s=0.1, prefill_tps=20.0, decode_s=0.1, decode_tps=10.0)
DONE = Done(STATS)
MINUTE = 60


class Client:
    """What a stream is sent to; it goes away when `gone` is set."""

    def __init__(self) -> None:
        self.sent, self.gone = [], asyncio.Event()

    async def receive(self) -> dict:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def streamed(answer_queue: AnswerQueue, start: Callable, client: Client, record: RequestRecord | None = None,
                   notes: list | None = None) -> None:
    listener = EventReader(answer_queue.submit(start), (notes if notes is not None else []).append, record or RequestRecord())
    await EventStream(listener, ChatSerializer("m"))({"type": "http"}, client.receive, client.send)


def held(answer_queue: AnswerQueue) -> Callable[[], None]:
    """An answer that has the engine until it is let go."""
    begun, release = threading.Event(), threading.Event()
    answer_queue.submit(lambda left: iter([begun.set(), release.wait(), DONE][2:]))
    assert begun.wait(MINUTE), "else it might be left before it begins"
    return release.set


def test_waiting_clients_are_notified(answer_queue: AnswerQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments, which are no events, before the first byte of an answer, and its status with them."""
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.02)
    monkeypatch.setattr(streams, "COMMENT_INTERVAL_S", 0.0)
    go = threading.Event()

    def answer(left: Callable[[], bool]) -> Iterator[Event]:
        yield Progress("reading the prompt", 512, 2048, "tokens")
        go.wait()
        yield TextDelta("yes")
        yield DONE

    async def test() -> None:
        client, unload_when_idle = Client(), held(answer_queue)
        task = asyncio.ensure_future(streamed(answer_queue, answer, client))
        while ": 1 answer before this one\n\n" not in client.body:
            await asyncio.sleep(0.01)
        unload_when_idle()
        while client.body.count(": reading the prompt: 512 of 2048 tokens\n\n") < 3:
            await asyncio.sleep(0.01)
        assert client.status == 200 and "data" not in client.body
        go.set()
        await asyncio.wait_for(task, MINUTE)
        first, said, end, done = [line for line in client.body.split("\n\n") if line.startswith("data: ")]
        assert json.loads(said[6:])["choices"][0]["delta"] == {"content": "yes"} and done == "data: [DONE]"
        assert json.loads(first[6:])["choices"][0]["delta"]["role"] == "assistant"
        assert json.loads(end[6:])["choices"][0]["finish_reason"] == "stop"

    asyncio.run(test())


def test_a_panic_of_a_library_ends_its_answer_alone(answer_queue: AnswerQueue) -> None:
    class Panic(BaseException):
        """As those of libraries in Rust are."""

    def answer(left: Callable[[], bool]) -> Iterator[Event]:
        yield TextDelta("ye")
        raise Panic("index out of bounds")

    async def test() -> None:
        client, record = Client(), RequestRecord()
        await asyncio.wait_for(streamed(answer_queue, answer, client, record), MINUTE)
        assert "internal error" in client.body and record.problem == "Panic: index out of bounds"
        client = Client()
        await asyncio.wait_for(streamed(answer_queue, lambda left: iter([TextDelta("yes"), DONE]), client), MINUTE)
        assert "yes" in client.body

    asyncio.run(test())


def test_connections_of_which_no_request_comes_are_closed_and_too_many_are_a_line(
        answer_queue: AnswerQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 1.0)
    notes, closed = [], []

    async def application(scope: dict, receive: Callable, send: Callable) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        while not closed:  # longer than an unused connection is kept
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b""})

    with http_server.bind_socket("127.0.0.1", 0) as bound:
        def clients() -> None:
            place = bound.getsockname()[:2]
            try:
                with socket.create_connection(place, MINUTE) as used, socket.create_connection(place, MINUTE) as idle:
                    used.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    try:
                        closed.append(idle.recv(1))
                    except ConnectionResetError:
                        closed.append(b"")
                    while not (got := used.recv(100)).endswith(b"\r\n\r\n"):
                        closed.append(got)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)  # or the server would go on for ever

        http_server.serve_http(application, bound, answer_queue, lambda: threading.Thread(target=clients).start(), notes.append)
    assert closed[0] == b"" and not notes
    said = http_server.loop_error({"message": "no accept", "exception": OSError(24, "Too many open files")})
    assert said.startswith("cannot accept more connections: Too many open files")


@pytest.mark.parametrize(("error", "status", "said"), [
    (OSError(5, "Input/output error", "/home/someone/model.safetensors"), 500,
     "reading or writing failed: Input/output error: the server's terminal says more"),
    (EffllmError("the page of /tmp/spill/7.kv is lost", "check the disk"), 500, "the page of (a file) is lost: check the disk"),
    (MemoryError(), 500, "out of memory: send less, or serve it with a smaller context (-c)"),
    (ZeroDivisionError("/secret"), 500, "internal error: ZeroDivisionError: the server's terminal says more"),
    (ContextOverflow("9 tokens, and the context holds 8", "shorten it"), 400,
     "9 tokens, and the context holds 8: shorten it (this model's maximum context length is 8 tokens)"),
    (UsageError("no"), 400, "no")])
def test_a_failure_is_told_to_its_client_alone(answer_queue: AnswerQueue, error: Exception, status: int, said: str) -> None:
    """Before the first byte as a status, behind it as an event; a user at the terminal reads all of it, and the next is answered."""

    def fails(after: list[Event]) -> Callable[[Callable], Iterator[Event]]:
        def answer(left: Callable[[], bool]) -> Iterator[Event]:
            yield from after
            raise error

        return answer

    async def test() -> None:
        starts_early, late, fine, record = Client(), Client(), Client(), RequestRecord()
        await streamed(answer_queue, fails([Notice("hm")]), starts_early, record)
        assert starts_early.status == status and json.loads(starts_early.body)["error"]["message"] == said
        assert bool(record.problem) == (status == 500) and bool(record.end_reason) == (status == 400)
        await streamed(answer_queue, fails([TextDelta("so")]), late)
        *_, last, done = late.body.strip().split("\n\n")
        assert late.status == 200 and json.loads(last[6:])["error"]["message"] == said and done == "data: [DONE]"
        await streamed(answer_queue, lambda left: iter([TextDelta("yes"), DONE]), fine)
        assert "yes" in fine.body
        with pytest.raises(Problem) as caught:
            await whole_response(Request({"type": "http"}, fine.receive), EventReader(
                answer_queue.submit(fails([])), print, RequestRecord()),
                                 ChatSerializer("m"))
        assert caught.value.status == status and caught.value.client_message == said

    asyncio.run(test())


def test_who_leaves_is_not_answered(answer_queue: AnswerQueue) -> None:
    """Neither what runs nor what waits goes on, and those behind it move up."""
    began, ended = [], threading.Event()

    def endless(left: Callable[[], bool]) -> Iterator[Event]:
        began.append("endless")
        while not left():
            yield TextDelta("more ")
            time.sleep(0.001)
        ended.set()

    def never(left: Callable[[], bool]) -> Iterator[Event]:
        began.append("never")
        yield DONE

    async def test() -> None:
        running, waiting, fine, record = Client(), Client(), Client(), RequestRecord()
        tasks = [asyncio.ensure_future(streamed(answer_queue, endless, running, record)),
                 asyncio.ensure_future(streamed(answer_queue, never, waiting))]
        while "more" not in running.body:
            await asyncio.sleep(0.01)
        last = asyncio.ensure_future(streamed(answer_queue, lambda left: iter([DONE]), fine))
        await asyncio.sleep(0.01)
        assert answer_queue.waiting == 2
        waiting.gone.set()
        await tasks[1]
        assert answer_queue.waiting == 1 and not ended.is_set()
        running.gone.set()
        await asyncio.wait_for(asyncio.gather(*tasks, last), MINUTE)
        assert ended.wait(MINUTE) and began == ["endless"] and "[DONE]" in fine.body and record.end_reason == "the client left"
        assert answer_queue.waiting == 0 and answer_queue.ahead_of(None) == 0

    asyncio.run(test())


def test_a_server_that_ends_tells_everyone(answer_queue: AnswerQueue) -> None:
    async def test() -> None:
        first, second, unload_when_idle = Client(), Client(), held(answer_queue)
        tasks = [asyncio.ensure_future(streamed(answer_queue, lambda left: iter([DONE]), client)) for client in (first, second)]
        await asyncio.sleep(0.01)
        answer_queue.close()
        await asyncio.wait_for(asyncio.gather(*tasks), MINUTE)  # whatever the engine is at
        assert {first.status, second.status} == {503}
        assert not answer_queue.join(0.05)
        unload_when_idle()
        with pytest.raises(Problem, match="the server is shutting down"):
            answer_queue.submit(lambda left: iter([DONE]))

    asyncio.run(test())


def test_remarks_go_to_the_terminal(answer_queue: AnswerQueue) -> None:
    notes: list[str] = []
    asyncio.run(streamed(answer_queue, lambda left: iter([Notice("slow"), TextDelta("a"), Notice("slower"), DONE]), Client(), None, notes))
    assert notes == ["slow", "slower"]


def test_hosts_of_this_machine() -> None:
    for name in ("localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.9.9", "::1"):
        assert is_loopback(name), name
    for name in ("", "0.0.0.0", "localhost.example", "192.168.0.1", "example", "127.0.0.1.example", "::"):
        assert not is_loopback(name), name
    everyone, nobody = AccessRules(False, origins=("*",)), AccessRules(False)
    assert everyone.allows("https://a.example", "b") and nobody.allows("https://a.example:1", "A.example:1")
    assert not nobody.allows("http://localhost:3000", "machine:8080"), "a page on the asking machine is not on this one"


def test_lines_of_a_server_have_the_time_but_in_the_journal(tmp_path: Path) -> None:
    with (tmp_path / "err").open("w+") as err:
        status = os.fstat(err.fileno())
        for stream in ("", f"{status.st_dev}:{status.st_ino}", f"{status.st_dev}:{status.st_ino + 1}"):
            screen = Screen(Environment(io.StringIO(), io.StringIO(), err, {"JOURNAL_STREAM": stream}))
            start_log(screen)
            screen.note("POST /v1/responses 200")
        err.seek(0)
        first, journal, other = err.read().splitlines()
    assert journal == "POST /v1/responses 200" and all(re.fullmatch(r"[-\d]{10} [:\d]{8} " + journal, line) for line in (first, other))
    terminal = Terminal()
    screen = Screen(Environment(io.StringIO(), io.StringIO(), terminal, {"JOURNAL_STREAM": "1:2"}))
    start_log(screen)
    screen.note("POST")
    assert re.fullmatch(r"(\x1b\[\d*m)?[:\d]{8} POST(\x1b\[0m)?\n", terminal.getvalue())


def test_files_are_not_named() -> None:
    for text, said in (("cannot read /etc/passwd: no", "cannot read (a file): no"), ("~/a/b.gguf is", "(a file) is"),
                       ("20 tokens/s, 3 of 4", "20 tokens/s, 3 of 4"), ("read ./x/y, then", "read (a file), then"),
                       ("<think>/</think>", "<think>/</think>"), ("it answers /v1/rerank", "it answers /v1/rerank"),
                       ("$ref names #/$defs/a, which", "$ref names #/$defs/a, which")):
        assert without_paths(text) == said
    assert public_name("org/repo:4bit") == "org/repo:4bit" and public_name("/models/mine/") == "mine"
    assert public_name(".") == Path.cwd().name
    assert problem_of(Problem(418, "tea")).status == 418


def test_what_is_not_here_is_what_changes_something() -> None:
    assert is_same(0, 0.0) and not is_same(0, False) and not is_same(1, True)
    base = {"prompt": "x"}
    answered = UNSUPPORTED_FIELDS.keys() & CompletionRequest.model_fields.keys()
    assert answered == {"echo", "logprobs", "n", "n_probs", "suffix"}, "what other requests cannot have"
    for field in UNSUPPORTED_FIELDS.keys() - answered:
        for value in (*UNSUPPORTED_FIELDS[field], None):
            assert parse(CompletionRequest, json.dumps({**base, field: value}).encode())
        with pytest.raises(Problem, match=f"^{field} is not supported"):
            parse(CompletionRequest, json.dumps({**base, field: {"more": 1}}).encode())


@pytest.mark.parametrize(("fields", "think", "variables"), [
    ({}, "auto", {}), ({"reasoning_effort": "none"}, "off", {}), ({"reasoning_effort": "high"}, "on", {"reasoning_effort": "high"}),
    ({"reasoning_effort": "minimal"}, "on", {"reasoning_effort": "low"}),
    ({"chat_template_kwargs": {"enable_thinking": False, "more": 1}}, "off", {"enable_thinking": False, "more": 1}),
    ({"chat_template_kwargs": {"reasoning_effort": "x"}, "reasoning_effort": "low"}, "on", {"reasoning_effort": "x"}),
    ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"}, "on", {"thinking": True})])
def test_reasoning_options(fields: dict, think: str, variables: dict) -> None:
    asked = parse(ChatRequest, json.dumps({"messages": [], **fields}).encode())
    template = SimpleNamespace(variables=frozenset({"reasoning_effort"}))
    wish, more = apply_reasoning(asked, GenerationOptions(SamplerSettings()), SimpleNamespace(thinks=True, template=template))
    assert (wish.think, more) == (think, variables)
    wish, more = apply_reasoning(asked, GenerationOptions(SamplerSettings()), SimpleNamespace(thinks=False, template=None))
    assert wish.think == "auto" and more == fields.get("chat_template_kwargs", {})


def test_a_request_that_says_nothing_is_as_the_command_line_has_it() -> None:
    usual = GenerationOptions(SamplerSettings(temperature=0.3, seed=4), "on", ("x",), 9, True,
                              schema_constraint({"type": "object"}, "--schema", "json"))
    tokenizer = SimpleNamespace()  # asked for what biases are of
    assert options_of(parse(ChatRequest, b'{"messages": []}'), Defaults(usual), tokenizer) == usual
    said = {"messages": [], "temperature": 0.3, "seed": -1, "stop": ["y", "y"], "max_tokens": -1, "ignore_eos": False,
            "response_format": {"type": "text"}, "top_k": -1, "repeat_last_n": 5}
    wish = options_of(parse(ChatRequest, json.dumps(said).encode()), Defaults(usual), tokenizer)
    assert wish == GenerationOptions(SamplerSettings(temperature=0.3, top_k=0, penalty_last_n=5), "on", ("y",))


def test_tokens_are_told_beside_the_loop(answer_queue: AnswerQueue) -> None:
    seen = []

    class Words:
        added: dict[str, int] = {}

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            seen.append(threading.current_thread())
            return [*range(len(text.split()))]

        def vocabulary(self) -> dict[str, int]:
            seen.append(threading.current_thread())
            return {"<0xF0>": 0, "\u2581b": 1}

    service = GenerationService(SimpleNamespace(tokenizer=Words()), answer_queue, "m", seen.append,
                                defaults=Defaults(GenerationOptions(SamplerSettings())))

    async def receive() -> dict:
        return {"type": "http.request", "body": b'{"content": "a b", "with_pieces": true}', "more_body": False}

    response = asyncio.run(LlamaPaths(service).tokenize(Request({"type": "http", "method": "POST", "headers": []}, receive)))
    assert json.loads(response.body) == {"tokens": [{"id": 0, "piece": [0xF0]}, {"id": 1, "piece": " b"}]}
    assert len(seen) >= 2 and threading.main_thread() not in seen


def test_a_port_that_another_server_took_meanwhile(answer_queue: AnswerQueue) -> None:
    """Both were bound to it before one listened."""
    with http_server.bind_socket("localhost", 0) as first, http_server.bind_socket("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(EffllmError, match="port [0-9]+ of 127.0.0.1 is in use"):
            http_server.serve_http(ChatSerializer("m"), second, answer_queue, lambda: pytest.fail("it does not listen"), pytest.fail)


def test_who_leaves_in_the_moment_of_an_event_is_gone(answer_queue: AnswerQueue) -> None:
    """An answer whose cancellation was lost to an event that came with it went on to its end."""

    def endless(left: Callable[[], bool]) -> Iterator[Event]:
        end = time.monotonic() + MINUTE
        while not left() and time.monotonic() < end:
            yield TextDelta("more ")
            time.sleep(1e-5)
        yield DONE

    async def test() -> None:
        for _ in range(500):
            client = Client()
            task = asyncio.ensure_future(streamed(answer_queue, endless, client))
            while "more" not in client.body:
                await asyncio.sleep(0)
            client.gone.set()
            done, _ = await asyncio.wait([task], timeout=MINUTE)
            assert done and "[DONE]" not in client.body

    asyncio.run(test())
