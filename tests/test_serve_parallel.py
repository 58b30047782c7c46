"""`effllm serve --parallel`: several requests are answered at once, each as if it were alone."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import CliRun
from server_process import MINUTE, ServerProcess, serving, wait_until

FOX = "The fox asked the king for bread and the king gave him none. "
LONG = [{"role": "user", "content": FOX * 40}]
ON_AND_ON = ("-t", "1", "--overflow", "shift")  # an endless answer is one, however long a test is kept from looking at it


@pytest.fixture(scope="module")
def server():
    with serving("-np", "3", "--queue", "1", *ON_AND_ON) as server:
        yield server


def at_once(*asked: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return [each.result(MINUTE) for each in [pool.submit(each) for each in asked]]


def text_of(reply) -> str:
    (choice,) = reply.json["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_answers_at_once_are_those_of_a_server_that_gives_one_at_a_time(server: ServerProcess) -> None:
    assert server.said["parallel"] == 3 and "context 2048 tokens each, 3 answers at once; Ctrl-C stops it\n" in server.err

    def asked(by: ServerProcess) -> list[Callable[[], object]]:
        return [lambda: by.chat(LONG, max_tokens=60), lambda: by.complete(max_tokens=200, ignore_eos=True),
                lambda: by.chat(max_tokens=150, temperature=1.0, seed=7)]

    with serving("--spec", "off") as alone:
        expected = [text_of(each()) for each in asked(alone)]
    assert len({*expected}) == 3
    for _ in range(2):  # what is held now of one is not taken for another's
        assert [text_of(each) for each in at_once(*asked(server))] == expected


def test_streams_come_side_by_side(server: ServerProcess) -> None:
    body = {"prompt": "Once upon a time", "temperature": 0, "stream": True, "ignore_eos": True, "max_tokens": -1}
    streams = [server.open("POST", "/v1/completions", {**body, "prompt": f"The {who}"}) for who in ("fox", "king")]
    try:
        for _ in range(5):
            for each in streams:
                while not (line := each.readline()).startswith(b"data: "):
                    assert line, "the stream has ended"
        assert server.chat(max_tokens=5).status == 200  # a third beside them
    finally:
        for each in streams:
            each.connection.close()
    server.wait_for_output("the client left")
    assert server.chat(max_tokens=5).status == 200


def test_a_request_waits_when_all_slots_are_busy_and_the_next_is_refused(server: ServerProcess) -> None:
    body = {"prompt": "The sea", "temperature": 0, "stream": True, "ignore_eos": True, "max_tokens": -1}
    streams = [server.open("POST", "/v1/completions", body) for _ in range(3)]
    waits = threading.Thread(target=lambda: got.append(server.chat(max_tokens=5)))
    got: list = []
    try:
        waits.start()
        wait_until(lambda: server.request("GET", "/health").json["waiting"])
        refused = server.chat(max_tokens=5)
        assert refused.status == 503 and refused.error["code"] == "queue_full"
    finally:
        for each in streams:
            each.connection.close()
    waits.join(MINUTE)
    assert got[0].status == 200


def test_long_conversations_beyond_those_at_once_are_kept(tmp_path: Path) -> None:
    talks = [[{"role": "user", "content": f"{i} {FOX * 24}"}] for i in range(4)]
    with serving("--parallel", "2", XDG_STATE_HOME=str(tmp_path)) as server:
        cached = []
        for _ in range(2):
            replies = at_once(*(lambda talk=talk: server.chat(talk, max_tokens=8) for talk in talks))
            cached = [each.json["usage"]["prompt_tokens_details"]["cached_tokens"] for each in replies]
            for talk, reply in zip(talks, replies, strict=True):
                talk += [reply.json["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        assert min(cached) > 256
        assert server.err.count("KV caches of inactive conversations") == 1


def test_a_plan_is_of_as_many_answers() -> None:
    def planned(*flags: str) -> str:
        ran = CliRun("plan", "fable", "--no-probe", *flags)
        assert ran.code == 0, ran.err
        return ran.out

    one, four = (json.loads(planned("--json", *flags)) for flags in ((), ("-np", "4")))
    assert (one["parallel"], four["parallel"]) == (1, 4) and four["kv_bytes"] == 4 * one["kv_bytes"] > 0
    assert four["per_token"] == one["per_token"] and four["weights_bytes"] == one["weights_bytes"]
    assert "2048 of 2048 tokens for each of 4 answers, cache at 16bit" in planned("--parallel", "4")


@pytest.mark.parametrize(("flags", "said"), [
    (("--parallel", "0"), "--parallel 0 is too small"), (("-np", "40", "--ram", "250M", "-c", "2048"), "40 times 2048 tokens"), *(
        pytest.param(*each, marks=pytest.mark.slow) for each in (
            (("--parallel", "2", "--spec", "mtp"), "--spec mtp does not go with"), (("--parallel", "900"), "--parallel 900 is more than"),
            (("-np", "2", "--strict", "--kv", "4bit+mikv"), "answers take turns")))])
def test_what_is_refused(flags: tuple[str, ...], said: str) -> None:
    ran = subprocess.run([sys.executable, "-P", "-m", "effllm", "serve", "fable", "--port", "0", *flags], capture_output=True, text=True,
                         timeout=MINUTE, stdin=subprocess.DEVNULL)
    assert ran.returncode and said in ran.stderr and "Traceback" not in ran.stderr and ran.stderr.count("hint: ") == 1
