"""Units of Ollama's API that the packaged model is too fast or too small for: requests, answers and lists as values, and waits."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from server_process import MINUTE, Reply
from test_serve_ollama import lines
from test_serve_units import STATS, Client
from test_tool_call_generation import WEATHER

import effllm
from effllm import EffllmError
from effllm.cli.server import streams
from effllm.cli.server.answer_queue import AnswerQueue
from effllm.cli.server.generation_options import Defaults, apply_reasoning, options_of
from effllm.cli.server.ollama_models import ModelEntry, RunningModel, digest_and_mtime, digest_of, engine_entry, ps_response, tags_response
from effllm.cli.server.ollama_requests import OllamaChatRequest, OllamaGenerateRequest, chat_of, check_request, raw_completion
from effllm.cli.server.ollama_serializer import OllamaChatSerializer, OllamaGenerateSerializer, timestamp
from effllm.cli.server.openai_requests import Body, parse
from effllm.cli.server.problems import Problem
from effllm.cli.server.streams import EventReader, LineStream, RequestRecord
from effllm.runtime.events import Call, Done, Event, Progress, PromptRead, TextDelta
from effllm.runtime.generation.served_model import GenerationOptions
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.tensors import check_tensors


def body(kind: type[Body], **fields: object) -> Body:
    return parse(kind, json.dumps(fields).encode())


def test_lists_take_any_number_of_models() -> None:
    big = ModelEntry("org/big:4bit", "qwen3", 32_760_000_000, "codebook4:16", 18 << 30, "ab" * 32, 1.7e9, True)
    small = ModelEntry("small", "llama", 137_000_000, "F16", 1 << 28, "cd" * 32, 1.7e9)
    models = tags_response([big, small])["models"]
    assert [(each["name"], each["details"]["parameter_size"], each["details"]["format"]) for each in models] == [
        ("org/big:4bit", "32.8B", "gguf"), ("small:latest", "137.0M", "safetensors")]
    assert tags_response([])["models"] == ps_response([])["models"] == []
    (one,) = ps_response([RunningModel(big, 20 << 30, 4 << 30, 4096, 1.8e9)])["models"]
    assert (one["size"], one["size_vram"], one["context_length"], one["expires_at"]) == (
        20 << 30, 4 << 30, 4096, "2027-01-15T08:00:00.000000Z")


def test_a_file_is_listed_by_the_name_of_its_blocks(tmp_path: Path) -> None:
    """Programs show it, or take models apart by it: what blocks are called inside says nothing to them."""
    list(export_gguf(Path(effllm.__path__[0]) / "models" / "fable", tmp_path / "m.gguf", "Q4_0", "a name"))
    prepared = prepare(tmp_path / "m.gguf", EngineOptions(device="cpu", ctx=256))
    tensors = check_tensors(prepared.config, prepared.store, prepared.container)
    one = engine_entry("m", SimpleNamespace(prepared=prepared, config=prepared.config, model=SimpleNamespace(tensors=tensors)))
    prepared.store.close()
    assert (one.stored, one.is_gguf, one.details["quantization_level"]) == ("Q4_0", True, "Q4_0")
    assert prepared.container.spec_text == "Q4_0, Q8_0", "what most are comes first"


def test_messages_get_names_for_their_calls() -> None:
    messages = [
        {"role": "System", "content": "s"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I call.", "thinking": "hm", "tool_calls": [
            {"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g", "arguments": {}}},
            {"function": {"name": "f", "arguments": {}}}, {"id": "own", "function": {"name": "h", "arguments": {}}}]},
        {"role": "tool", "tool_name": "g", "content": "two"}, {"role": "tool", "tool_name": "f", "content": "one"},
        {"role": "tool", "tool_name": "f", "content": "three"}, {"role": "tool", "tool_call_id": "own", "content": "four"},
        {"role": "tool", "content": "five"}]
    asked, made = chat_of(body(OllamaChatRequest, messages=messages, tools=[WEATHER]))
    assert [message["role"] for message in made] == ["system", "user", "assistant", *["tool"] * 5] and asked.tools == [WEATHER]
    assert made[2]["reasoning_content"] == "hm" and made[2]["content"] == "I call."
    names = [(call["id"], call["function"]["name"]) for call in made[2]["tool_calls"]]
    assert names == [("call_0", "f"), ("call_1", "g"), ("call_2", "f"), ("own", "h")]
    assert [message.get("tool_call_id") for message in made[3:]] == ["call_1", "call_0", "call_2", "own", None]
    assert [message.get("name") for message in made[3:]] == ["g", "f", "f", None, None]


def test_options_become_generation_options() -> None:
    options = {"temperature": 0.5, "top_k": 7.0, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9, "repeat_penalty": 1.1, "repeat_last_n": 64,
               "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 3, "stop": "x", "num_predict": 5, "num_keep": 4, "mirostat": 2.0,
               "mirostat_tau": 4, "mirostat_eta": 0.2}
    usual = Defaults(GenerationOptions(SamplerSettings(), max_tokens=9))
    wish = options_of(chat_of(body(OllamaChatRequest, options=options))[0], usual, None)
    assert wish == GenerationOptions(SamplerSettings(0.5, 7, 0.5, 0.1, 0.9, 1.1, 0.2, 0.3, 64, mirostat=2, mirostat_tau=4,
                                                     mirostat_eta=0.2, seed=3),
                        stops=("x",), max_tokens=5)
    assert options_of(raw_completion(body(OllamaGenerateRequest, prompt="a", options=options)), usual, None) == wish
    assert options_of(chat_of(body(OllamaChatRequest))[0], usual, None) == usual.options


@pytest.mark.parametrize(("think", "wished", "variables"), [
    (None, "auto", {}), (True, "on", {"enable_thinking": True}), (False, "off", {"enable_thinking": False}),
    ("low", "on", {"reasoning_effort": "low"}), ("max", "on", {"reasoning_effort": "high"})])
def test_thinking_options(think: bool | str | None, wished: str, variables: dict) -> None:
    asked = body(OllamaChatRequest, think=think)
    tokenizer = SimpleNamespace(thinks=True, template=SimpleNamespace(variables=frozenset({"reasoning_effort"})))
    wish, told = apply_reasoning(chat_of(asked)[0], GenerationOptions(SamplerSettings()), tokenizer)
    assert (wish.think, told) == (wished, variables) and check_request(asked, "m", True, 9) is None
    if think:
        with pytest.raises(Problem, match='^"m" does not support thinking'):
            check_request(asked, "m", False, 9)
    else:
        assert check_request(asked, "m", False, 9) is None


def test_what_was_reasoned_said_and_called_is_streamed_as_it_is_whole() -> None:
    happened = [PromptRead(9, 4), TextDelta("h", "thinking"), TextDelta("m", "thinking"), TextDelta("so"), Call("f", '{"a": 1}'),
                Call("g", "{}")]
    streamed, whole = OllamaChatSerializer("m"), OllamaChatSerializer("m")
    pieces = [piece["message"] for event in happened for piece in streamed.add(event)]
    for event in happened:
        whole.add(event)
    message = whole.whole_answer(STATS)["message"]
    assert [piece.get("thinking") for piece in pieces] == ["h", "m", None, None, None] and message["thinking"] == "hm"
    assert "".join(piece["content"] for piece in pieces) == message["content"] == "so"
    calls = [call["function"] for piece in pieces for call in piece.get("tool_calls", ())]
    assert calls == [call["function"] for call in message["tool_calls"]] == [
        {"index": 0, "name": "f", "arguments": {"a": 1}}, {"index": 1, "name": "g", "arguments": {}}]
    (last,) = streamed.last_chunks(STATS)
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("stop", 3, 2)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (100_000_000, 100_000_000)
    shape = OllamaGenerateSerializer("m")
    assert [piece["response"] for event in happened[:4] for piece in shape.add(event)] == ["", "", "so"]
    assert shape.whole_answer(STATS)["thinking"] == "hm"
    assert shape.error_chunks(Problem(500, "out of memory")) == [{"error": "out of memory"}]


def test_who_waits_gets_pieces_without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines have no comments. Progress alone begins no stream: what is wrong with a request keeps its status for as long as it can."""
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.05)
    go, answer_queue = threading.Event(), AnswerQueue(max_waiting=8)

    def answer(left: Callable[[], bool]) -> Iterator[Event]:
        yield Progress("reading the prompt", 512, 2048, "tokens")
        go.wait()
        yield from (PromptRead(3, 1), TextDelta("yes"), Done(STATS))

    def fails(left: Callable[[], bool]) -> Iterator[Event]:
        yield Progress("reading the prompt", 512, 2048, "tokens")
        raise MemoryError

    async def heard(start: Callable, waits: int) -> Client:
        client, listener = Client(), EventReader(answer_queue.submit(start), print, RequestRecord())
        stream = LineStream(listener, OllamaChatSerializer("m"))({"type": "http", "path": "/api/chat"}, client.receive, client.send)
        task = asyncio.ensure_future(stream)
        while client.body.count("\n") < waits:
            await asyncio.sleep(0.01)
        go.set()
        await asyncio.wait_for(task, MINUTE)
        return client

    made = lines(Reply(200, {"content-type": "application/x-ndjson"}, asyncio.run(heard(answer, 3)).body.encode()))
    assert [piece["message"]["content"] for piece in made[:3]] == [""] * 3
    assert [piece["message"]["content"] for piece in made[-2:]] == ["yes", ""] and made[-1]["done"]
    client = asyncio.run(heard(fails, 0))
    told = {"error": "out of memory: send less, or serve it with a smaller context (-c)"}
    assert client.status == 500 and json.loads(client.body) == told
    answer_queue.close()
    assert answer_queue.join(MINUTE)


def test_a_digest_is_of_all_that_a_model_answers_by(tmp_path: Path) -> None:
    fable = Path(effllm.__path__[0]) / "models" / "fable"
    made = {"alone": digest_of(fable), "at 4 bits": digest_of(fable, "4bit")}
    for what in ("copy", "chat_template.jinja", "generation_config.json", "1_Pooling/config.json"):
        folder = tmp_path / what.replace("/", "-")
        shutil.copytree(fable, folder)
        if what != "copy":
            (folder / what).parent.mkdir(exist_ok=True)
            (folder / what).write_text("{}")
        made[what] = digest_of(folder)
    assert made.pop("copy") == made["alone"] and len(set(made.values())) == len(made)
    with pytest.raises(EffllmError):
        digest_of(tmp_path / "nothing")


def test_a_moment_that_no_date_has_is_the_nearest() -> None:
    """As a file may have that was touched with a clock gone wrong."""
    assert timestamp(1e15).startswith("9999-12-31") and timestamp(-1e15).startswith("1970-01-01")
    assert timestamp(60) == "1970-01-01T00:01:00.000000Z"


def test_a_model_whose_files_have_gone_is_listed_still(tmp_path):
    """It is in memory, and answers."""
    digest, changed = digest_and_mtime("tale", tmp_path / "gone")
    assert digest == digest_and_mtime("tale", tmp_path / "other")[0] != digest_and_mtime("fable", tmp_path / "gone")[0]
    assert len(digest) == 64
    assert changed == 0.0
