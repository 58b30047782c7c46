"""MCP tools: the configuration, the client against handwritten servers, tool results, and the rounds."""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_server import PIXEL, TOOLS, answered

from effllm import UsageError
from effllm.runtime.events import Notice, Progress
from effllm.runtime.images.media_markers import BEGIN, END
from effllm.runtime.mcp import client as mcp_client
from effllm.runtime.mcp import stdio
from effllm.runtime.mcp.client import Cancelled, Client, ServerFailed
from effllm.runtime.mcp.configuration import ServerEntry, read_configuration
from effllm.runtime.mcp.results import ToolResult, parse_result, sanitized
from effllm.runtime.mcp.toolbox import Toolbox
from effllm.runtime.tokens.plain_text import TOKEN_BREAK

SERVER = str(Path(__file__).resolve().parent / "tool_server.py")


def entry(*manner: str, name: str = "demo", timeout_s: float = 20.0, env: dict[str, str] | None = None) -> ServerEntry:
    return ServerEntry(name, sys.executable, ("-S", SERVER, *manner), env or {}, timeout_s=timeout_s, source="mcp.json")


def never() -> bool:
    return False


@pytest.fixture
def client(request, tmp_path):
    """A client of the server in the manner of the test's parameter."""
    env = {"TOLD": str(tmp_path / "told"), "GIVEN": "yes"}
    made = Client(entry(*getattr(request, "param", ()), env=env), {**os.environ, "HF_TOKEN": "x"})
    yield made
    made.close()


def found(events) -> ToolResult:
    return [event for event in events if isinstance(event, ToolResult)][-1]


def told(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "told").read_text().splitlines() if line]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


# ---- the configuration


def test_a_configuration_is_read(tmp_path):
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {
        "files": {"command": "npx", "args": ["-y", "${PACKAGE:-files}"], "env": {"KEY": "${KEY}"}, "autoApprove": ["read"],
                  "disabled": False, "timeout": 5, "of another client": 1},
        "web": {"type": "http", "url": "http://127.0.0.1:1/mcp", "headers": {"Authorization": "Bearer ${KEY}"}, "alwaysAllow": ["a"]},
        "off": {"command": "x", "disabled": True}}}))
    files, web = read_configuration(path, {"KEY": "k"})
    assert files == ServerEntry("files", "npx", ("-y", "files"), {"KEY": "k"}, None, "", {}, frozenset({"read"}), 5.0, str(path))
    assert (web.url, web.headers, web.approved) == ("http://127.0.0.1:1/mcp", {"Authorization": "Bearer k"}, {"a"})


@pytest.mark.parametrize(("content", "said"), [
    ("{", "not JSON"), ("[]", "no object mcpServers"), ('{"servers": {}}', "no object mcpServers"),
    ('{"mcpServers": {}}', "names no server"),
    ({"a": {"command": "x", "disabled": True}}, "not disabled"), ({"a": []}, "mcpServers.a is not an object"),
    ({"a": {}}, "neither a command nor a url"), ({"a": {"command": "x", "url": "y"}}, "both a command and a url"),
    ({"a": {"type": "sse", "url": "http://x"}}, "type 'sse'"), ({"a": {"command": 3}}, "mcpServers.a.command is not text"),
    ({"a": {"command": "x", "args": "y"}}, "args is not a list"), ({"a": {"command": "x", "env": []}}, "env is not an object"),
    ({"a": {"command": "x", "timeout": True}}, "timeout is True"), ({"a": {"command": "x", "timeout": 0}}, "timeout is 0"),
    ({"a": {"url": "http://x", "headers": {"Authorization": "Bearer k\n"}}}, "headers: 'Authorization' is not a header that can be sent"),
    ({"a": {"url": "http://x", "headers": {"A b": "k"}}}, "headers: 'A b' is not a header"),
    ({"a": {"command": "${NOWHERE}"}}, "variable NOWHERE, which is not set"), ("[" * 100_000, "not JSON"),
])
def test_a_configuration_that_is_wrong_is_one_line_with_a_next_step(tmp_path, content, said):
    path = tmp_path / "mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps({"mcpServers": content}))
    with pytest.raises(UsageError, match=r".*" + said.replace("'", ".")) as error:
        read_configuration(path, {})
    assert error.value.hint and "\n" not in error.value.message


def test_a_configuration_that_is_not_there(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            read_configuration(path, {})


# ---- a server as a program


def test_tools_are_listed_and_called(client, tmp_path):
    client.start()
    assert all(isinstance(event, Progress) for event in client.connect(never))
    assert [tool["name"] for tool in client.tools] == [tool["name"] for tool in TOOLS], "both pages"
    assert found(client.call("weather", {"place": "Oslo"}, never)) == ToolResult("Oslo: rain, 7 degrees")
    assert found(client.call("broken", {"place": "x"}, never)) == ToolResult("Error: no such place", is_error=True)
    begun, *messages = told(tmp_path)
    assert begun["secret"] is None and begun["given"] == "yes", "a server gets no variables but its own and a few"
    assert [message["method"] for message in messages] == ["initialize", "notifications/initialized", *["tools/list"] * 2,
                                                           *["tools/call"] * 2]
    client.close()
    assert not is_alive(begun["pid"])


def test_a_server_that_dies_is_reported_and_restarted(client):
    list(client.connect(never))
    with pytest.raises(ServerFailed, match="demo ended with exit code 3: out of cheese") as failed:
        list(client.call("dies", {}, never))
    assert "mcp.json" in failed.value.hint
    assert found(client.call("weather", {"place": "Rome"}, never)).text.startswith("Rome")


def test_who_lets_go_is_free_at_once_and_the_server_is_told(client, tmp_path, monkeypatch):
    monkeypatch.setattr(stdio, "EXIT_TIMEOUT_S", 0.2)
    list(client.connect(never))
    begun, pressed = time.monotonic(), []
    with pytest.raises(Cancelled):
        for _ in client.call("slow", {}, lambda: bool(pressed)):
            pressed.append(True)
    monkeypatch.setattr(mcp_client, "PING_TIMEOUT_S", 0.2)
    assert found(client.call("weather", {"place": "Oslo"}, never)).text.startswith("Oslo"), "begun anew, since it is asleep"
    assert time.monotonic() - begun < 10
    sleeper, awake = (message["pid"] for message in told(tmp_path) if "pid" in message)
    assert not is_alive(sleeper) and is_alive(awake)


@pytest.mark.parametrize(("manner", "said"), [("ends", "ended with exit code 2: no key was given"), ("mute", "gave no answer within 0.5 s"),
                                              ("garbage", "0.5 s; it wrote an invalid message: listening")])
def test_a_server_that_cannot_be_used(manner, said):
    timeout_s = 10.0 if manner == "ends" else 0.5  # starting and ending takes its time on a busy machine
    client = Client(entry(manner, timeout_s=timeout_s), os.environ)
    with pytest.raises(ServerFailed, match=said) as failed:
        list(client.connect(never))
    assert "\n" not in failed.value.message and failed.value.hint and not client.is_started


@pytest.mark.parametrize("client", [["asks"]], indirect=True)
def test_what_a_server_asks_amid_a_call_is_answered(client, tmp_path):
    list(client.connect(never))
    events = list(client.call("weather", {"place": "Oslo"}, never))
    assert found(events).text.startswith("Oslo") and any(event.detail == "1 of 2" for event in events if isinstance(event, Progress))
    answers = {message["id"]: message for message in told(tmp_path)[1:] if "method" not in message}
    assert answers["p"]["result"] == {} and answers["q"]["error"]["code"] == -32601


def test_a_program_that_is_not_there():
    client = Client(ServerEntry("demo", "/no/such/program", source="mcp.json"), os.environ)
    with pytest.raises(ServerFailed, match="cannot be started: /no/such/program: No such file") as failed:
        client.start()
    assert failed.value.hint == "check mcpServers.demo in mcp.json"


# ---- a server at an address


class Handler(BaseHTTPRequestHandler):
    """The same tools by streamable HTTP: odd requests are answered by a stream, the others by one document."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, dict[str, str], dict]] = []
    manner = ""

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(("POST", {key.lower(): value for key, value in self.headers.items()}, message))
        if self.manner == "locked":
            self.answer(401, "text/plain", b"who are you?")
            return
        if self.manner == "forgets" and len(self.seen) == 5:  # the first call, of a session that is over
            error = {"jsonrpc": "2.0", "id": "server-error", "error": {"code": -32600, "message": "Session not found"}}
            self.answer(404, "application/json", json.dumps(error).encode())
            return
        if self.manner.startswith("moved") and self.path == "/mcp":
            self.send_response(307)
            self.send_header("Location", "/mcp/" if self.manner == "moved" else "http://127.0.0.2:1/mcp")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.manner == "silent" and message.get("method") == "tools/call":
            self.answer(200, "text/event-stream", b": nothing more\n\n")
            return
        if self.manner == "down":
            self.answer(503, "application/json", b'{"error": "busy"}')
            return
        if self.manner == "modern" and message.get("method") == "initialize":
            reply = {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32022, "message": "no handshake here", "data": {}}}
        else:
            reply = answered(message, TOOLS)
        if reply is None:
            self.answer(202, "text/plain", b"")
        elif message["id"] % 2:
            note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {}}
            events = "".join(f"event: message\r\ndata: {json.dumps(each)}\r\n\r\n" for each in (note, reply))
            self.answer(200, "text/event-stream", f": hello\n\n{events}".encode())
        else:
            self.answer(200, "application/json", json.dumps(reply).encode())

    def do_DELETE(self):
        self.seen.append(("DELETE", {key.lower(): value for key, value in self.headers.items()}, {}))
        self.answer(200, "text/plain", b"")

    def answer(self, status: int, kind: str, body: bytes):
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Mcp-Session-Id", "s1")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nobody reads it."""


@pytest.fixture
def web(request):
    """A server on the loopback, as a client is told of it."""
    handler = type("Handler", (Handler,), {"seen": [], "manner": getattr(request, "param", "")})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/mcp"
    client = Client(ServerEntry("web", url=address, headers={"Authorization": "Bearer k"}, timeout_s=20, source="mcp.json"), {})
    yield client, handler.seen
    client.close()
    server.shutdown()
    server.server_close()


def test_tools_at_an_address(web):
    client, seen = web
    list(client.connect(never))
    assert [tool["name"] for tool in client.tools] == [tool["name"] for tool in TOOLS]
    for place in ("Oslo", "Rome"):
        assert found(client.call("weather", {"place": place}, never)).text.startswith(place)
    client.close()
    heads = [head for _, head, _ in seen]
    assert all(head["authorization"] == "Bearer k" for head in heads) and "mcp-session-id" not in heads[0]
    assert all(head["mcp-session-id"] == "s1" and head["mcp-protocol-version"] == "2025-11-25" for head in heads[1:])
    assert [way for way, *_ in seen][-1] == "DELETE" and seen[1][2]["method"] == "notifications/initialized"


@pytest.mark.parametrize("web", ["modern"], indirect=True)
def test_a_server_without_a_handshake(web):
    """Every request says what it would have."""
    client, seen = web
    list(client.connect(never))
    assert found(client.call("weather", {"place": "Oslo"}, never)).text.startswith("Oslo")
    _, head, message = seen[-1]
    assert head["mcp-protocol-version"] == message["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"
    assert (head["mcp-method"], head["mcp-name"]) == ("tools/call", "weather")


@pytest.mark.parametrize("web", ["locked"], indirect=True)
def test_an_address_that_wants_a_key(web):
    with pytest.raises(ServerFailed, match="authentication .HTTP 401") as failed:
        list(web[0].connect(never))
    assert "headers" in failed.value.hint


def test_an_address_where_nobody_is():
    with pytest.raises(ServerFailed, match="cannot be reached") as failed:
        list(Client(ServerEntry("web", url="http://127.0.0.1:1/mcp", source="mcp.json"), {}).connect(never))
    assert "check the url" in failed.value.hint
    with pytest.raises(ServerFailed, match="not http or https"):
        Client(ServerEntry("web", url="ftp://x", source="mcp.json"), {}).start()


# ---- what tools give back


@pytest.mark.parametrize(("result", "text"), [
    ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"), ({}, "(nothing)"),
    ({"content": [], "structuredContent": {"a": 1}}, '{"a": 1}'), ({"content": [{"type": "audio", "data": ""}]}, "[audio, left out]"),
    ({"content": [{"type": "resource", "resource": {"uri": "f:x", "text": "t"}}]}, "f:x:\nt"),
    ({"content": [{"type": "resource", "resource": {"uri": "f:x", "blob": "AA"}}]}, "[f:x: not text, left out]"),
    ({"content": [{"type": "resource_link", "name": "n", "uri": "f:x"}]}, "[n: f:x]"),
    ({"content": [3, {"type": "new"}]}, "[unsupported content, left out]"),
    ({"content": [{"type": "image", "data": "?"}]}, "[unreadable image]"),
    ({"content": "a", "isError": True}, "Error: (nothing)"),
])
def test_results_become_a_text(result, text):
    assert parse_result(result) == ToolResult(text, is_error=result.get("isError", False))


def test_images_are_passed_on():
    assert parse_result({"content": [{"type": "image", "data": PIXEL}]}).images[0].startswith(b"\x89PNG")


@given(st.text() | st.lists(st.sampled_from(["\x1b[31m", BEGIN, END, TOKEN_BREAK, "\x07", "a", "\udc80", "\r"])).map("".join))
def test_nothing_that_a_tool_says_is_a_command(text):
    said = sanitized(text)
    assert not {*said} & {BEGIN, END, TOKEN_BREAK, "\x1b", "\x07", "\r"} and sanitized(said) == said
    said.encode()


# ---- all servers together


def test_tools_of_two_servers_have_names_of_their_own():
    one, other = (Client(ServerEntry(name, "x", approved=frozenset({"weather"}) if name == "one" else frozenset()), {})
                  for name in ("one", "the other"))
    box = Toolbox((), {})
    box.clients = [one, other]
    deep = {}
    for _ in range(200):
        deep = {"a": deep}
    one.tools = [{"name": "weather", "description": "\x1b[1mIt.\x1b[0m"}, {"name": "a b"}, {"name": "deep", "inputSchema": deep}]
    other.tools = [{"name": "weather", "inputSchema": {"type": "object", "properties": {"a\x07": {"type": "string"}}}}]
    notices = [event.text for event in box._assign_names() if isinstance(event, Notice)]
    assert [tool.name for tool in box.all_tools] == ["one.weather", "a_b", "the_other.weather"] and "too deeply" in notices[0]
    assert box.all_tools[0].description == "It." and box.approved == {"one.weather"}
    assert [*box.all_tools[2].function["function"]["parameters"]["properties"]] == ["a"]
    assert [tool.name for tool in box.set_enabled("the other", False)] == ["the_other.weather"] and box.find("the_other.weather") is None
    assert len(box.tools.functions) == 2 and box.set_enabled("one", False) and box.tools is None
    box.set_enabled("weather", True)
    assert [tool.name for tool in box.enabled] == ["one.weather", "the_other.weather"]
    with pytest.raises(UsageError, match="no tool or server"):
        box.set_enabled("nix", True)
