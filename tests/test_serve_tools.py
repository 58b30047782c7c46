"""Tool calls over HTTP: what clients of OpenAI's API send and receive, from a server with the real model."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from server_process import MESSAGES, serving
from test_tool_call_generation import FABLE, HERMES, TIME, WEATHER

from effllm.cli.server import responses_requests
from effllm.cli.server.openai_requests import ChatRequest, parse
from effllm.cli.server.problems import Problem
from effllm.cli.server.responses_requests import ResponsesRequest
from effllm.cli.server.serializers import ChatSerializer
from effllm.cli.server.tools import requested_tools
from effllm.runtime.events import Call, TextDelta

TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "weather"}}
MORE = {"max_tokens": 160}


@pytest.fixture(scope="module")
def server():
    """fable, whose template does not support tools."""
    with serving() as served:
        yield served


def knowing_folder(folder: Path) -> str:
    """A copy of fable with a template that knows tools."""
    shutil.copytree(FABLE, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": HERMES}))
    return str(folder)


@pytest.fixture(scope="module")
def knowing(tmp_path_factory):
    with serving(model=knowing_folder(tmp_path_factory.mktemp("model") / "knowing")) as served:
        yield served


def checked(call, index=None):
    """A call as OpenAI's API has it: (name, arguments)."""
    assert set(call) == {"id", "type", "function"} | ({"index"} if index is not None else set()) and call.get("index") == index
    assert call["type"] == "function" and call["id"] and set(call["function"]) == {"name", "arguments"}
    return call["function"]["name"], json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_whole_and_streamed(server, knowing, choice):
    for served in (server, knowing):
        choice_ = served.chat(tools=TOOLS, tool_choice=choice, **MORE).json["choices"][0]
        assert choice_["finish_reason"] == "tool_calls" and choice_["message"]["content"] is None
        call, = choice_["message"]["tool_calls"]
        name, arguments = checked(call)
        assert name in (("weather",) if choice is NAMED else ("weather", "time.now"))
        pieces = [event["choices"][0] for event in served.chat(tools=TOOLS, tool_choice=choice, stream=True, **MORE).events]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""} and pieces[-1] == {
            "index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
        piece, = pieces[1:-1]
        assert piece["finish_reason"] is None and checked(piece["delta"]["tool_calls"][0], 0) == (name, arguments)


def test_a_conversation_with_a_call(knowing):
    """What the tool gave back is in the next prompt, whose beginning the cache holds."""
    first = knowing.chat(tools=TOOLS, tool_choice=NAMED, **MORE).json
    message = first["choices"][0]["message"]
    messages = [*MESSAGES, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain."}]
    second = knowing.chat(messages, tools=TOOLS).json
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert second["choices"][0]["finish_reason"] in ("stop", "length")
    third = knowing.chat(messages, tools=TOOLS, tool_choice="none").json
    assert "tool_calls" not in third["choices"][0]["message"] and third["usage"]["prompt_tokens"] < second["usage"]["prompt_tokens"]
    assert knowing.chat(messages).status == 200


def test_an_image_of_a_tool_is_named_to_a_model_that_takes_none(server):
    """An agent that reads an image file sends it again with every further request: an error would end it there."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGFsbG8="}}
    called = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    back = {"role": "tool", "tool_call_id": "call12345", "content": [{"type": "text", "text": "a.png"}, picture]}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [called]}, back]
    prompt = server.request("POST", "/apply-template", {"messages": messages}).json["prompt"]
    assert "a.png\n[image left out: this model does not support image input" in prompt
    server.wait_for_output("image in a tool result left out (the model is told so): this model does not support image input")
    assert server.chat([{"role": "user", "content": [picture]}]).status == 400  # what a user shows is not passed over


def test_a_call_that_is_cut_is_content(server):
    answer = server.chat(tools=TOOLS, tool_choice=NAMED, max_tokens=12).json["choices"][0]
    assert answer["finish_reason"] == "length" and answer["message"]["content"].startswith("<tool_call>")
    assert "tool_calls" not in answer["message"]


def test_what_a_template_does_not_know_is_reported_once(server):
    for _ in range(2):
        assert server.chat(tools=TOOLS, max_tokens=1).status == 200
    assert server.err.count("has no tool support") == 1


@pytest.mark.parametrize(("fields", "param", "said"), [
    ({"tool_choice": "required"}, "tool_choice", "no tools"), ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "be none, auto"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "else"}}}, "tool_choice", "not one of the tools"),
    ({"tools": [{"type": "web_search"}]}, "tools", "not a function"), ({"tools": {"a": 1}}, "tools", "array"),
    ({"tools": ["f"]}, "tools[0]", "object"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"), ({"functions": TOOLS}, "functions", "not supported"),
    ({"tools": TOOLS, "grammar": 'root ::= "a"'}, None, "not by a grammar"),
])
def test_what_is_refused(server, fields, param, said):
    for more in ({}, {"stream": True}):
        answer = server.chat(**fields, **more)
        assert answer.status == 400 and answer.error["param"] == param and said in answer.error["message"], answer.error
    assert server.chat().status == 200


def allowing(mode: str, *names: str) -> dict:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [
        {"type": "function", "function": {"name": name}} for name in names]}}


def test_a_request_may_allow_some_of_its_tools():
    """It brings the same ones each time, and says which of them may be called now."""
    def asked(choice: dict) -> ChatRequest:
        return ChatRequest(messages=[], tools=TOOLS, tool_choice=choice)

    of_responses = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    responses = ResponsesRequest(input="x", tools=[{"type": "function", **each["function"]} for each in TOOLS], tool_choice=of_responses)
    for one in (asked(allowing("required", "weather")), responses_requests.chat_of(responses)[0]):
        told = requested_tools(one)
        assert [each["function"]["name"] for each in told.functions] == ["weather"] and told.choice == "required"
    both = requested_tools(asked(allowing("auto", "time.now", "weather")))
    assert both.functions == requested_tools(ChatRequest(messages=[], tools=TOOLS)).functions and both.choice == "auto"
    assert requested_tools(asked(allowing("auto"))) is None
    for wrong, said in ((allowing("any", "weather"), "auto or required"), (allowing("auto", "else"), "allows else"),
                        (allowing("required"), "no tools"), ({"type": "allowed_tools"}, "a list of tools"),
                        ({"type": "allowed_tools", "allowed_tools": {"tools": [7]}}, "not one of the tools")):
        with pytest.raises(Problem, match=said) as raised:
            requested_tools(asked(wrong))
        assert raised.value.status == 400 and raised.value.param.startswith("tool_choice")


@pytest.mark.parametrize("calls", [[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}], [{"id": "1"}], ["f"]])
def test_calls_of_before_that_are_none_are_refused(server, calls):
    answer = server.chat([*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "x"}])
    assert answer.status == 400 and "messages[1].tool_calls[0]" in answer.error["message"]


def test_a_schema_that_cannot_be_held_to_in_full_is_no_reason_to_refuse(server):
    odd = {"type": "function", "function": {"name": "odd", "strict": True, "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"a": {"type": "string", "format": "odd"}},
        "required": ["a"], "not": {"type": "array"}}}}
    odd["function"]["parameters"]["properties"]["number"] = {"type": "integer", "multipleOf": 10**9 + 7}  # gigabytes to prepare
    answer = server.chat(tools=[odd], tool_choice="required", **MORE)
    assert answer.status == 200, answer.json


def asked_for(**fields):
    return requested_tools(parse(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode()))


def test_choices():
    assert asked_for() is None and asked_for(tools=[]) is None and asked_for(tools=TOOLS, tool_choice="none") is None
    assert asked_for(tools=TOOLS).choice == "auto" and asked_for(tools=TOOLS).parallel
    assert asked_for(tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False).parallel is False
    assert asked_for(tools=TOOLS, tool_choice={"type": "function", "name": "weather"}).choice == "weather"
    with pytest.raises(Problem, match="not one of the tools"):
        asked_for(tools=[TIME], tool_choice=NAMED)


def test_names_of_calls():
    """The model's own where it is one; none twice."""
    shape = ChatSerializer("m")
    made = [shape.choice_of(Call("f", "{}", id))["delta"]["tool_calls"][0] for id in ("abcdefghi", "abcdefghi", "0", "", "functions.f:0")]
    ids = [each["id"] for each in made]
    assert [each["index"] for each in made] == [0, 1, 2, 3, 4] and ids[0] == "abcdefghi" and len({*ids}) == 5
    assert all(len(each) == 9 for each in ids)
    assert shape.choice_of(TextDelta("x"))["delta"] == {"content": "x"}
    stats = SimpleNamespace(finish_reason="stop")
    assert shape.finish_reason(stats) == "tool_calls" and ChatSerializer("m").finish_reason(stats) == "stop"
    assert shape.finish_reason(SimpleNamespace(finish_reason="length")) == "length"


SUM = r"[0-9]{1,3} [+-] [0-9]{1,3}\n"
OF_CHAT = {"type": "custom", "custom": {"name": "reckon", "description": "Adds.", "format": {
    "type": "grammar", "grammar": {"syntax": "regex", "definition": SUM}}}}
OF_RESPONSES = {"type": "custom", "name": "reckon", "format": {"type": "grammar", "syntax": "regex", "definition": SUM}}


def test_a_custom_tool_gets_text_of_its_grammar(server) -> None:
    """OpenAI's chats and Responses: no arguments, but a text, which is held to a grammar."""
    given = {"tools": [*TOOLS, OF_CHAT], "tool_choice": {"type": "custom", "custom": {"name": "reckon"}}, **MORE}
    choice = server.chat(**given).json["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert {*call} == {"id", "type", "custom"} and call["type"] == "custom" and choice["finish_reason"] == "tool_calls"
    assert call["custom"]["name"] == "reckon" and re.fullmatch(SUM, call["custom"]["input"])
    (streamed,) = [each for piece in server.chat(**given, stream=True).events
                   for each in piece["choices"][0]["delta"].get("tool_calls", ())]
    assert streamed == {"index": 0, **call, "id": streamed["id"]}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    assert server.chat(history, tools=[OF_CHAT]).status == 200
    item = server.respond(tools=[OF_RESPONSES], tool_choice={"type": "custom", "name": "reckon"}, max_output_tokens=160).json["output"][0]
    assert item["type"] == "custom_tool_call" and re.fullmatch(SUM, item["input"])
    for fields, param in (({"tools": [{"type": "custom"}]}, "tools[0].custom.name"),
                          ({"tools": [{**OF_CHAT, "custom": {"name": "f", "format": 1}}]}, "tools[0].custom.format"),
                          ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}]},
                           "messages[0].tool_calls[0].custom")):
        refused = server.chat(**fields)
        assert refused.status == 400 and refused.error["param"] == param
