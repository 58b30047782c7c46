"""Units of the Gemini API that the packaged model is too fast or too small for: requests, answers and schemas as values, and waits."""

import asyncio
import base64
import json
import threading
from types import SimpleNamespace

import pytest
from test_serve_gemini import TOOLS, text_of
from test_serve_units import STATS, Client

from effllm.cli.server import documents, media, streams
from effllm.cli.server.answer_queue import AnswerQueue
from effllm.cli.server.gemini_requests import FIELD_NAMES, CountTokensRequest, GenerateContentRequest, chat_of
from effllm.cli.server.gemini_schema import schema_of
from effllm.cli.server.gemini_serializer import GeminiSerializer
from effllm.cli.server.generation_options import apply_reasoning
from effllm.cli.server.multiple_answers import AnswerEnded
from effllm.cli.server.openai_requests import parse
from effllm.cli.server.problems import Problem
from effllm.cli.server.streams import EventReader, EventStream, ListStream, RequestRecord
from effllm.runtime.events import Call, PromptRead, TextDelta
from effllm.runtime.generation.served_model import GenerationOptions
from effllm.runtime.sampler import SamplerSettings


def asked(*parts: object, role: str = "user", **fields: object) -> GenerateContentRequest:
    return parse(GenerateContentRequest, json.dumps({"contents": [{"role": role, "parts": [*parts]}], **fields}).encode())


def test_a_conversation_is_that_of_chat_completions() -> None:
    body = {"contents": [
        {"parts": [{"text": "a"}]}, {"role": "user", "parts": [{"text": "b"}]},
        {"role": "model", "parts": [
            {"text": "hm", "thought": True}, {"text": "I call.", "thoughtSignature": "x"}, {"thoughtSignature": "y"},
            {"functionCall": {"id": "1", "name": "f", "args": {"a": 1}}}, {"functionCall": {"name": "g"}}]},
        {"role": "user", "parts": [
            {"functionResponse": {"name": "g", "response": {"error": "gone"}}},
            {"functionResponse": {"id": "1", "name": "f", "response": {"result": [1], "more": "é"}}}, {"text": "c"}]},
        {"role": "model", "parts": [{"executableCode": {"language": "PYTHON", "code": "1+1"}}, {"codeExecutionResult": {"output": "2"}}]}],
        "systemInstruction": {"parts": [{"text": "s"}, {"text": "t"}]}, "tools": TOOLS, "generationConfig": {
            "stopSequences": ["x"], "topK": 3.0, "presencePenalty": 0.5, "thinkingConfig": {"thinkingLevel": "LOW", "thinkingBudget": 9}}}
    chat, made = chat_of(parse(GenerateContentRequest, json.dumps(body).encode()), "m", stream=True)

    def text(*texts: str) -> list[dict]:
        return [{"type": "text", "text": each} for each in texts]

    (first, second) = made[2]["tool_calls"]
    assert first == {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert made == [
        {"role": "system", "content": text("s\nt")}, {"role": "user", "content": text("a", "b")},
        {"role": "assistant", "content": text("I call."), "reasoning_content": "hm", "tool_calls": [first, second]},
        {"role": "tool", "tool_call_id": second["id"], "content": "Error: gone"},
        {"role": "tool", "tool_call_id": "1", "content": '{"result": [1], "more": "é"}'},
        {"role": "user", "content": text("c")}, {"role": "assistant", "content": text("1+1", "2")}]
    assert (chat.model, chat.stream, chat.stop, chat.top_k, chat.presence_penalty, chat.n) == ("m", True, ["x"], 3, 0.5, None)
    assert chat.tools[0]["function"]["parameters"] == {
        "type": "object", "properties": {"place": {"type": "string", "enum": ["Oslo", "Bergen"]}}, "required": ["place"]}
    tokenizer = SimpleNamespace(thinks=True, template=None)
    options, _ = apply_reasoning(chat, GenerationOptions(SamplerSettings()), tokenizer)
    assert (options.think, options.max_reasoning_tokens) == ("on", 9)
    with pytest.raises(Problem, match="functionCall belongs to the model"):
        chat_of(asked({"functionCall": {"name": "f"}}), "m")
    assert FIELD_NAMES["max_tokens"] == "generationConfig.maxOutputTokens"
    assert parse(CountTokensRequest, b"{}").about.contents == []


def test_schemas_are_read_as_json_schemas() -> None:
    given = {"type": "ARRAY", "min_items": "2", "maxItems": 3, "items": {"type": "OBJECT", "nullable": True, "properties": {
        "type": {"type": "STRING", "enum": ["A", "B"], "nullable": True, "format": "enum"}, "any": {
            "anyOf": [{"type": "INTEGER", "format": "int32"}, {"type": "NUMBER"}], "nullable": True}, "x": {"type": "TYPE_UNSPECIFIED"}},
        "property_ordering": ["x", "gone", ["x"], "any"]}}
    made = schema_of(given, "here")
    inner = made.pop("items")
    assert made == {"type": "array", "minItems": 2, "maxItems": 3} and inner["type"] == ["object", "null"]
    assert [*inner["properties"]] == ["x", "any", "type"] and inner["properties"]["x"] == {}
    assert inner["properties"]["type"] == {"type": ["string", "null"], "enum": ["A", "B", None], "format": "enum"}
    assert inner["properties"]["any"]["anyOf"][-1] == {"type": "null"}
    with pytest.raises(Problem, match=r"here\.anyOf\[0\] has to be a schema"):
        schema_of({"anyOf": [3]}, "here")


def test_files_of_each_kind_find_who_reads_them() -> None:
    data = base64.urlsafe_b64encode(b"\xff\xfe?>").decode()
    body = asked({"inlineData": {"mimeType": "image/png", "data": data}}, {"inline_data": {"mime_type": "audio/wav", "data": data}},
                 {"inlineData": {"mimeType": "video/mp4", "data": data}}, {"fileData": {"mimeType": "image/png", "fileUri": "data:,x"}},
                 {"functionResponse": {"name": "f", "response": {}, "parts": [{"inlineData": {"mimeType": "image/png", "data": data}}]}},
                 {"inlineData": {"mimeType": "application/pdf", "data": data, "displayName": "a.pdf"}})
    seen, read = [*media.in_contents(body)], [*documents.in_contents(body)]
    assert [(each.noun, each.from_tool, each.where.rpartition(".")[2]) for each in seen] == [
        ("image", False, "parts[0]"), ("audio clip", False, "parts[1]"), ("video", False, "parts[2]"), ("image", False, "parts[3]"),
        ("image", True, "parts[0]")]
    assert media._bytes_of(seen[0]) == b"\xff\xfe?>" and (read[0].name, len(read)) == ("a.pdf", 1)
    for number, each in enumerate((*seen, *read)):
        each.put(f"mark {number}")
    (message, tool, last) = chat_of(body, "m")[1]
    assert [part["text"] for part in message["content"]] == ["mark 0", "mark 1", "mark 2", "mark 3"]
    assert tool["content"] == "{}\nmark 4" and last["content"][0]["text"] == "mark 5"


def test_what_was_reasoned_said_and_called_is_in_order() -> None:
    """Whole and streamed are one, of two answers."""
    happened = [PromptRead(3, 1), TextDelta("h", "thinking"), TextDelta("m", "thinking"), TextDelta("so"), Call("f", '{"a": 1}'),
                TextDelta("end"), AnswerEnded(STATS), TextDelta("other")]
    stats = SimpleNamespace(**{**vars(STATS), "reasoning_tokens": 1})
    streamed, whole = (GeminiSerializer("m", shows_thoughts=True) for _ in range(2))
    pieces = [piece for event in happened for piece in streamed.add(event)]
    for event in happened:
        whole.add(event)
    with pytest.MonkeyPatch.context() as patched:
        made = SimpleNamespace(token_ids=(1, 2, 3, 4), reasoning_tokens=1)
        patched.setattr("effllm.cli.server.gemini_serializer.total_stats", lambda ended: made)
        final, (last,) = whole.whole_answer(stats), streamed.last_chunks(stats)
    first, second = final["candidates"]
    parts = first["content"]["parts"]
    assert parts == [{"text": "hm", "thought": True}, {"text": "so"},
                     {"functionCall": {"id": parts[2]["functionCall"]["id"], "name": "f", "args": {"a": 1}}}, {"text": "end"}]
    assert second["content"]["parts"] == [{"text": "other"}] and (first["finishReason"], second["finishReason"]) == ("STOP", "STOP")
    assert final["usageMetadata"] == last["usageMetadata"] == {
        "promptTokenCount": 3, "cachedContentTokenCount": 1, "candidatesTokenCount": 3, "thoughtsTokenCount": 1, "totalTokenCount": 7}
    assert [each["candidates"][0]["index"] for each in pieces] == [0] * 6 + [1]
    assert streamed.keep_alive_chunks()[0]["candidates"][0]["content"]["parts"] == [{"text": "", "thought": True}]
    assert streamed.error_chunks(Problem(503, "the server is shutting down")) == [
        {"error": {"code": 503, "message": "the server is shutting down", "status": "UNAVAILABLE"}}]
    assert GeminiSerializer("m").add(TextDelta("h", "thinking")) == []


@pytest.mark.parametrize(("kind", "in_list"), [(EventStream, False), (ListStream, True)])
def test_a_wait_is_a_piece_without_words_and_a_failure_ends_the_stream(monkeypatch, kind: type[EventStream], in_list: bool) -> None:
    """Older programs of it take what begins with no `data:` for the beginning of a piece, and wait for its end."""
    for name in ("KEEP_ALIVE_S", "COMMENT_INTERVAL_S"):
        monkeypatch.setattr(streams, name, 0.02)
    going = threading.Event()

    def start(cancelled):
        yield PromptRead(3, 0)
        going.wait(10)
        yield TextDelta("so")
        raise Problem(503, "the server is shutting down")

    async def scene() -> bytes:
        answer_queue, client = AnswerQueue(4), Client()
        sent = []

        async def send(message: dict) -> None:
            sent.append(message)
            if message.get("body"):
                going.set()

        listener = EventReader(answer_queue.submit(start), lambda text: None, RequestRecord())
        await kind(listener, GeminiSerializer("m", in_list))({"type": "http", "path": "/v1beta/models/m"}, client.receive, send)
        answer_queue.close()
        return b"".join(message.get("body", b"") for message in sent)

    body = asyncio.run(scene()).decode()
    pieces = json.loads(body) if in_list else [json.loads(block.removeprefix("data: ")) for block in body.split("\n\n") if block]
    waited, said, failed = pieces[0], pieces[-2], pieces[-1]
    assert waited["candidates"][0]["content"]["parts"] == [{"text": "", "thought": True}]
    assert text_of(said) == "so" and failed["error"]["status"] == "UNAVAILABLE"
