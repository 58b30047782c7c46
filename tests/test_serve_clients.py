"""Requests of clients that know only an address, against a real server of one model and of all: huggingface_hub's."""

import json
from collections.abc import Iterator

import pytest
from huggingface_hub import ChatCompletionInputFunctionName, ChatCompletionInputToolChoiceClass, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from server_process import MESSAGES, ServerProcess, serving

TELLER = {"type": "function", "function": {"name": "tell", "description": "Tells.", "parameters": {
    "type": "object", "properties": {"of": {"enum": ["fox", "king"]}}, "required": ["of"]}}}
TELL = ChatCompletionInputToolChoiceClass(ChatCompletionInputFunctionName("tell"))
SCHEMA = {"type": "object", "properties": {"of": {"enum": ["fox", "king"]}}, "required": ["of"], "additionalProperties": False}


@pytest.fixture(scope="module", params=["fable", None], ids=["one model", "all models"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with serving(model=request.param) as server:
        server.chat(model="fable")
        yield server


def test_an_address_alone_means_the_model_that_is_there(server: ServerProcess) -> None:
    """The client then says dummy for a model."""
    client, wanted = InferenceClient(model=server.url.removesuffix("/v1")), server.chat(model="fable").json
    whole = client.chat_completion(MESSAGES, max_tokens=24, temperature=0)
    assert whole.model == "fable" and whole.choices[0].message.content == wanted["choices"][0]["message"]["content"]
    assert whole.usage.completion_tokens == 24
    pieces = client.chat_completion(MESSAGES, max_tokens=24, temperature=0, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == whole.choices[0].message.content
    called = client.chat_completion(MESSAGES, max_tokens=200, temperature=0, tools=[TELLER], tool_choice=TELL).choices[0].message.tool_calls
    assert [call.function.name for call in called] == ["tell"] and "fox" in called[0].function.arguments
    form = {"type": "json_schema", "json_schema": {"name": "told", "schema": SCHEMA}}
    said = client.chat_completion(MESSAGES, max_tokens=200, temperature=0, response_format=form).choices[0].message.content
    assert json.loads(said)["of"] in ("fox", "king")
    address = {"model": f"http://127.0.0.1:{server.port}/v1/chat/completions"}  # as the client in JavaScript says
    assert server.chat(**address).json["choices"] == wanted["choices"]


def test_a_name_is_still_a_name(server: ServerProcess) -> None:
    client = InferenceClient(base_url=server.url, api_key="none")
    assert client.chat.completions.create(model="fable", messages=MESSAGES, max_tokens=2).usage.completion_tokens == 2
    with pytest.raises(HfHubHTTPError, match="there is no model 'dum'"):
        client.chat.completions.create(model="dum", messages=MESSAGES, max_tokens=2)
