"""OpenAI's own client with the Responses API: it understands every response."""

import json
import re
import time

import pytest
from server_process import QUESTION, serving
from test_serve_responses import TOOL

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.peer, pytest.mark.slow]
GIVEN = {"model": "fable", "input": QUESTION, "temperature": 0, "max_output_tokens": 24}


@pytest.fixture(scope="module")
def client():
    with serving() as server, openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_answers_whole_and_streamed(client) -> None:
    whole = client.responses.create(**GIVEN, instructions="Be brief.", store=False, include=["reasoning.encrypted_content"])
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens" and whole.usage.output_tokens == 24
    assert whole.usage.input_tokens_details.cached_tokens >= 0 and whole.output_text
    events = [*client.responses.create(**GIVEN, instructions="Be brief.", stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text
    with client.responses.stream(**GIVEN, instructions="Be brief.") as stream:
        last = [event for event in stream if event.type == "response.output_text.delta"][-1]
        assert last.snapshot == whole.output_text


def test_objects_of_a_class(client) -> None:
    from pydantic import BaseModel

    class Fox(BaseModel):
        is_king: bool

    given = {**GIVEN, "max_output_tokens": 100, "text_format": Fox}
    parsed = client.responses.parse(**given)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Fox)
    with client.responses.stream(**given) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_calls_whole_streamed_and_answered(client) -> None:
    given = {**GIVEN, "max_output_tokens": 160, "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}
    (call,) = client.responses.create(**given).output
    assert call.type == "function_call" and call.name == "weather" and json.loads(call.arguments)["place"]
    with client.responses.stream(**given) as stream:
        (done,) = [event for event in stream if event.type == "response.function_call_arguments.done"]
        (final,) = stream.get_final_response().output
    assert done.arguments == final.arguments == call.arguments
    told = [{"role": "user", "content": QUESTION}, call, {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}]
    assert client.responses.create(**{**GIVEN, "input": told, "tools": [TOOL]}).status in ("completed", "incomplete")


def test_one_is_resumed_and_counted(client) -> None:
    first = client.responses.create(model="fable", input=QUESTION, temperature=0, max_output_tokens=12)
    asked = {"model": "fable", "input": "And then?", "previous_response_id": first.id}
    second = client.responses.create(**asked, temperature=0, max_output_tokens=12)
    assert second.previous_response_id == first.id and second.output_text
    assert client.responses.input_tokens.count(**asked).input_tokens == second.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        client.responses.create(**{**asked, "previous_response_id": "resp_none"})


def test_errors_are_of_their_classes(client) -> None:
    with pytest.raises(openai.NotFoundError, match="this server serves fable"):
        client.responses.create(**{**GIVEN, "model": "gpt-5"})
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**GIVEN, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    events = [*client.responses.create(**{**GIVEN, "input": "fox " * 3000}, stream=True)]
    assert events[-1].type == "response.failed" and events[-1].response.error.code == "context_length_exceeded"


def test_responses_are_told_again_and_conversations_resumed(client) -> None:
    first = client.responses.create(**GIVEN)
    assert client.responses.retrieve(first.id) == first
    assert [item.content[0].text for item in client.responses.input_items.list(first.id)] == [QUESTION]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    begun = client.conversations.create(items=[{"type": "message", "role": "user", "content": "I am Ann."}], metadata={"a": "b"})
    answered = client.responses.create(**GIVEN, conversation=begun.id)
    assert answered.conversation.id == begun.id and client.conversations.retrieve(begun.id).metadata == {"a": "b"}
    items = [*client.conversations.items.list(begun.id, order="asc", limit=2)]  # page by page
    assert [item.content[0].text for item in items] == ["I am Ann.", QUESTION, answered.output_text]
    added, = client.conversations.items.create(begun.id, items=[{"role": "user", "content": "Why?"}]).data
    assert client.conversations.items.retrieve(added.id, conversation_id=begun.id) == added
    assert client.conversations.items.delete(added.id, conversation_id=begun.id).id == begun.id
    assert client.conversations.delete(begun.id).deleted


def test_one_continues_in_the_background(client) -> None:
    """As its documents have it: asked for until it has ended, followed after a break, cancelled."""
    response = client.responses.create(**GIVEN, background=True)
    while response.status in ("queued", "in_progress"):
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    assert response.status == "incomplete" and response.background and response.output_text
    with client.responses.create(**GIVEN, background=True, stream=True) as stream:
        seen = [next(stream) for _ in range(8)]
    rest = [*client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number)]
    assert [event.sequence_number for event in (*seen, *rest)] == [*range(len(seen) + len(rest))]
    assert seen[1].type == "response.queued" and rest[-1].response.output_text == response.output_text
    going = client.responses.create(**{**GIVEN, "max_output_tokens": 1800}, background=True)
    assert client.responses.cancel(going.id).status == "cancelled" == client.responses.retrieve(going.id).status
    with pytest.raises(openai.BadRequestError, match="nothing to cancel"):
        client.responses.cancel(client.responses.create(**GIVEN).id)


def test_a_conversation_is_made_short(client) -> None:
    short = client.responses.compact(model="fable", input=[{"role": "user", "content": QUESTION}], instructions="Be brief.")
    assert [item.type for item in short.output] == ["message", "compaction"] and short.object == "response.compaction"
    answer = client.responses.create(**{**GIVEN, "input": [*short.output, {"role": "user", "content": "Go on."}]})
    assert answer.usage.input_tokens > short.usage.output_tokens and answer.output_text


def test_a_custom_tool_gets_text_of_its_grammar(client) -> None:
    grammar = 'start: NUMBER " + " NUMBER\nNUMBER: /[0-9]{1,3}/'
    tool = {"type": "custom", "name": "reckon", "format": {"type": "grammar", "syntax": "lark", "definition": grammar}}
    given = {**GIVEN, "max_output_tokens": 160, "tools": [tool], "tool_choice": {"type": "custom", "name": "reckon"}}
    call, = client.responses.create(**given).output
    assert call.type == "custom_tool_call" and re.fullmatch(r"\d{1,3} \+ \d{1,3}", call.input)
    told = [{"role": "user", "content": QUESTION}, call, {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "4"}]
    assert client.responses.create(**{**GIVEN, "input": told, "tools": [tool]}).output_text
    of_chat = {"type": "custom", "custom": {"name": "reckon", "format": {
        "type": "grammar", "grammar": {"syntax": "lark", "definition": grammar}}}}
    asked = {"model": "fable", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 160, "tools": [of_chat],
             "tool_choice": {"type": "custom", "custom": {"name": "reckon"}}}
    message = client.chat.completions.create(**asked).choices[0].message
    assert re.fullmatch(r"\d{1,3} \+ \d{1,3}", message.tool_calls[0].custom.input)
    back = [*asked["messages"], message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}]
    assert client.chat.completions.create(model="fable", messages=back, tools=[of_chat], max_tokens=8).choices
