"""DRY, XTC, top-n-sigma and logit biases: against plain definitions and llama.cpp's samplers, in a run, and their cost."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf_samples import fable_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from speculative_runs import both_ways

import effllm
from effllm import EffllmError, UsageError
from effllm.cli.options import SamplingFlags
from effllm.kernels import reference_sampling as reference
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import BANNED_BIAS, Sampler, SamplerSettings
from effllm.runtime.sampling.dry import MAX_TAIL_TOKENS, Breakers, breakers_of
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.tokens.token_bytes import token_bytes_of

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "seed": 0}
VOCAB = 300


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FABLE, read_config(FABLE))


def logits_of(seed: int, vocab: int = VOCAB, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def settings_of(**changes: object) -> SamplerSettings:
    return SamplerSettings(**{**NEUTRAL, **changes})


def broken_by(sequences: Sequence[Sequence[int]], rows: int) -> Breakers:
    """Sequences of tokens as a sampler takes them."""
    each = sorted({tuple(sequence) for sequence in sequences})
    first = np.searchsorted([sequence[0] for sequence in each], np.arange(rows + 1)).astype(np.int32)
    tails = [token for sequence in each for token in sequence[1:]]
    return Breakers(rows, first, np.cumsum([0, *(len(sequence) - 1 for sequence in each)]).astype(np.int32), np.array(tails, np.int32))


def survivors(chosen: SamplerSettings, logits: np.ndarray) -> set[int]:
    sampler = Sampler(chosen, len(logits))
    count = sampler._filter(sampler._penalise(logits, ()))
    return {*sampler._ids[:count].tolist()}


def dense(chosen: SamplerSettings, logits: np.ndarray) -> np.ndarray:
    """What is drawn from, float64 [V]."""
    sampler = Sampler(chosen, len(logits))
    count = sampler._filter(sampler._penalise(logits, ()))
    shares = np.zeros(len(logits))
    shares[sampler._ids[:count]] = sampler._weights[:count]
    return shares / shares.sum()


few_tokens = st.lists(st.integers(0, 3), max_size=40)


@settings(max_examples=300)
@given(few_tokens, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=2), st.integers(0, 4),
       st.sampled_from((0.5, 2.0)), st.sampled_from((1.0, 1.75, 3.0)), st.sampled_from((-1, 0, 7, 25)))
def test_repeats_are_those_of_the_definition(history: list[int], sequences: list[list[int]], allowed: int, multiplier: float, base: float,
                                             last_n: int) -> None:
    chosen = settings_of(dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n)
    logits, seen = logits_of(1), [] if last_n == 0 else history if last_n < 0 else history[-last_n:]
    found = Sampler(chosen, VOCAB, broken_by(sequences, 100))._penalise(logits, history)
    expected = reference.penalise_repeats(logits, seen, multiplier, base, allowed, sequences)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_a_history_may_grow_be_cut_and_hold_what_has_no_logit() -> None:
    chosen, logits = settings_of(dry_multiplier=1.0, dry_base=1.02, dry_allowed_length=1), logits_of(2)
    kept = Sampler(chosen, VOCAB)
    for history in ([1, 2, 3, 1, 2], [1, 2, 3, 1, 2, 3], [1, 2, 1], [9, 9, 9], [], [5, 400, 5, 400, 5], (4, -1, 4), np.array([7, 8, 7]),
                    [*range(200)] * 7, [3]):
        seen = [int(token) for token in history]
        np.testing.assert_allclose(kept._penalise(logits, history), reference.penalise_repeats(logits, seen, 1.0, 1.02, 1), rtol=1e-4)
    assert kept._penalise(logits, [5, 400, 5])[5] == logits[5]  # what would repeat has no logit


def test_a_long_repeat_leaves_numbers() -> None:
    history = [7] * 5000
    found = Sampler(settings_of(dry_multiplier=5.0, dry_base=4.0), VOCAB)._penalise(logits_of(3), history)
    assert np.isfinite(found).all() and found[7] < -1e29
    assert Sampler(settings_of(dry_multiplier=5.0, dry_base=4.0), VOCAB).sample(logits_of(3), history) != 7


def test_greedy_answers_do_not_repeat_and_else_are_what_they_were() -> None:
    logits, history = logits_of(4), [*range(20, 30), *range(20, 29)]
    logits[29] = 50
    assert Sampler(SamplerSettings(temperature=0), VOCAB).sample(logits, history) == 29
    assert Sampler(SamplerSettings(temperature=0, xtc_probability=1.0, top_n_sigma=0.1), VOCAB).sample(logits, history) == 29
    assert Sampler(SamplerSettings(temperature=0, dry_multiplier=1.0), VOCAB).sample(logits, history) == int(np.argsort(logits)[-2])
    assert Sampler(SamplerSettings(temperature=0, logit_bias=((29, -60.0),)), VOCAB).sample(logits, history) != 29


@given(st.integers(0, 10**6), st.floats(0.2, 4), st.floats(0.5, 6))
def test_top_n_sigma_keeps_what_is_near_the_largest(seed: int, sigmas: float, scale: float) -> None:
    logits = logits_of(seed, 700, scale)
    logits[:9] = -np.inf  # a grammar takes such away before
    edge = reference.above_sigmas(logits, sigmas)
    for more in ({}, {"top_k": 5}, {"temperature": 0.3}):
        found = dense(settings_of(top_n_sigma=sigmas, **more), logits)
        expected = reference.probabilities(edge, more.get("temperature", 1.0), more.get("top_k", 0), 1.0, 0.0, 1.0)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-9)
    assert survivors(settings_of(top_n_sigma=0.0), logits) == survivors(settings_of(top_n_sigma=-1.0), logits) == {*range(9, 700)}


def test_what_is_taken_away_is_none_of_the_logits_whose_deviation_counts() -> None:
    """A bias of never, and a long repeat, are far numbers: one of them among the others would let all pass."""
    logits = logits_of(8)
    edge = {*np.flatnonzero(np.isfinite(reference.above_sigmas(np.where(np.arange(VOCAB) < 2, -np.inf, logits), 1.0))).tolist()}
    assert 1 < len(edge) < 100
    for more in ({}, {"repetition_penalty": 1e6}, {"repetition_penalty": 1e-6}):
        chosen = settings_of(top_n_sigma=1.0, logit_bias=((0, BANNED_BIAS), (1, BANNED_BIAS)), **more)
        sampler = Sampler(chosen, VOCAB)
        count = sampler._filter(sampler._penalise(logits, [1]))
        assert {*sampler._ids[:count].tolist()} == edge
    repeated = Sampler(settings_of(top_n_sigma=1.0, logit_bias=((0, BANNED_BIAS),), dry_multiplier=5.0, dry_base=4.0), VOCAB)
    count = repeated._filter(repeated._penalise(logits, [1] * 500))
    assert {*repeated._ids[:count].tolist()} == edge
    everything = tuple((token, BANNED_BIAS) for token in range(VOCAB))
    assert survivors(settings_of(top_n_sigma=1.0, logit_bias=everything), logits) == {*range(VOCAB)}


@given(st.integers(0, 10**6), st.floats(0, 0.5), st.sampled_from((1e-6, 1e-3, 0.01, 0.03, 0.2, 0.7, 2.0)), st.sampled_from((0, 12)),
       st.sampled_from((1.0, 0.9)))
def test_xtc_leaves_the_least_likely_of_those_that_are_likely(seed: int, threshold: float, temperature: float, top_k: int,
                                                              typical_p: float) -> None:
    """At low temperatures too, where all that is left has no weight beside what is taken away."""
    logits = np.round(logits_of(seed, 400) * 4) / 4  # which tie often
    logits[:9], logits[9] = -np.inf, BANNED_BIAS  # a grammar takes such away before
    chosen = settings_of(xtc_probability=1.0, xtc_threshold=threshold, temperature=temperature, top_k=top_k, typical_p=typical_p)
    left = reference.survivors(logits, temperature, top_k, 1.0, 0.0, typical_p) & (logits > reference.MASKED_LOGIT)
    weights = np.where(left, np.exp(logits.astype(np.float64) - logits.max()), 0)
    # None that float32 may take for the other side.
    if not threshold or np.abs(weights / weights.sum() - threshold).min() > 1e-5 * threshold:
        expected = reference.shares(logits, temperature, reference.without_top(left, logits, threshold))
        np.testing.assert_allclose(dense(chosen, logits), expected, rtol=1e-4, atol=1e-9)


def test_xtc_is_done_as_often_as_it_is_asked_for() -> None:
    logits = np.full(VOCAB, -20, np.float32)
    logits[[3, 5, 8]] = 2.0, 1.5, 1.0
    for asked in (0.0, 0.25, 1.0):
        sampler = Sampler(settings_of(xtc_probability=asked), VOCAB)
        drawn = [sampler.sample(logits) for _ in range(4000)]
        expected = reference.probabilities(logits, 1.0, 0, 1.0, 0.0, 1.0)[8] * (1 - asked) + asked
        assert np.mean(np.array(drawn) == 8) == pytest.approx(expected, abs=0.03)
    off = [Sampler(settings_of(**each), VOCAB) for each in ({}, {"xtc_probability": 1.0, "xtc_threshold": 0.51})]
    assert [off[0].sample(logits) for _ in range(50)] == [off[1].sample(logits) for _ in range(50)]  # nor is a number drawn for it


def test_biases_are_added_first() -> None:
    logits = logits_of(5)
    chosen = settings_of(logit_bias=((3, 2.5), (9, -100), (250, BANNED_BIAS), (10**6, 5.0)), repetition_penalty=1.5)
    found = Sampler(chosen, VOCAB)._penalise(logits, [3, 9])
    changed = logits.astype(np.float64)
    changed[[3, 9, 250]] += 2.5, -100, BANNED_BIAS
    np.testing.assert_allclose(found, reference.penalise(changed, np.array([3, 9]), np.array([1, 1]), 1.5, 0, 0), rtol=1e-5)
    broken = logits.copy()
    broken[7] = np.nan
    with pytest.raises(EffllmError, match="NaN"):
        Sampler(chosen, VOCAB).sample(broken)
    assert 250 not in survivors(settings_of(logit_bias=((250, BANNED_BIAS),)), logits)


@pytest.mark.parametrize("changes", [
    {"dry_multiplier": -1}, {"dry_multiplier": True}, {"dry_base": 0.9}, {"dry_allowed_length": -1}, {"dry_allowed_length": 1.5},
    {"dry_penalty_last_n": -2}, {"dry_sequence_breakers": "\n"}, {"dry_sequence_breakers": [""]}, {"dry_sequence_breakers": [1]},
    {"dry_sequence_breakers": ["a"] * 65}, {"xtc_probability": 1.1}, {"xtc_threshold": -0.1}, {"top_n_sigma": float("nan")},
    {"logit_bias": [3]}, {"logit_bias": [(1, "x")]}, {"logit_bias": [(-1, 2)]}, {"logit_bias": [(1, 1e9)]}, {"logit_bias": 4}], ids=str)
def test_senseless_settings_are_usage_errors(changes: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        SamplerSettings(**changes)


def test_a_model_may_ask_for_them_but_not_for_biases() -> None:
    stated = {"dry_multiplier": 0.8, "dry_sequence_breakers": ["."], "xtc_probability": 0.5, "logit_bias": {"3": 1}}
    found = SamplerSettings.from_generation_config(stated)
    assert (found.dry_multiplier, found.dry_sequence_breakers, found.xtc_probability, found.logit_bias) == (0.8, (".",), 0.5, ())


def test_texts_of_flags_are_read_as_llama_cpp_reads_them() -> None:
    for given_, meant in (([r"\n", r"\"", r"a\\b", "x y"], ("\n", '"', "a\\b", "x y")), (["none"], ()), (["none", "."], ("none", "."))):
        assert SamplingFlags(dry_sequence_breakers=given_).overrides()["dry_sequence_breakers"] == meant


def test_texts_that_break_repeats_as_tokens(tokenizer: Tokenizer) -> None:
    own = token_bytes_of(tokenizer)
    found = breakers_of(tokenizer, settings_of(dry_multiplier=1.0, dry_sequence_breakers=("\n", "fox")))
    sequences = found.sequences()
    alone = {sequence[0] for sequence in sequences if len(sequence) == 1}
    assert alone == {token for token, said in own.all.items() if b"\n" in said or b"fox" in said} and len(alone) > 1
    joined = [sequence for sequence in sequences if len(sequence) > 1]
    assert joined and all(len(sequence) <= 1 + MAX_TAIL_TOKENS and "fox" in tokenizer.decode(sequence) for sequence in joined)
    assert breakers_of(tokenizer, settings_of(dry_multiplier=1.0, dry_sequence_breakers=())) is None
    assert breakers_of(tokenizer, settings_of()) is None


@pytest.mark.parametrize("text", ["eee n", "anan", "é", "<|end|>", " the king"])
def test_a_token_may_end_in_any_beginning_of_such_a_text(tokenizer: Tokenizer, text: str) -> None:
    own, whole, expected = token_bytes_of(tokenizer), text.encode(), set()
    for token, said in own.all.items():
        begun = [b""] if whole in said else [whole[cut:] for cut in range(1, len(whole)) if said.endswith(whole[:cut])]
        rests = [tokenizer.encode(rest.decode("utf-8", "ignore"), add_special_tokens=False) for rest in begun]
        expected |= {(token, *rest) for rest in rests}
    found = breakers_of(tokenizer, settings_of(dry_multiplier=1.0, dry_sequence_breakers=(text,))).sequences()
    assert {*found} == expected and len(found) == len(expected) > 0


def test_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    own, text = token_bytes_of(tokenizer), "The kïng’s 3 foxes — 狐 🦊\n\tsaid: \"no\""
    assert b"".join(map(own, tokenizer.encode(text, add_special_tokens=False))) == text.encode()
    assert own(tokenizer.stop_ids and min(tokenizer.stop_ids)) == b"<|endoftext|>" and own(10**6) == b""


# -- on the way through a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    pytest.param({"temperature": 0.0, "dry_multiplier": 0.8}, marks=pytest.mark.slow),
    {"temperature": 0.9, "xtc_probability": 0.5, "seed": 3},
    {"temperature": 1.2, "top_n_sigma": 1.0, "dry_multiplier": 1.5, "logit_bias": ((264, 3.0),), "seed": 4}], ids=str)
def test_drafts_change_no_answer(tokenizer: Tokenizer, changes: dict) -> None:
    *_, engine = open_engine(FABLE, EngineOptions(ctx=512, spec="off"))
    without, drafted = both_ways(engine, tokenizer, SamplerSettings(**changes), 100)
    assert [step.token for step in without] == [step.token for step in drafted]
    engine.close()


def test_a_token_costs_little_more() -> None:
    """0.02 ms over 2,000 tokens on a quiet machine; a comparison of each with each would take several."""
    vocab, history = 131_072, [*range(700)] * 3
    logits = logits_of(0, vocab, 1.0)
    samplers = {0.0: Sampler(SamplerSettings(seed=1), vocab), 0.8: Sampler(SamplerSettings(seed=1, dry_multiplier=0.8), vocab)}
    seen, taken = {each: history[:2000] for each in samplers}, {each: [] for each in samplers}
    for _ in range(40):  # by turns: what else the machine does comes and goes, and a median of one before the other had only some of it
        for each, sampler in samplers.items():
            begin = time.perf_counter()
            seen[each].append(sampler.sample(logits, seen[each]))
            taken[each].append(time.perf_counter() - begin)
    assert min(taken[0.8]) - min(taken[0.0]) < 5e-4


# -- llama.cpp ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    library = pytest.importorskip("llama_cpp")
    path = tmp_path_factory.mktemp("peer") / "m.gguf"
    fable_gguf(path)
    params = library.llama_model_default_params()
    params.vocab_only = True
    library.llama_backend_init()
    model = library.llama_model_load_from_file(str(path).encode(), params)
    return SimpleNamespace(library=library, vocab=library.llama_model_get_vocab(model))


def by_llama_cpp(peer: SimpleNamespace, samplers: Sequence[object], logits: np.ndarray, history: Sequence[int] = ()) -> np.ndarray:
    """What its samplers make of logits; -inf where none is left."""
    library = peer.library
    data = (library.llama_token_data * len(logits))()
    for token, logit in enumerate(logits):
        data[token].id, data[token].logit = token, float(logit)
    array = library.llama_token_data_array(data=ctypes.cast(data, ctypes.POINTER(library.llama_token_data)), size=len(logits), selected=-1)
    for sampler in samplers:
        for token in history:
            library.llama_sampler_accept(sampler, token)
        library.llama_sampler_apply(sampler, ctypes.byref(array))
        library.llama_sampler_free(sampler)
    left = np.full(len(logits), -np.inf)
    for place in range(array.size):
        left[array.data[place].id] = array.data[place].logit
    return left


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_finds_the_same_repeats(peer: SimpleNamespace, tokenizer: Tokenizer) -> None:
    random, rows = np.random.default_rng(1), peer.library.llama_vocab_n_tokens(peer.vocab)
    words = tokenizer.encode('the fox said: "no*\n', add_special_tokens=False)
    for trial, texts in enumerate([("\n", ":", '"', "*"), (".",), (), (" fox said", "the king"), ("he ki", "\n\n", "a")] * 20):
        pool = [*map(int, random.integers(5, rows, 4)), *(words if trial % 2 else ())]
        history = [pool[each] for each in random.integers(0, len(pool), int(random.integers(1, 150)))]
        logits, allowed, last_n = logits_of(trial, rows), int(random.integers(0, 5)), int(random.choice([20, 64, 1000]))
        chosen = settings_of(dry_multiplier=0.8, dry_allowed_length=allowed, dry_penalty_last_n=last_n, dry_sequence_breakers=texts)
        named = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
        theirs = peer.library.llama_sampler_init_dry(peer.vocab, 0.8, 1.75, allowed, last_n, named, len(texts))
        found = Sampler(chosen, rows, breakers_of(tokenizer, chosen))._penalise(logits, history)
        np.testing.assert_allclose(found, by_llama_cpp(peer, [theirs], logits, history), rtol=1e-4, atol=1e-4)


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_keeps_the_same_tokens(peer: SimpleNamespace) -> None:
    rows, library = peer.library.llama_vocab_n_tokens(peer.vocab), peer.library
    for trial in range(60):
        scale, sigmas, threshold = (1, 3, 6)[trial % 3], (0.5, 1.0, 2.0)[trial % 3], (0.02, 0.1, 0.3)[trial // 3 % 3]
        logits = logits_of(trial, rows, scale)
        left = by_llama_cpp(peer, [library.llama_sampler_init_top_n_sigma(sigmas)], logits)
        assert survivors(settings_of(top_n_sigma=sigmas), logits) == {*np.flatnonzero(np.isfinite(left)).tolist()}
        theirs = [library.llama_sampler_init_top_k(40), library.llama_sampler_init_min_p(0.05, 0),
                  library.llama_sampler_init_xtc(1.0, threshold, 0, 1)]
        chosen = settings_of(top_k=40, min_p=0.05, xtc_probability=1.0, xtc_threshold=threshold)
        assert survivors(chosen, logits) == {*np.flatnonzero(np.isfinite(by_llama_cpp(peer, theirs, logits))).tolist()}
