"""OpenAI's API of `effllm serve`: a real process on the loopback with the packaged model."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_process import MESSAGES, MINUTE, QUESTION, ServerProcess, serving

import effllm

SCHEMA = {"type": "object", "properties": {"fox": {"type": "boolean"}}, "required": ["fox"], "additionalProperties": False}


def run(*flags: str) -> str:
    ran = subprocess.run([sys.executable, "-P", "-m", "effllm", "run", "fable", *flags, "--temp", "0", "-n", "24", "--json"],
                         capture_output=True, text=True, timeout=MINUTE, stdin=subprocess.DEVNULL, check=True, env=os.environ)
    return json.loads(ran.stdout)["text"]


def text_of(events: list, name: str = "content") -> str:
    return "".join(choice["delta"].get(name) or "" for event in events for choice in event["choices"])


def test_it_says_where_it_listens(server: ServerProcess) -> None:
    assert server.said == {"url": f"http://127.0.0.1:{server.port}/v1", "model": "fable", "context": 2048, "parallel": 1}
    assert f"http://127.0.0.1:{server.port}/v1 serves fable, context 2048 tokens; Ctrl-C stops it\n" in server.err
    assert server.request("GET", "/health").json["status"] == "ok"
    for path in ("/v1/models", "/models"):
        (card,) = server.request("GET", path).json["data"]
        assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == ("fable", "model", "effllm", 2048)
        assert card["meta"]["n_ctx"] == 2048 and server.request("GET", f"{path}/fable").json == card
    assert b"/v1" in server.request("GET", "/").body


def test_an_answer_is_that_of_run_and_has_the_shape_of_openais(server: ServerProcess) -> None:
    reply = server.chat([{"role": "system", "content": "Be brief."}, *MESSAGES])
    whole, (choice,) = reply.json, reply.json["choices"]
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    assert choice["message"] == {"role": "assistant", "content": run(QUESTION, "-s", "Be brief.")}
    assert (whole["object"], whole["model"], choice["index"], choice["finish_reason"]) == ("chat.completion", "fable", 0, "length")
    assert whole["id"].startswith("chatcmpl-") and whole["created"] > 1_700_000_000 and choice["logprobs"] is None
    usage = whole["usage"]
    assert usage["completion_tokens"] == 24 and usage["total_tokens"] == usage["prompt_tokens"] + 24
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0} and "cached_tokens" in usage["prompt_tokens_details"]
    assert whole["timings"]["predicted_n"] == 24 and whole["timings"]["predicted_per_second"] > 0


def test_reasoning_that_a_model_has_none_of_is_no_error_and_told_once(server: ServerProcess) -> None:
    """Programs ask for it by habit, whichever the model."""
    plain = server.chat(max_tokens=4).json["choices"]
    for asked in ({"reasoning_effort": "low"}, {"thinking_budget": 9}, {"thinking": {"type": "enabled", "budget_tokens": 9}}):
        assert server.chat(max_tokens=4, **asked).json["choices"] == plain
    server.wait_for_output("a client requests reasoning, or limits it: this model does not reason, and answers without")
    assert server.err.count("a client requests reasoning") == 1


def test_a_stream_joined_is_the_whole(server: ServerProcess) -> None:
    whole = server.chat().json
    reply = server.chat(stream=True, stream_options={"include_usage": True})
    first, *pieces, last, usage = reply.events
    assert reply.headers["content-type"].startswith("text/event-stream") and "content-length" not in reply.headers
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(pieces) == whole["choices"][0]["message"]["content"] and len(pieces) > 10
    assert {event["choices"][0]["finish_reason"] for event in (first, *pieces)} == {None}
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 24
    assert {event["usage"] for event in (first, *pieces)} == {None}
    others = server.chat(stream=True, stream_options={"include_usage": True}, cache_prompt=True).events
    assert ["usage" in event for event in others] == [False] * (len(others) - 1) + [True], "as llama-server, whose field it is"
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in reply.events}) == 1
    assert first["object"] == "chat.completion.chunk" and first["id"] != whole["id"]
    assert not any("usage" in event for event in server.chat(stream=True).events)


def test_texts_are_continued(server: ServerProcess) -> None:
    whole = server.complete().json
    assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-")
    assert whole["choices"] == [{"index": 0, "text": run("Once upon a time", "--raw"), "logprobs": None, "finish_reason": "length"}]
    events = server.complete(stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    ids = server.request("POST", "/tokenize", {"content": "Once upon a time"}).json["tokens"]
    for prompt in (ids, [ids], ["Once upon a time"]):
        assert server.complete(prompt).json["choices"] == whole["choices"]


def test_text_and_tokens(server: ServerProcess) -> None:
    ids = server.request("POST", "/tokenize", {"content": "the fox, the kïng"}).json["tokens"]
    assert ids and server.request("POST", "/detokenize", {"tokens": ids}).json == {"content": "the fox, the kïng"}
    pieces = server.request("POST", "/tokenize", {"content": "the fox", "with_pieces": True}).json["tokens"]
    assert "".join(each["piece"] for each in pieces) == "the fox"
    assert server.request("POST", "/detokenize", {"tokens": [10**6]}).error["param"] == "tokens"


def test_the_second_question_of_a_conversation_reads_what_is_new(server: ServerProcess) -> None:
    server.complete("Another text that is in nobody's way.")
    first = server.chat().json
    messages = [*MESSAGES, first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    usage = server.chat(messages).json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] <= 2
    assert cached >= first["usage"]["total_tokens"] - 1 and usage["prompt_tokens"] - cached < 15
    server.wait_for_output(f"{usage['prompt_tokens']} tokens in ({cached} cached), ")


def test_nothing_of_a_request_is_left_in_the_next(server: ServerProcess) -> None:
    plain = server.chat().json["choices"]
    wild = {"temperature": 1.9, "seed": 3, "top_k": 3, "stop": ["e", "a"], "max_tokens": 3, "repeat_penalty": 3, "ignore_eos": True,
            "grammar": 'root ::= "yes" | "no"', "reasoning_effort": "none"}
    assert server.chat(**wild).json["choices"][0]["message"]["content"] in ("y", "yes", "no")
    assert server.chat().json["choices"] == plain


@pytest.mark.parametrize("fields", [
    {"temperature": 1.2, "seed": 5}, {"temperature": 1.2, "seed": -5}, {"temperature": 1, "top_p": 0.5, "seed": 7},
    {"temperature": 1, "top_k": 2, "min_p": 0.1, "typical_p": 0.9, "seed": 2}, {"frequency_penalty": 30}, {"presence_penalty": 30},
    {"logit_bias": {"18": -100, " said": False}, "n": 1}, {"logit_bias": [[18, -100], [" the", 9.5], ["A fox", False]]},
    {"dry_multiplier": 3.0, "dry_allowed_length": 0, "dry_sequence_breakers": []}, {"temperature": 1, "seed": 1, "top_n_sigma": 0.5},
    {"temperature": 1, "seed": 1, "xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"temperature": 1, "seed": 7.0, "top_k": 40.0}, {"repeat_penalty": 1.9, "repeat_last_n": 64.0},
    {"repetition_penalty": 1.9}, {"logit_bias": {}, "logprobs": False}])
def test_fields_of_sampling(server: ServerProcess, fields: dict) -> None:
    """The same twice; what draws otherwise says something else."""
    first, second = (server.chat(**fields) for _ in range(2))
    assert first.status == 200 and first.json["choices"] == second.json["choices"]
    assert (first.json["choices"] != server.chat().json["choices"]) == (fields != {"logit_bias": {}, "logprobs": False})


def test_where_answers_end(server: ServerProcess) -> None:
    whole = server.chat(max_tokens=60).json["choices"][0]["message"]["content"]
    stop = whole[20:24]
    for stops in (stop, [stop, "\x00"]):
        (choice,) = server.chat(max_tokens=60, stop=stops).json["choices"]
        assert choice["message"]["content"] == whole.partition(stop)[0] and choice["finish_reason"] == "stop"
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        reply = server.request("POST", "/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, name: 3}).json
        assert reply["usage"]["completion_tokens"] == 3 and reply["choices"][0]["finish_reason"] == "length"
    assert server.chat(max_tokens=0).json["usage"]["completion_tokens"] == 0
    ended = server.complete("The fox said yes.", max_tokens=-1, stop=["."]).json
    assert ended["choices"][0]["finish_reason"] in ("stop", "length") and "." not in ended["choices"][0]["text"]


def test_answers_of_a_form(server: ServerProcess) -> None:
    def said(**fields: object) -> str:
        return server.chat(max_tokens=200, **fields).json["choices"][0]["message"]["content"]

    strict = {"type": "json_schema", "json_schema": {"name": "fox", "strict": True, "schema": SCHEMA}}
    assert set(json.loads(said(response_format=strict))) == {"fox"}
    assert set(json.loads(said(response_format={"type": "json_object", "schema": SCHEMA}))) == {"fox"}
    assert said(grammar='root ::= "yes" | "no"') in ("yes", "no")
    assert said(response_format={"type": "text"}) == said()
    wild = {"temperature": 1.5, "seed": 4, "dry_multiplier": 2.0, "xtc_probability": 0.7, "top_n_sigma": 2.0, "logit_bias": {"{": False}}
    assert set(json.loads(said(response_format=strict, **wild))) == {"fox"}
    assert said(grammar='root ::= "yes" | "no"', **wild) in ("yes", "no")
    joined = text_of(server.chat(response_format=strict, stream=True, max_tokens=200).events)
    assert set(json.loads(joined)) == {"fox"}


@pytest.mark.parametrize("wrap", [lambda kind, value: {f"guided_{kind}": value}, lambda kind, value: {"structured_outputs": {kind: value}}])
def test_forms_by_the_names_that_vllm_has(server: ServerProcess, wrap) -> None:
    def said(kind: str, value: object, ask=server.chat) -> str:
        choice, = ask(max_tokens=200, **wrap(kind, value)).json["choices"]
        return choice["text"] if ask == server.complete else choice["message"]["content"]

    assert said("choice", ['the "fox"', "the wolf\nor the bear"]) in ('the "fox"', "the wolf\nor the bear")
    for regex in (r"[0-9]{3}/[a-c]{2}", r"^[0-9]{3}/[a-c]{2}$"):
        assert re.fullmatch(r"[0-9]{3}/[a-c]{2}", said("regex", regex))
    assert said("regex", r"a\$") == "a$" and re.fullmatch("[a-c]{4}", said("regex", "[a-c]{4}", server.complete))
    assert said("grammar", 'root ::= "yes" | "no"') in ("yes", "no")
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert set(json.loads(said("json", schema))) == {"fox"}


@pytest.mark.parametrize(("fields", "fits"), [
    ({"regex": "[a-c]{4}"}, "[a-c]{4}"), ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
    ({"json_schema": json.dumps({"enum": ["yes", "no"]})}, '"(yes|no)"'), ({"json_schema": {"enum": ["yes", "no"]}}, '"(yes|no)"'),
    ({"response_format": {"type": "regex", "value": "[a-c]{4}"}}, "[a-c]{4}"),
    ({"response_format": {"type": "json", "value": {"enum": ["yes", "no"]}}}, '"(yes|no)"'),
    ({"response_format": {"type": "grammar", "grammar": 'root ::= "yes" | "no"'}}, "yes|no")])
def test_forms_by_the_names_that_sglang_and_others_have(server: ServerProcess, fields: dict, fits: str) -> None:
    """What outlines sends to SGLang and huggingface_hub to TGI: to let it pass would be an answer of another form."""
    assert re.fullmatch(fits, server.chat(**fields).json["choices"][0]["message"]["content"])
    assert re.fullmatch(fits, server.complete(**fields).json["choices"][0]["text"])


def test_what_harms_nobody_is_let_pass(server: ServerProcess) -> None:
    plain = server.chat().json["choices"]
    fields = {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True, "n": None,
              "tools": [], "tool_choice": "auto", "logit_bias": None, "model": "fable", "chat_template_kwargs": {"enable_thinking": False},
              "reasoning_effort": "low", "response_format": None, "stream": False, "cache_prompt": True, "name_of_nothing": {"x": [1]}}
    reply = server.chat(**fields)
    assert reply.status == 200 and reply.json["choices"] == plain
    parts = [{"role": "developer", "content": "Be brief."},
             {"role": "user", "name": "ann", "content": [{"type": "text", "text": QUESTION}]}]
    assert server.chat(parts).json["choices"] == server.chat([{"role": "system", "content": "Be brief."}, *MESSAGES]).json["choices"]


def test_several_clients_at_once_are_answered_each_as_if_alone(server: ServerProcess) -> None:
    prompts = [f"There were {number} foxes and" for number in range(6)]
    alone = [server.complete(prompt).json["choices"] for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: server.complete(prompt).json["choices"], prompts))
    assert together == alone


def test_the_command_line_says_what_requests_leave_out() -> None:
    with serving("--temp", "0", "-n", "5", "-s", "Be brief.", "--stop", "@@", "--name", "gpt-x", "--quiet") as server:
        plain = server.request("POST", "/v1/chat/completions", {"messages": MESSAGES, "model": "gpt-x"}).json
        assert plain["model"] == "gpt-x" and plain["usage"]["completion_tokens"] == 5
        with_system = server.chat([{"role": "system", "content": "Be brief."}, *MESSAGES], max_tokens=5).json
        assert plain["choices"] == with_system["choices"] and plain["usage"]["prompt_tokens"] == with_system["usage"]["prompt_tokens"]
        assert server.chat(max_tokens=7).json["usage"]["completion_tokens"] == 7
        assert server.chat(model="fable").error["code"] == "model_not_found"
        assert "POST" not in server.err and "serves gpt-x" in server.err


def test_schemas_of_classes_hold_answers_to_what_they_name(server: ServerProcess) -> None:
    """As instructor sends one: nothing says that there are no other properties, and a small model would go on to name some."""
    schema = {"properties": {"place": {"enum": ["Oslo", "Bergen"], "title": "Place", "type": "string"},
                             "inner": {"properties": {"rain": {"type": "boolean"}}, "required": ["rain"], "type": "object"}},
              "required": ["place", "inner"], "title": "W", "type": "object"}
    for form in ({"type": "json_schema", "json_schema": {"name": "W", "schema": schema}}, {"type": "json_object", "schema": schema}):
        choice = server.chat(response_format=form, max_tokens=300).json["choices"][0]
        made = json.loads(choice["message"]["content"])
        assert choice["finish_reason"] == "stop" and [*made] == ["place", "inner"] and [*made["inner"]] == ["rain"]


def thinking_model(folder: Path) -> Path:
    """The packaged model with a template that opens reasoning, unless it is told not to."""
    fable = Path(effllm.__path__[0]) / "models" / "fable"
    folder.mkdir()
    for path in fable.iterdir():
        (folder / path.name).symlink_to(path)
    settings = json.loads((fable / "tokenizer_config.json").read_text())
    opening = "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}"
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": settings["chat_template"] + opening}))
    return folder


def test_reasoning_stands_apart(tmp_path: Path) -> None:
    with serving(model=str(thinking_model(tmp_path / "thinker"))) as server:
        assert server.said["model"] == "thinker", "no folder of this machine"
        reply = server.chat(model="thinker").json
        message, details = reply["choices"][0]["message"], reply["usage"]["completion_tokens_details"]
        assert message["content"] == "" and message["reasoning_content"] and details == {"reasoning_tokens": 24}
        events = server.chat(stream=True).events
        assert text_of(events) == "" and text_of(events, "reasoning_content") == message["reasoning_content"]
        for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            plain = server.chat(**fields).json
            assert plain["choices"][0]["message"].keys() == {"role", "content"} and plain["choices"][0]["message"]["content"]
            assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        assert server.chat().json["choices"] == reply["choices"]
        assert server.chat(reasoning_effort="much").error["param"] == "reasoning_effort"
