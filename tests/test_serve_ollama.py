"""Ollama's API of `effllm serve`: a real process on the loopback with the packaged model."""

import json
import re
from datetime import datetime
from pathlib import Path

import pytest
from server_process import MESSAGES, QUESTION, Reply, ServerProcess, serving
from test_serve import thinking_model
from test_serve_tools import knowing_folder
from test_tool_call_generation import WEATHER

GREEDY = {"temperature": 0, "num_predict": 24}
SCHEMA = {"type": "object", "properties": {"fox": {"type": "boolean"}}, "required": ["fox"]}
RARE = {"const": -7}  # which fable is less inclined to begin with than a call


@pytest.fixture(scope="module")
def guarded():
    with serving("--api-key", "k", "-s", "Be brief.", "--temp", "0", "-n", "24", "--stop", "the king", "--name", "house") as server:
        yield server


def ask(server: ServerProcess, path: str, options: dict | None = None, **fields: object) -> Reply:
    return server.request("POST", f"/api/{path}", {"model": "fable", "options": {**GREEDY, **(options or {})}, **fields})


def chat(server: ServerProcess, messages: object = MESSAGES, options: dict | None = None, **fields: object) -> Reply:
    return ask(server, "chat", options, messages=messages, **fields)


def generate(server: ServerProcess, prompt: object = QUESTION, options: dict | None = None, **fields: object) -> Reply:
    return ask(server, "generate", options, prompt=prompt, **fields)


def lines(reply: Reply) -> list[dict]:
    """The objects of a stream."""
    assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson" and reply.body.endswith(b"\n")
    made = [json.loads(line) for line in reply.body.decode().removesuffix("\n").split("\n")]
    assert [each["done"] for each in made] == [False] * (len(made) - 1) + [True]
    assert all({"model", "created_at"} <= set(each) and datetime.fromisoformat(each["created_at"]).tzinfo for each in made)
    return made


def error_of(reply: Reply) -> str:
    """Ollama's object for errors, whose key is this."""
    assert set(reply.json) == {"error"} and isinstance(reply.json["error"], str) and reply.json["error"]
    return reply.json["error"]


# ---- answers


def test_an_answer_is_that_of_chat_completions(server: ServerProcess) -> None:
    said = server.chat([{"role": "system", "content": "Be brief."}, *MESSAGES]).json
    text = said["choices"][0]["message"]["content"]
    for reply in (chat(server, [{"role": "system", "content": "Be brief."}, *MESSAGES], stream=False, keep_alive="5m"),
                  generate(server, system="Be brief.", stream=False, keep_alive=-1, context=[], suffix="", template="", images=[])):
        whole = reply.json
        assert reply.status == 200 and reply.headers["content-type"] == "application/json"
        assert whole.get("message", {"role": "assistant", "content": whole.get("response")}) == {"role": "assistant", "content": text}
        assert (whole["model"], whole["done"], whole["done_reason"], whole["load_duration"]) == ("fable", True, "length", 0)
        assert whole["prompt_eval_count"] == said["usage"]["prompt_tokens"] and whole["eval_count"] == 24
        times = [whole[f"{name}_duration"] for name in ("prompt_eval", "eval", "total")]
        assert all(isinstance(each, int) and each > 0 for each in times) and times[0] + times[1] <= times[2] < 60e9


def test_streams_are_lines_unless_a_program_says_no(server: ServerProcess) -> None:
    whole = chat(server, stream=False).json
    for fields in ({}, {"stream": True}, {"stream": None}):
        *pieces, last = lines(chat(server, **fields))
        assert {(*piece, *piece["message"]) for piece in pieces} == {("model", "created_at", "message", "done", "role", "content")}
        assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"] and len(pieces) > 10
        assert last["message"] == {"role": "assistant", "content": ""} and last["done_reason"] == "length" and last["eval_count"] == 24
        assert set(last) == set(whole)
    *pieces, last = lines(generate(server))
    assert "".join(piece["response"] for piece in pieces) == whole["message"]["content"] and last["response"] == ""


def test_a_prompt_that_is_taken_as_it_stands(server: ServerProcess) -> None:
    text = server.complete("Once upon a time").json["choices"][0]["text"]
    assert generate(server, "Once upon a time", raw=True, stream=False).json["response"] == text
    assert "".join(piece["response"] for piece in lines(generate(server, "Once upon a time", raw=True))) == text
    assert "system" in error_of(generate(server, raw=True, system="Be brief."))


def test_why_answers_end(server: ServerProcess) -> None:
    text = chat(server, stream=False, options={"num_predict": 60}).json["message"]["content"]
    for stop in (text[20:24], ["\x00", text[20:24]]):
        ended = chat(server, stream=False, options={"num_predict": 60, "stop": stop}).json
        assert (ended["done_reason"], ended["message"]["content"]) == ("stop", text.partition(text[20:24])[0])
    begun = [*MESSAGES, {"role": "assistant", "content": text[:20]}]
    assert chat(server, begun, stream=False).json["eval_count"] == 24
    # no limit is 0 too, where chat completions would write nothing
    short = {"type": "object", "properties": {"fox": {"const": True}}, "required": ["fox"]}
    for most in (0, -1, -2):
        made = chat(server, stream=False, format=short, options={"num_predict": most}).json
        assert made["done_reason"] == "stop" and json.loads(made["message"]["content"]) == {"fox": True}


def test_a_request_of_nothing_but_the_model(server: ServerProcess) -> None:
    for path, fields, said in (("chat", {}, {"message": {"role": "assistant", "content": ""}}), ("generate", {}, {"response": ""}),
                               ("chat", {"messages": [], "keep_alive": 0}, {"message": {"role": "assistant", "content": ""}}),
                               ("generate", {"prompt": "", "stream": True}, {"response": ""})):
        reply = server.request("POST", f"/api/{path}", {"model": "fable", **fields})
        made = reply.json
        assert reply.status == 200 and made.pop("created_at") and made == {"model": "fable", **said, "done": True, "done_reason": "load"}


def test_forms_hold_answers_to_what_they_name(server: ServerProcess) -> None:
    """A schema that is made of a class does not say that there is nothing else."""
    for made in (chat(server, format=SCHEMA, stream=False, options={"num_predict": 100}).json["message"]["content"],
                 generate(server, format=SCHEMA, stream=False, options={"num_predict": 100}).json["response"]):
        assert [*json.loads(made)] == ["fox"]
    assert chat(server, format="json", stream=False).json["message"]["content"].lstrip().startswith("{")
    for nothing in (None, ""):
        assert chat(server, format=nothing, stream=False).json["message"] == chat(server, stream=False).json["message"]


def test_a_call_and_its_answer(server: ServerProcess) -> None:
    given = {"tools": [WEATHER], "format": RARE, "options": {"num_predict": 160}}
    whole = chat(server, stream=False, **given).json
    (call,) = whole["message"]["tool_calls"]
    assert whole["message"]["content"] == "" and whole["done_reason"] == "stop"
    assert set(call) == {"id", "function"} and set(call["function"]) == {"index", "name", "arguments"}
    assert call["function"]["name"] == "weather" and call["function"]["arguments"]["place"] in ("Oslo", "Bergen")
    piece, last = lines(chat(server, **given))
    assert [each["function"] for each in piece["message"]["tool_calls"]] == [call["function"]] and piece["message"]["content"] == ""
    assert "tool_calls" not in last["message"] and last["done_reason"] == "stop"
    told = [*MESSAGES, whole["message"], {"role": "tool", "tool_name": "weather", "content": "Rain."}]
    after = chat(server, told, stream=False, tools=[WEATHER], options={"num_predict": 4}).json
    assert after["prompt_eval_count"] > whole["prompt_eval_count"]


def test_reasoning_stands_apart(tmp_path: Path) -> None:
    with serving(model=str(thinking_model(tmp_path / "thinker"))) as server:
        for think in ({}, {"think": True}, {"think": "low"}):
            message = chat(server, model="thinker", stream=False, **think).json["message"]
            assert message["content"] == "" and message["thinking"]
        assert "".join(piece["message"].get("thinking", "") for piece in lines(chat(server, model="thinker"))) == message["thinking"]
        assert generate(server, model="thinker", stream=False).json["thinking"] == message["thinking"]
        message = chat(server, model="thinker", stream=False, think=False).json["message"]
        assert message["content"] and set(message) == {"role", "content"}
        assert "think has to be true, false, low" in error_of(chat(server, model="thinker", think="much"))
        shown = server.request("POST", "/api/show", {"model": "thinker"}).json
        assert shown["capabilities"] == ["completion", "thinking"] and shown["thinking"] == {"values": [False, True], "default": True}


def test_what_a_request_does_not_say_is_as_the_command_line_has_it(guarded: ServerProcess) -> None:
    def made(system: str | None = None, **options: object) -> dict:
        messages = [*([] if system is None else [{"role": "system", "content": system}]), *MESSAGES]
        reply = guarded.request("POST", "/api/chat", {"messages": messages, "stream": False, "options": options}, Authorization="Bearer k")
        return {key: value for key, value in reply.json.items() if key in ("model", "message", "done_reason", "eval_count")}

    assert made() == made("Be brief.") == made("Be brief.", temperature=0, num_predict=24, stop=["the king"])
    assert made()["model"] == "house" and made(num_predict=3)["eval_count"] == 3
    shown = guarded.request("POST", "/api/show", {"model": "house"}, x_api_key="k").json
    said = dict(line.split(maxsplit=1) for line in shown["parameters"].split("\n"))
    assert (said["num_predict"], said["temperature"], said["stop"]) == ("24", "0.0", '"the king"') and shown["system"] == "Be brief."


# ---- models


def test_the_model_is_listed_shown_and_running(server: ServerProcess) -> None:
    (listed,) = server.request("GET", "/api/tags").json["models"]
    (loaded,) = server.request("GET", "/api/ps").json["models"]
    shown = server.request("POST", "/api/show", {"model": "fable:latest"}).json
    assert listed["name"] == listed["model"] == "fable:latest" and re.fullmatch("[0-9a-f]{64}", listed["digest"])
    assert listed["details"] == loaded["details"] == shown["details"] == {
        "parent_model": "", "format": "safetensors", "family": "llama", "families": ["llama"], "parameter_size": "5.8M",
        "quantization_level": "BF16"}
    assert loaded["context_length"] == 2048 and loaded["size"] > listed["size"] > 10_000_000 and loaded["size_vram"] == 0
    assert datetime.fromisoformat(loaded["expires_at"]) > datetime.fromisoformat(listed["modified_at"])
    info = shown["model_info"]
    assert info["general.architecture"] == "llama" and info["llama.context_length"] == 2048 and 5e6 < info["general.parameter_count"] < 6e6
    assert shown["capabilities"] == ["completion"] and "thinking" not in shown and "assistant" in shown["template"] and shown["license"]
    assert "num_ctx                       2048\n" in shown["parameters"] and shown["modified_at"] == listed["modified_at"]
    assert server.request("POST", "/api/show", {"name": "fable"}).json == shown  # as it was called before


def test_tools_are_said_of_models_that_were_made_for_them(tmp_path: Path) -> None:
    with serving("-c", "512", model=knowing_folder(tmp_path / "knowing")) as server:
        shown = server.request("POST", "/api/show", {"model": "knowing"}).json
    assert shown["capabilities"] == ["completion", "tools"] and shown["model_info"]["llama.context_length"] == 512


def test_names_may_end_in_latest(server: ServerProcess) -> None:
    for path, fields in (("/api/chat", {"messages": MESSAGES, "options": GREEDY, "stream": False}),
                         ("/api/generate", {"prompt": "a", "options": GREEDY, "stream": False}),
                         ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2})):
        assert server.request("POST", path, {"model": "fable:latest", **fields}).status == 200
        assert server.request("POST", path, {"model": "fable:other", **fields}).status == 404
    assert chat(server, model="fable:latest", stream=False).json["model"] == "fable:latest"


def test_what_programs_look_for_first(server: ServerProcess) -> None:
    """That somebody is there, by words that they know, and a version that is new enough for them."""
    assert b"Ollama is running" in server.request("GET", "/").body and b"effllm serves fable" in server.request("GET", "/").body
    version = server.request("GET", "/api/version").json
    assert tuple(map(int, version["version"].split("."))) >= (0, 14, 2) and version["effllm"]
    for path in ("/", "/api/version", "/api/tags", "/api/ps"):
        reply = server.request("HEAD", path)
        assert reply.status == 200 and reply.body == b""


def test_how_likely_tokens_were(server: ServerProcess) -> None:
    """As chats and completions tell it, whole and with the pieces; of prompts that are taken as they stand too."""
    fields = {"logprobs": True, "top_logprobs": 2}
    wanted = server.chat(**fields).json["choices"][0]["logprobs"]["content"]
    for path, given in ((chat, MESSAGES), (generate, QUESTION)):
        told = path(server, given, stream=False, **fields).json["logprobs"]
        assert [each["token"] for each in told] == [each["token"] for each in wanted]
        assert [each["logprob"] for each in told] == pytest.approx([each["logprob"] for each in wanted], abs=2e-3)
        assert all(len(each["top_logprobs"]) == 2 and bytes(each["bytes"]).decode() == each["token"] for each in told)
        pieces = lines(path(server, given, **fields))
        assert [each["token"] for piece in pieces for each in piece.get("logprobs", ())] == [each["token"] for each in told]
        assert "logprobs" not in pieces[-1] and "logprobs" not in path(server, given, stream=False).json
    columns = server.complete("A fox", logprobs=1).json["choices"][0]["logprobs"]
    raw = generate(server, "A fox", stream=False, raw=True, logprobs=True).json["logprobs"]
    assert [each["token"] for each in raw] == columns["tokens"] and raw[0]["top_logprobs"] == []
    reply = generate(server, "A fox", stream=False, raw=True, logprobs=True, top_logprobs=21)
    assert reply.status == 400 and error_of(reply).startswith("top_logprobs has to be between 0 and 20")
    assert error_of(generate(server, "A fox", raw=True, top_logprobs=2)).startswith("top_logprobs goes with")


# ---- refusals


@pytest.mark.parametrize(("fields", "said"), [
    ({"options": {"temperature": -1}}, "options.temperature must be"), ({"options": {"temperature": "0"}}, "options.temperature"),
    ({"options": {"top_k": 0.5}}, "options.top_k"), ({"options": {"top_p": 2}}, "options.top_p"), ({"options": 3}, "options"),
    ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty"), ({"options": {"stop": [""]}}, "options.stop: an empty string"),
    ({"options": {"mirostat": 3}}, "options.mirostat must be"), ({"options": {"num_predict": "9"}}, "options.num_predict"),
    ({"format": "xml"}, 'format has to be "json" or a JSON schema'), ({"format": {"type": "odd"}}, "format: the schema"),
    ({"think": True}, '"fable" does not support thinking'), ({"think": "high"}, "does not support thinking"),
    ({"suffix": "}"}, "suffix is not supported"),
    ({"template": "{{ .Prompt }}"}, "template is not supported; the model's own"), ({"context": [1, 2]}, "/api/chat takes a conversation"),
    ({"logprobs": 1}, "logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs has to be between 0 and 20"),
    ({"top_logprobs": 2}, "top_logprobs goes with logprobs true"), ({"stream": "yes"}, "stream")])
def test_what_is_refused_is_named(server: ServerProcess, fields: dict, said: str) -> None:
    for path, more in (("chat", {"messages": MESSAGES}), ("generate", {"prompt": "a"})):
        for stream in ({}, {"stream": False}):
            reply = server.request("POST", f"/api/{path}", {"model": "fable", **stream, **more, **fields})
            assert reply.status == 400 and said in error_of(reply), reply.body


def test_images_beside_a_prompt_of_a_model_of_text_are_refused_by_name(server: ServerProcess) -> None:
    assert error_of(generate(server, images=["AAAA"])).startswith("images[0]: this model does not support image input")
    assert error_of(chat(server, images=["AAAA"])).startswith("images is not supported; in a chat each message has its own")


@pytest.mark.parametrize(("messages", "said"), [
    ("x", "messages"), ([{"content": "x"}], "messages[0].role"), ([{"role": "wizard"}], "messages[0].role has to be system, user"),
    ([{"role": "user", "content": 7}], "messages[0].content"),
    ([*MESSAGES, {"role": "user", "content": "What is it?", "images": ["AAAA"]}], "messages[1].images[0]: this model does not support"),
    ([*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}, *MESSAGES], "messages[1].tool_calls[0]"),
    ([*MESSAGES, {"role": "assistant", "content": "", "tool_calls": ["f"]}, *MESSAGES], "messages[1].tool_calls[0]"),
    ([*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, *MESSAGES],
     "arguments is not a JSON object"),
    ([{"role": "user", "content": "fox " * 3000}], "the prompt has 300")])
def test_messages_that_are_none(server: ServerProcess, messages: object, said: str) -> None:
    for stream in ({}, {"stream": False}):
        reply = chat(server, messages, **stream)
        assert reply.status == 400 and said in error_of(reply), reply.body


def test_tools_that_are_none(server: ServerProcess) -> None:
    for tools, said in (([{"type": "web_search"}], "tools[0] is not a function"), ({}, "tools"),
                        ([{"function": {"name": "a b"}}], "letters")):
        reply = chat(server, tools=tools)
        assert reply.status == 400 and said in error_of(reply)


def test_errors_have_their_statuses(server: ServerProcess, guarded: ServerProcess) -> None:
    for path in ("chat", "generate", "show", "pull"):
        reply = server.request("POST", f"/api/{path}", {"model": "llama3", "messages": MESSAGES, "prompt": "a"})
        assert reply.status == 404 and error_of(reply).startswith("model not found: there is no model 'llama3'")
        assert server.request("POST", f"/api/{path}", b"{").status == 400
    assert "effllm pull llama3" in error_of(server.request("POST", "/api/pull", {"model": "llama3"}))
    assert error_of(server.request("POST", "/api/show", {})) == "model is missing"
    assert server.request("GET", "/api/chat").status == 405 and "takes POST" in error_of(server.request("GET", "/api/chat"))
    assert server.request("POST", "/api/nothing", {}).status == 404 and "/api/chat" in error_of(server.request("POST", "/api/nothing", {}))
    assert error_of(server.request("POST", "/api/chat", {}, Host="a.example"))
    assert error_of(server.request("GET", "/api/tags", Origin="http://a.example"))
    for headers in ({}, {"Authorization": "Bearer no"}):
        reply = guarded.request("GET", "/api/tags", **headers)
        assert reply.status == 401 and "the key is missing or wrong" in error_of(reply)
    assert guarded.request("GET", "/api/tags", Authorization="Bearer k").json["models"][0]["name"] == "house:latest"


def test_what_is_done_at_the_terminal_says_so(server: ServerProcess) -> None:
    for method, path, said in (("POST", "create", "effllm quantize"), ("POST", "copy", "effllm alias"), ("DELETE", "delete", "effllm rm"),
                               ("POST", "push", "effllm export"), ("POST", "blobs/sha256:ab", "effllm quantize")):
        reply = server.request(method, f"/api/{path}", {"model": "fable"})
        assert reply.status == 501 and said in error_of(reply)
    assert server.request("POST", "/api/pull", {"model": "fable"}).json == {"status": "success"}  # it is here


def test_a_larger_context_than_there_is_is_remarked_once(server: ServerProcess) -> None:
    for context in (2048, 512.0, 8192, 8192.0):
        assert chat(server, stream=False, options={"num_ctx": context, "num_predict": 1, "num_gpu": 1, "num_thread": 2}).status == 200
    assert server.err.count("num_ctx") == 1 and "num_ctx 8192: the context is 2048 tokens (-c)" in server.err


def test_programs_of_lm_studio_are_answered_at_its_paths(server):
    listed = server.request("GET", "/api/v0/models").json
    model, = listed["data"]
    assert listed["object"] == "list" and server.request("GET", "/api/v0/models/fable").json == model
    assert {name: model[name] for name in ("id", "object", "type", "publisher", "arch", "compatibility_type", "state", "capabilities")} == {
        "id": "fable", "object": "model", "type": "llm", "publisher": "effllm", "arch": "llama", "compatibility_type": "mlx",
        "state": "loaded", "capabilities": []}
    assert model["max_context_length"] == model["loaded_context_length"] == 2048 and model["quantization"]
    asked = {"model": "fable", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    assert server.request("POST", "/api/v0/chat/completions", asked).json["choices"] == server.chat(max_tokens=8).json["choices"]
    pieces = server.request("POST", "/api/v0/completions", {"prompt": "Once", "temperature": 0, "max_tokens": 8, "stream": True}).events
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == server.complete("Once", max_tokens=8).json["choices"][0]["text"]
    for method, path, body in (("GET", "/api/v0/models/other", None), ("POST", "/api/v0/chat/completions", {**asked, "model": "other"})):
        refused = server.request(method, path, body)
        assert refused.status == 404 and refused.error["code"] == "model_not_found", "as OpenAI's API has errors"
    reply = server.request("POST", "/api/v0/embeddings", {"input": "Once"})
    assert reply.error["message"].startswith("this model is not an embedding model")


def test_what_zed_asks_of_lm_studio(server):
    """A request as its provider makes it: a stream without end, an empty list of stop strings, contents in parts, calls that were made."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [
        {"type": "text", "text": "Look"}, {"type": "text", "text": " there."}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": [{"type": "text", "text": "a fox"}, {"type": "text", "text": "a king"}], "tool_call_id": "c1"}]
    tool = {"type": "function", "function": {"name": "look", "description": None, "parameters": {"type": "object", "properties": {}}}}
    asked = {"model": "fable", "messages": messages, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": -1,
             "stop": [], "tools": [tool], "tool_choice": "auto"}
    pieces = server.request("POST", "/api/v0/chat/completions", asked).events
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"]["completion_tokens"] > 0
    assert all({"created", "model", "object"} <= piece.keys() for piece in pieces)
    assert all({"index", "delta", "finish_reason"} <= choice.keys() for piece in pieces for choice in piece["choices"])


def test_what_home_assistant_asks(server):
    """As its integration does by ollama-python: for ever is minus one second, the context a number of its own."""
    tool = {"type": "function", "function": {"name": "HassTurnOn", "description": "Turns on", "parameters": {
        "type": "object", "required": [],
        "properties": {"name": {"type": "string"}, "domain": {"type": "array", "items": {"type": "string"}}}}}}
    turned = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "HassTurnOn", "arguments": {"name": "light"}}}]}
    asked = {"model": "fable:latest", "messages": [*MESSAGES, turned, {"role": "tool", "content": '{"success": true}'}], "tools": [tool],
             "stream": True, "think": False, "keep_alive": "-1s", "options": {"num_ctx": 8192, "num_predict": 8}}
    reply = server.request("POST", "/api/chat", asked)
    lines = [json.loads(line) for line in reply.body.splitlines()]
    assert reply.status == 200 and lines[-1]["done"] and lines[-1]["eval_count"] == 8
