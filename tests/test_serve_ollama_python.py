"""Ollama's own client against `effllm serve`: it understands every response."""

from pathlib import Path

import pytest
from packaged_embedder import embedder
from server_process import MESSAGES, QUESTION, serving
from test_serve import thinking_model

ollama = pytest.importorskip("ollama")
pytestmark = [pytest.mark.peer, pytest.mark.slow]
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "enum": ["Oslo", "Bergen"]}}, "required": ["place"]}}}
GREEDY = {"temperature": 0, "num_predict": 24, "num_ctx": 2048}


@pytest.fixture(scope="module")
def client():
    with serving("--api-key", "k") as server:
        yield ollama.Client(server.url.removesuffix("/v1"), headers={"Authorization": "Bearer k"})


def test_answers_whole_and_streamed(client) -> None:
    whole = client.chat("fable", MESSAGES, options=GREEDY)
    assert (whole.message.role, whole.done, whole.done_reason, whole.eval_count) == ("assistant", True, "length", 24)
    pieces = [*client.chat("fable:latest", MESSAGES, options=GREEDY, stream=True)]
    assert "".join(piece.message.content for piece in pieces) == whole.message.content != "" and len(pieces) > 10
    assert pieces[-1].done and pieces[-1].total_duration > pieces[-1].eval_duration > 0 and pieces[-1].eval_count == 24
    assert client.generate("fable", QUESTION, options=GREEDY).response == whole.message.content
    raw = client.generate("fable", "Once upon a time", raw=True, options=GREEDY).response
    assert "".join(piece.response for piece in client.generate("fable", "Once upon a time", raw=True, options=GREEDY, stream=True)) == raw
    assert client.generate("fable").done_reason == client.chat("fable").done_reason == "load"


def test_calls_whole_streamed_and_answered(client) -> None:
    given = {"tools": [WEATHER], "format": {"const": -7}, "options": {**GREEDY, "num_predict": 160}}
    whole = client.chat("fable", MESSAGES, **given).message
    (call,) = whole.tool_calls
    assert call.function.name == "weather" and call.function.arguments["place"]
    (streamed,) = [call for piece in client.chat("fable", MESSAGES, stream=True, **given) for call in piece.message.tool_calls or ()]
    assert streamed == call
    told = [*MESSAGES, whole, {"role": "tool", "tool_name": "weather", "content": "Rain."}]
    assert client.chat("fable", told, tools=[WEATHER], options=GREEDY).eval_count > 0


def test_objects_of_a_class(client) -> None:
    from pydantic import BaseModel

    class Fox(BaseModel):
        is_king: bool

    answer = client.chat("fable", MESSAGES, format=Fox.model_json_schema(), options={**GREEDY, "num_predict": 100})
    assert isinstance(Fox.model_validate_json(answer.message.content), Fox)


def test_reasoning(tmp_path: Path) -> None:
    with serving(model=str(thinking_model(tmp_path / "thinker"))) as server:
        client = ollama.Client(server.url.removesuffix("/v1"))
        thought = client.chat("thinker", MESSAGES, think=True, options=GREEDY).message
        assert thought.thinking and not thought.content and client.chat("thinker", MESSAGES, think=False, options=GREEDY).message.content
        assert "thinking" in client.show("thinker").capabilities


def test_models(client) -> None:
    (listed,), (running,), shown = client.list().models, client.ps().models, client.show("fable")
    assert listed.model == running.model == "fable:latest" and listed.digest == running.digest and listed.size > 0
    assert running.context_length == 2048 and shown.details == listed.details and shown.modelinfo["llama.context_length"] == 2048
    assert client.pull("fable").status == "success" and [each.status for each in client.pull("fable", stream=True)] == ["success"]


def test_vectors(tmp_path: Path) -> None:
    with serving(model=str(embedder(tmp_path / "vectors"))) as server:
        client = ollama.Client(server.url.removesuffix("/v1"))
        both = client.embed("vectors", ["The fox.", "The king."])
        assert [len(each) for each in both.embeddings] == [256, 256] and both.prompt_eval_count > 2
        assert client.embeddings("vectors", "The king.").embedding == both.embeddings[1]
        assert len(client.embed("vectors", "The fox.", dimensions=8).embeddings[0]) == 8


def test_errors(client) -> None:
    for call, status, said in ((lambda: client.chat("llama3", MESSAGES), 404, "model not found"),
                               (lambda: [*client.chat("fable", MESSAGES, stream=True, think=True)], 400, "does not support thinking"),
                               (lambda: client.chat("fable", [{**MESSAGES[0], "images": [b"x"]}]), 400, "does not support image input"),
                               (lambda: client.pull("llama3"), 404, "effllm pull llama3"),
                               (lambda: client.delete("fable"), 501, "effllm rm"),
                               (lambda: client.embed("fable", "a"), 400, "not an embedding model"),
                               (lambda: client.generate("fable", "fox " * 3000), 400, "the prompt has")):
        with pytest.raises(ollama.ResponseError, match=said) as caught:
            call()
        assert caught.value.status_code == status
