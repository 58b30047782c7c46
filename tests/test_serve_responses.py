"""OpenAI's Responses API of `effllm serve`: over HTTP with the real model, and as units where it does not suffice."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from server_process import MESSAGES, MINUTE, QUESTION, Reply, ServerProcess
from test_serve_units import Client
from test_tool_call_generation import WEATHER

from effllm.cli.server import streams
from effllm.cli.server.answer_queue import AnswerQueue
from effllm.cli.server.messages_requests import MessagesRequest
from effllm.cli.server.messages_serializer import MessageSerializer
from effllm.cli.server.openai_requests import parse
from effllm.cli.server.problems import Problem
from effllm.cli.server.responses_requests import ResponsesRequest, ToolNames, chat_of
from effllm.cli.server.responses_serializer import ResponseSerializer
from effllm.cli.server.serializers import AnswerSerializer
from effllm.cli.server.streams import EventReader, EventStream, RequestRecord
from effllm.runtime.events import Call, Done, Event, Progress, PromptRead, TextDelta

STATS = SimpleNamespace(finish_reason="stop", token_ids=(1, 2), prompt_tokens=3, cached_tokens=1, reasoning_tokens=1, stop_string=None)
TOOL = {"type": "function", **WEATHER["function"]}
FREE = {"type": "custom", "name": "patch", "description": "Changes files.", "format": {"type": "text"}}
SPACE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}]}
SCHEMA = {"type": "object", "properties": {"fox": {"type": "boolean"}}, "required": ["fox"], "additionalProperties": False}
FORM = {"type": "json_schema", "name": "fox", "strict": True, "schema": SCHEMA}


def asked(**fields: object) -> ResponsesRequest:
    return parse(ResponsesRequest, json.dumps({"input": "x", **fields}).encode())


def same(event: dict, **more: object) -> dict:
    """Without what each answer has of its own."""
    own = {"id", "item_id", "created_at", "completed_at", "call_id", "usage"}
    plain = {key: [same(each) for each in value] if key in ("output", "items") else same(value) if isinstance(value, dict) else value
             for key, value in event.items() if key not in own}
    return {**plain, **more}


def test_an_answer_is_that_of_chat_completions(server: ServerProcess) -> None:
    said = server.chat([{"role": "system", "content": "Be brief."}, *MESSAGES]).json
    part = [{"type": "input_text", "text": QUESTION}]
    for given in (QUESTION, MESSAGES, [{"type": "message", "role": "user", "content": part}]):
        reply = server.respond(given, instructions="Be brief.", metadata={"a": "b"}, store=True, user="me")
        whole, (item,) = reply.json, reply.json["output"]
        assert reply.status == 200 and item["content"][0]["text"] == said["choices"][0]["message"]["content"]
        assert item["type"] == "message" and item["role"] == "assistant" and item["id"].startswith("msg_")
        assert item["content"] == [{"type": "output_text", "text": item["content"][0]["text"], "annotations": [], "logprobs": []}]
        assert (whole["object"], whole["model"], whole["status"], whole["store"]) == ("response", "fable", "incomplete", True)
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"} and item["status"] == "incomplete"
        assert whole["id"].startswith("resp_") and whole["instructions"] == "Be brief." and whole["metadata"] == {"a": "b"}
        assert whole["usage"]["input_tokens"] == said["usage"]["prompt_tokens"] and whole["usage"]["output_tokens"] == 24
        assert whole["usage"]["total_tokens"] == said["usage"]["total_tokens"]


def test_a_stream_builds_the_whole(server: ServerProcess) -> None:
    whole = server.respond().json
    reply = server.respond(stream=True)
    events = reply.named_events
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"]
    assert {*kinds[4:-4]} == {"response.output_text.delta"} and len(kinds) > 20
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(event["delta"] for event in events[4:-4]) == text == events[-4]["text"] == events[-3]["part"]["text"]
    assert {event["item_id"] for event in events[3:-2]} == {events[2]["item"]["id"]} == {events[-2]["item"]["id"]}
    assert same(events[-1]["response"]) == same(whole) and events[-1]["response"]["output"] == [events[-2]["item"]]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert reply.headers["content-type"].startswith("text/event-stream") and b"[DONE]" not in reply.body


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_is_made_and_its_answer_continues(server: ServerProcess, choice: object) -> None:
    given = {"tools": [TOOL], "tool_choice": choice, "max_output_tokens": 160}
    first = server.respond(**given).json
    (call,) = first["output"]
    assert first["status"] == "completed" and call["type"] == "function_call" and call["name"] == "weather"
    assert json.loads(call["arguments"])["place"] in ("Oslo", "Bergen") and call["call_id"] and call["id"].startswith("fc_")
    events = server.respond(stream=True, **given).named_events
    assert [event["type"].removeprefix("response.") for event in events[2:]] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"]
    assert events[2]["item"]["arguments"] == "" and events[3]["delta"] == events[4]["arguments"] == call["arguments"]
    assert same(events[5]["item"]) == same(call)
    told = [*MESSAGES, {"type": "reasoning", "id": "rs_1", "summary": []}, call,
            {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}]
    second = server.respond(told, tools=[TOOL]).json
    assert second["status"] in ("completed", "incomplete") and second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"] - 1
    parts = [{**told[-1], "output": [{"type": "input_text", "text": "Rain."}]}]
    assert server.respond([*told[:-1], *parts], tools=[TOOL]).json["usage"]["input_tokens"] == second["usage"]["input_tokens"]


def test_forms_hold_answers(server: ServerProcess) -> None:
    answer = server.respond(text={"format": FORM}, max_output_tokens=100).json
    assert [*json.loads(answer["output"][0]["content"][0]["text"])] == ["fox"] and answer["text"]["format"] == FORM
    assert server.respond(text={"format": {"type": "json_object"}}).json["output"][0]["content"][0]["text"].startswith("{")
    assert server.respond(text={"format": {"type": "text"}, "verbosity": "low"}).json["text"]["format"] == {"type": "text"}


def test_a_context_that_is_too_small(server: ServerProcess) -> None:
    """An event where the answer is a stream: programs make room by it."""
    long = "fox " * 3000
    whole = server.respond(long)
    assert whole.status == 400 and whole.error["code"] == "context_length_exceeded"
    reply = server.respond(long, stream=True)
    *begun, failed = reply.named_events
    assert reply.status == 200 and [event["type"] for event in begun] == ["response.created", "response.in_progress"]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed" and failed["sequence_number"] == 2
    assert failed["response"]["error"] == {"code": "context_length_exceeded", "message": whole.error["message"]}
    assert server.respond().status == 200


@pytest.mark.parametrize(("fields", "param", "said"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
    ({"conversation": "c"}, "conversation", ""),
    ({"background": True, "store": False}, "store", "has to be stored"), ({"truncation": "auto"}, "truncation", "not supported"),
    ({"top_logprobs": 2}, "top_logprobs", "message.output_text.logprobs in include"), ({"logprobs": True}, "logprobs", ""),
    ({"top_logprobs": 30, "include": ["message.output_text.logprobs"]}, "top_logprobs", "between 0 and 20"),
    ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1]", "web_search"), ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
    ({"tools": [{**SPACE, "tools": [SPACE]}]}, "tools[0].tools[0]", "namespace"),
    ({"tools": [{**SPACE, "tools": 1}]}, "tools[0].tools", ""),
    ({"tools": [{**TOOL, "parameters": "x"}]}, "tools[0].parameters", "a JSON schema"),
    ({"tools": [{**TOOL, "strict": "yes"}]}, "tools[0].strict", "true or false"),
    ({"tools": [{**SPACE, "tools": ["x"]}]}, "tools[0].tools[0]", ""),
    ({"tools": [{**FREE, "description": 1}]}, "tools[0].description", ""),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools", "letters"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"), ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", ""),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice", "not one of the tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type has to be text"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.json_schema.schema", "missing"),
    ({"reasoning": {"effort": "most"}}, "reasoning.effort", "reasoning.effort has to be one of"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort", ""),
    ({"max_output_tokens": -2}, "max_output_tokens", "max_output_tokens has to be 0 or more"),
    ({"max_output_tokens": "9"}, "max_output_tokens", ""),
    ({"temperature": -1}, "temperature", ""), ({"top_p": 2}, "top_p", ""), ({"instructions": 1}, "instructions", ""),
    ({"input": 3}, "input", "a string or a list"), ({"input": ["x"]}, "input[0]", "not an item"), ({"input": []}, None, "no messages"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", ""),
    ({"input": [{"role": "user"}]}, "input[0].content", ""), ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]", ""),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]",
     "does not support image input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send the whole"), ({"input": [{"type": "odd"}]}, "input[0]", "odd"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}]}, "input[0].arguments", "not a JSON object"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "missing"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output", "")])
def test_what_is_refused_is_named(server: ServerProcess, fields: dict, param: str | None, said: str) -> None:
    for more in ({}, {"stream": True}):
        reply = server.respond(**fields, **more)
        assert reply.status == 400 and reply.error["param"] == param and said in reply.error["message"], reply.error


def test_items_become_messages() -> None:
    given = [
        {"role": "developer", "content": "d"}, {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I call."}]},
        {"type": "function_call", "call_id": "1", "name": "spawn", "namespace": "agents", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "+ x"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "two"},
        {"role": "developer", "content": "later"}, {"role": "user", "content": "c"}]

    def text(*texts: str) -> list[dict]:
        return [{"type": "text", "text": each} for each in texts]

    def call(called: str, name: str, arguments: dict) -> dict:
        return {"id": called, "type": "function", "function": {"name": name, "arguments": arguments}}

    chat, messages, names = chat_of(asked(input=given, instructions="i", tools=[TOOL, FREE, SPACE], tool_choice={
        "type": "custom", "name": "patch"}, reasoning={"effort": "low", "summary": "auto"}, top_k=3))
    assert messages == [
        {"role": "system", "content": text("i", "d")}, {"role": "user", "content": text("a", "b")},
        {"role": "assistant", "content": text("I call."), "reasoning_content": "hm\nso",
         "tool_calls": [call("1", "agents.spawn", {"a": 1}), call("2", "patch", {"input": "+ x"})]},
        {"role": "tool", "tool_call_id": "1", "content": "one"}, {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "user", "content": text("later", "c")}]
    assert [tool["function"]["name"] for tool in chat.tools] == ["weather", "patch", "agents.spawn"]
    assert names == ToolNames({"agents.spawn": ("agents", "spawn")}, {"patch"}) and chat.tool_choice["function"]["name"] == "patch"
    assert (chat.reasoning_effort, chat.top_k, chat.parallel_tool_calls) == ("low", 3, None)


@pytest.mark.parametrize("summary", [None, "auto"])
def test_what_was_reasoned_said_and_called_is_in_order(summary: str | None) -> None:
    """Whole and streamed are one; a call of a namespace or of free text is what the program knows."""
    happened = [TextDelta("h", "thinking"), TextDelta("m", "thinking"), TextDelta("so"), Call("agents.spawn", '{"a": 1}'),
                Call("patch", '{"input": "+ x"}'), TextDelta("end")]
    _, _, names = chat_of(asked(tools=[FREE, SPACE]))
    streamed, whole = (ResponseSerializer("m", asked(reasoning={"summary": summary}), names) for _ in range(2))
    events = [*streamed.first_chunks(), *(piece for event in happened for piece in streamed.add(event)), *streamed.last_chunks(STATS)]
    for event in happened:
        whole.add(event)
    final = whole.whole_answer(STATS)
    assert same(events[-1]["response"]) == same(final) and final["status"] == "completed" and final["usage"]["input_tokens"] == 3
    reasoned, said, spawned, patched, end = final["output"]
    place, kind = ("summary", "summary_text") if summary else ("content", "reasoning_text")
    assert reasoned["type"] == "reasoning" and reasoned[place] == [{"type": kind, "text": "hm"}]
    assert reasoned["content" if summary else "summary"] == []
    assert said["content"][0]["text"] == "so" and end["content"][0]["text"] == "end"
    called = [(each["type"], each.get("namespace"), each["name"], each.get("arguments"), each.get("input")) for each in (spawned, patched)]
    assert called == [("function_call", "agents", "spawn", '{"a": 1}', None), ("custom_tool_call", None, "patch", None, "+ x")]
    kinds = [event["type"].removeprefix("response.") for event in events]
    text = "reasoning_summary_text" if summary else "reasoning_text"
    part = "reasoning_summary_part" if summary else "content_part"
    assert kinds[2:9] == ["output_item.added", f"{part}.added", f"{text}.delta", f"{text}.delta", f"{text}.done", f"{part}.done",
                          "output_item.done"]
    assert "custom_tool_call_input.done" in kinds and kinds[-1] == "completed"
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3, 4]
    assert [event["item"] for event in done] == events[-1]["response"]["output"]


def test_an_answer_that_ends_early_says_so() -> None:
    shape = ResponseSerializer("m", asked(), ToolNames())
    begun = shape.first_chunks() + shape.keep_alive_chunks() + shape.add(TextDelta("so"))
    (failed,) = shape.error_chunks(Problem(500, "out of memory", "server_error"))
    assert begun[2] == {"type": "keepalive", "sequence_number": 2}
    assert failed["response"]["error"] == {"code": "server_error", "message": "out of memory"}
    assert failed["response"]["output"][0]["status"] == "incomplete" and failed["sequence_number"] > len(begun)


def test_waiting_clients_receive_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first text: comments alone would not keep Codex."""
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.02)
    monkeypatch.setattr(streams, "COMMENT_INTERVAL_S", 0.0)
    go, answer_queue = threading.Event(), AnswerQueue(max_waiting=8)

    def answer(left: Callable[[], bool]) -> Iterator[Event]:
        yield Progress("reading the prompt", 512, 2048, "tokens")
        go.wait()
        yield from (PromptRead(3, 1), TextDelta("yes"), Done(STATS))

    async def heard(shape: AnswerSerializer, waiting: str) -> list[dict]:
        client, listener = Client(), EventReader(answer_queue.submit(answer), print, RequestRecord())
        task = asyncio.ensure_future(EventStream(listener, shape)({"type": "http"}, client.receive, client.send))
        while client.body.count(waiting) < 3:
            await asyncio.sleep(0.01)
        go.set()
        await asyncio.wait_for(task, MINUTE)
        return Reply(200, {}, client.body.encode()).named_events

    kinds = [event["type"] for event in asyncio.run(heard(ResponseSerializer("m", asked(), ToolNames()), "event: keepalive\n"))]
    assert kinds[:5] == ["response.created", "response.in_progress", *["keepalive"] * 3] and kinds[-1] == "response.completed"
    go.clear()
    body = parse(MessagesRequest, json.dumps({"messages": MESSAGES, "max_tokens": 9}).encode())
    events = asyncio.run(heard(MessageSerializer("m", body), ": reading the prompt: 512 of 2048 tokens\n\n"))
    assert events[0]["type"] == "message_start" and events[0]["message"]["usage"]["input_tokens"] == 2
    answer_queue.close()
    assert answer_queue.join(MINUTE)
