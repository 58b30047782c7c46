"""OpenAI's own client with tool calls: its requests are understood, and it reads ours as tool calls."""

import json

import pytest
from server_process import MESSAGES, serving
from test_serve_tools import MORE, NAMED, TOOLS, knowing_folder

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.peer, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = knowing_folder(tmp_path_factory.mktemp("model") / "knowing")
    with serving(model=folder) as server, openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_calls_whole_streamed_and_answered(client):
    given = {"model": client.models.list().data[0].id, "messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, "temperature": 0, **MORE}
    whole = client.chat.completions.create(**given).choices[0]
    call, = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and call.function.name == "weather" and json.loads(call.function.arguments)["place"]
    arguments, names = "", []
    for piece in client.chat.completions.create(**given, stream=True):
        for delta in piece.choices[0].delta.tool_calls or ():
            arguments += delta.function.arguments or ""
            names.append(delta.function.name)
    assert names == ["weather"] and arguments == call.function.arguments
    messages = [*MESSAGES, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    assert client.chat.completions.create(**{**given, "messages": messages, "tool_choice": "auto"}).choices
