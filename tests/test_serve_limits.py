"""Refusals of `effllm serve`, access control, and shutdown: the next request is always answered."""

import asyncio
import json
import re
import signal
import socket
import threading
import time

import psutil
import pytest
from command_line import CliRun
from server_process import MESSAGES, MINUTE, ServerProcess, serving, start_server, wait_until
from starlette.datastructures import Headers

from effllm.cli.serve import check_server_flags
from effllm.cli.server.guard import AccessRules
from effllm.cli.server.proxy import ADDRESS, proxied

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SLOWLY = ("-t", "1", "--spec", "off")
ON_AND_ON = (*SLOWLY, "--overflow", "shift")  # an endless answer is one, however long a test is kept from looking at it
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server():
    with serving("--queue", "1", *SLOWLY) as server:
        yield server


@pytest.fixture(scope="module")
def talker():
    with serving("--queue", "1", *ON_AND_ON) as server:
        yield server


@pytest.fixture(scope="module")
def plain(server: ServerProcess) -> list:
    return server.chat().json["choices"]


@pytest.mark.parametrize(("fields", "param"), [
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"logit_bias": {"999999": 1}}, "logit_bias"), ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": [[5]]}, "logit_bias"), ({"logit_bias": 3}, "logit_bias"), ({"dry_base": 0.5}, "dry_base"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"), ({"xtc_threshold": 2}, "xtc_threshold"),
    ({"top_n_sigma": "1"}, "top_n_sigma"),
    ({"logprobs": 1}, "logprobs"), ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"echo": True}, "echo"), ({"n_probs": 21}, "n_probs"), ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"n_probs": 2, "post_sampling_probs": True}, "post_sampling_probs"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}]}, "messages[0].content[1]"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"), ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"), ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": "x"}, "messages"), ({"messages": ["x"]}, "messages[0]"), ({"messages": []}, None),
    ({"temperature": "hot"}, "temperature"), ({"temperature": True}, "temperature"), ({"temperature": -1}, "temperature"),
    ({"top_p": -0.5}, "top_p"), ({"top_k": 1.5}, "top_k"), ({"repeat_penalty": -1}, "repeat_penalty"), ({"max_tokens": -5}, "max_tokens"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens"), ({"stop": [1]}, "stop[0]"), ({"stop": ""}, "stop"),
    ({"stream": "yes"}, "stream"), ({"stream_options": 1}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"), ({"grammar": "root ::= (("}, "grammar"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"colour": 1}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, None),
    ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "grammar"), ({"grammar": "/etc/passwd"}, "grammar"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"), ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": 7}, "guided_json"),
    ({"guided_regex": "(?=x)"}, "guided_regex"), ({"guided_choice": []}, "guided_choice"), ({"guided_choice": [""]}, "guided_choice"),
    ({"regex": "(?=x)"}, "regex"), ({"regex": 7}, "regex"), ({"regex": "a", "ebnf": "b"}, "ebnf"), ({"json_schema": 7}, "json_schema"),
    ({"response_format": {"type": "regex"}}, "response_format.type"),
    ({"structured_outputs": {"choice": "x"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"), ({"structured_outputs": []}, "structured_outputs"),
    ({"structured_outputs": {"json": 7, "disable_fallback": True}}, "structured_outputs.json"),
    ({"structured_outputs": {"colour": "red"}}, "structured_outputs.colour"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"choice": ["a"]}, "grammar": 'root ::= "a"'}, "structured_outputs.choice"),
    ({"modalities": ["audio"]}, "modalities"), ({"mirostat": 3}, "mirostat"),
    ({"mirostat_tau": -1}, "mirostat_tau"), ({"dynatemp_range": 0.5}, "dynatemp_range")])
def test_what_is_not_answered_names_its_field(server: ServerProcess, plain: list, fields: dict, param: str | None) -> None:
    for stream in ({}, {"stream": True}):
        reply = server.chat(**stream | fields)
        assert reply.status == 400 and reply.error["type"] == "invalid_request_error" and reply.error["param"] == param
    assert "root:" not in reply.error["message"]
    assert server.chat().json["choices"] == plain


@pytest.mark.parametrize(("fields", "param"), [
    ({"prompt": ["a", 7]}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": [[1], "a"], "n": 99}, "n"),
    ({"prompt": [1.5]}, "prompt"),
    ({"echo": 1}, "echo"), ({"suffix": "end"}, "suffix"), ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"best_of": 2}, "best_of"), ({"echo": True, "prompt": [5] * 2048}, None),
    ({"prompt": [10**6]}, None), ({"prompt": [-1]}, None), ({"prompt": ""}, None), ({"prompt": []}, None)])
def test_texts_that_are_not_continued(server: ServerProcess, fields: dict, param: str | None) -> None:
    reply = server.complete(**{"prompt": "Once", **fields})
    assert reply.status == 400 and reply.error["param"] == param


def test_bodies_that_are_no_request(server: ServerProcess, plain: list) -> None:
    for body in (b"", b"{", b"[]", b"null", b"\xff", b'{"messages": [' + b"[" * 5000, b'{"temperature": NaN}', b'{"prompt": "\\ud80"}'):
        for path in (CHAT, TEXT, "/tokenize"):
            reply = server.request("POST", path, body)
            assert reply.status == 400 and reply.error["type"] == "invalid_request_error", body
    reply = server.request("POST", CHAT, b"\x1f\x8b", Content_Encoding="gzip")
    assert reply.status == 415 and "Content-Encoding gzip is not supported" in reply.error["message"]
    reply = server.request("POST", CHAT, b" " * (33 << 20))
    assert reply.status == 413 and reply.error["code"] == "body_too_large"
    assert server.chat().json["choices"] == plain


@pytest.mark.parametrize(("sent", "meant"), [
    (rb"fox \ud83e", "fox \ufffd"), (rb"\udd8a fox", "\ufffd fox"), (rb"\uD83E\uDD8A\ud83e fox", "\U0001f98a\ufffd fox"),
    (rb"\\ud83e fox", r"\ud83e fox"), (rb"\ud83e\ud83e\udd8a", "\ufffd\U0001f98a")])
def test_half_an_emoji_is_read_as_a_mark_in_its_place(server: ServerProcess, sent: bytes, meant: str) -> None:
    """Programs cut texts by units of 16 bits, and send what is left of a letter with every turn from then on: refused, none could go on."""
    whole = b'{"temperature": 0, "max_tokens": 9, "messages": [{"role": "user", "content": "%s"}]}' % sent
    expected = server.chat([{"role": "user", "content": meant}], max_tokens=9).json
    for path in (CHAT, "/v1/messages"):
        reply = server.request("POST", path, whole).json
        assert (reply["choices"][0]["message"] if path == CHAT else reply)["content"] in (
            expected["choices"][0]["message"]["content"], [{"type": "text", "text": expected["choices"][0]["message"]["content"]}])
    ids = server.request("POST", "/tokenize", b'{"content": "%s"}' % sent).json["tokens"]
    assert ids == server.request("POST", "/tokenize", {"content": meant}).json["tokens"]


def test_paths_methods_and_models_that_there_are_not(server: ServerProcess) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("POST", "/v1/moderations", 404), ("GET", CHAT, 405), ("DELETE", TEXT, 405),
                                 ("POST", "/v1/models", 405), ("GET", "/v1/models/gpt-4o", 404), ("GET", "/..%2f..%2fetc/passwd", 404)):
        assert server.request(method, path).status == status and server.request(method, path).error["param"] is None
    reply = server.chat(model="gpt-4o")
    assert reply.status == 404 and (reply.error["param"], reply.error["code"]) == ("model", "model_not_found")
    assert "this server serves fable" in reply.error["message"]


def test_a_prompt_that_is_too_long_says_how_long_it_is(server: ServerProcess, plain: list) -> None:
    for stream in ({}, {"stream": True}):
        reply = server.chat([{"role": "user", "content": "fox " * 3000}], **stream)
        assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
        assert re.match(r"the prompt has 3\d\d\d tokens and the context holds 2048: shorten it", reply.error["message"])
        assert "this model's maximum context length is 2048 tokens" in reply.error["message"], "words by which clients make room"
    long = server.complete("The fox " * 1010, max_tokens=None, stream=True).events
    assert long[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    assert server.chat().json["choices"] == plain


def test_the_key_is_asked_for() -> None:
    with serving("--api-key", "s3cret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, {"Authorization": "Basic s3cret"},
                        {"Authorization": "Bearer s3cret\xe4"}, {"X_Api_Key": ""}):
            for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/nothing")):
                reply = server.request(method, path, None, **headers)
                assert reply.status == 401 and reply.error["code"] == "invalid_api_key" and reply.headers["www-authenticate"] == "Bearer"
        assert server.request("GET", "/health").status == 200
        for headers in ({"Authorization": "Bearer s3cret"}, {"Authorization": "bearer s3cret"}, {"X_Api_Key": "s3cret"}):
            assert server.request("GET", "/v1/models", **headers).status == 200
        assert "s3cret" not in server.err
    with serving(EFFLLM_API_KEY="other") as server:
        assert server.request("GET", "/v1/models").status == 401
        assert server.request("GET", "/v1/models", Authorization="Bearer other").status == 200


def test_pages_of_other_sites_may_not_ask(server: ServerProcess) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    for headers in ({"Host": "evil.example"}, {"Host": f"evil.example:{server.port}"}, {"Host": "127.0.0.1.evil.example"},
                    {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "https://app"}, {"Origin": "ftp://127.0.0.1"},
                    {"Origin": "http://localhost.evil.example"}, {"Host": "host.docker.internal.evil.example"}, {"Host": "docker.internal"},
                    {"Origin": "http://host.docker.internal"},
                    {"Origin": "http://[::1"}):
        reply = server.request("POST", CHAT, body, **headers)
        assert reply.status == 403 and "access-control-allow-origin" not in reply.headers, headers
    for headers in ({"Host": "localhost"}, {"Host": f"LOCALHOST:{server.port}"}, {"Host": "127.0.0.7"}, {"Host": "[::1]:80"},
                    {"Host": f"host.docker.internal:{server.port}"}, {"Host": "host.containers.internal"},
                    {"Origin": "tauri://localhost"}, {"Origin": "app://obsidian.md"}, {"Origin": "vscode-webview://0a"},
                    {"Origin": f"http://127.0.0.1:{server.port}"}, {"Origin": "http://localhost:3000"}):
        reply = server.request("POST", CHAT, body, **headers)
        assert reply.status == 200 and reply.headers.get("access-control-allow-origin") == headers.get("Origin"), headers


def test_nothing_of_another_sites_page_asks() -> None:
    """An image, a script, a frame or a link of it has no Origin, and might have a model loaded."""
    def refused(path: str, *origins: str, **said: str) -> bool:
        headers = {f"sec-fetch-{name}": value for name, value in said.items()}
        return AccessRules(True, origins=origins).refused(path, Headers({"host": "127.0.0.1:8080", **headers})) is not None

    picture, link = {"site": "cross-site", "mode": "no-cors", "dest": "image"}, {"site": "cross-site", "mode": "navigate", "dest": "iframe"}
    for said in (picture, link):
        assert refused("/props", **said) and refused("/v1/models", **said) and not refused("/", **said) and not refused("/health", **said)
        assert not refused("/props", **{**said, "site": "none"}) and not refused("/props", **{**said, "site": "same-origin"})
        assert not refused("/props", "*", **said)
    assert not refused("/props", site="cross-site", mode="cors"), "a program's window whose requests a browser does not judge"


def test_what_the_server_in_front_has_judged_is_not_judged_again() -> None:
    """With --cors '*' it lets a page's image through, which the model's own server, that knows of no --cors, would refuse."""
    sent = [(b"origin", b"http://a.page"), (b"sec-fetch-site", b"cross-site"), (b"Sec-Fetch-Mode", b"no-cors"), (b"accept", b"text/html")]

    async def passed() -> bytes:
        came: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, ADDRESS, 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with proxied(port, "k", "GET", b"/props", sent, b"", 0) as answer:
                assert answer.status == 204
        return came[0].lower()

    head = asyncio.run(passed())
    assert b"accept: text/html" in head and b"sec-fetch" not in head and b"origin" not in head


def test_who_serves_reads_why_a_request_was_refused() -> None:
    with serving("--api-key", "k") as server:
        server.request("GET", "/v1/models", Origin="https://chat.example")
        server.wait_for_output("GET /v1/models 403 · pages of https://chat.example may not send requests: "
                               "--cors https://chat.example allows them")
        server.request("GET", "/v1/models", Host="evil.example:80")
        server.wait_for_output("403 · this server accepts the hosts localhost and 127.0.0.1, not evil.example:80: use one of these; "
                               "behind a proxy serve with --cors")
        server.request("GET", "/v1/models")
        server.wait_for_output("GET /v1/models 401 · the key is missing or wrong")
        server.request("POST", CHAT, {"messages": MESSAGES, "max_tokens": 4}, Authorization="Bearer k")
        server.wait_for_output(" 4 tokens out")
        *first, last = server.err.splitlines()
        assert re.fullmatch(r"[-\d]{10} [:\d]{8} POST \S+ 200 · 17 tokens in, 4 tokens out, [\d.]+ tokens/s, [\d.]+ s", last)
        assert first[0].startswith("http://127.0.0.1:"), "the line to copy has no time before it"


def test_origins_that_are_let_in() -> None:
    with serving("--cors", "https://chat.example", "--api-key", "k", "--queue", "0") as server:
        asked = {"Origin": "https://chat.example", "Access_Control_Request_Method": "POST",
                 "Access_Control_Request_Headers": "authorization,x-own"}
        reply = server.request("OPTIONS", CHAT, **asked)
        allowed = {name.removeprefix("access-control-allow-"): value for name, value in reply.headers.items()}
        assert (reply.status, reply.body, allowed["origin"]) == (204, b"", "https://chat.example")
        assert allowed["headers"] == "authorization,x-own" and "POST" in allowed["methods"]
        assert server.request("OPTIONS", CHAT, **asked | {"Origin": "https://other.example"}).status == 403
        reply = server.request("GET", "/v1/models", Origin="https://chat.example", Authorization="Bearer k")
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://chat.example"
        refused = server.request("GET", "/v1/models", Origin="https://chat.example")
        assert refused.status == 401 and "access-control-allow-origin" in refused.headers, "else a page cannot read why"
        for host, status in (("chat.example", 200), ("CHAT.example:443", 200), ("a.chat.example", 403), ("evil.example", 403)):
            reply = server.request("GET", "/v1/models", Host=host, Authorization="Bearer k")
            assert reply.status == status, f"a proxy that passes on the name {host}"


def endless(server: ServerProcess):
    """A stream that goes on until it is left."""
    response = server.open("POST", TEXT, {"prompt": "Once", "temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": -1})
    assert response.readline().startswith(b"data: ")
    return response


def test_a_client_that_goes_away_ends_its_answer(talker: ServerProcess, plain: list) -> None:
    for _ in range(3):
        lines = talker.err.count("the client left")
        response = endless(talker)
        response.connection.sock.shutdown(socket.SHUT_RDWR)
        response.close()
        response.connection.close()
        talker.chat(max_tokens=1)
        wait_until(lambda lines=lines: talker.err.count("the client left") > lines)
        assert talker.err.count("the client left") == lines + 1
    with socket.create_connection(("127.0.0.1", talker.port)) as client:
        body = json.dumps({"prompt": "Once", "ignore_eos": True, "max_tokens": -1}).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: talker.request("GET", "/slots").json[0]["is_processing"])
    assert talker.chat().json["choices"] == plain, "one that waits for a whole answer goes too"
    talker.wait_for_output("POST /v1/completions 499 · the client left")


def test_others_wait_in_order_and_no_more_than_may(talker: ServerProcess, plain: list) -> None:
    first = endless(talker)
    ended: list[str] = []
    waiting = threading.Thread(target=lambda: ended.append(talker.chat().json["choices"]))
    waiting.start()
    wait_until(lambda: talker.request("GET", "/health").json["waiting"])
    reply = talker.chat()
    assert reply.status == 503 and reply.error["code"] == "queue_full" and reply.headers["retry-after"] == "1"
    assert not ended and talker.request("GET", "/v1/models").status == 200
    first.close()
    first.connection.close()
    waiting.join(MINUTE)
    assert ended == [plain] and talker.chat().status == 200


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_it_within_a_second(number: signal.Signals) -> None:
    with serving(*ON_AND_ON) as server:
        running, idle, replies = endless(server), server.open("GET", "/health"), []
        waiting = threading.Thread(target=lambda: replies.append(server.chat()))
        waiting.start()
        wait_until(lambda: server.request("GET", "/health").json["waiting"])
        began = time.monotonic()
        server.process.send_signal(number)
        *_, last, done = running.read().decode().strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_closing" and done == "data: [DONE]"
        assert server.process.wait(5) == 0 and time.monotonic() - began < 3
        waiting.join(MINUTE)
        assert replies[0].status == 503 and replies[0].error["code"] == "server_closing" and idle.status == 200
        assert "Traceback" not in server.err
        with pytest.raises(ConnectionRefusedError):
            server.request("GET", "/health")


@pytest.mark.parametrize(("flag", "value", "code", "said"), [
    ("--port", "that of another", 1, "is in use"), ("--host", "no.such.host.invalid", 2, "--host no.such.host"), *(
        pytest.param(*each, marks=pytest.mark.slow) for each in (
            ("--port", "70000", 2, "is not a port"), ("--host", "192.0.2.1", 1, "--host 192.0.2.1"), ("--api-key", "", 2, "--api-key"),
            ("--cors", "chat.example", 2, "is not an origin"), ("--cors", "http://[::1", 2, "is not an origin"),
            ("--queue", "-1", 2, "--queue -1"), ("--name", " ", 2, "--name"),
            ("--stop", "", 2, "stop")))])
def test_addresses_that_cannot_be_had(server: ServerProcess, flag: str, value: str, code: int, said: str) -> None:
    if value == "that of another":
        value, said = str(server.port), f"port {server.port} of 127.0.0.1 is in use"
    done = CliRun("serve", "fable", flag, value)
    assert done.code == code and said in done.err and "hint: " in done.err and not done.out


def test_a_model_that_is_nowhere_is_not_served() -> None:
    assert CliRun("serve", "no-such-model").code == 3


def test_another_address_without_a_key_is_reported() -> None:
    process, stderr = start_server("--host", "0.0.0.0")
    try:
        server = ServerProcess(process, stderr)
        assert server.url.startswith("http://0.0.0.0:") and "without --api-key: anyone who reaches this machine can use it" in server.err
        assert server.request("GET", "/v1/models", Host="my-machine.lan").status == 200
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        stderr.close()


@pytest.mark.slow
def test_memory_stays_flat(server: ServerProcess) -> None:
    def ask(number: int) -> None:
        server.complete(f"There were {number} foxes", max_tokens=4, stream=bool(number % 2))

    measured, process = [], psutil.Process(server.process.pid)
    for number in range(300):
        ask(number)
        if number in (99, 299):
            measured.append(process.memory_info().rss)
    assert measured[1] - measured[0] < 4 << 20, measured
    assert process.num_fds() < 60 and process.num_threads() < 30


@pytest.mark.parametrize("origin", ["https://chat.example:8443", "file://", "app://window", "*"])
def test_an_origin_is_what_pages_send(origin: str) -> None:
    """Programs with windows send `file://`, which the server tells to pass to --cors."""
    check_server_flags(None, None, [origin], 1)
    assert origin == "*" or AccessRules(True, origins=(origin.rstrip("/"),)).allows(origin, "127.0.0.1")
