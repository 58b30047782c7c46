"""Units of the router: what a stream receives while its model is loaded, keep-alive, and model names."""

import asyncio
import io
import json
import os
import shutil
import socket
import sys
import threading
from pathlib import Path

import pytest
from gguf_samples import add_fable_tokenizer, write_model

import effllm
from effllm.cli.environment import Environment
from effllm.cli.screen import Screen
from effllm.cli.serve import public_name
from effllm.cli.serve_router import unique_models
from effllm.cli.server import relay
from effllm.cli.server.guard import RECORD
from effllm.cli.server.keep_alive import NEVER, parse_keep_alive
from effllm.cli.server.keep_alive import format_duration as time_in_words
from effllm.cli.server.model_pool import ModelPool, PoolLimits
from effllm.cli.server.model_registry import ModelRegistry, named_models
from effllm.cli.server.problems import Problem
from effllm.cli.server.relay import parse_problem
from effllm.cli.server.router import Router
from effllm.cli.server.streams import RequestRecord
from effllm.cli.server.worker_process import WorkerLauncher, in_words
from effllm.offload import hardware
from effllm.runtime.catalog import resolve
from effllm.runtime.events import Progress

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
MIB = 1 << 20
ASKED = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
         "/v1/completions": {"prompt": "Once", "max_tokens": 3}, "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
         "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}}


def made(notes: list[str], **limits: object) -> Router:
    """In this process, with children of it that ask for the key."""
    starter = WorkerLauncher(["--host=127.0.0.1", "--port=0"], {**os.environ, "EFFLLM_API_KEY": "key"}, lambda name, event: None,
                             lambda name, text: notes.append(text))
    return Router(ModelRegistry(os.environ), ModelPool(starter, PoolLimits(**limits), notes.append), "key")


async def asked(router: Router, path: str, method: str = "POST", **fields: object) -> tuple[int, str]:
    """Status and body of what is answered to a request that stays until the end."""
    sent, body = [], json.dumps({"model": "fable", **ASKED.get(path, {}), **fields}).encode()
    coming = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, object]:
        return next(coming, None) or await asyncio.Future()

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": [(b"content-type", b"application/json")], RECORD: RequestRecord()}
    await router.application()(scope, receive, send)
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent).decode()


def in_loop(router: Router, *paths: str, **fields: object) -> list[tuple[int, str]]:
    async def together() -> list[tuple[int, str]]:
        try:
            return await asyncio.gather(*(asked(router, path, **fields) for path in paths))
        finally:
            await asyncio.sleep(0.05)  # what happens behind the last answer does
            router.pool.close()
            await router.pool.closed()

    return asyncio.run(together())


def parts(text: str) -> tuple[list[str], list[dict]]:
    """The comments and the objects of a stream: the former come first."""
    lines = [line for line in text.split("\n") if line and line != "data: [DONE]" and not line.startswith("event: ")]
    comments = [line for line in lines if line.startswith(": ")]
    assert lines[: len(comments)] == comments
    return comments, [json.loads(line.removeprefix("data: ")) for line in lines[len(comments) :]]


def test_streams_are_told_of_the_load_that_all_of_them_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "KEEP_ALIVE_S", 0.05)
    notes: list[str] = []
    router = made(notes, keep_s=0.0)
    replies = in_loop(router, *ASKED, stream=True)
    assert sum("fable is loaded" in each for each in notes) == 1 and len(replies) == 4
    assert sum("fable is unloaded: its request has ended" in each for each in notes) == 1, "after the last of them"
    for path, (status, text) in zip(ASKED, replies, strict=True):
        comments, objects = parts(text)
        assert status == 200 and ": fable: starting" in comments and len(objects) > 2, path
    assert replies[0][1].endswith("data: [DONE]\n\n") and parts(replies[3][1])[1][-1]["type"] == "message_stop"


def test_a_load_that_fails_is_an_error_of_each_api(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(relay, "KEEP_ALIVE_S", 60.0)  # a stream that has begun meanwhile has its status
    router = made(notes, ram=hardware.rss() + 30 * MIB, waiting=2)
    replies = sorted(in_loop(router, "/v1/chat/completions", "/v1/messages", "/v1/completions", stream=True))
    assert [status for status, _ in replies] == [400, 400, 503] and "and the queue is full (--queue)" in replies[-1][1]
    for _, text in replies[:2]:
        said = json.loads(text)["error"]["message"]
        assert "fable cannot be loaded: " in said and " MiB" in said and "--ram" in said, "the numbers, and the next step"
    assert len(notes) == 1 and notes[0].startswith("fable could not be loaded: ") and not router.pool.loaded()

    monkeypatch.setattr(relay, "KEEP_ALIVE_S", 0.05)
    chat, _, response, message = in_loop(made([], ram=hardware.rss() + 30 * MIB), *ASKED, stream=True)
    for (status, text), found in ((chat, lambda last: last["error"]), (response, lambda last: last["response"]["error"]),
                                  (message, lambda last: last["error"])):
        comments, objects = parts(text)
        assert status == 200 and comments and "cannot be loaded" in found(objects[-1])["message"]
    assert parts(chat[1])[1][-1]["error"]["code"] == parts(response[1])[1][-1]["response"]["error"]["code"] == "does_not_fit"


def test_who_is_told_that_a_model_ended_does_not_meet_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections end some time before its process is known to have: here 0.3 seconds."""
    listening = socket.create_server(("127.0.0.1", 0))
    said = {"port": listening.getsockname()[1], "context": 8, "parallel": 1, "nbytes": 100}
    script = tmp_path / "child"
    script.write_text("#!/bin/sh\nread budget\necho '{\"planned\": {\"nbytes\": 100}}'\nread go\n"
                      f"echo '{json.dumps({'listening': said})}'\nsleep 0.3\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    notes: list[str] = []
    router = made(notes)

    async def told() -> list[object]:
        status, text = await asked(router, "/v1/completions")
        assert status == 500 and json.loads(text)["error"]["code"] == "model_ended"
        return router.pool.loaded()

    with listening:
        threading.Thread(target=lambda: listening.accept()[0].close(), daemon=True).start()
        assert asyncio.run(told()) == [] and notes[-1] == "fable ended with code 0: the next request loads it again"


def test_a_model_whose_files_are_broken_or_gone_hides_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(FABLE, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 1 << 16])
    router = made([])
    router.registry = ModelRegistry(os.environ, [resolve("fable", os.environ), resolve(str(folder), os.environ)])

    def tags() -> list[str]:
        ((status, text),) = in_loop(router, "/api/tags", method="GET")
        assert status == 200
        return [each["name"] for each in json.loads(text)["models"]]

    assert tags() == ["fable:latest", "broken:latest"]
    shutil.rmtree(folder)
    assert tags() == ["fable:latest", "broken:latest"]
    ((status, text),) = in_loop(router, "/api/show", model="broken")
    assert status == 500 and "there is no " in json.loads(text)["error"] and str(tmp_path) not in text


@pytest.mark.parametrize(("said", "seconds"), [("90", 90), (90, 90), ("0", 0), ("5m", 300), ("1h30m", 5400), ("0.5s", 0.5), (1.5, 1.5),
                                               ("-1", NEVER), (-1, NEVER), ("-1m", NEVER), ("1d", 86400), ("876000h", NEVER),
                                               (1e300, NEVER), ("9" * 400, NEVER), (1e-9, 0), ("36499d", 36499 * 86400)])
def test_times(said: str | float, seconds: float) -> None:
    assert parse_keep_alive(said) == seconds


@pytest.mark.parametrize("said", ["", "m", "soon", "5 m", "5x", "1..2s", "--1", "-", "nan", "1m2.", "٣s", NEVER])
def test_what_is_no_time(said: str) -> None:
    with pytest.raises(ValueError):
        parse_keep_alive(said)


def test_what_is_said_of_waiting() -> None:
    assert [time_in_words(each) for each in (300, 60, 3600, 90, 1, 0.4)] == \
        ["5 minutes", "1 minute", "1 hour", "90 seconds", "1 second", "0.4 seconds"]
    assert in_words(Progress("loading", 3 * MIB, 9 * MIB, "bytes")) == "loading: 3.00 MiB of 9.00 MiB"
    assert in_words(Progress("compiling kernels", 2, 37, "kernels")) == "compiling kernels: 2 of 37 kernels"


def test_models_of_paths_are_called_by_what_tells_them_apart(tmp_path: Path) -> None:
    folders = [tmp_path / place / "model" for place in ("a", "b", "c")]
    models = named_models([("fable", FABLE, None, None), *((str(each), each, None, None) for each in folders)])
    assert [each.name for each in models] == ["fable", "model", "b/model", "c/model"]
    assert [each.typed for each in models] == ["fable", *map(str, folders)]
    assert named_models([("fable", FABLE, None, None), *((str(each), each, None, None) for each in [*folders, *folders])]) == models


def test_a_link_is_called_as_it_is_itself(tmp_path: Path) -> None:
    """Files of the hub's cache are links to blobs, whose names are checksums."""
    (tmp_path / "a1b2c3").touch()
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).symlink_to("a1b2c3")
    models = named_models([(str(tmp_path / name), tmp_path / name, None, None) for name in ("one.gguf", "two.gguf", "a1b2c3")])
    assert [each.name for each in models] == ["one.gguf", "two.gguf", "a1b2c3"]
    assert public_name(str(tmp_path / "one.gguf")) == "one.gguf"


def test_the_problem_of_any_api_is_read() -> None:
    for problem in (Problem(400, "too hot", param="temperature", code="x"), Problem(503, "the server is shutting down")):
        again = parse_problem(problem.status, json.dumps(problem.to_json()).encode())
        assert (again.status, again.message, again.param, again.code) == (problem.status, problem.message, problem.param, problem.code)
        assert parse_problem(problem.status, json.dumps(problem.to_anthropic()).encode()).message == problem.message
    assert parse_problem(404, b'{"error": "no such model"}').message == "no such model"
    assert parse_problem(400, b"Invalid HTTP request received.").message == "Invalid HTTP request received."


def test_parts_of_one_file_that_are_typed_apart_are_one_model(tmp_path: Path) -> None:
    write_model(FABLE, tmp_path / "fable.gguf", "Q8_0", change=add_fable_tokenizer, per_file=20)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    (tmp_path / "other").mkdir()
    other = shutil.copytree(FABLE, tmp_path / "other" / "fable")

    def served(*typed: Path) -> tuple[list[str], str]:
        environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
        refs = unique_models([resolve(str(each), os.environ) for each in typed], Screen(environment))
        return [ref.text for ref in refs], environment.stderr.getvalue()

    kept, said = served(second, other, first, third)
    assert kept == [str(second), str(other)] and said.count("are parts of one model, which is served as") == 2
    assert f"{first} and {second} are parts" in said
    assert served(other, FABLE) == ([str(other), str(FABLE)], "") and served(first, other)[0] == [str(first), str(other)]
