"""Speculative decoding on real models: passes of several tokens have the bits of single-token passes, and answers are the same with and
without drafts: greedy, seeded, with penalties, packed caches, streamed weights, at every boundary."""

import importlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conversions import options, run
from family_models import CASES
from saved_models import saved
from streamed_models import streaming

import effllm
from effllm.kernels.cpu.ops import FEW_TOKENS
from effllm.runtime import speculate
from effllm.runtime.engine import Engine, Step, open_engine
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.speculate import MAX_VERIFIED, Speculation
from effllm.runtime.speculation.draft_model import DraftModel
from effllm.runtime.speculation.drafts import Draft, RecycledTokens, SuffixMatch
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.weights import stream_layout

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
QUESTION = "Tell me a story about the fox and the king."
GREEDY = SamplerSettings(temperature=0)
SEEDED = SamplerSettings(temperature=0.9, top_k=50, seed=7)
PENALISED = SamplerSettings(temperature=0.8, seed=3, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, penalty_last_n=40)
SAMPLERS = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}


class Ticks:
    """A clock on which every pass takes as long as any other."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Guesser:
    """Knows the answer, and says so with an error now and then; never right with `right` 0."""

    def __init__(self, answer: list[int], right: float, vocabulary: int) -> None:
        self._answer, self._right, self._vocabulary, self._random = answer, right, vocabulary, random.Random(5)
        self._at = 0

    def follow(self, history: list[int], known: int) -> None:
        self._at = len(history)

    def propose(self, most: int) -> Draft | None:
        tokens = [token if self._random.random() < self._right else (token + 1) % self._vocabulary
                  for token in self._answer[self._at : self._at + most]]
        return Draft(tuple(tokens), "guess") if tokens else None

    def observe(self, tokens: list[int], logits: np.ndarray) -> None:
        assert len(tokens) == len(logits)


class Silent(Guesser):
    """Never has an idea."""

    def __init__(self) -> None:
        super().__init__([], 0.0, 1)


def opened(folder: Path = FABLE, **asked: object) -> Engine:
    return list(open_engine(folder, EngineOptions(device="cpu", **{"ctx": 640, **asked})))[-1]


def pairs(others: Iterable[object], sooner: set[tuple[str, object]]) -> list[object]:
    """Every kind of cache with every other thing: some in every run, so that each of both is held there, all with the slow tests."""
    return [pytest.param(kind, other, marks=() if (kind, other) in sooner else pytest.mark.slow)
            for kind in ("raw", "packed", "all") for other in others]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    made = {"raw": opened(), "packed": opened(kv="4bit", kv_window=32), "all": opened(kv="3bit", kv_sink=0, kv_window=0)}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(autouse=True)
def _off(engines: dict[str, Engine]) -> Iterator[None]:
    """Engines are shared: what a test lets them draft with ends with it."""
    yield
    for engine in engines.values():
        engine.speculation = None


def lookup(*proposers: object) -> Speculation:
    return Speculation(proposers or (SuffixMatch(), RecycledTokens()), clock=Ticks())


def state(engine: Engine) -> tuple[object, ...]:
    """What the cache holds and takes."""
    cache = engine.cache
    slots = dict(cache.slots.of), sorted(cache.slots.free), set(cache.slots.used)
    return cache.n, cache.sealed, slots, cache.allocated_nbytes, list(engine.tokens)


def answer(engine: Engine, prompt: list[int], tokens: int | None, settings: SamplerSettings = GREEDY,
           stops: frozenset[int] = frozenset()) -> tuple[list[Step], tuple[object, ...], np.ndarray]:
    """The steps, what the cache is afterwards, and the logits of a token more."""
    engine.cache.truncate(0)  # gives slots back, which a reset does not
    engine.reset()
    for _ in engine.prefill(prompt):
        continue
    steps = list(engine.generate(Sampler(settings, engine.config.vocab_size), tokens, stops))
    after = state(engine)
    return steps, after, engine.forward_logits([5]).copy()


def same(engine: Engine, speculation: Speculation, prompt: list[int], tokens: int | None, settings: SamplerSettings = GREEDY,
         stops: frozenset[int] = frozenset()) -> list[Step]:
    """Hold an answer with drafts against that without, and everything that is left behind."""
    engine.speculation = None
    expected = answer(engine, prompt, tokens, settings, stops)
    engine.speculation = speculation
    found = answer(engine, prompt, tokens, settings, stops)
    assert found[0] == expected[0] and found[1] == expected[1] and np.array_equal(found[2], expected[2])
    return found[0]


def story(engine: Engine) -> list[int]:
    """A prompt of 120 tokens or so; pages of the engines here end 8 and 72 tokens behind it, and are sealed then or 32 tokens later."""
    text = "Once upon a time there was a little fox. The fox was happy, and he ran to the river every day. " * 6
    return Tokenizer.load(FABLE, engine.config).encode(text + "Once upon a", add_special_tokens=False)[-120:]


# -- bits ------------------------------------------------------------------------------------------------------------------------


def wide_and_narrow(engine: Engine, start: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of tokens run as many at once as may be, and of the same tokens one by one."""
    ids = np.random.default_rng(3).integers(0, engine.config.vocab_size, start + tokens).tolist()
    found = []
    for most in (MAX_VERIFIED, 1):
        engine.reset()
        rows = []
        for _ in engine.prefill(ids[:start]):
            continue
        while (at := len(engine.tokens)) < len(ids):
            count = min(most, engine.cache.max_speculative_tokens, len(ids) - at)
            rows.append(engine.run_draft(ids[at : at + count]).copy())
            for token in ids[at : at + count]:
                engine.accept_token(token)
        found.append(np.concatenate(rows))
    return found[0], found[1]


def test_a_pass_is_as_wide_as_the_kernels_of_a_few_tokens() -> None:
    assert MAX_VERIFIED == FEW_TOKENS == 8


@pytest.mark.parametrize("kind", ("raw", "packed", "all"))
def test_tokens_side_by_side_have_the_bits_of_tokens_alone(engines: dict[str, Engine], kind: str) -> None:
    for start, tokens in ((20, 60), (210, 80)):
        wide, narrow = wide_and_narrow(engines[kind], start, tokens)
        assert np.array_equal(wide, narrow)
    assert kind == "raw" or engines[kind].cache.sealed


@pytest.mark.parametrize("name", ("llama, float16", "gemma2", "opt", "mixtral", "gpt_oss",
                                  *(pytest.param(name, marks=pytest.mark.slow) for name in (
                                      "llama, biases", "qwen3", "phi3", "gemma3", "olmo2", "granite", "mistral, window", "qwen3_moe",
                                      "glm4"))))
def test_every_family_has_them(name: str, tmp_path: Path) -> None:
    saved(CASES[name], tmp_path / "model")
    engine = opened(tmp_path / "model", ctx=300)
    wide, narrow = wide_and_narrow(engine, 50, 90)
    assert np.array_equal(wide, narrow)
    engine.close()


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The packaged model in a format, made once."""

    @cache
    def made(spec: str) -> Path:
        out = tmp_path_factory.mktemp("quantized") / "fable"
        run(FABLE, out, options(spec))
        return out

    return made


@pytest.mark.parametrize(("spec", "more"), (("4bit", {}), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
    ("3bit", {"kernel": "lut"}), ("affine4:64", {"exact": True}), ("8bit", {})))))
def test_quantized_weights_have_them(spec: str, more: dict[str, object], quantized: Callable[[str], Path]) -> None:
    engine = opened(quantized(spec), **more)
    wide, narrow = wide_and_narrow(engine, 40, 90)
    assert np.array_equal(wide, narrow)
    engine.close()


# -- answers ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), pairs(SAMPLERS, {("raw", "greedy"), ("packed", "seeded"), ("all", "penalised")}))
def test_an_answer_with_lookup_is_the_answer_without(engines: dict[str, Engine], kind: str, name: str) -> None:
    engine, speculation, settings = engines[kind], lookup(), SAMPLERS[name]
    same(engine, speculation, story(engine), 120, settings)
    assert speculation.counts.drafted > 30 and 0 < speculation.counts.accepted < speculation.counts.drafted
    assert speculation.counts.passes + speculation.counts.accepted == 119


@pytest.mark.parametrize(("kind", "right"), pairs((0.0, 0.9, 1.0), {("raw", 0.9), ("packed", 0.0), ("packed", 0.9), ("all", 1.0)}))
def test_right_and_wrong_guesses_leave_the_same_behind(engines: dict[str, Engine], kind: str, right: float) -> None:
    """The answers end before, on and behind the borders of pages and of drafts."""
    engine, prompt = engines[kind], story(engines[kind])
    whole = prompt + [step.token for step in answer(engine, prompt, 60, SEEDED)[0]]
    for tokens in (1, 2, 9, 10, 43):
        same(engine, lookup(Guesser(whole, right, 4096)), prompt, tokens, SEEDED)


def test_a_right_guess_saves_passes_and_a_wrong_one_is_abandoned(engines: dict[str, Engine]) -> None:
    engine, prompt = engines["raw"], story(engines["raw"])
    whole = prompt + [step.token for step in answer(engine, prompt, 200)[0]]
    knows, errs = lookup(Guesser(whole, 1.0, 4096)), lookup(Guesser(whole, 0.0, 4096))
    same(engine, knows, prompt, 150)
    assert knows.counts.tokens_per_pass > 4 and knows.counts.accepted == knows.counts.drafted
    same(engine, errs, prompt, 100)
    before = errs.counts
    same(engine, errs, prompt, 60)
    without = errs.counts.since(before)
    assert before.drafted < 60 and without.drafted == 0, "what never matches is not drafted"
    assert without.undrafted == speculate.NOT_WORTH_IT and before.undrafted == ""
    assert errs.counts.accepted == 0


def test_nothing_drafted_has_a_reason(engines: dict[str, Engine]) -> None:
    engine, prompt = engines["raw"], story(engines["raw"])
    for proposers, tokens, reason in (((RecycledTokens(),), 2, speculate.TOO_SHORT), ((Silent(),), 9, speculate.NO_DRAFT)):
        speculation = lookup(*proposers)
        same(engine, speculation, prompt, tokens)
        assert speculation.counts.undrafted == reason


@pytest.mark.slow
def test_the_end_of_the_context_and_shifting() -> None:
    for more, tokens in (({}, None), ({"overflow": "shift"}, 180), ({"overflow": "shift", "kv": "4bit", "kv_window": 16}, 180)):
        engine = opened(ctx=256, **more)
        steps = same(engine, lookup(), story(engine), tokens, replace(SEEDED, temperature=0.6))
        assert steps[-1].finish == ("context" if tokens is None else "length")
        assert engine.speculation.counts.accepted > 0
        engine.close()


def test_a_stop_token_inside_a_draft_ends_the_answer(engines: dict[str, Engine]) -> None:
    engine, prompt = engines["raw"], story(engines["raw"])
    tokens = [step.token for step in answer(engine, prompt, 60)[0]]
    for end in (3, 10, 11, 12, 30):
        steps = same(engine, lookup(Guesser(prompt + tokens, 1.0, 4096)), prompt, 60, GREEDY, frozenset([tokens[end]]))
        assert steps[-1].finish == "stop" and steps[-1].token == tokens[end]


def test_an_answer_that_is_left_continues_where_it_stood(engines: dict[str, Engine]) -> None:
    engine, prompt = engines["raw"], story(engines["raw"])
    expected = [step.token for step in answer(engine, prompt, 30)[0]]
    for leave in (1, 5, 6, 7, 8, 15):
        engine.speculation = lookup(Guesser(prompt + expected, 0.9, 4096))
        engine.reset()
        for _ in engine.prefill(prompt):
            continue
        found, steps = [], engine.generate(Sampler(GREEDY, 4096), 30, frozenset())
        for step in steps:
            found.append(step.token)
            if len(found) == leave:
                break
        assert engine.tokens == prompt + found[:-1] and engine.cache.n == len(engine.tokens)
        steps.close()
        for _ in engine.prefill(prompt + found):
            continue
        found += [step.token for step in engine.generate(Sampler(GREEDY, 4096), 30 - leave, frozenset())]
        assert found == expected


def test_a_guess_that_overflows_harms_nothing(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = engines["raw"], story(engines["raw"])
    whole = prompt + [step.token for step in answer(engine, prompt, 80)[0]]
    real, spoilt = engine.run_draft, []

    def spoil(ids: list[int]) -> np.ndarray:
        rows = real(ids)
        if len(ids) > 3:
            rows[:] = np.nan
            spoilt.append(ids)
        return rows

    monkeypatch.setattr(engine, "run_draft", spoil)
    same(engine, lookup(Guesser(whole, 1.0, 4096)), prompt, 60)
    assert spoilt


@pytest.mark.parametrize("kv", (pytest.param("16bit", marks=pytest.mark.slow), "4bit"))
def test_streamed_weights(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 512 << 10)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 128 << 10)
    engine = streaming(FABLE, ctx=640, kv=kv, kv_window=32, keep=3)
    speculation = lookup()
    same(engine, speculation, story(engine), 45, SEEDED)
    assert speculation.counts.accepted > 0 and engine.model.pager.traffic.reads > 0
    engine.close()


def test_a_draft_model(engines: dict[str, Engine], quantized: Callable[[str], Path]) -> None:
    """The packaged model drafts for itself, and at four bits, up to the end of its own context."""
    engine = engines["packed"]
    for folder in (FABLE, quantized("4bit")):
        for settings in (GREEDY, SEEDED):
            model = DraftModel(prepare(folder, EngineOptions(device="cpu", ctx=200)), 4096)
            list(model.load())
            speculation = Speculation((), model, Ticks())
            same(engine, speculation, story(engine), 100, settings)
            counts = speculation.counts
            assert counts.passes + counts.accepted == 99 and counts.drafted >= counts.accepted > 20
            assert settings is not GREEDY or counts.accepted / counts.drafted > 0.6
            model.close()


# -- conversations ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "settings"), (("raw", SEEDED), ("packed", GREEDY), pytest.param("all", SEEDED, marks=pytest.mark.slow)))
def test_a_conversation_says_the_same(engines: dict[str, Engine], kind: str, settings: SamplerSettings) -> None:
    engine = engines[kind]
    tokenizer = Tokenizer.load(FABLE, engine.config)

    def talk(speculation: Speculation | None, **more: object) -> list[object]:
        engine.cache.truncate(0)
        engine.reset()
        engine.speculation = speculation
        session, told = Session(engine, tokenizer, settings, **{"max_tokens": 30, **more}), []

        def say(events: object) -> None:
            stats = list(events)[-1].stats
            told.append((stats.text, stats.token_ids, stats.finish_reason, stats.cached_tokens, stats.context_used, state(engine)))

        say(session.ask(QUESTION))
        say(session.ask("Say it again."))
        say(session.regenerate())
        say(session.continue_())
        session.undo()
        say(session.ask("And then?"))
        told.append((session.messages, session.used))
        return told

    expected, speculation = talk(None), lookup()
    assert talk(speculation) == expected and speculation.counts.accepted > 0
    word = expected[0][0].split()[12]
    assert talk(lookup(), stops=(word,)) == talk(None, stops=(word,))


def test_stats_tell_what_was_drafted(engines: dict[str, Engine]) -> None:
    engine = engines["raw"]
    engine.speculation = None
    session = Session(engine, Tokenizer.load(FABLE, engine.config), SEEDED, max_tokens=80)
    assert list(session.ask(QUESTION))[-1].stats.speculation is None
    engine.speculation = lookup()
    stats = list(session.regenerate())[-1].stats
    told = stats.to_json()["speculation"]
    assert told == stats.speculation and set(told) == {"passes", "drafted", "accepted", "tokens_per_pass", "gain",
                                                         "undrafted"}
    assert told["passes"] + told["accepted"] == len(stats.token_ids) - 1
    assert told["tokens_per_pass"] == pytest.approx((len(stats.token_ids) - 1) / told["passes"])


def test_the_benchmark_adds_up_what_its_answers_tell(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(effllm.__path__[0]) / "benchmarks"))
    script, engine, speculation = importlib.import_module("speculation"), engines["raw"], lookup()
    spent, prompt, text = script.Timings(), story(engine), list(range(300, 310)) * 6
    for _ in range(2):
        engine.reset()
        for _ in engine.prefill(prompt):
            continue
        script.time_passes(engine, speculation, script.Replay(len(prompt), text), len(text), spent, float("inf"))
    assert spent.counts == speculation.counts and spent.counts.accepted > 0
    assert spent.tokens[True] == spent.counts.passes + spent.counts.accepted and sum(spent.tokens.values()) == 2 * (len(text) - 1)
