"""LM Studio's REST API v1, on a real server: a stateful chat, and models that are listed, loaded and unloaded."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from server_process import QUESTION, Reply, ServerProcess, serving
from test_serve import thinking_model
from test_serve_tools import knowing_folder

from effllm.cli.server.lm_studio_chat import LmStudioChatRequest, LmStudioSerializer, responses_of, with_newest_system
from effllm.cli.server.ollama_models import ModelEntry
from effllm.cli.server.openai_requests import parse
from effllm.cli.server.problems import Problem
from effllm.cli.server.responses_requests import ToolNames
from effllm.cli.server.responses_serializer import ResponseSerializer
from effllm.runtime.events import PromptRead, TextDelta

CHAT, MODELS = "/api/v1/chat", "/api/v1/models"


def said(server: ServerProcess, input: object = QUESTION, **fields: object) -> Reply:
    return server.request("POST", CHAT, {"model": "fable", "input": input, "temperature": 0, "max_output_tokens": 24, **fields})


def error_of(reply: Reply) -> dict:
    error = reply.json["error"]
    assert set(reply.json) == {"error"} and {"type", "message"} <= set(error) <= {"type", "message", "code", "param"}
    return error


def test_an_answer_is_that_of_chat_completions(server: ServerProcess) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = server.chat(messages).json
    whole = said(server, system_prompt="Be brief.").json
    assert whole["output"] == [{"type": "message", "content": chat["choices"][0]["message"]["content"]}]
    assert whole["model_instance_id"] == "fable" and whole["response_id"].startswith("resp_")
    stats = whole["stats"]
    assert stats["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert (stats["total_output_tokens"], stats["reasoning_output_tokens"]) == (24, 0)
    assert stats["tokens_per_second"] > 0 < stats["time_to_first_token_seconds"]
    parts = [{"type": "message", "content": QUESTION}]
    assert said(server, parts, system_prompt="Be brief.").json["output"] == whole["output"]


def test_a_chat_continues_by_the_name_of_its_answer(server: ServerProcess) -> None:
    """From any of its answers, under its own system prompt, or a new one in its place."""
    first = said(server, system_prompt="Be brief.").json
    text = first["output"][0]["content"]
    told = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    for own, system in (({}, "Be brief."), ({"system_prompt": "Be long."}, "Be long."), ({}, "Be brief.")):
        second = said(server, "And then?", previous_response_id=first["response_id"], **own).json
        expected = server.chat([{"role": "system", "content": system}, *told]).json["choices"][0]["message"]["content"]
        assert second["output"][0]["content"] == expected and second["response_id"] != first["response_id"]
    unkept = said(server, store=False).json
    assert "response_id" not in unkept and unkept["output"]
    lost = said(server, previous_response_id="resp_gone")
    assert lost.status == 400 and error_of(lost)["type"] == "invalid_request" and error_of(lost)["param"] == "previous_response_id"


def test_a_stream_builds_the_whole(server: ServerProcess) -> None:
    whole = said(server).json
    events = said(server, stream=True).named_events
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["chat.start", "prompt_processing.start", "prompt_processing.end", "message.start"]
    assert kinds[-2:] == ["message.end", "chat.end"] and set(kinds[4:-2]) == {"message.delta"}
    result = events[-1]["result"]
    assert "".join(event["content"] for event in events[4:-2]) == result["output"][0]["content"] == whole["output"][0]["content"]
    goes_on = said(server, "And then?", previous_response_id=result["response_id"])
    assert goes_on.status == 200 and goes_on.json["stats"]["input_tokens"] > result["stats"]["input_tokens"]


def test_reasoning_stands_apart(tmp_path: Path) -> None:
    with serving(model=str(thinking_model(tmp_path / "thinker"))) as server:
        thought = said(server, model="thinker").json
        assert [item["type"] for item in thought["output"]] == ["reasoning"] and thought["stats"]["reasoning_output_tokens"] == 24
        assert [item["type"] for item in said(server, model="thinker", reasoning="off").json["output"]] == ["message"]
        events = said(server, model="thinker", stream=True).named_events
        assert {event["type"] for event in events[3:-2]} == {"reasoning.start", "reasoning.delta"}


@pytest.mark.parametrize(("fields", "param", "told"), [
    ({"input": 5}, "input", "valid"), ({"input": [{"type": "video"}]}, "input[0]", "data_url"),
    ({"reasoning": "some"}, "reasoning", "off, low"), ({"integrations": ["mcp/x"]}, "integrations", "--mcp"),
    ({"input": [{"type": "image", "data_url": "data:image/png;base64,aGk="}]}, "input[0].content[0]", "does not support image input"),
    ({"max_output_tokens": -7}, "max_output_tokens", "-7")])
def test_what_is_refused_is_named(server: ServerProcess, fields: dict, param: str, told: str) -> None:
    error = error_of(said(server, **fields))
    assert error["type"] == "invalid_request" and error["param"].startswith(param) and told in error["message"]


def test_one_model_is_listed_is_loaded_and_stays(server: ServerProcess) -> None:
    (model,) = server.request("GET", MODELS).json["models"]
    assert (model["key"], model["type"], model["format"], model["params_string"]) == ("fable", "llm", "mlx", "5.8M")
    assert model["loaded_instances"] == [{"id": "fable", "config": {"context_length": 2048}}] and model["max_context_length"] == 2048
    assert model["quantization"]["bits_per_weight"] == pytest.approx(16, abs=0.5) and model["capabilities"]["vision"] is False
    loaded = server.request("POST", f"{MODELS}/load", {"model": "fable", "context_length": 512, "echo_load_config": True}).json
    assert (loaded["status"], loaded["instance_id"], loaded["load_config"]) == ("loaded", "fable", {"context_length": 2048})
    stays = server.request("POST", f"{MODELS}/unload", {"instance_id": "fable"})
    assert stays.status == 501 and error_of(stays)["type"] == "not_implemented"
    assert server.request("POST", f"{MODELS}/download", {"model": "https://hub.example/fable"}).json == {"status": "already_downloaded"}
    absent = server.request("POST", f"{MODELS}/download", {"model": "org/other"})
    assert absent.status == 404 and error_of(absent)["type"] == "model_not_found" and "effllm pull org/other" in error_of(absent)["message"]
    assert server.request("GET", f"{MODELS}/download/status").json == {"downloading": [], "completed": [], "failed": [], "paused": []}
    assert error_of(server.request("GET", f"{MODELS}/download/status/job_1"))["type"] == "job_not_found"
    said(server, context_length=9000)
    server.wait_for_output("requests a context_length of 9000")


@pytest.mark.parametrize("several", [False, True])
def test_tool_use_is_said_of_templates_that_take_tools(tmp_path: Path, several: bool) -> None:
    """fable has a template that takes none; the other has one that does."""
    folder, name = knowing_folder(tmp_path / "knowing"), "knowing"
    if several:
        with serving(folder, model="fable") as server:
            listed = {each["key"]: each["capabilities"] for each in server.request("GET", MODELS).json["models"]}
            older = {each["id"]: each["capabilities"] for each in server.request("GET", "/api/v0/models").json["data"]}
    else:
        listed, older = {}, {}
        for each in (folder, "fable"):
            with serving(model=each) as server:
                (model,) = server.request("GET", MODELS).json["models"]
                (card,) = server.request("GET", "/api/v0/models").json["data"]
                listed[model["key"]], older[card["id"]] = model["capabilities"], card["capabilities"]
    assert listed == {name: {"vision": False, "trained_for_tool_use": True}, "fable": {"vision": False, "trained_for_tool_use": False}}
    assert older == {name: ["tool_use"], "fable": []}


def test_llama_servers_paths_load_and_keep_the_one_model(server: ServerProcess) -> None:
    """Programs that load a model before they use it, as on a server of several, find it loaded."""
    for body in ({"model": "fable"}, {"model": "fable:latest"}, {}):
        assert server.request("POST", "/models/load", body).json == {"success": True}
    stays = server.request("POST", "/models/unload", {"model": "fable"})
    assert stays.status == 501 and "stays loaded" in stays.error["message"]
    for path in ("/models/load", "/models/unload"):
        assert server.request("POST", path, {"model": "other"}).status == 404
        assert server.request("POST", path, {"model": 5}).error["param"] == "model"


def test_models_are_loaded_and_ended_by_name() -> None:
    with serving(model=None) as server:
        def instances() -> list[dict]:
            (model,) = [each for each in server.request("GET", MODELS).json["models"] if each["key"] == "fable"]
            return model["loaded_instances"]

        assert instances() == []
        gone = server.request("POST", f"{MODELS}/unload", {"instance_id": "fable"})
        assert gone.status == 400 and error_of(gone)["param"] == "instance_id"
        assert server.request("POST", f"{MODELS}/load", {"model": "fable"}).json["type"] == "llm"
        assert [each["id"] for each in instances()] == ["fable"]
        first = said(server).json
        second = said(server, "And then?", previous_response_id=first["response_id"], stream=True).named_events
        assert second[-1]["result"]["stats"]["input_tokens"] > first["stats"]["input_tokens"]
        assert server.request("POST", f"{MODELS}/unload", {"instance_id": "fable"}).json == {"instance_id": "fable"}
        assert instances() == []
        assert said(server, model="nobody").status == 404
        assert said(server, stream=True).named_events[-1]["type"] == "chat.end", "it is loaded again"


@pytest.mark.parametrize("model", ["fable", pytest.param(None, marks=pytest.mark.slow)])
def test_what_crush_asks_to_know_of_models(model: str | None) -> None:
    """It joins what OpenAI's list names with what LM Studio's and llama-server's tell of it, and takes Ollama's names to OpenAI's chats."""
    with serving("-c", "1024", model=model) as server:
        listed = {each["id"]: each for each in server.request("GET", "/v1/models").json["data"]}
        assert listed["fable"]["meta"]["n_ctx"] == 1024 and listed["fable"]["meta"]["n_ctx_train"] == 2048
        told = {each["key"]: each for each in server.request("GET", MODELS).json["models"]}
        loaded = told["fable"]["loaded_instances"]
        assert set(told) == set(listed) and told["fable"]["max_context_length"] == 2048
        assert [each["config"]["context_length"] for each in loaded] == ([1024] if model else [])
        (name,) = [each["name"] for each in server.request("GET", "/api/tags").json["models"] if each["name"].startswith("fable:")]
        tool = {"type": "function", "function": {"name": "view", "description": "Shows a file.", "parameters": {
            "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}
        events = server.chat(model=name, stream=True, stream_options={"include_usage": True}, tools=[tool], tool_choice="auto",
                             parallel_tool_calls=True, user="crush").events
        assert events[-1]["usage"]["completion_tokens"] == 24


def test_requests_and_answers_as_values() -> None:
    asked = parse(LmStudioChatRequest, json.dumps({"input": [{"type": "text", "content": "a"}, {"type": "image", "data_url": "data:,b"}],
                                                   "system_prompt": "s", "reasoning": "on", "top_k": 3.0}).encode())
    meant = responses_of(asked)
    assert meant.input == [{"role": "system", "content": "s"}, {"role": "user", "content": [
        {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:,b"}]}]
    assert (meant.reasoning.effort, meant.top_k, meant.store) == ("medium", 3, None)
    old, new, user = {"role": "system", "content": "old"}, {"role": "system", "content": "new"}, {"role": "user", "content": "a"}
    assert with_newest_system([old, user, new, user]) == [new, user, user] and with_newest_system([user]) == [user]
    stats = SimpleNamespace(finish_reason="stop", token_ids=(1, 2), prompt_tokens=9, cached_tokens=4, reasoning_tokens=1, decode_tps=5.0,
                            ttft_s=0.5)
    shape = LmStudioSerializer("m", ResponseSerializer("m", meant, ToolNames()))
    happened = [PromptRead(9, 4), TextDelta("h", "thinking"), TextDelta("m", "thinking"), TextDelta("so")]
    pieces = [*shape.first_chunks(), *(piece for event in happened for piece in shape.add(event)), *shape.last_chunks(stats)]
    assert [piece["type"] for piece in pieces] == [
        "chat.start", "prompt_processing.start", "prompt_processing.end", "reasoning.start", "reasoning.delta", "reasoning.delta",
        "reasoning.end", "message.start", "message.delta", "message.end", "chat.end"]
    assert pieces[-1]["result"]["output"] == [{"type": "reasoning", "content": "hm"}, {"type": "message", "content": "so"}]
    assert LmStudioSerializer("m").error_chunks(Problem(500, "it broke", "server_error")) == [
        {"type": "error", "error": {"type": "internal_error", "message": "it broke"}}]


def test_a_model_of_no_size_is_listed() -> None:
    from effllm.cli.server.lm_studio import NOT_LOADED, LmStudioModel

    broken = LmStudioModel(ModelEntry("org/gone", "", 0, "0bit", 0, "ab", 0.0), False, False, False, NOT_LOADED, None, None)
    card = broken.card_1()
    assert (card["type"], card["publisher"], card["quantization"]["bits_per_weight"]) == ("embedding", "org", None)
    assert card["loaded_instances"] == [] and "capabilities" not in card
