"""Adapter scales chosen per request: the logits of a run started with those scales, on every tier, and no cache entry read under other
scales is reused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from command_line import CliRun
from gpu_runs import card_here, simulated
from streamed_models import streaming
from test_adapters import assert_near, low_bit, of_all_matrices, opened  # noqa: F401  a fixture
from test_cli_chat import STORY, Chat
from test_cli_eval import SAMPLE
from test_continuous_batching import one_by_one, tokens_of, written

import effllm
from effllm import UsageError
from effllm.kernels.cpu import lora
from effllm.runtime.adapters.merge import merge
from effllm.runtime.engine import Engine
from effllm.runtime.generation.batching import PendingToken, open_sequences
from effllm.runtime.generation.served_model import GenerationOptions, ServedModel
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.sessions.prompt_cache import PromptCache
from effllm.runtime.sessions.saved_cache import identity
from effllm.runtime.sessions.saved_sessions import SavedSessions
from effllm.runtime.sessions.session_store import SessionStore
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
IDS = np.random.default_rng(3).integers(3, 256, 160).tolist()
TALE = "The fox asked the king for bread and the king gave him none. " * 30 + "But the boat"
CHOICES = ((0.0, 0.0), (1.0, 0.0), (0.3, -0.5), (1.0, 1.0))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two adapters of the packaged model."""
    folder = tmp_path_factory.mktemp("adapters")
    return tuple(str(of_all_matrices(FABLE, folder / name, seed)) for name, seed in (("sea", 1), ("fox", 50)))


def logits_of(engine: Engine, choice: tuple[float, ...]) -> np.ndarray:
    """Behind a prompt, of single tokens and of a few at once."""
    engine.choose(choice)
    engine.reset()
    list(engine.prefill(IDS[:140]))
    found = [engine._logits.copy(), *(engine.forward_logits([token])[0].copy() for token in IDS[140:150])]
    return np.stack([*found, *engine.forward_logits(IDS[150:156]).copy()])


@cache
def started(base: Path, pair: tuple[str, ...], choice: tuple[float, ...], **asked: object) -> np.ndarray:
    """The logits of a run that has this choice from its beginning."""
    engine = opened(base, *(f"{own}:{scale}" for own, scale in zip(pair, choice)), **asked)
    try:
        assert engine.adapter_scales == choice
        return logits_of(engine, choice)
    finally:
        engine.close()


@pytest.fixture(params=["bf16", "4bit"])
def base(request: pytest.FixtureRequest, low_bit: Path) -> Path:  # noqa: F811
    return FABLE if request.param == "bf16" else low_bit


def test_a_choice_is_a_run_that_was_started_so(base: Path, pair: tuple[str, ...]) -> None:
    """To the bit, whatever was chosen before; of passes that come again too."""
    engine = opened(base, *pair, kv="16bit")
    found = [(choice, logits_of(engine, choice)) for choice in (*CHOICES, *CHOICES[::-1])]
    engine.close()
    for choice, ours in found:
        assert np.array_equal(ours, started(base, pair, choice, kv="16bit")), choice
    assert len({ours.tobytes() for _, ours in found}) == len(CHOICES)


def test_nothing_of_any_is_a_run_without(base: Path, pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, since no thin product is made."""
    engine, made = opened(base, *pair, kv="16bit"), []
    thin = lora._into_products
    monkeypatch.setattr(lora, "_into_products", lambda *asked: made.append(1) or thin(*asked))
    logits_of(engine, (0.5, 0.0))
    counted = len(made)
    ours = logits_of(engine, (0.0, 0.0))
    assert counted and len(made) == counted
    assert np.array_equal(ours, started(base, (), (), kv="16bit"))
    engine.close()


def test_one_of_several_is_it_alone(pair: tuple[str, ...]) -> None:
    ours, alone = (started(FABLE, pair[:number], choice) for number, choice in ((2, (0.7, 0.0)), (1, (0.7,))))
    assert np.array_equal(ours, alone)
    assert np.array_equal(started(FABLE, pair, (0.0, 0.7)), started(FABLE, pair[1:], (0.7,)))
    assert np.abs(alone - started(FABLE, (), ())).max() > 0.05 * np.abs(alone).max()


def test_what_nobody_in_a_pass_has_is_not_read(base: Path, pair: tuple[str, ...]) -> None:
    """Nor counted: whatever its values are."""
    expected = started(base, pair, (0.3, 0.0), kv="16bit")
    engine = opened(base, *pair, kv="16bit")
    adapted = engine.prepared.adapters
    for added in adapted.weights.values():
        for own in (added[1].into, added[1].out):
            own.data.fill(0x7FC0 if own.data.dtype == np.uint16 else np.nan)
    assert np.array_equal(logits_of(engine, (0.3, 0.0)), expected)
    assert np.isnan(logits_of(engine, (0.3, 0.1))).all()
    engine.close()
    parts = [adapted.nbytes_of(choice) for choice in ((1.0, 0.0), (0.0, -2.0), (0.3, 0.2))]
    assert parts[0] + parts[1] == parts[2] == adapted.nbytes and min(parts) > 0


def test_texts_of_different_choices_share_a_pass(base: Path, pair: tuple[str, ...]) -> None:
    """Each has the bits that it has alone."""
    alone_and_together(base, pair)


def alone_and_together(base: Path, pair: tuple[object, ...]) -> list[np.ndarray]:
    """What texts of CHOICES have alone, after it was seen that they have the same bits in passes that they share."""
    engine = opened(base, *pair, kv="16bit", parallel=len(CHOICES))
    engines, said = open_sequences(engine, len(CHOICES))
    assert not said
    alone = [logits_of(engine, choice)[1:11] for choice in CHOICES]
    for each, choice in zip(engines, CHOICES):
        each.choose(choice)
        each.reset()
        list(each.prefill(IDS[:140]))
    for at, token in enumerate(IDS[140:150]):
        wants = [PendingToken(each, token) for each in engines]
        engine.batched_passes.run(wants)
        for want, expected in zip(wants, alone):
            assert want.error is None and np.array_equal(want.logits, expected[at])
    close(engines)
    return alone


def close(engines: list[Engine]) -> None:
    for other in engines[1:]:
        other.cache.close()
    engines[0].close()


def test_from_the_disk(pair: tuple[str, ...]) -> None:
    engine = streaming(FABLE, ctx=256, spec="off", lora=tuple(pair))
    for choice in CHOICES:
        assert np.array_equal(logits_of(engine, choice), started(FABLE, pair, choice, kv="16bit"))
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 6])
def test_layers_on_a_gpu(pair: tuple[str, ...], layers: int) -> None:
    """Also passes that run again as one graph."""
    with card_here(simulated()):
        engine = opened(FABLE, *pair, device="auto", gpu_layers=layers, exact=True)
    assert engine.placement.devices.count("cuda") == layers
    for choice in (*CHOICES, *CHOICES):
        assert_near(logits_of(engine, choice), started(FABLE, pair, choice, exact=True))
    engine.close()


def test_drafts_change_no_token(pair: tuple[str, ...]) -> None:
    ids, texts = IDS[:24] * 4, {}
    for spec in ("off", "lookup"):
        engine = opened(FABLE, *pair, spec=spec, kv="16bit")
        for choice in CHOICES:
            engine.choose(choice)
            list(engine.prefill(ids))
            sampler = Sampler(SamplerSettings(temperature=0.0), engine.config.vocab_size)
            texts[spec, choice] = [step.token for step in engine.generate(sampler, 30, frozenset())]
        drafted = engine.speculation is not None and engine.speculation.counts.drafted
        engine.close()
    assert drafted and all(texts["off", choice] == texts["lookup", choice] for choice in CHOICES)


def test_what_is_held_is_of_one_choice(pair: tuple[str, ...]) -> None:
    engine = opened(FABLE, *pair)
    list(engine.prefill(IDS))
    engine.choose((1.0, 1.0))
    list(engine.prefill(IDS))
    assert engine.num_cached_tokens > 128
    engine.choose((1.0, 0.5))
    assert not engine.tokens and not engine.cache.n
    list(engine.prefill(IDS))
    assert engine.num_cached_tokens == 0
    for wrong, said in (((1.0,), "1 scales for 2 adapters"), ((1.0, float("nan")), "nan is not a valid adapter scale"),
                        ((1e39, 0.0), "1e+39 is not a valid adapter scale")):
        with pytest.raises(UsageError, match=said.replace("+", "[+]")):
            engine.choose(wrong)
    assert engine.adapter_scales == (1.0, 0.5) and len(engine.tokens) == len(IDS)
    engine.close()


def test_two_of_one_name_are_distinguished(pair: tuple[str, ...]) -> None:
    engine = opened(FABLE, pair[0], f"{pair[0]}:0.5", pair[1], exact=True)
    assert engine.prepared.adapters.names == ("sea", "sea-2", "fox") and engine.adapter_scales == (1.0, 0.5, 1.0)
    assert_near(logits_of(engine, (0.25, 0.75, 0.0)), started(FABLE, pair, (1.0, 0.0), exact=True))
    engine.close()


def test_a_saved_cache_says_what_was_chosen(pair: tuple[str, ...]) -> None:
    engine, plain = opened(FABLE, *pair), opened(FABLE)
    found = {}
    for choice in CHOICES:
        engine.choose(choice)
        found[choice] = identity(engine)
    assert len({each.get("adapters") for each in found.values()}) == len(CHOICES)
    assert found[0.0, 0.0] == identity(plain)
    engine.close()
    plain.close()


def wanted(choice: tuple[float, ...] | None, most: int = 24) -> GenerationOptions:
    return GenerationOptions(SamplerSettings(temperature=0), max_tokens=most, ignore_eos=True, choice=choice)


@pytest.mark.slow
def test_answers_at_once_have_each_its_own(pair: tuple[str, ...]) -> None:
    """Of the same prompt, which none of them takes from another; one that says nothing has what is usual, which may change."""
    engine = opened(FABLE, *pair, kv="16bit", ctx=1024, parallel=4)
    engines, _ = open_sequences(engine, 4)
    replies = ServedModel(engine, Tokenizer.load(FABLE, engine.config), None, engines[1:])
    ask = {str(choice): lambda choice=choice: replies.complete(TALE, wanted(choice)) for choice in (*CHOICES[:3], None)}
    alone = one_by_one(replies, ask)
    as_they_are = one_by_one(replies, {"": lambda: replies.complete(TALE, wanted((1.0, 1.0)))})
    assert len({*alone.values()}) == 4 and alone["None"] == as_they_are[""]
    ends, _ = written(replies, {key: start() for key, start in ask.items()})
    assert tokens_of(ends) == alone and all(done.stats.cached_tokens == 0 for done in ends.values())
    ends, _ = written(replies, {key: start() for key, start in ask.items()})
    assert tokens_of(ends) == alone and all(done.stats.cached_tokens > 300 for done in ends.values())
    replies.default_scales = CHOICES[2]
    ends, _ = written(replies, {"None": ask["None"]()})
    assert tokens_of(ends)["None"] == alone[str(CHOICES[2])] and ends["None"].stats.cached_tokens > 300
    same, _ = written(replies, {"one": ask["None"](), "other": ask["None"]()})  # which is lent where the choice is the same
    assert tokens_of(same) == {"one": alone[str(CHOICES[2])], "other": alone[str(CHOICES[2])]}
    assert all(done.stats.cached_tokens > 128 for done in same.values())
    close(engines)


def test_prompts_that_are_kept_come_back_for_the_same_choice(pair: tuple[str, ...], tmp_path: Path) -> None:
    """Also to a server that starts with another one."""
    answers = {}
    for usual in (CHOICES[1], CHOICES[0]):
        engine = opened(FABLE, *(f"{own}:{scale}" for own, scale in zip(pair, usual)), kv="16bit", ctx=1024)
        kept = PromptCache(engine, SavedSessions(SessionStore(tmp_path), "fable", 1 << 30))
        replies = ServedModel(engine, Tokenizer.load(FABLE, engine.config), kept)
        for choice in (*CHOICES[:3], *CHOICES[:3]):
            *_, done = replies.complete(TALE, wanted(choice))
            answers.setdefault(choice, []).append((done.stats.token_ids, done.stats.cached_tokens > 256))
        engine.close()
    assert len({found[0][0] for found in answers.values()}) == 3
    for choice, found in answers.items():
        assert len({ids for ids, _ in found}) == 1, choice
        assert [is_held for _, is_held in found] == [False, True, True, True], choice


def measured(*words: object) -> dict[str, float]:
    ran = CliRun("eval", *words, "-c", "128", "--kv", "32bit", "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


@pytest.mark.slow
def test_eval_says_what_an_adapter_does_to_a_model(pair: tuple[str, ...], tmp_path: Path) -> None:
    """Against the model without it: nothing where there is nothing of it, and what the merged model does where there is."""
    (text := tmp_path / "text.txt").write_text(SAMPLE.read_text(encoding="utf-8")[:1200], encoding="utf-8")
    list(merge(FABLE, Path(pair[0]), merged := tmp_path / "merged"))
    nothing, whole = (measured("kld", FABLE, "--text", text, "--lora", f"{pair[0]}:{scale}") for scale in (0, 1))
    alike = measured("kld", merged, "--against", FABLE, "--text", text)
    assert nothing["kld_mean"] == 0 and nothing["same_top"] == 1 and nothing["ppl"] == nothing["ppl_ref"] == whole["ppl_ref"]
    assert whole["kld_mean"] == pytest.approx(alike["kld_mean"], rel=0.05) and whole["kld_mean"] > 100 * whole["floor_kld_mean"]
    assert measured("ppl", FABLE, "--text", text, "--lora", pair[0])["ppl"] == pytest.approx(whole["ppl"], rel=1e-5)


def test_a_chat_chooses_as_it_goes(pair: tuple[str, ...], tmp_path: Path) -> None:
    chat = Chat(tmp_path, "chat", "fable", "--lora", f"{pair[0]}:0", "--lora", f"{pair[1]}:0", "--temp", "0", "-n", "12")
    chat.wait()
    assert "sea  0" in (listed := chat.say("/lora")) and "fox  0" in listed
    plain = chat.say(STORY)
    assert "processes the conversation again" in (said := chat.say("/lora sea 3")) and "sea  3" in said and "fox" not in said
    chat.say("/undo")
    other = chat.say(STORY)
    assert "there is no adapter 'boat'" in chat.say("/lora boat 1") and "'much' is not an adapter scale" in chat.say("/lora sea much")
    chat.say("/lora sea 0")
    chat.say("/undo")
    again = chat.say(STORY)
    assert again == plain != other
    assert "/lora NAME SCALE" in chat.say("/set lora 1")
    assert chat.leave("/exit\r") == 0


def test_a_chat_without_any_says_where_they_come_from(tmp_path: Path) -> None:
    chat = Chat(tmp_path, "chat", "fable")
    chat.wait()
    assert "this chat has no adapter" in (said := chat.say("/lora")) and "--lora ADAPTER" in said
    assert chat.leave("/exit\r") == 0
