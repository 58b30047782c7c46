"""Logprobs from `effllm serve`: against a float64 softmax over the engine's own logits, in every API that has them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from server_process import MESSAGES, ServerProcess, serving
from speculative_runs import both_ways
from test_continuous_batching import FOX, opened, rounds_of, wish, written
from test_serve import thinking_model
from test_tool_call_generation import WEATHER

import effllm
from effllm.cli.server.logprobs import LogprobColumns
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Call, Progress, TextDelta
from effllm.runtime.generation.batching import open_sequences
from effllm.runtime.generation.served_model import ServedModel
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.sampling.logprobs import MIN_LOGPROB, LogprobTrail, TokenLogprobs, token_logprobs
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.tokens.reasoning import ThinkFilter
from effllm.runtime.tokens.stream_filters import StopStrings

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
NEAR = 1e-9
FORM = 'root ::= "狐🦊 yes"'
INCLUDE = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def engine():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", spec="off")))[-1]
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    return Tokenizer.load(FABLE, engine.config)


def log_softmax(engine: Engine, ids: list[int]) -> np.ndarray:
    """float64 [len(ids), V]: of what comes behind each."""
    rows = np.concatenate([logits.astype(np.float64) for _, logits in engine.score(ids)])
    rows -= rows.max(1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(1, keepdims=True))


def of_answer(engine: Engine, prompt: list[int], ids: list[int]) -> np.ndarray:
    """`log_softmax` of what stands before each token of an answer, read as it was written."""
    engine.reset()
    for _ in engine.prefill(prompt):
        continue
    rows = np.array([engine._logits.copy(), *(engine.forward_logits([token])[0].copy() for token in ids[:-1])], np.float64)
    rows -= rows.max(1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(1, keepdims=True))


def spelled_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens by their text; fable has no two of one text."""
    found = {tokenizer.decode([token], False): token for token in tokenizer.vocabulary().values()}
    return found


def assert_told(told: list[dict], rows: np.ndarray, ids: list[int], top: int, tokenizer: Tokenizer) -> None:
    """Objects against the rows of a softmax that stand before each of the tokens."""
    assert len(told) == len(rows) == len(ids)
    for each, row, token in zip(told, rows, ids):
        assert each["token"] == tokenizer.decode([token], False) and each["bytes"] == [*each["token"].encode()]
        assert each["logprob"] == pytest.approx(row[token], abs=NEAR)
        assert [other["logprob"] for other in each["top_logprobs"]] == pytest.approx(np.sort(row)[::-1][:top].tolist(), abs=NEAR)
        assert all(other["bytes"] == [*other["token"].encode()] for other in each["top_logprobs"] if "\\x" not in other["token"])


def forgetful(server: ServerProcess) -> ServerProcess:
    """The server, which holds nothing of a prompt any more: what it held was read in other pieces, to other bits."""
    server.complete("Zebras.", max_tokens=0)
    return server


def content_of(reply) -> list[dict]:
    return reply.json["choices"][0]["logprobs"]["content"]


def ids_of(told: list[dict], tokenizer: Tokenizer) -> list[int]:
    by_text = spelled_ids(tokenizer)
    return [by_text[each["token"]] for each in told]


@pytest.mark.parametrize("fields", [
    {}, {"temperature": 1.4, "seed": 3, "top_k": 5, "repeat_penalty": 1.5}, {"logit_bias": {"264": -100, " said": False}},
    {"temperature": 1, "seed": 2, "xtc_probability": 1, "dry_multiplier": 2, "n_probs": 7}], ids=str)
def test_a_chat_tells_the_models_own_distribution(server: ServerProcess, engine: Engine, tokenizer: Tokenizer, fields: dict) -> None:
    """However tokens were drawn."""
    reply = forgetful(server).chat(logprobs=True, top_logprobs=4, **fields)
    prompt, told = tokenizer.encode_chat(MESSAGES, add_generation_prompt=True), content_of(reply)
    ids = ids_of(told, tokenizer)
    assert reply.json["usage"]["prompt_tokens"] == len(prompt) and len(ids) == 24
    assert_told(told, of_answer(engine, prompt, ids), ids, 4, tokenizer)
    (choice,) = reply.json["choices"]
    assert bytes(byte for each in told for byte in each["bytes"]).decode() == choice["message"]["content"]
    assert choice["message"] == server.chat(**{**fields, "n_probs": None}).json["choices"][0]["message"]  # it changes no answer
    assert choice["logprobs"].keys() == {"content", "refusal"} and choice["logprobs"]["refusal"] is None


def test_a_stream_tells_the_same(server: ServerProcess) -> None:
    whole = forgetful(server).chat(logprobs=True, top_logprobs=2, stop=["xyz"])
    events = forgetful(server).chat(logprobs=True, top_logprobs=2, stop=["xyz"], stream=True).events
    pieces = [choice for event in events for choice in event["choices"] if choice["logprobs"]]
    assert all(bytes(byte for each in piece["logprobs"]["content"] for byte in each["bytes"]).decode() == piece["delta"]["content"]
               for piece in pieces) and len(pieces) > 10
    joined = [each for piece in pieces for each in piece["logprobs"]["content"]]
    assert [each["token"] for each in joined] == [each["token"] for each in content_of(whole)]
    assert [each["logprob"] for each in joined] == pytest.approx([each["logprob"] for each in content_of(whole)], abs=NEAR)
    assert events[0]["choices"][0]["logprobs"] is None is events[-1]["choices"][0]["logprobs"]


def test_what_does_not_ask_is_told_nothing(server: ServerProcess) -> None:
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}, {"n_probs": 0}, {"top_logprobs": 0}):
        assert server.chat(**fields).json["choices"][0]["logprobs"] is None
    assert server.complete(logprobs=False).json["choices"][0]["logprobs"] is None
    assert server.message(logprobs=True).json["error"]["message"].startswith("logprobs is not supported")
    assert server.chat(logprobs=True).json["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_completions_have_four_lists(server: ServerProcess, engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Once upon a time")
    for fields in ({"logprobs": 3}, {"n_probs": 3}, {"logprobs": 0}):
        (choice,) = forgetful(server).complete(prompt, **fields).json["choices"]
        told, text = choice["logprobs"], choice["text"]
        ids, top = [spelled_ids(tokenizer)[token] for token in told["tokens"]], 3 if fields != {"logprobs": 0} else 0
        rows = of_answer(engine, prompt, ids)
        assert "".join(told["tokens"]) == text and told["text_offset"] == [len("".join(told["tokens"][:at])) for at in range(24)]
        assert told["token_logprobs"] == pytest.approx([row[token] for row, token in zip(rows, ids)], abs=NEAR)
        for likeliest, row, token in zip(told["top_logprobs"], rows, told["tokens"]):
            assert token in likeliest and len(likeliest) - top in (0, 1)
            assert [*likeliest.values()][:top] == pytest.approx(np.sort(row)[::-1][:top].tolist(), abs=NEAR)
    events = server.complete(prompt, logprobs=0, stream=True).events
    joined = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [each for part in joined for each in part[name]] == told[name]


def test_half_characters_are_told_by_their_bytes(server: ServerProcess) -> None:
    reply = server.chat(grammar=FORM, logprobs=True, max_tokens=40)
    text = reply.json["choices"][0]["message"]["content"]
    assert text.startswith("狐🦊") and bytes(byte for each in content_of(reply) for byte in each["bytes"]).decode() == text
    assert [each["token"] for each in content_of(reply)][0] == "\\xe7"
    (choice,) = server.complete(grammar=FORM, logprobs=0, max_tokens=40).json["choices"]
    assert choice["logprobs"]["tokens"][:3] == ["bytes:\\xe7", "bytes:\\x8b", "bytes:\\x90"]
    assert choice["logprobs"]["text_offset"][:4] == [0, 0, 0, 1]


def test_what_stands_before_a_stop_string_at_the_very_end_is_reported(server: ServerProcess) -> None:
    """A stop string that half a character completes where the answer is cut; another held back what comes before it."""
    fields = {"grammar": 'root ::= "x狐"', "max_tokens": 2, "stop": ["xy", "\ufffd"]}
    for more in ({}, {"logprobs": 0}):
        (choice,) = server.complete(**fields, **more).json["choices"]
        assert choice["text"] == "x" and (not more or choice["logprobs"]["tokens"] == ["x"])


def test_a_special_token_takes_no_place_in_the_text(tokenizer: Tokenizer) -> None:
    """As where an answer goes on behind the end of a text. An echoed prompt has it as it is written."""
    end, letters = min(tokenizer.stop_ids), tokenizer.encode("ab", add_special_tokens=False)
    told = [TokenLogprobs(token, -1.0) for token in (letters[0], end, letters[-1])]
    written = tokenizer.decode(letters[:1])
    assert LogprobColumns(tokenizer).to_json(told, tokenizer.decode([letters[0], letters[-1]]))["text_offset"] == [
        0, len(written), len(written)]
    echoed = tokenizer.decode([each.token for each in told], False)
    places = LogprobColumns(tokenizer).to_json(told, echoed)["text_offset"]
    assert places == [0, len(written), len(echoed) - len(tokenizer.decode(letters[-1:]))] and places[2] > places[1]


def test_a_stop_string_is_not_told(server: ServerProcess) -> None:
    whole = server.chat(max_tokens=60).json["choices"][0]["message"]["content"]
    for begin in (18, 20, 23):
        reply = server.chat(max_tokens=60, stop=whole[begin : begin + 7], logprobs=True)
        text, tokens = reply.json["choices"][0]["message"]["content"], [each["token"] for each in content_of(reply)]
        assert "".join(tokens[:-1]) in text and "".join(tokens).startswith(text)  # of the last token the stop string may have a part


def test_reasoning_stands_apart(tmp_path: Path) -> None:
    with serving(model=str(thinking_model(tmp_path / "thinker"))) as server:
        choice = server.chat(logprobs=True).json["choices"][0]
        assert choice["logprobs"]["content"] is None
        said = "".join(each["token"] for each in choice["logprobs"]["reasoning_content"])
        assert said.strip() == choice["message"]["reasoning_content"].strip() != ""
        events = server.chat(logprobs=True, stream=True).events
        pieces = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["delta"].get("reasoning_content")]
        assert "".join(each["token"] for piece in pieces for each in piece["reasoning_content"]) == said


def test_tool_calls_are_told_no_tokens_of(server: ServerProcess) -> None:
    for stream in (False, True):
        reply = server.chat(tools=[WEATHER], tool_choice="required", logprobs=True, max_tokens=160, stream=stream)
        choices = [choice for event in (reply.events if stream else [reply.json]) for choice in event["choices"]]
        assert any((choice.get("message") or choice["delta"]).get("tool_calls") for choice in choices)
        assert not any(choice["logprobs"] and choice["logprobs"]["content"] for choice in choices)


def test_responses_tell_them_where_they_are_included(server: ServerProcess) -> None:
    wanted = content_of(forgetful(server).chat(logprobs=True, top_logprobs=2))
    reply = forgetful(server).respond(include=INCLUDE, top_logprobs=2).json
    told = reply["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in told] == [each["token"] for each in wanted] and reply["top_logprobs"] == 2
    assert [each["logprob"] for each in told] == pytest.approx([each["logprob"] for each in wanted], abs=NEAR)
    events = server.respond(include=INCLUDE, top_logprobs=2, stream=True).named_events
    joined = [each for event in events if event["type"] == "response.output_text.delta" for each in event["logprobs"]]
    (done,) = (event["logprobs"] for event in events if event["type"] == "response.output_text.done")
    assert joined == done and [each["token"] for each in joined] == [each["token"] for each in wanted]


def test_what_is_said_of_answers_at_once_is_what_is_said_of_each_alone(server: ServerProcess) -> None:
    asked = [{"prompt": "Once upon a time", "seed": 1}, {"prompt": "The king", "seed": 2}, {"prompt": "A fox and a wolf", "seed": 3}]
    fields = {"logprobs": 2, "temperature": 1.0, "max_tokens": 60, "ignore_eos": True, "dry_multiplier": 0.5, "xtc_probability": 0.5,
              "top_n_sigma": 1.5}
    alone = [forgetful(server).complete(**each, **fields).json["choices"][0]["logprobs"] for each in asked]
    with serving("-np", "3") as other, ThreadPoolExecutor(3) as pool:
        together = [each.result() for each in [pool.submit(lambda each=each: other.complete(**each, **fields)) for each in asked]]
    for one, reply in zip(alone, together):
        told = reply.json["choices"][0]["logprobs"]
        assert told["tokens"] == one["tokens"] and told["token_logprobs"] == pytest.approx(one["token_logprobs"], abs=NEAR)


def test_drafts_change_no_number(engine: Engine, tokenizer: Tokenizer) -> None:
    chosen = SamplerSettings(temperature=0.7, seed=3, dry_multiplier=0.1)
    try:
        without, drafted = both_ways(engine, tokenizer, chosen, 80, tells=3)
        assert [step.logprobs for step in without] == [step.logprobs for step in drafted] and without[0].logprobs is not None
    finally:
        engine.speculation = None


# -- a text that is scored ----------------------------------------------------------------------------------------------------------


def test_an_echoed_prompt_is_scored(server: ServerProcess, engine: Engine, tokenizer: Tokenizer) -> None:
    """As lm-evaluation-harness asks: token ids, a list of one, a token more or none."""
    text = "Once upon a time there was a fox — a 狐 — who had a house."
    ids = tokenizer.encode(text)
    rows = log_softmax(engine, ids)
    for prompt, tokens in ((text, 0), (ids, 0), ([ids], 1), ([text], 1)):
        reply = server.complete(prompt, echo=True, logprobs=1, max_tokens=tokens).json
        (choice,) = reply["choices"]
        told = choice["logprobs"]
        assert choice["text"].startswith(text) and (choice["text"] == text) == (tokens == 0) and len(told["tokens"]) == len(ids) + tokens
        assert told["token_logprobs"][0] is None is told["top_logprobs"][0] and told["text_offset"][:3] == [0, 4, 9]
        assert told["token_logprobs"][1 : len(ids)] == pytest.approx([row[token] for row, token in zip(rows, ids[1:])], abs=NEAR)
        assert [max(each.values()) for each in told["top_logprobs"][1 : len(ids)]] == pytest.approx(rows[:-1].max(1).tolist(), abs=NEAR)
        assert reply["usage"]["prompt_tokens"] == len(ids) and reply["usage"]["completion_tokens"] == tokens
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    plain = server.complete(text, max_tokens=4).json["choices"][0]["text"]
    assert server.complete(text, echo=True, max_tokens=4).json["choices"][0]["text"] == text + plain
    events = server.complete(text, echo=True, max_tokens=4, stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events) == text + plain
    long = server.complete("The fox said. " * 200, echo=True, logprobs=0, max_tokens=0).json["choices"][0]["logprobs"]
    assert len(long["tokens"]) > 600 and max(long["token_logprobs"][1:]) < 0


def test_others_write_while_a_prompt_is_scored(tokenizer: Tokenizer) -> None:
    """Between its chunks, with the numbers that it has alone."""
    first = opened()
    engines, _ = open_sequences(first, 2)
    replies, scored = ServedModel(first, tokenizer, None, engines[1:]), wish(max_tokens=0, logprobs=1, echo=True)

    def numbers(came) -> list[float]:
        return [each.logprob for key, event in came if key == "scores" and isinstance(event, TextDelta) for each in event.tokens]

    alone = numbers(written(replies, {"scores": replies.complete(FOX * 55, scored)})[1])
    for each in engines:
        each.reset()
    rounds = rounds_of(replies)
    rounds.begin("writes", replies.complete("The sea", wish()))
    for _ in range(5):
        list(rounds.step())
    _, came = written(replies, {"scores": replies.complete(FOX * 55, scored)}, rounds)
    assert len(alone) > 700 and numbers(came) == alone
    keys = [key for key, event in came if isinstance(event, Progress | TextDelta)]
    chunks = [index for index, key in enumerate(keys) if key == "scores"]
    assert "writes" in keys[chunks[0] : chunks[-1]]
    engines[1].cache.close()
    first.close()


@pytest.mark.peer
@pytest.mark.slow
def test_lm_evaluation_harness_scores_by_it(server: ServerProcess, engine: Engine, tokenizer: Tokenizer) -> None:
    for each in ("aiohttp", "tenacity"):  # which it wants for this alone
        pytest.importorskip(each)
    Instance = pytest.importorskip("lm_eval.api.instance").Instance
    LocalCompletionsAPI = pytest.importorskip("lm_eval.models.openai_completions").LocalCompletionsAPI
    asked = [("Once upon a time there was a", " fox who had a house"), ("The king said:", " yes")]
    peer = LocalCompletionsAPI(model="fable", base_url=f"{server.url}/completions", tokenizer=str(FABLE), tokenizer_backend="huggingface")
    found = peer.loglikelihood([Instance("loglikelihood", {}, each, at) for at, each in enumerate(asked)])
    for (context, target), (score, greedy) in zip(asked, found):
        begin, ids = len(tokenizer.encode(context)), tokenizer.encode(context + target)
        rows = log_softmax(engine, ids)
        assert score == pytest.approx(sum(rows[at - 1, ids[at]] for at in range(begin, len(ids))), abs=NEAR) and not greedy


# -- pieces -------------------------------------------------------------------------------------------------------------------------


def test_chances_are_those_of_a_softmax() -> None:
    logits = (np.random.default_rng(1).standard_normal(500) * 4).astype(np.float32)
    logits[[3, 9]] = logits[7] = 20.0
    logits[20] = -np.inf
    wide = logits.astype(np.float64)
    expected = np.maximum(wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max(), MIN_LOGPROB)
    for top in (0, 2, 20, 500, 900):
        told = token_logprobs(logits, 20, top)
        assert told.logprob == MIN_LOGPROB and len(told.top) == min(top, 500)
        assert [token for token, _ in told.top][:3] == [3, 7, 9][:top]
        assert [value for _, value in told.top] == pytest.approx(np.sort(expected)[::-1][: len(told.top)].tolist(), abs=1e-9)
    assert token_logprobs(logits, 5, 0) == TokenLogprobs(5, pytest.approx(expected[5], abs=1e-9))
    sampler = Sampler(SamplerSettings(), 500)
    sampler.sample(np.where(np.isfinite(logits), logits, -30).astype(np.float32))
    assert sampler.token_logprobs is None


def spoken(tokens: list[str], think: ThinkFilter | None, stops: tuple[str, ...] = (),
           calls: bool = False) -> list[tuple[str, str, list[int]]]:
    """Texts of tokens on the way of an answer: (kind, text, numbers of its tokens) of each piece."""
    trail, stop, made = LogprobTrail(), StopStrings(stops), []
    for number, text in enumerate([*tokens, None]):
        certain = stop.push(text) if text is not None else stop.flush()
        at_answer, may_open = think is None or think.at_answer, think is not None and think.may_open
        parts = think.push(certain) if think else [("answer", certain)] if certain else []
        if text is None:
            parts += think.flush() if think else []
        else:
            is_answer = (at_answer or may_open) and (think is None or think.at_answer)
            trail.add(TokenLogprobs(number, 0.0), text, None if may_open and think.may_open else "answer" if is_answer else "thinking")
        parts = [("call", Call("f", "{}")) if calls and kind == "answer" and "(" in part else (kind, part) for kind, part in parts]
        for event in trail.events(parts, len(certain)):
            if isinstance(event, TextDelta):
                made.append((event.kind, event.text, [each.token for each in event.tokens]))
    return made


def test_tokens_leave_with_the_piece_that_holds_their_first_letter() -> None:
    assert spoken(["a", "", "é", "b"], None) == [("answer", "a", [0]), ("answer", "é", [1, 2]), ("answer", "b", [3])]
    assert spoken(["so", " E", "N", "x"], None, (" END",)) == [("answer", "so", [0]), ("answer", " ENx", [1, 2, 3])]
    assert spoken(["so. E", "ND", "x"], None, (" END",)) == [("answer", "so.", [0])]
    assert spoken(["s", " EN"], None, (" END",)) == [("answer", "s", [0]), ("answer", " EN", [1])]
    assert spoken(["I", "f(1)", "so"], None, calls=True) == [("answer", "I", [0]), ("answer", "so", [2])]


def test_tokens_of_reasoning_and_of_the_answer_part() -> None:
    made = spoken(["<think>", "hm", " so", "</think>", "\n\n", "yes", "!"], ThinkFilter())
    assert [(kind, text) for kind, text, _ in made] == [("thinking", "hm"), ("thinking", " so"), ("answer", "yes"), ("answer", "!")]
    assert [tokens for _, _, tokens in made] == [[0, 1], [2], [4, 5], [6]]
    made = spoken(["<", "b>", "yes"], ThinkFilter())
    assert made == [("answer", "<b>", [0, 1]), ("answer", "yes", [2])]
