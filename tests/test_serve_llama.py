"""llama.cpp's own API of `effllm serve`: a real process with the packaged model, and several behind one address."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_process import MESSAGES, Reply, ServerProcess, serving, wait_until
from test_serve_router import here, states  # noqa: F401  a fixture

import effllm
from effllm.runtime.calibrate import built_in_text

ONCE = "Once upon a time"
SCHEMA = {"type": "object", "properties": {"fox": {"type": "boolean"}}, "required": ["fox"], "additionalProperties": False}
# What SillyTavern sends to it, but for its names of samplers that are llama.cpp's for nothing.
OF_TAVERN = {"prompt": ONCE, "max_new_tokens": 24, "max_tokens": 24, "n_predict": 24, "num_predict": 24, "temperature": 0.7, "top_p": 0.9,
             "typical_p": 1, "typical": 1, "min_p": 0.05, "repetition_penalty": 1.1, "rep_pen": 1.1, "repeat_penalty": 1.1,
             "repeat_last_n": 64, "frequency_penalty": 0, "presence_penalty": 0, "top_k": 40, "tfs": 1, "seed": 7, "rep_pen_range": 64,
             "ignore_eos": False, "stopping_strings": ["\nYou:"], "stop": ["\nYou:"], "stream": False, "dynatemp_range": 0,
             "dynatemp_exponent": 1, "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "dry_multiplier": 0, "dry_base": 1.75,
             "dry_allowed_length": 2, "dry_penalty_last_n": 0, "dry_sequence_breakers": ["\n", ":"], "xtc_threshold": 0.1,
             "xtc_probability": 0, "nsigma": 0, "top_n_sigma": 0, "min_keep": 0, "grammar": "", "n_probs": 10, "logit_bias": [],
             "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "tfs_z", "top_p", "min_p", "xtc", "temperature"],
             "cache_prompt": True, "model": "fable"}


@pytest.fixture(scope="module")
def many(here: dict[str, str]) -> Iterator[ServerProcess]:  # noqa: F811
    with serving(model=None, **here) as server:
        yield server


def completed(server: ServerProcess, path: str = "/completion", **fields: object) -> Reply:
    return server.request("POST", path, {"prompt": ONCE, "temperature": 0, "n_predict": 12, **fields})


def events(reply: Reply) -> list[dict]:
    """The objects of a stream, which has no mark at its end."""
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream") and b"[DONE]" not in reply.body
    return [json.loads(each.removeprefix("data: ")) for each in reply.body.decode().split("\n\n") if each and each[0] != ":"]


def test_an_answer_has_the_shape_of_llama_servers(server: ServerProcess) -> None:
    text = server.complete(ONCE, max_tokens=12).json["choices"][0]["text"]
    ids = server.request("POST", "/tokenize", {"content": ONCE}).json["tokens"]
    for path in ("/completion", "/completions"):
        whole = completed(server, path, return_tokens=True).json
        assert (whole["content"], whole["stop"], whole["model"], whole["index"]) == (text, True, "fable", 0)
        assert server.request("POST", "/detokenize", {"tokens": whole["tokens"]}).json["content"] == text and len(whole["tokens"]) == 12
        assert (whole["tokens_predicted"], whole["tokens_evaluated"], whole["prompt"]) == (12, len(ids), ONCE)
        assert (whole["stop_type"], whole["stopping_word"], whole["truncated"], whole["has_new_line"]) == ("limit", "", False, "\n" in text)
        assert whole["tokens_cached"] in (len(ids) + 11, len(ids) + 12)
        assert {"prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms",
                "predicted_per_token_ms", "predicted_per_second", "cache_n"} <= set(whole["timings"])
        settings = whole["generation_settings"]
        assert (settings["temperature"], settings["n_predict"], settings["stream"], settings["top_k"]) == (0, 12, False, 50)
        assert isinstance(settings["seed"], int) and settings["seed"] >= 0
    assert completed(server).json["tokens"] == []


def test_prompts_of_text_and_tokens(server: ServerProcess) -> None:
    ids = server.request("POST", "/tokenize", {"content": ONCE}).json["tokens"]
    first = server.request("POST", "/tokenize", {"content": "Once upon"}).json["tokens"]
    said = completed(server).json["content"]
    for prompt in ([ONCE], ids, [ids], {"prompt_string": ONCE}, [{"prompt_string": ONCE, "multimodal_data": []}], ["Once upon", *ids[2:]],
                   [*first, " a time"], [[*first, " a time"]]):
        assert completed(server, prompt=prompt).json["content"] == said, prompt
    assert completed(server, prompt=["Once upon", *ids[2:]]).json["prompt"] == ONCE
    for prompt in ([ONCE, 1.5], [ids, True], [[ONCE, ONCE]], [1.5], [True], 7, None, {"prompt_string": 3}, [[ids]], {}):
        assert completed(server, prompt=prompt).error["param"] == "prompt", prompt
    assert "prompt is empty" in completed(server, prompt="").error["message"]
    assert completed(server, prompt=[10**6]).status == 400
    image = {"prompt_string": "<__media__>", "multimodal_data": ["AAAA"]}
    assert "multimodal_data is not supported" in completed(server, prompt=image).error["message"]


def test_a_stream_joined_is_the_whole(server: ServerProcess) -> None:
    whole = completed(server, return_tokens=True).json
    *pieces, last = events(completed(server, stream=True, return_tokens=True))
    assert "".join(each["content"] for each in pieces) == whole["content"] and len(pieces) > 6
    assert [token for each in pieces for token in each["tokens"]] == whole["tokens"]
    assert not any(each["stop"] for each in pieces) and last["stop"] and last["content"] == "" and last["stop_type"] == "limit"
    assert last["timings"]["predicted_n"] == 12 and last["generation_settings"]["stream"] is True
    assert all(each["tokens"] == [] for each in events(completed(server, stream=True)))


def test_where_it_ends(server: ServerProcess) -> None:
    whole = completed(server, n_predict=40).json["content"]
    stop = whole[20:25]
    ended = completed(server, n_predict=40, stop=[stop, "\0"]).json
    assert (ended["content"], ended["stop_type"], ended["stopping_word"]) == (whole.partition(stop)[0], "word", stop)
    end = server.request("POST", "/tokenize", {"content": "<|end|>"}).json["tokens"]
    assert completed(server, logit_bias=[[end[0], 1000]]).json["stop_type"] == "eos"
    nothing = completed(server, n_predict=0).json
    assert (nothing["content"], nothing["tokens_predicted"], nothing["stop_type"]) == ("", 0, "limit")
    assert completed(server, n_predict=-1, stop=["."]).json["stop_type"] in ("word", "eos", "limit")
    full = completed(server, prompt="the fox " * 3000)
    assert full.status == 400 and full.error["code"] == "context_length_exceeded"


# What SillyTavern 1.19 sends of a fresh installation, with token probabilities on.
OF_SILLYTAVERN = {
    "max_new_tokens": 20, "max_tokens": 20, "logprobs": 10, "temperature": 0.7, "top_p": 0.5, "typical_p": 1, "typical": 1, "min_p": 0,
    "repetition_penalty": 1.2, "frequency_penalty": 0, "presence_penalty": 0, "top_k": 40, "skew": 0, "min_tokens": 0,
    "add_bos_token": True, "smoothing_factor": 0.0, "smoothing_curve": 1.0, "dry_allowed_length": 2, "dry_multiplier": 0.0,
    "dry_base": 1.75, "dry_sequence_breakers": ["\n", ":", '"', "*"], "dry_penalty_last_n": 0, "max_tokens_second": 0,
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p"],
    "stopping_strings": ["\nUser:"], "stop": ["\nUser:"], "truncation_length": 2048, "ban_eos_token": False, "skip_special_tokens": True,
    "include_reasoning": True, "top_a": 0, "tfs": 1, "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "",
    "banned_strings": [], "api_type": "llamacpp", "api_server": "http://127.0.0.1:8080", "xtc_threshold": 0.1, "xtc_probability": 0,
    "nsigma": 0.0, "top_n_sigma": 0.0, "min_keep": 0, "adaptive_target": -0.01, "adaptive_decay": 0.9, "rep_pen": 1.2, "rep_pen_range": 0,
    "repetition_penalty_range": 0, "guidance_scale": 1, "negative_prompt": "", "repeat_penalty": 1.2, "repeat_last_n": 0, "n_predict": 20,
    "num_predict": 20, "num_ctx": 2048, "mirostat": 0, "ignore_eos": False, "n_probs": 10, "rep_pen_slope": 1, "n": 1, "logit_bias": [],
    "grammar": "", "cache_prompt": True}


def test_sillytavern_is_answered(server: ServerProcess) -> None:
    for stream in (False, True):
        reply = completed(server, **OF_SILLYTAVERN, stream=stream)
        told = events(reply)[0] if stream else reply.json
        assert reply.status == 200 and len(told["completion_probabilities"][0]["top_logprobs"]) == 10


def test_forms_and_chances(server: ServerProcess) -> None:
    assert set(json.loads(completed(server, json_schema=SCHEMA, n_predict=60).json["content"])) == {"fox"}
    assert completed(server, grammar='root ::= "yes" | "no"').json["content"] in ("yes", "no")
    told = completed(server, n_probs=3, return_tokens=True).json
    rows = told["completion_probabilities"]
    assert [row["id"] for row in rows] == told["tokens"] and "".join(row["token"] for row in rows) == told["content"]
    assert all(row["logprob"] <= 0 and len(row["top_logprobs"]) == 3 and set(row) == {"id", "token", "logprob", "bytes", "top_logprobs"}
               and set(row["top_logprobs"][0]) == {"id", "token", "logprob", "bytes"} for row in rows)
    *pieces, last = events(completed(server, n_probs=3, stream=True))
    assert [row for piece in pieces for row in piece["completion_probabilities"]] == rows and "completion_probabilities" not in last


@pytest.mark.parametrize("token", [-1, 1 << 32, 10**30, 4096])
def test_tokens_that_no_vocabulary_has(server: ServerProcess, token: int) -> None:
    refused = completed(server, prompt=["Once", token])
    assert refused.status == 400 and refused.error["param"] == "prompt" and f"token id {token} is outside" in refused.error["message"]


def test_fields_of_an_answer_are_chosen(server: ServerProcess) -> None:
    chosen = completed(server, response_fields=["content", "timings/predicted_n", "generation_settings/n_predict", "nothing", "stop/deep"])
    assert set(chosen.json) == {"content", "timings/predicted_n", "generation_settings/n_predict"}
    assert chosen.json["timings/predicted_n"] == chosen.json["generation_settings/n_predict"] == 12


def test_samplers_that_are_not_named_are_off(server: ServerProcess) -> None:
    def settings(**fields: object) -> dict:
        asked = {"n_predict": 0, "seed": 1, "temperature": 0.7, "top_k": 9, "top_p": 0.5, "min_p": 0.2, **fields}
        return completed(server, **asked).json["generation_settings"]

    usual = settings()
    assert (usual["top_k"], usual["top_p"], usual["min_p"], usual["temperature"], usual["repeat_penalty"]) == (9, 0.5, 0.2, 0.7, 1.2)
    for named in (["top_k", "min_p"], "km"):
        few = settings(samplers=named)
        assert (few["top_k"], few["top_p"], few["min_p"], few["temperature"], few["repeat_penalty"]) == (9, 1, 0.2, 1, 1), named
    assert settings(samplers="edskypmxt") == usual == settings(samplers=usual["samplers"])
    sure = settings(samplers=["top_k", "top_p", "infill"])
    assert sure["samplers"][-1] == "infill" and (sure["top_k"], sure["top_p"], sure["temperature"]) == (9, 0.5, 1)
    assert settings(samplers=["top_k"], temperature=0)["temperature"] == 0, "what is greedy stays so"


@pytest.mark.parametrize(("samplers", "unknown"), [(["top_k", "topk"], "'topk'"), (["temp"], "'temp'"), ("kqt", "'q'")])
def test_an_unknown_sampler_is_refused_with_the_known_names(server: ServerProcess, samplers: object, unknown: str) -> None:
    refused = completed(server, samplers=samplers)
    assert refused.status == 400 and refused.error["param"] == "samplers" and f"{unknown} is not a sampler" in refused.error["message"]
    assert "penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature, infill" in refused.error["message"]
    assert ("edskypmxti" in refused.error["message"]) is isinstance(samplers, str)


def test_what_the_model_is_sure_of(server: ServerProcess) -> None:
    """It ends where that is nothing; a form goes before."""
    asked = {"samplers": ["top_k", "top_p", "infill"], "n_predict": 60, "top_k": 40, "top_p": 0.99, "temperature": None}
    first, second = (completed(server, prompt="and they lived happily ever", **asked).json for _ in range(2))
    assert first["content"] == second["content"] and first["stop_type"] == "eos" and first["content"].startswith(" after.")
    rows = completed(server, prompt="and they lived happily ever", **asked, n_probs=1).json["completion_probabilities"]
    assert all(row["logprob"] > -2.5 for row in rows), "a fifth of all, or of the ways to cut one text"
    assert completed(server, grammar='root ::= "yes"', **asked).json["content"] == "yes"


def test_what_sillytavern_sends(server: ServerProcess) -> None:
    whole = server.request("POST", "/completion", OF_TAVERN)
    assert whole.status == 200 and whole.json["tokens_predicted"] <= 24 and whole.json["generation_settings"]["seed"] == 7
    *pieces, _ = events(server.request("POST", "/completion", {**OF_TAVERN, "stream": True}))
    assert "".join(each["content"] for each in pieces) == whole.json["content"]
    props = server.request("GET", "/props").json
    assert props["default_generation_settings"]["n_ctx"] == 2048 and "<|assistant|>" in props["chat_template"]


def test_what_is_told_of_the_server(server: ServerProcess) -> None:
    props = server.request("GET", "/props").json
    assert props["total_slots"] == 1 and props["model_alias"] == "fable" and "/" not in props["model_path"]
    assert (props["bos_token"], props["eos_token"]) == ("<|endoftext|>", "<|end|>")
    assert props["modalities"] == {"vision": False, "audio": False} and props["build_info"] == f"effllm-{effllm.__version__}"
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8 and server.request("GET", "/props?x=1").json == props
    prompt = server.request("POST", "/apply-template", {"messages": MESSAGES}).json["prompt"]
    assert prompt == f"<|user|>\n{MESSAGES[0]['content']}<|end|><|assistant|>\n"
    chat = server.chat(MESSAGES, max_tokens=5).json["choices"][0]["message"]["content"]
    assert completed(server, prompt=prompt, n_predict=5).json["content"] == chat
    assert server.request("POST", "/apply-template", {}).error["param"] == "messages"


def test_nothing_of_the_server_is_changed_by_a_request(server: ServerProcess, many: ServerProcess) -> None:
    before = states(many)
    for each in (server, many):
        refused = each.request("POST", "/props", {"default_generation_settings": {}})
        assert refused.status == 501 and refused.error["type"] == "not_supported_error"
        assert "only POST /lora-adapters changes server settings" in refused.error["message"]
    assert states(many) == before


def test_pieces_of_tokens_are_texts_or_bytes(server: ServerProcess) -> None:
    text = "the kïng 🦊"
    made = server.request("POST", "/tokenize", {"content": text, "with_pieces": True}).json["tokens"]
    assert [each["id"] for each in made] == server.request("POST", "/tokenize", {"content": text}).json["tokens"]
    spelled = [each["piece"] if isinstance(each["piece"], list) else [*each["piece"].encode()] for each in made]
    assert bytes(sum(spelled, [])).decode() == text and made[0]["piece"] == "the"
    assert sum(isinstance(each["piece"], list) for each in made) >= 4, "a fox is four bytes"


def test_marks_in_a_text_are_letters_where_that_is_asked(server: ServerProcess) -> None:
    def tokens(content: str, **fields: object) -> list[int]:
        return server.request("POST", "/tokenize", {"content": content, **fields}).json["tokens"]

    text = "a<|end|>b"
    (end,) = tokens("<|end|>")
    assert end in tokens(text) == tokens(text, parse_special=True)
    plain = tokens(text, parse_special=False)
    assert end not in plain and server.request("POST", "/detokenize", {"tokens": plain}).json["content"] == text
    assert tokens("a fox", parse_special=False) == tokens("a fox") and end in tokens(text), "and nobody else's are"
    begun = tokens(text, parse_special=False, add_special=True)
    assert begun[len(begun) - len(plain):] == plain and begun[: len(begun) - len(plain)] == [
        token for token in tokens("a", add_special=True) if token not in tokens("a")]


def figures(server: ServerProcess, query: str = "") -> dict[str, float]:
    reply = server.request("GET", f"/metrics{query}")
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = reply.body.decode().splitlines()
    found = dict(line.split(" ") for line in lines if not line.startswith("#"))
    for name in found:
        assert any(line.startswith(f"# HELP {name} ") for line in lines) and f"# TYPE {name} " in reply.body.decode()
    return {name.removeprefix("llamacpp:"): float(value) for name, value in found.items()}


def test_what_answers_took_is_counted(server: ServerProcess) -> None:
    before = figures(server)
    server.complete("Nobody else has read this prompt before.", max_tokens=7)
    server.chat(MESSAGES, max_tokens=3, stream=True)
    server.request("POST", "/api/generate", {"prompt": ONCE, "options": {"num_predict": 2}})
    after = figures(server)
    assert after["tokens_predicted_total"] - before["tokens_predicted_total"] == 12
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] >= 10
    assert after["prompt_seconds_total"] > before["prompt_seconds_total"] and after["predicted_tokens_seconds"] > 0
    assert after["n_tokens_max"] >= 20 and after["requests_processing"] == after["requests_deferred"] == 0


def test_slots_that_are_busy() -> None:
    """With an answer that goes on for as long as a test may be kept from looking at it."""
    with serving("--overflow", "shift", "-t", "1") as server:
        (slot,) = server.request("GET", "/slots").json
        assert slot["id"] == 0 and slot["n_ctx"] == 2048 and slot["is_processing"] is False
        endless = {"prompt": ONCE, "ignore_eos": True, "n_predict": -1, "stream": True, "temperature": 0}
        running = server.open("POST", "/completion", endless)
        running.readline()
        (slot,) = server.request("GET", "/slots").json
        assert slot["is_processing"] is True and server.request("GET", "/slots?fail_on_no_slot=1").status == 503
        assert figures(server)["requests_processing"] == 1
        running.connection.close()
        wait_until(lambda: not server.request("GET", "/slots").json[0]["is_processing"])
        assert server.request("GET", "/slots?fail_on_no_slot=1").status == 200


def test_a_model_without_the_tokens_fills_in_nothing(server: ServerProcess) -> None:
    reply = server.request("POST", "/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert reply.status == 501 and reply.error["message"].startswith("Infill is not supported by this model: fable has no tokens")
    assert server.complete(suffix="b").error["param"] == "suffix"
    reply = server.request("POST", "/api/generate", {"prompt": "a", "suffix": "b"})
    assert reply.status == 400 and '"fable" does not support insert' in reply.json["error"], "by which Ollama's programs know it"
    assert server.complete().status == 200


def test_a_key_guards_all_of_them() -> None:
    with serving("--api-key", "k", "--parallel", "2") as server:
        for method, path in (("POST", "/completion"), ("POST", "/infill"), ("GET", "/props"), ("GET", "/slots"), ("GET", "/metrics"),
                             ("POST", "/apply-template")):
            assert server.request(method, path, {}).status == 401
            assert server.request(method, path, {}, Authorization="Bearer k").status != 401
        assert server.request("GET", "/props", Authorization="Bearer k").json["total_slots"] == 2
        with ThreadPoolExecutor(4) as pool:
            bodies = [{"prompt": f"There were {number} foxes and", "temperature": 0, "n_predict": 9} for number in range(4)]
            asked = [*pool.map(lambda body: server.request("POST", "/completion", body, Authorization="Bearer k").json["content"], bodies)]
        assert asked == [server.request("POST", "/completion", body, Authorization="Bearer k").json["content"] for body in bodies]
        assert len(server.request("GET", "/slots", Authorization="Bearer k").json) == 2


def test_a_prompt_is_read_again_where_that_is_asked() -> None:
    """Over a packed cache tokens that are read again see as packed what they saw exact before."""
    chat = [{"role": "user", "content": built_in_text()[:1400]}]
    with serving("--kv", "4bit", "--parallel", "2") as server:
        def told(**fields: object) -> tuple[int, object, int, object]:
            text = server.complete(chat[0]["content"], max_tokens=48, logprobs=1, **fields).json
            said = server.chat(chat, max_tokens=48, logprobs=True, **fields).json
            return (text["usage"]["prompt_tokens_details"]["cached_tokens"], text["choices"],
                    said["usage"]["prompt_tokens_details"]["cached_tokens"], said["choices"])

        first, anew, again, last = told(), told(cache_prompt=False), told(cache_prompt=True), told(cache_prompt=False)
        with ThreadPoolExecutor() as both:  # one that is being read lends to the other
            beside = [each.result() for each in [both.submit(told, cache_prompt=False) for _ in range(2)]]
    assert beside == [first, first] and first == anew == last and first[0] == first[2] == 0
    assert again[0] > 200 and again[2] > 200 and again[1] != first[1]


def test_of_several_models_a_request_names_its_own(many: ServerProcess) -> None:
    assert completed(many).status == 400 and many.request("GET", "/props").status == 400, "none is loaded"
    for path in ("/slots", "/metrics"):
        assert "twin is not loaded" in many.request("GET", f"{path}?model=twin").error["message"]
    assert set(states(many).values()) == {"unloaded"}, "and none is by these"
    alone = completed(many, model="fable").json
    assert alone["model"] == "fable" and completed(many).json["content"] == alone["content"], "the one that is loaded"
    assert [each["content"] for each in events(completed(many, stream=True))][-1] == ""
    assert many.request("POST", "/infill", {"input_prefix": "a", "input_suffix": "b"}).status == 501
    template = many.request("GET", "/props?model=twin").json["chat_template"]
    assert template.startswith("Long, long ago.") and states(many)["twin"] == "loaded"
    for name in ("fable", "twin"):
        prompt = many.request("POST", "/apply-template", {"model": name, "messages": MESSAGES}).json["prompt"]
        assert prompt.startswith("Long, long ago.") == (name == "twin")
    assert figures(many, "?model=fable")["tokens_predicted_total"] >= 24 and figures(many, "?model=twin")["tokens_predicted_total"] == 0
    assert many.request("GET", "/slots?model=twin").json[0]["n_ctx"] == 2048
    assert many.request("GET", "/props?model=nobody").status == 404 and many.request("GET", "/slots").status == 400


def test_watching_a_model_is_no_use_of_it(many: ServerProcess) -> None:
    assert completed(many, model="fable", keep_alive="1s").status == 200
    wait_until(lambda: many.request("GET", "/metrics?model=fable").status != 200, message=lambda: "it is held by those who watch")
    assert states(many)["fable"] == "unloaded"
