"""Anthropic's Messages API of `effllm serve`: over HTTP with the real model, and as units where it does not suffice."""

import json
from types import SimpleNamespace

import pytest
from server_process import MESSAGES, QUESTION, Reply, ServerProcess, serving
from test_serve_responses import SCHEMA
from test_tool_call_generation import WEATHER

from effllm.cli.server.anthropic_tools import KNOWN
from effllm.cli.server.generation_options import apply_reasoning
from effllm.cli.server.messages_requests import MessagesRequest, chat_of
from effllm.cli.server.messages_serializer import MessageSerializer
from effllm.cli.server.openai_requests import parse
from effllm.cli.server.problems import Problem
from effllm.runtime.events import Call, PromptRead, TextDelta
from effllm.runtime.generation.served_model import GenerationOptions
from effllm.runtime.sampler import SamplerSettings

TOOL = {"name": "weather", "description": "Tells it.", "input_schema": WEATHER["function"]["parameters"]}
PATHS = ("/v1/messages", "/v1/messages/count_tokens")


@pytest.fixture(scope="module")
def guarded():
    with serving("--api-key", "k", "-s", "Be brief.") as server:
        yield server


def error_of(reply: Reply) -> dict:
    """Anthropic's object for errors, whose keys are these."""
    assert set(reply.json) == {"type", "error"} and reply.json["type"] == "error"
    assert set(reply.json["error"]) == {"type", "message"} and all(reply.json["error"].values())
    return reply.json["error"]


def prompt_of(usage: dict) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def asked(*content: object, role: str = "user", **fields: object) -> MessagesRequest:
    body = {"max_tokens": 9, "messages": [{"role": role, "content": [*content]}], **fields}
    return parse(MessagesRequest, json.dumps(body).encode())


def test_an_answer_is_that_of_chat_completions(server: ServerProcess) -> None:
    said = server.chat([{"role": "system", "content": "Be brief."}, *MESSAGES]).json
    text = said["choices"][0]["message"]["content"]
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    attributed = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0a1b2;"}
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]}]
    for messages, system in ((MESSAGES, "Be brief."), (parts, [attributed, cached])):
        reply = server.request("POST", "/v1/messages?beta=true", {
            "messages": messages, "system": system, "temperature": 0, "max_tokens": 24, "model": "fable", "metadata": {"user_id": "me"}},
            anthropic_version="2023-06-01", anthropic_beta="unknown-2026-01-01")
        whole = reply.json
        assert reply.status == 200 and whole["content"] == [{"type": "text", "text": text}]
        assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "fable") and whole["id"].startswith("msg_")
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
        usage = whole["usage"]
        assert usage["output_tokens"] == 24 and usage["cache_creation_input_tokens"] == 0 < usage["cache_read_input_tokens"]
        assert prompt_of(usage) == said["usage"]["prompt_tokens"]


def test_a_stream_builds_the_whole(server: ServerProcess) -> None:
    whole = server.message().json
    reply = server.message(stream=True)
    start, begun, *deltas, ended, last, stop = reply.named_events
    assert start["type"] == "message_start" and start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert begun == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {(event["type"], event["index"], event["delta"]["type"]) for event in deltas} == {("content_block_delta", 0, "text_delta")}
    assert "".join(event["delta"]["text"] for event in deltas) == whole["content"][0]["text"] and len(deltas) > 10
    assert ended == {"type": "content_block_stop", "index": 0} and stop == {"type": "message_stop"}
    assert last["type"] == "message_delta" and last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None, "stop_details": None}
    told, counted = start["message"]["usage"], last["usage"]
    assert told == {**counted, "output_tokens": 0} and counted["output_tokens"] == 24
    assert prompt_of(told) == prompt_of(whole["usage"]) and b"[DONE]" not in reply.body


def test_why_answers_end(server: ServerProcess) -> None:
    text = server.message(max_tokens=60).json["content"][0]["text"]
    stop = text[20:24]
    answer = server.message(max_tokens=60, stop_sequences=["\x00", stop]).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == text.partition(stop)[0]
    last = server.message(max_tokens=60, stop_sequences=[stop], stream=True).named_events[-2]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop, "stop_details": None}
    ended = server.message(grammar='root ::= "yes"').json
    assert (ended["content"][0]["text"], ended["stop_reason"], ended["stop_sequence"]) == ("yes", "end_turn", None)
    assert server.message(max_tokens=5000).json["stop_reason"] in ("end_turn", "model_context_window_exceeded")
    begun = [*MESSAGES, {"role": "assistant", "content": text[:20]}]
    assert server.message(begun, max_tokens=0).json["content"] == []
    assert server.message(begun).json["usage"]["output_tokens"] == 24


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}])
def test_a_call_is_made_and_its_answer_continues(server: ServerProcess, choice: dict) -> None:
    given = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 160}
    first = server.message(**given).json
    (call,) = first["content"]
    assert first["stop_reason"] == "tool_use" and call["type"] == "tool_use" and call["name"] == "weather"
    assert call["input"]["place"] in ("Oslo", "Bergen") and call["id"]
    start, begun, delta, ended, last, _ = server.message(stream=True, **given).named_events
    assert begun["content_block"] == {**call, "id": begun["content_block"]["id"], "input": {}} and ended["type"] == "content_block_stop"
    assert start["type"] == "message_start" and last["delta"]["stop_reason"] == "tool_use"
    assert delta["delta"]["type"] == "input_json_delta" and json.loads(delta["delta"]["partial_json"]) == call["input"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Rain."}
    told = [*MESSAGES, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, call]}]
    second = server.message([*told, {"role": "user", "content": [result]}], tools=[TOOL]).json
    assert prompt_of(second["usage"]) > prompt_of(first["usage"])
    parts = {**result, "content": [{"type": "text", "text": "Rain."}], "cache_control": {"type": "ephemeral"}}
    counted = [server.message([*told, {"role": "user", "content": [each]}], PATHS[1], tools=[TOOL]).json for each in (result, parts)]
    assert counted[0] == counted[1] == {"input_tokens": prompt_of(second["usage"])}


def test_tokens_are_counted_as_they_are_read(server: ServerProcess) -> None:
    for fields in ({}, {"system": "Be brief."}, {"tools": [TOOL]}, {"thinking": {"type": "disabled"}}):
        used = prompt_of(server.message(**fields, max_tokens=1).json["usage"])
        body = {"messages": MESSAGES, "model": "fable", **fields}
        assert server.request("POST", PATHS[1], body).json == {"input_tokens": used}
        if "tools" not in fields:
            system = [{"role": "system", "content": fields["system"]}] if "system" in fields else []
            of_responses = {"input": MESSAGES, "instructions": fields.get("system")}
            for path, asked in (("responses", of_responses), ("chat/completions", {"messages": [*system, *MESSAGES]})):
                counted = server.request("POST", f"/v1/{path}/input_tokens", asked).json
                assert counted == {"object": "response.input_tokens", "input_tokens": used}
    assert server.message("x", PATHS[1]).status == 400 and server.message([], PATHS[1]).status == 400


def test_forms_hold_answers(server: ServerProcess) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        assert [*json.loads(server.message(max_tokens=100, **fields).json["content"][0]["text"])] == ["fox"]


@pytest.mark.parametrize(("fields", "said"), [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": -1}, "max_tokens has to be 0 or more"), ({"max_tokens": "9"}, "max_tokens"),
    ({"temperature": "0"}, "temperature"), ({"temperature": -1}, "temperature"), ({"top_p": 2}, "top_p"), ({"top_k": 0.5}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"), ({"stop_sequences": [""]}, "stop_sequences: an empty string"),
    ({"system": 1}, "system has to be"),
    ({"system": [{"type": "image"}]}, "system[0]: image"), ({"messages": []}, "no messages"), ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"), ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0]: this model does not support image input"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "x"}]}]}]},
     "messages[0].content[0].content[0]: x"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}]}]},
     "messages[0].content[0] is "),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text"}}]}]}, "source.data is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "do not belong to the user"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}]}]},
     "input has to be an object"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: tools of type web_search_20250305"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"), ({"tools": [{"name": "a b", "input_schema": {}}]}, "letters"),
    ({"tool_choice": {"type": "any"}}, "no tools"), ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.type has to be"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "not one of the tools"), ({"tool_choice": "any"}, "tool_choice"),
    ({"thinking": {"type": "some"}}, "thinking.type has to be"),
    ({"output_config": {"effort": "most"}}, "output_config.effort has to be one of"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type has to be"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers")])
def test_what_is_refused_is_named(server: ServerProcess, fields: dict, said: str) -> None:
    for more in ({}, {"stream": True}):
        reply = server.message(**{**fields, **more})
        assert reply.status == 400 and error_of(reply)["type"] == "invalid_request_error" and said in error_of(reply)["message"], reply.body


def test_errors_are_of_their_types(server: ServerProcess, guarded: ServerProcess) -> None:
    long = [{"role": "user", "content": "fox " * 3000}]
    for more in ({}, {"stream": True}):
        reply = server.message(long, **more)
        assert reply.status == 400 and error_of(reply)["message"].startswith("prompt is too long: the prompt has ")
        assert error_of(server.message(model="claude", **more))["type"] == "not_found_error"
    assert error_of(server.request("GET", "/v1/messages"))["message"].startswith("/v1/messages takes POST")
    assert error_of(server.request("POST", "/v1/messages/batches", {}))["type"] == "not_found_error"
    assert error_of(server.request("POST", "/v1/messages", b"{"))["type"] == "invalid_request_error"
    assert error_of(server.request("POST", "/v1/messages", {}, Host="a.example"))["type"] == "permission_error"
    for headers in ({}, {"x_api_key": "no"}, {"Authorization": "Bearer no", "x_api_key": "no"}):
        reply = guarded.request("POST", "/v1/messages", {}, **headers)
        assert reply.status == 401 and error_of(reply)["type"] == "authentication_error"
    for headers in ({"x_api_key": "k"}, {"Authorization": "Bearer k"}, {"Authorization": "Bearer no", "x_api_key": "k"}):
        body = {"messages": MESSAGES, "max_tokens": 1}
        assert guarded.request("POST", "/v1/messages", body, **headers).status == 200


def test_the_command_lines_system_prompt_is_that_of_requests_without(guarded: ServerProcess) -> None:
    counts = [guarded.request("POST", PATHS[1], {"messages": MESSAGES, **fields}, x_api_key="k").json["input_tokens"]
              for fields in ({}, {"system": "Be brief."}, {"system": "Be"})]
    assert counts[0] == counts[1] > counts[2]


def test_blocks_become_messages() -> None:
    messages = [
        {"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "y"},
            {"type": "text", "text": "I call."}, {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "2", "name": "g", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one"}]},
            {"type": "tool_result", "tool_use_id": "2", "content": "no such file", "is_error": True}, {"type": "text", "text": "c"}]},
        {"role": "system", "content": "later"}]

    def text(*texts: str) -> list[dict]:
        return [{"type": "text", "text": each} for each in texts]

    def call(called: str, name: str, arguments: dict) -> dict:
        return {"id": called, "type": "function", "function": {"name": name, "arguments": arguments}}

    chat, made = chat_of(asked(messages=messages, system="s", tools=[TOOL], stop_sequences=["x"], top_k=3, thinking={
        "type": "enabled", "budget_tokens": 1024}))
    assert made == [
        {"role": "system", "content": text("s")}, {"role": "user", "content": text("a", "b")},
        {"role": "assistant", "content": text("I call."), "reasoning_content": "hm",
         "tool_calls": [call("1", "f", {"a": 1}), call("2", "g", {})]},
        {"role": "tool", "tool_call_id": "1", "content": "one"}, {"role": "tool", "tool_call_id": "2", "content": "Error: no such file"},
        {"role": "user", "content": text("c", "later")}]
    assert (chat.stop, chat.top_k, chat.max_tokens, chat.parallel_tool_calls) == (["x"], 3, 9, True)
    assert chat.chat_template_kwargs == {"enable_thinking": True} and chat.reasoning_effort is None
    assert chat_of(asked())[0].chat_template_kwargs == {}


@pytest.mark.parametrize(("fields", "think", "variables"), [
    ({}, "auto", {}), ({"thinking": {"type": "between_tools"}}, "auto", {}),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "auto", {"reasoning_effort": "high"}),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "on", {"enable_thinking": True}),
    ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, "off", {"reasoning_effort": "low", "enable_thinking": False}),
    ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}}, "off", {"enable_thinking": False})])
def test_thinking_options(fields: dict, think: str, variables: dict) -> None:
    """Effort alone asks for none: what the command line says of it stays."""
    tokenizer = SimpleNamespace(thinks=True, template=SimpleNamespace(variables=frozenset({"reasoning_effort"})))
    wish, told = apply_reasoning(chat_of(asked(**fields))[0], GenerationOptions(SamplerSettings()), tokenizer)
    assert (wish.think, told) == (think, variables)


def test_what_was_reasoned_said_and_called_is_in_order() -> None:
    """Whole and streamed are one."""
    happened = [PromptRead(9, 4), TextDelta("h", "thinking"), TextDelta("m", "thinking"), TextDelta("so"), Call("f", '{"a": 1}'),
                TextDelta("end")]
    stats = SimpleNamespace(finish_reason="stop", token_ids=(1, 2), prompt_tokens=9, cached_tokens=4, reasoning_tokens=1,
                            stop_string=None)
    streamed, whole = (MessageSerializer("m", asked()) for _ in range(2))
    streamed.add(happened[0])
    events = [*streamed.first_chunks(), *(piece for event in happened[1:] for piece in streamed.add(event)), *streamed.last_chunks(stats)]
    for event in happened:
        whole.add(event)
    final = whole.whole_answer(stats)
    used = {"type": "tool_use", "id": final["content"][2]["id"], "name": "f", "input": {"a": 1}}
    assert final["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "effllm"}, {"type": "text", "text": "so"}, used,
        {"type": "text", "text": "end"}]
    assert final["stop_reason"] == "tool_use" == events[-2]["delta"]["stop_reason"]
    assert final["usage"] == events[-2]["usage"] == {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
                                                     "output_tokens": 2, "output_tokens_details": {"thinking_tokens": 1}}
    assert events[0]["message"]["usage"] == {**final["usage"], "output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
    assert [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"] == [
        "thinking_delta", "thinking_delta", "signature_delta", "text_delta", "input_json_delta", "text_delta"]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert streamed.keep_alive_chunks() == [{"type": "ping"}]
    assert streamed.error_chunks(Problem(503, "the server is shutting down", "overloaded_error")) == [
        {"type": "error", "error": {"type": "overloaded_error", "message": "the server is shutting down"}}]


def test_what_a_server_did_before_is_read_as_calls_and_what_they_gave_back() -> None:
    """A conversation that began with a model of Anthropic's, whose server searched, and was made shorter."""
    found = [{"type": "web_search_result", "url": "https://a.example", "title": "Foxes", "encrypted_content": "zz", "page_age": None}]
    page = {"type": "web_fetch_result", "url": "https://b.example", "retrieved_at": "2026-11-01T00:00:00Z",
            "content": {"type": "document", "title": "Kings", "source": {"type": "text", "media_type": "text/plain", "data": "A king."}}}
    turn = [{"type": "compaction", "content": "They spoke of foxes."},
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "fox"}, "caller": {"type": "direct"}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": found},
            {"type": "server_tool_use", "id": "s2", "name": "web_fetch", "input": {"url": "https://b.example"}},
            {"type": "web_fetch_tool_result", "tool_use_id": "s2", "content": page},
            {"type": "server_tool_use", "id": "s3", "name": "bash_code_execution", "input": {"command": "ls"}},
            {"type": "bash_code_execution_tool_result", "tool_use_id": "s3",
             "content": {"type": "bash_code_execution_result", "stdout": "a.txt", "stderr": "", "return_code": 0, "content": []}},
            {"type": "web_search_tool_result", "tool_use_id": "s4", "content": {
                "type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}},
            {"type": "text", "text": "So it is.", "citations": []}]
    _, messages = chat_of(asked(*turn, role="assistant"))
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    first, search, _, fetched, _, ran, failed, last = messages
    assert first["content"][0]["text"] == "They spoke of foxes." and first["tool_calls"][0]["function"]["arguments"] == {"query": "fox"}
    assert search == {"role": "tool", "tool_call_id": "s1", "content": "Foxes\nhttps://a.example"}
    assert fetched["content"] == "https://b.example\nKings\nA king." and ran["content"] == "a.txt\n"
    assert failed["content"] == "max_uses_exceeded" and last["content"][0]["text"] == "So it is."
    pdf = {"type": "web_fetch_tool_result", "tool_use_id": "s1", "content": {"source": {"type": "base64", "data": "JVBERi0="}}}
    assert chat_of(asked(pdf, role="assistant"))[1][0]["content"] == ""
    with pytest.raises(Problem, match="server_tool_use"):
        chat_of(asked(turn[1]))


@pytest.mark.parametrize(("kind", "name", "fields"), [
    ("bash_20250124", "bash", {"command", "restart"}), ("text_editor_20250124", "str_replace_editor", {"new_str", "insert_line"}),
    ("text_editor_20250728", "str_replace_based_edit_tool", {"insert_text", "new_str"}),
    ("memory_20250818", "memory", {"old_path", "new_path", "insert_text"})])
def test_tools_of_anthropic_that_programs_run_are_functions(kind: str, name: str, fields: set[str]) -> None:
    """A request brings no schema of them."""
    chat, _ = chat_of(asked({"type": "text", "text": "x"}, tools=[{"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}]))
    function = chat.tools[0]["function"]
    assert function["name"] == name and function["description"] and fields <= set(function["parameters"]["properties"])
    for known in KNOWN.values():
        assert set(known[1]["required"]) <= set(known[1]["properties"])
    assert "insert_text" not in KNOWN["text_editor_20250429"][1]["properties"]


def test_tools_that_a_search_would_find_are_reported_at_once() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    chat, _ = chat_of(asked({"type": "text", "text": "x"}, tools=[search, {**TOOL, "defer_loading": True}]))
    assert [tool["function"]["name"] for tool in chat.tools] == ["weather"]


def test_a_shell_is_called_by_its_schema(server: ServerProcess) -> None:
    call, = server.message(tools=[{"type": "bash_20250124", "name": "bash"}], tool_choice={"type": "any"}, max_tokens=200).json["content"]
    assert call["name"] == "bash" and set(call["input"]) <= {"command", "restart"}
