"""Fill-in-the-middle in the APIs of llama.cpp, OpenAI and Ollama: a real process with a small model that has the tokens for it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from infill_models import OF_CODESTRAL, OF_QWEN, filling_model, model_of
from server_process import Reply, ServerProcess, serving
from test_infill import VOCABS, needs_vocabularies

PREFIX, SUFFIX = "def fox(king):\n", "\n    return tail\n"
# As llama.vim sends them, and llama.vscode.
OF_VIM = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "prompt": "    ", "n_predict": 128, "stop": [], "n_indent": 4, "top_k": 40,
          "top_p": 0.9, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
          "t_max_predict_ms": 1000, "id_slot": 0,
          "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "a.py"}, {"text": "y = 2\n", "time": [3, 4], "filename": "b.py"}],
          "response_fields": ["content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
                              "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
                              "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated", "tokens_cached"]}
WARMING = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "temperature": 0.0, "samplers": [], "stream": False,
           "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""], "id_slot": 0}
OF_VSCODE = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": [], "prompt": "    ", "n_predict": 32, "top_k": 40,
             "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 4,
             "t_max_prompt_ms": 500, "t_max_predict_ms": 1000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(model=str(filling_model(tmp_path_factory.mktemp("model") / "coder"))) as server:
        yield server


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With a context that is soon full, in which suffixes come first."""
    model = filling_model(tmp_path_factory.mktemp("model") / "codestral", OF_CODESTRAL)
    with serving("-c", "256", "--parallel", "2", model=str(model)) as server:
        yield server


def infill(server: ServerProcess, **fields: object) -> Reply:
    return server.request("POST", "/infill", {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 12, "temperature": 0, **fields})


def test_the_answer_is_that_to_the_prompt_of_its_marks(server: ServerProcess) -> None:
    whole = infill(server, prompt="    x").json
    said = f"<|fim_prefix|>{PREFIX}    x<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    assert whole["prompt"] == said and whole["stop"] is True and whole["model"] == "coder" and whole["truncated"] is False
    assert whole["tokens_evaluated"] == len(server.request("POST", "/tokenize", {"content": said}).json["tokens"])
    completed = server.complete(said, max_tokens=12).json["choices"][0]["text"]
    assert whole["content"] == completed != ""
    for path, fields in (("/v1/completions", {"prompt": PREFIX + "    x", "suffix": SUFFIX, "max_tokens": 12, "temperature": 0}),
                         ("/api/generate", {"prompt": PREFIX + "    x", "suffix": SUFFIX, "stream": False, "system": "Be brief.",
                                            "options": {"num_predict": 12, "temperature": 0}})):
        reply = server.request("POST", path, fields)
        assert reply.status == 200
        joined = f"<|fim_prefix|>{PREFIX}    x<|fim_suffix|>{SUFFIX}<|fim_middle|>"
        text = reply.json["choices"][0]["text"] if "choices" in reply.json else reply.json["response"]
        assert text == server.complete(joined, max_tokens=12).json["choices"][0]["text"], path


def test_a_stream_joined_is_the_whole(server: ServerProcess) -> None:
    whole = infill(server).json
    reply = infill(server, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream") and b"[DONE]" not in reply.body
    *pieces, last = (json.loads(line.removeprefix("data: ")) for line in reply.body.decode().split("\n\n") if line and line[0] != ":")
    assert "".join(piece["content"] for piece in pieces) == whole["content"] and not any(piece["stop"] for piece in pieces)
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", whole["stop_type"]) and last["prompt"] == whole["prompt"]
    for fields in ({"suffix": SUFFIX, "prompt": PREFIX, "max_tokens": 12},):
        events = server.request("POST", "/v1/completions", {**fields, "temperature": 0, "stream": True}).events
        assert "".join(event["choices"][0]["text"] for event in events) == whole["content"]
    lines = server.request("POST", "/api/generate", {"prompt": PREFIX, "suffix": SUFFIX, "options": {"num_predict": 12, "temperature": 0}})
    assert "".join(json.loads(line)["response"] for line in lines.body.splitlines()) == whole["content"]


@pytest.mark.parametrize("mark", OF_QWEN)
def test_marks_end_it_and_are_no_text(server: ServerProcess, mark: str) -> None:
    number = server.request("POST", "/tokenize", {"content": mark}).json["tokens"]
    assert len(number) == 1
    ended = infill(server, logit_bias=[[number[0], 1000]]).json
    assert (ended["content"], ended["stop_type"], ended["tokens_predicted"]) == ("", "eos", 1)
    by_hand = server.complete(f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>", logit_bias=[[number[0], 1000]]).json
    assert by_hand["choices"][0]["finish_reason"] == "stop" and by_hand["usage"]["completion_tokens"] == 1, "by programs that mark it"
    elsewhere = server.complete(PREFIX, logit_bias=[[number[0], 1000]], max_tokens=3).json["choices"][0]
    assert elsewhere["finish_reason"] == "length", "a model may write them where nothing is to be filled in"
    assert infill(server, input_prefix=f"mark = '{mark}'", n_predict=0).json["prompt"].count(mark) <= 2, "one of them is written there"
    asked = infill(server, input_prefix=f"mark = '{mark}'", n_predict=0).json
    plain = infill(server, input_prefix="mark = ''", n_predict=0).json
    assert asked["tokens_evaluated"] > plain["tokens_evaluated"] + 3, "as letters"


def test_what_editors_send(server: ServerProcess) -> None:
    server.complete("Something else is read in between.", max_tokens=2)
    assert server.request("POST", "/infill", {**WARMING, "input_extra": OF_VIM["input_extra"]}).json == {}
    first = server.request("POST", "/infill", OF_VIM)
    assert first.status == 200 and set(first.json) == {*OF_VIM["response_fields"]} and first.json["truncated"] is False
    prompt = infill(server, **{**OF_VIM, "n_predict": 0, "response_fields": None}).json
    files = "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = 2\n<|file_sep|>filename\n"
    assert prompt["prompt"] == f"{files}<|fim_prefix|>{PREFIX}    <|fim_suffix|>{SUFFIX}<|fim_middle|>"
    read, all_of_it = first.json["timings/prompt_n"], prompt["tokens_evaluated"]
    held = len(server.request("POST", "/tokenize", {"content": files + "<|fim_prefix|>"}).json["tokens"])
    assert read == all_of_it - held, "what was read to warm is not read again"
    again = server.request("POST", "/infill", {**OF_VIM, "response_fields": None}).json
    assert again["content"] == first.json["content"] and again["stop_type"] == "eos", "random weights are sure of nothing for long"
    second = server.request("POST", "/infill", OF_VSCODE)
    assert second.status == 200 and {"content", "generation_settings", "tokens_cached", "truncated", "timings"} <= set(second.json)
    assert second.json["prompt"].startswith("<|fim_prefix|>"), "no file, no names"
    for body in (OF_VIM, OF_VSCODE):
        assert server.request("POST", "/infill", {**body, "stream": True}).status == 200


def test_where_it_ends(server: ServerProcess) -> None:
    line = server.request("POST", "/tokenize", {"content": "\n"}).json["tokens"][0]
    word = server.request("POST", "/tokenize", {"content": " fox"}).json["tokens"][0]
    two = {"grammar": 'root ::= " fox\\n" " fox\\n" " fox\\n" " fox\\n"', "n_predict": 20}
    assert infill(server, **two).json["content"] == " fox\n" * 4 and line != word
    for indent, said in ((1, " fox\n" * 4), (2, " fox\n")):
        ended = infill(server, **two, n_indent=indent).json
        assert ended["content"] == said and (indent == 1 or ended["stop_type"] == "limit")
    late = infill(server, **two, t_max_predict_ms=0.001).json
    assert late["content"] == " fox\n" and late["stop_type"] == "limit"
    assert infill(server, **two, t_max_predict_ms=60_000).json["content"] == " fox\n" * 4
    assert infill(server, **two, stop=["x\n f"]).json["content"] == " fo"


def test_what_has_no_room_is_left_out(small: ServerProcess) -> None:
    near = infill(small, input_prefix="the fox " * 300 + "here", input_suffix="there" + " the king" * 300, prompt=" and", n_predict=8)
    said = near.json
    assert near.status == 200 and said["truncated"] is True and said["tokens_evaluated"] <= 256 - 8 and said["tokens_predicted"] <= 8
    assert said["prompt"].startswith("[SUFFIX]there the king") and said["prompt"].endswith("the fox here and")
    assert "[PREFIX]" in said["prompt"] and said["tokens_evaluated"] > 256 * 0.8
    small.wait_for_output("only what is nearest to the gap is read")
    files = [{"filename": f"{number}.py", "text": "the tale " * 30} for number in range(9)]
    held = infill(small, input_extra=files, n_predict=4).json
    assert held["truncated"] is True and held["prompt"].count("--- snippet ---") in (1, 2) and held["tokens_evaluated"] < 256
    assert infill(small, prompt="begun " * 400).error["code"] == "context_length_exceeded"
    for path, fields in (("/v1/completions", {"prompt": "the fox " * 300, "suffix": "."}),
                         ("/api/generate", {"prompt": "the fox " * 300, "suffix": "."})):
        reply = small.request("POST", path, fields)
        assert reply.status == 400 and "the context holds 256" in reply.body.decode(), "nothing is cut where nobody asks for it"


def test_prompts_of_editors_are_not_kept_on_the_disk(server: ServerProcess) -> None:
    """Each is another one at the next key. What they take the place of is kept."""
    for number in range(4):
        before, behind = "the fox " * 100 + "and " * number, f"{number}" + " the king" * 300
        assert infill(server, input_prefix=before, input_suffix=behind).status == 200
    assert server.chat([{"role": "user", "content": "the tale " * 200}], max_tokens=2).status == 200
    assert "are kept in" not in server.err
    assert infill(server).status == 200
    server.wait_for_output("are kept in")


@pytest.mark.parametrize(("fields", "said"), [
    ({"input_extra": {}}, "input_extra"), ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
    ({"input_extra": [{"filename": 1, "text": "a"}]}, "input_extra[0].filename"), ({"input_prefix": 3}, "input_prefix"),
    ({"prompt": [1]}, "prompt"), ({"n_predict": -2}, "n_predict has to be 0 or more"), ({"temperature": -1}, "temperature must be"),
    ({"lora": [{"id": 0, "scale": 0.5}]}, "lora: there is no adapter 0"), ({"n_cmpl": 3}, "n_cmpl is not supported"),
    ({"json_schema": {}, "grammar": "root ::= \"a\""}, "json_schema and grammar both"),
    ({"json_schema": {"type": "odd"}}, "json_schema: the"),
    ({"samplers": [1]}, "samplers"), ({"t_max_predict_ms": "1"}, "t_max_predict_ms")])
def test_what_is_refused_is_named(server: ServerProcess, fields: dict, said: str) -> None:
    for stream in (False, True):
        reply = infill(server, **fields, stream=stream)
        assert reply.status == 400 and said in reply.error["message"], reply.body


def test_suffixes_that_are_none(server: ServerProcess) -> None:
    plain = server.complete(PREFIX).json["choices"]
    for nothing in ("", None):
        assert server.complete(PREFIX, suffix=nothing).json["choices"] == plain
    for fields in ({"echo": True}, {"prompt": [5, 6]}):
        assert server.complete(**{"prompt": PREFIX, **fields}, suffix=SUFFIX).error["param"] == "suffix"
    assert server.chat(suffix=SUFFIX).error["message"].startswith("suffix is not supported")
    assert server.request("POST", "/api/show", {"model": "coder"}).json["capabilities"] == ["completion", "insert"]


@pytest.mark.slow
@needs_vocabularies
def test_a_published_vocabulary(tmp_path: Path) -> None:
    with serving(model=str(model_of(tmp_path / "deepseek", VOCABS[0] / "deepseek-coder.gguf", 32_256))) as server:
        said = infill(server, prompt="    é").json["prompt"]
        assert said == f"<｜begin▁of▁sentence｜><｜fim▁begin｜>{PREFIX}    é<｜fim▁hole｜>{SUFFIX}<｜fim▁end｜>"
        assert infill(server, input_prefix="<｜fim▁end｜></s>", n_predict=3).status == 200
