"""Our client against servers of the official Model Context Protocol package, over both transports."""

import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from server_process import wait_until

from effllm.runtime.mcp.client import Client
from effllm.runtime.mcp.configuration import ServerEntry
from effllm.runtime.mcp.results import ToolResult

pytestmark = pytest.mark.peer
pytest.importorskip("mcp.server.mcpserver")
PROGRAM = """
import sys
from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer("peer")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def fails() -> str:
    raise ValueError("out of cheese")

@server.tool()
async def counts(context: Context) -> str:
    await context.report_progress(1, 2, "half way")
    return "counted"

@server.tool()
def looks() -> Image:
    return Image(data=b"\\x89PNG", format="png")

if sys.argv[1:]:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


def never() -> bool:
    return False


def found(client: Client, tool: str, **arguments: object) -> tuple[ToolResult, list[str]]:
    """A tool's result, and the progress that it reported meanwhile."""
    *moved, last = client.call(tool, arguments, never)
    return last, [event.detail for event in moved if event.detail]


def tried(client: Client) -> None:
    with closing(client):
        list(client.connect(never))
        assert [tool["name"] for tool in client.tools] == ["add", "fails", "counts", "looks"]
        assert client.tools[0]["description"] == "Add two numbers." and client.tools[0]["inputSchema"]["required"] == ["a", "b"]
        assert found(client, "add", a=2, b=3)[0] == ToolResult("5")
        wrong, _ = found(client, "add", a="x")
        assert wrong.is_error and "add" in wrong.text
        assert found(client, "fails")[0].is_error and found(client, "nix")[0].is_error
        assert found(client, "looks")[0].images == (b"\x89PNG",)
        assert found(client, "counts")[0] == ToolResult("counted")


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "peer.py"
    path.write_text(PROGRAM)
    return str(path)


def test_by_pipes(program: str) -> None:
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    tried(Client(ServerEntry("peer", sys.executable, ("-P", program), env, source="mcp.json"), os.environ))


def test_by_http(program: str) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def listens() -> bool:
        with closing(socket.socket()) as trying:
            return trying.connect_ex(("127.0.0.1", port)) == 0

    with subprocess.Popen([sys.executable, "-P", program, str(port)], env=env, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(listens)
            tried(Client(ServerEntry("peer", url=f"http://127.0.0.1:{port}/mcp", source="mcp.json"), {}))
        finally:
            server.terminate()
