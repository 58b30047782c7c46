"""Values of the wrong type in loosely typed fields of a request: a 400 that names the field."""

import json

import pytest
from test_tool_call_generation import FABLE, WEATHER

from effllm import UsageError
from effllm.cli.server.generation_options import Defaults
from effllm.cli.server.llama_requests import LlamaCompletionRequest, llama_options
from effllm.cli.server.media import in_chat
from effllm.cli.server.ollama_requests import OllamaChatRequest, chat_of
from effllm.cli.server.openai_requests import ChatRequest, messages_of, parse
from effllm.cli.server.problems import Problem
from effllm.cli.server.responses_requests import ResponsesRequest
from effllm.cli.server.responses_requests import chat_of as response_of
from effllm.cli.server.structured_output import requested_constraint
from effllm.cli.server.tools import requested_tools
from effllm.runtime.config import read_config
from effllm.runtime.generation.served_model import GenerationOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.tool_calls.tool_calling import ToolCalling

ODD = [[], {}, [1], {"a": 1}, 3, 0.5, True]
USER = {"role": "user", "content": "Is it raining?"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FABLE, read_config(FABLE))


def chat(*messages: object, **fields: object) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": messages or [USER], **fields}).encode())


def called(**changes: object) -> dict[str, object]:
    """A message in which the assistant calls a function."""
    return {"role": "assistant", "content": "", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}, **changes}]}


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_a_part_of_no_type(odd: object) -> None:
    asked = chat({"role": "user", "content": [{"type": odd, "text": "x"}]})
    assert [*in_chat(asked)] == []
    with pytest.raises(Problem, match=r"messages\[0\]\.content\[0\]"):
        messages_of(asked)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_a_form_of_no_type(odd: object) -> None:
    with pytest.raises(Problem, match="response_format.type has to be text, json_object or json_schema"):
        requested_constraint(chat(response_format={"type": odd, "value": "x"}), None)


@pytest.mark.parametrize("odd", [odd for odd in ODD if odd], ids=repr)
def test_calls_that_are_no_list_and_answers_to_none(tokenizer: Tokenizer, odd: object) -> None:
    calling = ToolCalling(tokenizer)
    with pytest.raises(UsageError, match=r"messages\[1\]\.tool_calls"):
        calling.prepare([USER, {**called(), "tool_calls": odd}], None)
    told, _ = calling.prepare([USER, called(), {"role": "tool", "tool_call_id": odd, "content": "yes"}], None)
    assert "yes" in told[-1]["content"], "as one that names no call"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_json_has_not(tokenizer: Tokenizer, number: str) -> None:
    """Python's reader takes them, and so does pydantic's where a value may be anything."""
    text = json.dumps({"messages": [USER], "tools": [WEATHER]}).replace('"minimum": 1', f'"minimum": {number}')
    assert number in text
    with pytest.raises(Problem, match=r"tools\[0\] is not JSON: a number in it is NaN or infinite"):
        requested_tools(parse(ChatRequest, text.encode()))
    for arguments in (f'{{"a": {number}}}', {"a": float(number)}):
        with pytest.raises(UsageError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments is not a JSON object"):
            ToolCalling(tokenizer).prepare([called(function={"name": "weather", "arguments": arguments})], None)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_calls_of_ollamas_programs(tokenizer: Tokenizer, odd: object) -> None:
    for message in (called(function=odd), called(id=odd)):
        asked = parse(OllamaChatRequest, json.dumps({"model": "fable", "messages": [
            USER, message, {"role": "tool", "content": "yes"}]}).encode())
        _, messages = chat_of(asked)
        if message["tool_calls"][0]["id"] == "a":
            with pytest.raises(UsageError, match=r"messages\[1\]\.tool_calls\[0\] has no function with a name"):
                ToolCalling(tokenizer).prepare(messages, None)
        else:
            assert "yes" in ToolCalling(tokenizer).prepare(messages, None)[0][-1]["content"]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_what_was_reasoned_is_a_list_of_texts(odd: object) -> None:
    """Codex sends back what it was given, others send nothing: what is no list says nothing."""
    items = [{"type": "message", **USER}, {"type": "reasoning", "content": odd}]
    _, messages, _ = response_of(parse(ResponsesRequest, json.dumps({"input": items}).encode()))
    assert [message["role"] for message in messages] == ["user"]


def test_a_time_of_very_many_digits(tokenizer: Tokenizer) -> None:
    asked = parse(LlamaCompletionRequest, f'{{"prompt": "a", "t_max_predict_ms": {10**400}}}'.encode())
    assert llama_options(asked, Defaults(GenerationOptions(SamplerSettings())), tokenizer).max_seconds > 1e8
