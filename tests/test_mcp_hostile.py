"""Malicious or broken MCP servers: what they write, what they withhold, where they redirect."""

# ruff: noqa: F811
import base64
import json
import os
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_mcp import client, entry, found, never, told, web  # noqa: F401
from tool_server import TOOLS

from effllm.runtime.events import Notice
from effllm.runtime.mcp.client import Client, ServerFailed
from effllm.runtime.mcp.configuration import ServerEntry
from effllm.runtime.mcp.http import header_value
from effllm.runtime.mcp.jsonrpc import MAX_MESSAGE_ITEMS, MAX_MESSAGE_NBYTES, ConnectionLost, Inbox
from effllm.runtime.mcp.toolbox import MAX_DEFINITION_LENGTH, Toolbox


@pytest.mark.parametrize("client", [["odd"]], indirect=True)
def test_a_list_that_is_none_offers_nothing(client, tmp_path):
    """Nor does one go on for ever that names its own page as the next."""
    list(client.connect(never))
    assert client.tools == [] and [each.get("method") for each in told(tmp_path)[1:]].count("tools/list") == 2


@pytest.mark.parametrize("client", [["deep"]], indirect=True)
def test_a_schema_that_is_too_deep_to_be_compared_is_another(client):
    """The server is begun anew, and tells the same."""
    for _ in range(2):
        list(client.connect(never))
        assert [tool["name"] for tool in client.tools] == ["t"]
        client.close()
    assert client.is_changed


@pytest.mark.parametrize("client", [["far"]], indirect=True)
def test_progress_of_any_size_is_shown_or_left_out(client):
    list(client.connect(never))
    assert found(client.call("weather", {"place": "Oslo"}, never)).text.startswith("Oslo")


def test_a_message_of_parts_without_end_is_not_taken_apart():
    inbox = Inbox()
    inbox.put(b'{"id": 1, "result": {"content": [' + b"[]," * (MAX_MESSAGE_ITEMS // 2) + b"[]]}}")
    with pytest.raises(ConnectionLost, match="more than 4,000,000 parts"):
        inbox.take(0)


def test_what_nobody_asks_for_fills_no_memory():
    inbox = Inbox()
    for _ in range(3):
        inbox.put(json.dumps({"method": "notifications/message", "params": {"data": "x" * 1000}}))
    assert inbox.take(0) is None and not inbox.is_changed
    inbox.put('{"method": "notifications/tools/list_changed"}')
    assert inbox.is_changed and inbox.take(0) is None
    ping = json.dumps({"id": 1, "method": "ping", "params": {"_": "x" * (MAX_MESSAGE_NBYTES // 4)}})
    for _ in range(3):
        inbox.put(ping)
    assert inbox.take(0)["method"] == "ping" and not inbox.is_full
    for _ in range(9):
        inbox.put(ping)
    assert inbox.is_full
    with pytest.raises(ConnectionLost, match="64 MiB without being asked"):
        for _ in range(9):
            inbox.take(0)


@pytest.mark.parametrize("web", ["forgets"], indirect=True)
def test_a_session_that_is_over_is_restarted(web):
    """Nothing was called yet, so the call is made again, once."""
    client, seen = web
    list(client.connect(never))
    assert found(client.call("weather", {"place": "Oslo"}, never)).text.startswith("Oslo")
    assert [message.get("method") for way, _, message in seen if way == "POST"].count("initialize") == 2


@pytest.mark.parametrize("web", ["moved"], indirect=True)
def test_an_address_that_has_moved_at_its_server_is_followed(web):
    list(web[0].connect(never))
    assert len(web[0].tools) == len(TOOLS)


@pytest.mark.parametrize(("web", "said"), [("moved away", "has moved to http://127.0.0.2:1/mcp"), ("down", 'HTTP 503: {"error": "busy"}')],
                         indirect=["web"])
def test_an_address_that_does_not_answer_is_reported_at_once(web, said):
    """What is told to one server, a key above all, is no other's."""
    with pytest.raises(ServerFailed, match=re.escape(said)) as failed:
        list(web[0].connect(never))
    assert "url of mcpServers.web" in failed.value.hint


@pytest.mark.parametrize("web", ["silent"], indirect=True)
def test_a_stream_that_ends_without_the_answer_is_reported_at_once(web):
    list(web[0].connect(never))
    begun = time.monotonic()
    with pytest.raises(ServerFailed, match="closed the connection mid-response: it ended without one"):
        list(web[0].call("weather", {"place": "Oslo"}, never))
    assert time.monotonic() - begun < 10, "of 20 s of patience"


@given(st.text())
def test_any_name_can_stand_in_a_header(name):
    said = header_value(name)
    assert said.isascii() and said.isprintable() and said == said.strip()
    if said != name:
        assert base64.b64decode(said.removeprefix("=?base64?").removesuffix("?=")) == name.encode(errors="replace")


def test_a_tool_that_is_told_at_great_length_is_left_out():
    client = Client(ServerEntry("one", "x", source="mcp.json"), {})
    client.tools, client.has_more = [{"name": "a"}, {"name": "b", "description": "x" * MAX_DEFINITION_LENGTH}, *[{"name": "a"}] * 2], True
    box = Toolbox((), {})
    box.clients = [client]
    more, *notices = [event.text for event in box._assign_names()]
    assert [tool.name for tool in box.all_tools] == ["a"] and "more than 500 tools" in more
    assert "more than the 100,000 allowed" in notices[0]


def test_other_tools_are_learned_and_what_was_agreed_to_holds_for_those_of_before():
    client = Client(entry("changes"), os.environ)
    box = Toolbox((), {})
    box.clients = [client]
    list(box.start()), list(box.connect(never))
    box.set_enabled("slow", False)
    box.approved, before = {"weather", "long"}, box.tools
    list(client.call("weather", {"place": "Oslo"}, never))
    assert box.is_changed and box.tools == before, "until they are asked for"
    notice = [event.text for event in box.refresh(never) if isinstance(event, Notice)][-1]
    assert "(new: tides; gone: broken, slow, dies, picture, long and 1 more; told otherwise: weather)" in notice
    assert [tool.original_name for tool in box.all_tools] == ["weather", "tides"] and not box.is_changed
    assert box.approved == set(), "a person agreed to what was told before"
    client.tools = [*client.tools, {"name": "slow"}]
    list(box._assign_names())
    assert box.find("slow") is None and box.find("tides"), "what was turned off stays off"
    client.close()
