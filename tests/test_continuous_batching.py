"""Continuous batching on the real model: each answer equals, token for token, the one generated alone; one continues during another's
prefill."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from test_speculation import Ticks

import effllm
from effllm import EffllmError, UsageError
from effllm.runtime.constraints.constraint import read_grammar_flag
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Done, Event, TextDelta
from effllm.runtime.generation.batching import MAX_PASS_TOKENS, open_sequences
from effllm.runtime.generation.parallel import drafts_nbytes
from effllm.runtime.generation.scheduler import Scheduler
from effllm.runtime.generation.served_model import GenerationOptions, ServedModel
from effllm.runtime.planning.process_memory import baseline
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.speculate import Speculation
from effllm.runtime.speculation.drafts import RecycledTokens, SuffixMatch
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.tool_calls.tool_calling import tools_of

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
FOX = "The fox asked the king for bread and the king gave him none. "
GREEDY = SamplerSettings(temperature=0)
SEQUENCES = 4


def opened(**options) -> Engine:
    return list(open_engine(FABLE, EngineOptions(device="cpu", ctx=1024, parallel=SEQUENCES, **options)))[-1]


@pytest.fixture(scope="module", params=[pytest.param("16bit", marks=pytest.mark.slow), "4bit"])
def engines(request) -> Iterator[list[Engine]]:
    engine = opened(kv=request.param)
    engine.speculation = Speculation((SuffixMatch(), RecycledTokens()), clock=Ticks())
    made, said = open_sequences(engine, SEQUENCES)
    assert len(made) == SEQUENCES and not said
    yield made
    for other in made[1:]:
        other.cache.close()
    engine.close()


@pytest.fixture
def replies(engines) -> ServedModel:
    for engine in engines:
        engine.reset()
    return ServedModel(engines[0], Tokenizer.load(FABLE, engines[0].config), None, engines[1:])


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def wish(**more) -> GenerationOptions:
    return GenerationOptions(**{"settings": GREEDY, "max_tokens": 60, "ignore_eos": True, **more})


def rounds_of(replies: ServedModel) -> Scheduler[str]:
    """Each turn takes a second: after a chunk of a prompt there is one pass of the others."""
    return Scheduler(replies.engine.batched_passes, count().__next__)


def written(replies: ServedModel, wanted: dict[str, Iterator[Event]], rounds: Scheduler | None = None,
            ) -> tuple[dict[str, Done], list[tuple[str, Event]]]:
    """How answers ended, an error in the place of what it cost, and all events in the order in which they came."""
    rounds = rounds_of(replies) if rounds is None else rounds
    for key, events in wanted.items():
        rounds.begin(key, events)
    ends, came = {}, []
    while len(rounds):
        for key, event in rounds.step():
            if isinstance(event, Done | Exception):
                ends[key] = event
            came.append((key, event))
    return ends, came


def tokens_of(ends) -> dict[str, tuple[int, ...]]:
    return {key: done.stats.token_ids for key, done in ends.items()}


def one_by_one(replies: ServedModel, wanted) -> dict[str, tuple[int, ...]]:
    found = {}
    for key, start in wanted.items():
        found |= tokens_of(written(replies, {key: start()})[0])
        for engine in (replies.engine, *(slot.engine for slot in replies._slots)):
            engine.reset()
    return found


def test_answers_at_once_are_what_they_are_alone(replies):
    """Of prompts of several lengths, over the borders of pages and past where some are packed; one sampled, one held to a form, one that
    ends at a stop string, so that the others go on in passes of fewer."""
    wanted = {"short": lambda: replies.reply(asked("Tell me of the sea."), wish(max_tokens=300)),
              "long": lambda: replies.reply(asked(FOX * 30), wish(max_tokens=200)),
              "sampled": lambda: replies.reply(asked(FOX * 5), wish(settings=SamplerSettings(temperature=1.0, seed=5), max_tokens=150)),
              "held": lambda: replies.complete("The king said",
                                               wish(constraint=read_grammar_flag('root ::= [a-z ]{40} "king"'), ignore_eos=False))}
    alone = one_by_one(replies, wanted)
    assert len({*alone.values()}) == SEQUENCES and min(map(len, alone.values())) > 5
    ends, came = written(replies, {key: start() for key, start in wanted.items()})
    assert tokens_of(ends) == alone
    last = max(index for index, (key, event) in enumerate(came) if key == "sampled" and isinstance(event, TextDelta))
    assert {key for key, event in came[:last] if isinstance(event, TextDelta)} == wanted.keys()  # side by side, not in turn


def test_an_answer_drafts_while_it_is_alone(replies):
    """Others that begin and end beside it change no token, whenever they come: it goes on without drafts, then with them again."""
    texts = {"tells": (FOX * 12, 120), "comes": ("The sea", 9), "reads": ("The boat", 0)}

    def started(key: str) -> Iterator[Event]:
        text, most = texts[key]
        return replies.complete(text, wish(max_tokens=most))

    engine = list(open_engine(FABLE, EngineOptions(device="cpu", ctx=1024, kv=replies.engine.options.kv, spec="off")))[-1]
    plain = ServedModel(engine, replies.tokenizer, None)
    expected = {}
    for key, (text, most) in texts.items():
        engine.reset()
        expected[key] = next(event for event in plain.complete(text, wish(max_tokens=most)) if isinstance(event, Done)).stats.token_ids
    engine.close()
    alone, _ = written(replies, {"tells": started("tells")})
    assert alone["tells"].stats.token_ids == expected["tells"] and alone["tells"].stats.speculation["accepted"] > 20
    for begins in (1, 2, 7):
        rounds = rounds_of(replies)
        rounds.begin("tells", started("tells"))
        for _ in range(begins):
            list(rounds.step())
        ends, _ = written(replies, {"comes": started("comes"), "reads": started("reads")}, rounds)
        assert tokens_of(ends) == expected
        assert 0 < ends["tells"].stats.speculation["accepted"] < len(expected["tells"])


def test_what_drafts_know_of_the_model_serves_all_and_is_planned():
    """What passes cost and which tokens are likely is learned once; places in a text are each one's own, and counted."""
    engine = opened(spec="lookup")
    engines, _ = open_sequences(engine, SEQUENCES)
    one, *others = (each.speculation for each in engines)
    assert len({id(each) for each in (one, *others)}) == SEQUENCES
    for other in others:
        (own, learned), (places, known) = other._proposers, one._proposers
        assert learned is known and own is not places and other._costs is one._costs
    assert drafts_nbytes(1) == 0 and drafts_nbytes(SEQUENCES) == sum(len(each._proposers[0]._latest) * 4 for each in others)
    for other in engines[1:]:
        other.cache.close()
    engine.close()


def test_passes_are_of_all_and_come_again(replies, monkeypatch):
    passes, again = [], []
    model, host = replies.engine.model, replies.engine.backends["cpu"]
    forward, replay = model.forward, host.replay
    monkeypatch.setattr(model, "forward", lambda ids, cache, **more: passes.append(len(ids)) or forward(ids, cache, **more))
    monkeypatch.setattr(host, "replay", lambda *key: again.append(replay(*key)) or again[-1])
    written(replies, {str(i): replies.complete(f"The {who} said", wish(max_tokens=33)) for i, who in enumerate(("fox", "king", "sea"))})
    assert sum(passes) >= 3 * 32 and passes.count(3) > 20  # the first ones began to write while the others read
    assert again.count(True) > 20  # a page of one is full now and then


def test_more_than_a_pass_takes_go_in_groups():
    engine = opened()
    engines, _ = open_sequences(engine, MAX_PASS_TOKENS + 2)
    replies = ServedModel(engine, Tokenizer.load(FABLE, engine.config), None, engines[1:])
    wanted = {str(i): lambda i=i: replies.complete("The fox " * (i + 1), wish(max_tokens=12)) for i in range(MAX_PASS_TOKENS + 2)}
    alone = one_by_one(replies, wanted)
    try:
        assert tokens_of(written(replies, {key: start() for key, start in wanted.items()})[0]) == alone
        with pytest.raises(RuntimeError, match=f"more than {MAX_PASS_TOKENS + 2} answers"):
            held = [replies.complete("The sea", wish()) for _ in range(MAX_PASS_TOKENS + 3)]
            for each in held:
                next(each)
    finally:
        engine.close()


def test_one_writes_while_another_reads(replies):
    """The long prompt takes several chunks; between any two of them the other generates."""
    rounds = rounds_of(replies)
    rounds.begin("writes", replies.complete("The sea", wish(max_tokens=400)))
    for _ in range(5):
        list(rounds.step())
    _, came = written(replies, {"reads": replies.complete(FOX * 55, wish(max_tokens=5))}, rounds)
    first = next(index for index, (key, event) in enumerate(came) if key == "reads" and isinstance(event, TextDelta))
    before = [key for key, _ in came[:first]]
    pieces = [index for index, key in enumerate(before) if key == "reads"]
    assert len(pieces) >= 2 and all("writes" in before[one:other] for one, other in zip(pieces, pieces[1:]))


@pytest.mark.parametrize("length", [100, 700, 1000])
def test_pieces_of_a_prompt_leave_what_its_chunks_do(engines, length, monkeypatch):
    """Computed while others wait, in passes of any length, a prompt leaves the same pages and the same logits, packed where they would
    be."""
    shares, (one, other, *_) = engines[0].batched_passes, engines
    for engine in engines:  # none copies what another has read
        monkeypatch.setattr(engine, "extend_prefix", lambda ids, held: (held, []))
    ids = [5 + (7 * i * i + i // 3) % 900 for i in range(length)]
    monkeypatch.setattr(shares, "is_single", True)
    one.reset()
    assert len(list(one.prefill(ids))) < 3
    expected = one._logits.copy()
    monkeypatch.setattr(shares, "is_single", False)
    for tokens_per_s in (0.0, 150.0, 333.0):
        monkeypatch.setattr(shares, "record_prefill", lambda tokens, seconds: None)
        monkeypatch.setattr(shares, "_prefill_tps", tokens_per_s)
        other.reset()
        assert len(list(other.prefill(ids))) >= length // 200 - 1
        assert np.array_equal(other._logits, expected) and other.num_fresh_tokens == one.num_fresh_tokens
        assert (other.cache.n, other.cache.sealed) == (one.cache.n, one.cache.sealed)
        assert other.cache.exact_blocks() == one.cache.exact_blocks()
        for page in range(other.cache.sealed):
            for mine, right in zip(other.cache.read(page), one.cache.read(page), strict=True):
                assert np.array_equal(mine, right)


def test_a_prompt_that_is_left_amid_a_chunk_continues_as_if_it_were_not(engines, monkeypatch):
    shares, (one, other, *_) = engines[0].batched_passes, engines
    for engine in engines:  # none copies what another has read
        monkeypatch.setattr(engine, "extend_prefix", lambda ids, held: (held, []))
    ids = [5 + (7 * i * i + i // 3) % 900 for i in range(1000)]
    monkeypatch.setattr(shares, "is_single", True)
    one.reset()
    list(one.prefill(ids))
    expected = one._logits.copy()
    monkeypatch.setattr(shares, "is_single", False)
    for pieces in (3, 5):
        other.reset()
        monkeypatch.setattr(shares, "_prefill_tps", 0.0)
        monkeypatch.setattr(shares, "record_prefill", lambda tokens, seconds: None)
        reading = other.prefill(ids)
        for _ in range(pieces):
            next(reading)
        reading.close()
        monkeypatch.setattr(shares, "is_single", True)
        list(other.prefill(ids))
        assert np.array_equal(other._logits, expected) and other.num_cached_tokens > 0
        monkeypatch.setattr(shares, "is_single", False)


def test_an_answer_that_is_left_and_one_that_fails_end_alone(replies):
    alone = one_by_one(replies, {"stays": lambda: replies.complete("The king", wish())})
    given_up, seen = [], []

    def left() -> Iterator[Event]:
        for event in replies.complete("The sea", wish(), lambda: bool(given_up)):
            seen.append(event)
            if len(seen) == 6:
                given_up.append(True)
            yield event

    def broken() -> Iterator[Event]:
        yield next(replies.complete("The fox", wish()))
        raise KeyboardInterrupt

    ends, _ = written(replies, {"stays": replies.complete("The king", wish()), "left": left(), "broken": broken(),
                                "wrong": replies.complete([10**9], wish())})
    assert tokens_of({"stays": ends["stays"]}) == alone
    assert ends["left"].stats.finish_reason == "cancelled" and len(ends["left"].stats.token_ids) < 10
    assert isinstance(ends["wrong"], UsageError) and isinstance(ends["broken"], RuntimeError)
    assert tokens_of(written(replies, {"stays": replies.complete("The king", wish())})[0]) == alone  # and its place is free again


def test_a_cache_that_takes_no_token_fails_its_own_answer(replies, engines, monkeypatch):
    alone = one_by_one(replies, {"stays": lambda: replies.complete("The king", wish())})
    sea = replies.tokenizer.encode("The sea")

    def refuses(engine: Engine, commit, *tokens) -> None:
        commit(*tokens)
        if engine.tokens[: len(sea)] == sea and len(engine.tokens) > 20:
            raise EffllmError("the KV cache cannot be packed")

    for engine in engines:
        monkeypatch.setattr(engine.cache, "commit", partial(refuses, engine, engine.cache.commit))
    ends, _ = written(replies, {"stays": replies.complete("The king", wish()), "fails": replies.complete("The sea", wish())})
    assert tokens_of({"stays": ends["stays"]}) == alone and isinstance(ends["fails"], EffllmError)


def test_a_conversation_continues_where_it_was(replies):
    """Each goes to the sequence that holds it, whichever comes first; a new one to one that rested."""
    talks = {about: asked(f"Tell me of the {about}.") for about in ("sea", "fox", "king")}
    ends, _ = written(replies, {about: replies.reply(talk, wish(max_tokens=20, ignore_eos=False)) for about, talk in talks.items()})
    for about in ("king", "sea", "fox"):
        talks[about] += [{"role": "assistant", "content": ends[about].stats.text}, {"role": "user", "content": "Go on."}]
        done, _ = written(replies, {about: replies.reply(talks[about], wish(max_tokens=5))})
        before = ends[about].stats
        assert done[about].stats.cached_tokens >= before.prompt_tokens + len(before.token_ids) - 1
    new, _ = written(replies, {"new": replies.complete("Once upon a time", wish(max_tokens=3))})
    assert new["new"].stats.cached_tokens <= 1
    assert [len(slot.engine.tokens) > 20 for slot in replies._slots].count(True) == 3


def test_a_beginning_that_another_has_read_is_copied(replies):
    """Beside an answer that is being written, and where several come at once: the first reads, the others wait for it."""
    before = FOX * 50
    wanted = {who: lambda who=who: replies.reply(asked(f"{before} And the {who}?"), wish(max_tokens=40)) for who in ("king", "sea", "boat")}
    alone = one_by_one(replies, wanted)
    rounds = rounds_of(replies)
    rounds.begin("first", wanted["king"]())
    while not any(isinstance(event, TextDelta) for _, event in list(rounds.step())):
        continue
    ends, _ = written(replies, {"second": wanted["sea"]()}, rounds)
    assert (ends["second"].stats.token_ids, ends["first"].stats.token_ids) == (alone["sea"], alone["king"])
    read, cached = ends["second"].stats.read_tokens, ends["second"].stats.cached_tokens
    assert cached > 512 and read + cached == ends["second"].stats.prompt_tokens and not ends["first"].stats.cached_tokens
    for slot in replies._slots:
        slot.engine.reset()
    ends, _ = written(replies, {key: start() for key, start in wanted.items()})
    assert tokens_of(ends) == alone
    assert sorted(done.stats.cached_tokens > 512 for done in ends.values()) == [False, True, True]


def test_a_prompt_that_begins_as_another_does_takes_no_place_of_it(replies):
    """Long ones with a beginning in common lie in sequences of their own; a new answer to the same one goes where that lies."""
    for who, cached in (("king", False), ("sea", True), ("sea", True), ("boat", True)):
        text = FOX * 32 + f"{who} " * 280
        ends, _ = written(replies, {who: replies.reply(asked(text), wish(max_tokens=5))})
        assert (ends[who].stats.cached_tokens > 128) == cached
    assert [len(slot.engine.tokens) > 300 for slot in replies._slots] == [True, True, True, False]


def test_tool_calls_are_each_answers_own(replies):
    tools = tools_of([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
        "place": {"type": "string", "maxLength": 8}}, "required": ["place"]}}}], "required")
    wanted = {"calls": lambda: replies.reply(asked("Is it raining?"), wish(ignore_eos=False), tools),
              "talks": lambda: replies.reply(asked("Is it raining?"), wish())}
    alone = one_by_one(replies, wanted)
    ends, _ = written(replies, {key: start() for key, start in wanted.items()})
    assert tokens_of(ends) == alone and ends["calls"].stats.finish_reason != ends["talks"].stats.finish_reason


def test_a_context_that_shifts_lets_others_continue():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", ctx=256, parallel=2, overflow="shift")))[-1]
    engines, _ = open_sequences(engine, 2)
    replies = ServedModel(engine, Tokenizer.load(FABLE, engine.config), None, engines[1:])
    wanted = {"shifts": lambda: replies.complete(FOX * 10, wish(max_tokens=200)), "other": lambda: replies.complete("The", wish())}
    try:
        alone = one_by_one(replies, wanted)
        assert tokens_of(written(replies, {key: start() for key, start in wanted.items()})[0]) == alone
        assert len(alone["shifts"]) == 200
    finally:
        engine.close()


def test_what_cannot_share_a_pass_takes_turns():
    engine = opened(kv="4bit+mikv")
    engines, said = open_sequences(engine, 2)
    replies = ServedModel(engine, Tokenizer.load(FABLE, engine.config), None, engines[1:])
    wanted = {who: lambda who=who: replies.complete(f"The {who}" + FOX * 20, wish(max_tokens=250)) for who in ("fox", "sea")}
    try:
        assert len(said) == 1 and "take turns" in said[0] and "4bit+mikv" in said[0]
        alone = one_by_one(replies, wanted)
        ends, came = written(replies, {key: start() for key, start in wanted.items()})
        assert tokens_of(ends) == alone
        order = [key for key, event in came if isinstance(event, TextDelta)]
        assert sum(one != other for one, other in zip(order, order[1:])) > 50
    finally:
        engine.close()


@pytest.mark.parametrize("asked", [{"draft": str(FABLE)}, {"spec": "mtp"}, {"kv_ram": "1M"}, {"disk": "1G"}, {"kv_read": "sparse"}])
def test_what_is_for_one_text_is_refused_or_given_up(asked):
    with pytest.raises(UsageError, match="does not go with --parallel 4"):
        prepare(FABLE, EngineOptions(device="cpu", parallel=4, **asked))
    prepared = prepare(FABLE, EngineOptions(device="cpu", parallel=4, from_settings=frozenset(asked), **asked))
    assert any("does not go with --parallel 4" in notice for notice in prepared.notices)
    assert prepared.speculation.draft is None and not prepared.speculation.mtp
    prepared.store.close()


def test_a_plan_counts_every_cache(monkeypatch):
    weighed = baseline(("raw",))  # memory of other tests may be given back between two plans
    monkeypatch.setattr("effllm.runtime.planning.process_memory.baseline", lambda kinds: weighed)
    plans = []
    for parallel in (1, 4):
        prepared = prepare(FABLE, EngineOptions(device="cpu", ctx=1024, parallel=parallel))
        plans.append(prepared.placement)
        prepared.store.close()
    one, four = plans
    assert four.kv_bytes == 4 * one.kv_bytes and four.total_bytes - one.total_bytes >= 3 * one.kv_bytes
    with pytest.raises(EffllmError, match="4 times 1024 tokens"):
        prepare(FABLE, EngineOptions(device="cpu", ctx=1024, parallel=4, ram=str(one.total_bytes)))
    with pytest.raises(UsageError, match="--parallel 1000"):
        prepare(FABLE, EngineOptions(device="cpu", parallel=1000))
