"""The sampler against transformers' logits processors and a float64 reference; determinism, penalties, bad input, cost."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from effllm import EffllmError, UsageError
from effllm.kernels import reference_sampling as reference
from effllm.runtime.sampler import Sampler, SamplerSettings

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


def logits_of(seed: int, vocab: int, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def settings_of(**changes: object) -> SamplerSettings:
    return SamplerSettings(**{**NEUTRAL, **changes})


def distribution(sampler: Sampler, logits: np.ndarray, history: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """(ids[n] ascending, probabilities float64[n]) that `sample` draws from, where it is not greedy; draws nothing."""
    count = sampler._filter(sampler._penalise(logits, history))
    weights = sampler._weights[:count].astype(np.float64)
    return sampler._ids[:count].copy(), weights / weights.sum()


def dense(sampler: Sampler, logits: np.ndarray, history: Sequence[int] = ()) -> np.ndarray:
    ids, shares = distribution(sampler, logits, history)
    assert np.all(np.diff(ids) > 0)
    result = np.zeros(len(logits))
    result[ids] = shares
    return result


def with_transformers(logits: np.ndarray, s: SamplerSettings, history: list[int]) -> np.ndarray:
    """The same settings through transformers, in the order its `generate` applies them."""
    chain = [hf.TemperatureLogitsWarper(s.temperature)]
    if s.repetition_penalty != 1:
        chain.insert(0, hf.RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.top_k:
        chain.append(hf.TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        chain.append(hf.TopPLogitsWarper(s.top_p))
    if s.min_p:
        chain.append(hf.MinPLogitsWarper(s.min_p))
    if s.typical_p < 1:
        chain.append(hf.TypicalLogitsWarper(s.typical_p))
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    for step in chain:
        scores = step(torch.tensor([history]), scores)
    return torch.softmax(scores, -1)[0].numpy()


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """The same tokens survive with the same probabilities; one token at a border of mass may fall either way by rounding."""
    differing = np.flatnonzero((ours > 0) != (theirs > 0))
    assert len(differing) <= 1, differing
    slack = float((ours + theirs)[differing].sum())
    assert slack <= 2e-3
    np.testing.assert_allclose(np.delete(ours, differing), np.delete(theirs, differing), rtol=5e-6 + 2 * slack, atol=1e-12)


FILTERS = [
    {}, {"temperature": 0.7}, {"top_k": 1}, {"top_k": 40}, {"top_k": 900}, {"top_k": 10**6}, {"top_k": 2**64 + 1},
    {"top_p": 0.9}, {"top_p": 0.05},
    {"top_p": 1e-9}, {"min_p": 0.05}, {"min_p": 1.0}, {"typical_p": 0.9}, {"typical_p": 0.2},
    {"repetition_penalty": 1.3}, {"repetition_penalty": 0.8},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.7, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.7},
    {"temperature": 0.6, "top_k": 200, "top_p": 0.98, "min_p": 0.002, "typical_p": 0.95, "repetition_penalty": 1.2},
    {"temperature": 0.05, "top_p": 0.99}, {"top_k": 500, "typical_p": 0.5},
]


@pytest.mark.parametrize("changes", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [1000, 4096, 32003])
def test_same_survivors_and_probabilities_as_transformers(changes: dict, vocab: int) -> None:
    history = [int(t) for t in np.random.default_rng(9).integers(0, vocab, 50)]
    for seed in range(3):
        logits = logits_of(seed, vocab)
        chosen = settings_of(**changes)
        assert_same(dense(Sampler(chosen, vocab), logits, history), with_transformers(logits, chosen, history))


NUDGE = 1e-5  # float32 may move a token across a border of mass that is nearer than this


def assert_between(ours: np.ndarray, tight: np.ndarray, loose: np.ndarray, logits: np.ndarray, temperature: float) -> None:
    """All survivors of slightly tighter filters survive, none but those of slightly looser ones, in the proportions of the softmax."""
    assert not np.any((tight > 1e-30) & (ours == 0)) and not np.any((ours > 1e-30) & (loose == 0))
    unfiltered = reference.probabilities(logits, temperature, 0, 1.0, 0.0, 1.0)
    expected = np.where(ours > 0, unfiltered, 0)
    np.testing.assert_allclose(ours, expected / expected.sum(), rtol=1e-4, atol=1e-9)


@given(st.integers(0, 10**6), st.integers(1, 700), st.floats(0.1, 20), st.floats(0.05, 3), st.integers(0, 800),
       st.floats(0.01, 1), st.floats(0, 1))
def test_the_kernel_follows_the_reference(seed: int, vocab: int, scale: float, temperature: float, top_k: int, top_p: float,
                                          min_p: float) -> None:
    """Logits on a coarse grid, which tie often."""
    logits = np.round(logits_of(seed, vocab, scale) * 4) / 4
    ours = dense(Sampler(SamplerSettings(temperature, top_k, top_p, min_p), vocab), logits)
    tight, loose = (reference.probabilities(logits, temperature, top_k, min(1, top_p * (1 + nudge)), min(1, min_p * (1 - nudge)), 1.0)
                    for nudge in (-NUDGE, NUDGE))
    assert_between(ours, tight, loose, logits, temperature)


@given(st.integers(0, 10**6), st.integers(1, 700), st.floats(0.1, 20), st.floats(0.05, 3), st.integers(0, 800), st.floats(0.01, 1))
def test_typical_follows_the_reference(seed: int, vocab: int, scale: float, temperature: float, top_k: int, typical_p: float) -> None:
    logits = logits_of(seed, vocab, scale)
    ours = dense(Sampler(settings_of(temperature=temperature, top_k=top_k, typical_p=typical_p), vocab), logits)
    tight, loose = (reference.probabilities(logits, temperature, top_k, 1.0, 0.0, min(1, typical_p * (1 + nudge)))
                    for nudge in (-NUDGE, NUDGE))
    assert_between(ours, tight, loose, logits, temperature)


def test_ties_stay_together() -> None:
    logits = np.array([1, 3, 2, 3, 2, 2, 0], np.float32)
    for changes, kept in (({"top_k": 1}, [1, 3]), ({"top_k": 3}, [1, 2, 3, 4, 5]), ({"top_p": 0.4}, [1, 3]), ({"top_p": 0.6}, [1, 3]),
                          ({"top_p": 0.75}, [1, 2, 3, 4, 5])):
        assert distribution(Sampler(settings_of(**changes), 7), logits)[0].tolist() == kept, changes


def test_top_k_looks_in_every_block() -> None:
    """All winners inside one block of the search, and winners in the short last block."""
    logits = logits_of(3, 10_007, 0.1)
    logits[640:680] += 50
    assert distribution(Sampler(settings_of(top_k=40), 10_007), logits)[0].tolist() == list(range(640, 680))
    logits[-3:] += 90
    assert distribution(Sampler(settings_of(top_k=3), 10_007), logits)[0].tolist() == [10_004, 10_005, 10_006]


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(300, -np.inf, np.float32)
    logits[[7, 250]] = 1.0, 2.0
    for changes in ({}, {"top_k": 40}, {"top_k": 250}, {"top_p": 0.999}, {"typical_p": 0.99},
                    {"top_k": 5, "top_p": 0.9999, "typical_p": 0.9999}):
        ids, shares = distribution(Sampler(settings_of(**changes), 300), logits)
        assert set(ids.tolist()) <= {7, 250} and shares.sum() == pytest.approx(1), changes


def test_draws_follow_the_distribution() -> None:
    logits, sampler = logits_of(5, 5000), Sampler(settings_of(top_k=12, seed=11), 5000)
    expected = dense(sampler, logits)
    counts = np.bincount([sampler.sample(logits) for _ in range(8000)], minlength=5000)
    kept = expected > 0
    chi_squared = ((counts - 8000 * expected)[kept] ** 2 / (8000 * expected[kept])).sum()
    assert counts[~kept].sum() == 0 and chi_squared < 45  # 11 degrees of freedom: beyond 45 once in 200,000


def test_a_draw_over_a_large_vocabulary_follows_the_reference() -> None:
    logits = logits_of(6, 40_000, 1.0)
    sampler, random = Sampler(settings_of(seed=3), 40_000), np.random.Philox(key=3)
    expected = reference.probabilities(logits, 1.0, 0, 1.0, 0.0, 1.0)
    cumulative = np.cumsum(expected)
    for _ in range(300):
        token, uniform = sampler.sample(logits), (int(random.random_raw()) >> 11) * 2.0**-53
        wanted = reference.draw(expected, uniform)
        assert token == wanted or abs(cumulative[min(token, wanted)] - uniform) < 1e-6


def test_same_seed_same_tokens() -> None:
    def run(seed: int | None) -> tuple[int, list[int]]:
        sampler, history = Sampler(SamplerSettings(seed=seed, repetition_penalty=1.1), 4096), []
        for step in range(60):
            history.append(sampler.sample(logits_of(step, 4096), history))
        return sampler.seed, history

    assert run(5) == run(5)
    assert run(5)[1] != run(6)[1]
    drawn, tokens = run(None)
    assert run(drawn)[1] == tokens
    assert run(None)[0] != drawn


def test_reset_starts_again() -> None:
    sampler, logits = Sampler(settings_of(seed=8), 1000), logits_of(1, 1000)
    first = [sampler.sample(logits) for _ in range(20)]
    sampler.reset(8)
    assert [sampler.sample(logits) for _ in range(20)] == first
    sampler.reset(9)
    assert [sampler.sample(logits) for _ in range(20)] != first


def test_greedy_takes_the_lowest_of_equal_logits_and_no_random_number() -> None:
    sampler, logits = Sampler(SamplerSettings(temperature=0, seed=1), 6), np.zeros(6, np.float32)
    assert sampler.sample(np.array([0, 4, 1, 4, -np.inf, 2], np.float32)) == 1
    sampler.settings, fresh = settings_of(), Sampler(settings_of(seed=1), 6)
    assert [sampler.sample(logits) for _ in range(20)] == [fresh.sample(logits) for _ in range(20)]


def test_penalties_follow_the_reference() -> None:
    logits, history = logits_of(2, 500), [3, 3, 3, 499, 0, 3, 12, 700, -1]  # the last two have no logit
    chosen = settings_of(repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.25)
    changed = reference.penalise(logits, np.array([0, 3, 12, 499]), np.array([1, 4, 1, 1]), 1.25, 0.5, 0.25)
    expected = reference.probabilities(changed, 1, 0, 1, 0, 1)
    np.testing.assert_allclose(dense(Sampler(chosen, 500), logits, history), expected, rtol=1e-5)
    greedy = Sampler(SamplerSettings(temperature=0, presence_penalty=100.0), 500)
    assert greedy.sample(logits, [int(logits.argmax())]) == int(np.argsort(logits)[-2])


@pytest.mark.parametrize("last_n", [-1, 0, 1, 5])
def test_counts_follow_a_history_that_is_cut_and_rewritten(last_n: int) -> None:
    """One sampler over a changing history equals a fresh one at every step."""
    chosen = settings_of(repetition_penalty=1.3, frequency_penalty=0.2, penalty_last_n=last_n)
    kept, logits = Sampler(chosen, 50), logits_of(4, 50)
    histories = [[1, 2, 3], [1, 2, 3, 4], [1, 2], [1, 2, 9, 9], [9, 9, 9, 9], [], [7] * 12, [7] * 13, [8] + [7] * 12, (7, 8),
                 np.array([1, 2, 3])]
    for history in histories:
        np.testing.assert_array_equal(dense(kept, logits, history), dense(Sampler(chosen, 50), logits, list(history)))
        window = [] if last_n == 0 else [int(t) for t in history] if last_n < 0 else [int(t) for t in history][-last_n:]
        tokens, counts = np.unique(np.array(window, np.int64), return_counts=True)
        expected = reference.probabilities(reference.penalise(logits, tokens, counts, 1.3, 0.0, 0.2), 1, 0, 1, 0, 1)
        np.testing.assert_allclose(dense(kept, logits, history), expected, rtol=1e-5)


@pytest.mark.parametrize("value, word", [(math.nan, "NaN"), (-math.nan, "NaN"), (math.inf, "infinite")])
@pytest.mark.parametrize("changes", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9, "typical_p": 0.9}], ids=str)
def test_broken_logits_end_in_one_line(value: float, word: str, changes: dict) -> None:
    for place in (0, 77, 999):
        logits = logits_of(1, 1000)
        logits[place] = value
        with pytest.raises(EffllmError, match=word) as caught:
            Sampler(settings_of(**changes), 1000).sample(logits)
        assert "\n" not in caught.value.message and caught.value.hint
    with pytest.raises(EffllmError, match="infinite"):
        Sampler(settings_of(**changes), 1000).sample(np.full(1000, -np.inf, np.float32))


def test_a_wrong_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of 10"):
        Sampler(SamplerSettings(), 10).sample(np.zeros(11, np.float32))


@pytest.mark.parametrize("changes", [
    {"temperature": -1}, {"temperature": math.nan}, {"temperature": 1e-9}, {"temperature": "hot"}, {"top_k": -1}, {"top_k": 2.5},
    {"top_k": True}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2}, {"typical_p": 0}, {"repetition_penalty": 0},
    {"presence_penalty": math.inf}, {"penalty_last_n": -2}, {"seed": -1}, {"seed": 2**64}, {"seed": 1.5}], ids=str)
def test_senseless_settings_are_usage_errors(changes: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        SamplerSettings(**changes)


def test_generation_config_supplies_defaults() -> None:
    built_in = SamplerSettings()
    assert SamplerSettings.from_generation_config({}) == built_in
    assert SamplerSettings.from_generation_config({"eos_token_id": 2, "do_sample": True, "seed": 4}) == built_in
    # A recipe is taken whole: what it leaves out is off.
    recipe = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2, "top_k": None}
    assert SamplerSettings.from_generation_config(recipe) == settings_of(temperature=0.6, top_p=0.9, repetition_penalty=1.2)
    assert SamplerSettings.from_generation_config(recipe, temperature=None, top_k=7, seed=3) == settings_of(
        temperature=0.6, top_p=0.9, repetition_penalty=1.2, top_k=7, seed=3)
    assert SamplerSettings.from_generation_config({"repetition_penalty": 1.1}).top_k == built_in.top_k
    assert SamplerSettings.from_generation_config({"do_sample": False}).temperature == 0
    assert SamplerSettings.from_generation_config({"do_sample": False}, temperature=0.5).temperature == 0.5
    assert SamplerSettings.from_generation_config({"top_k": -1}).top_k == 0
    with pytest.raises(UsageError):
        SamplerSettings.from_generation_config({}, top_p=3.0)
    with pytest.raises(EffllmError, match="generation_config.json: top_k") as caught:
        SamplerSettings.from_generation_config({"top_k": "many"})
    assert caught.value.exit_code == 1 and caught.value.hint


def test_a_128k_vocabulary_costs_little() -> None:
    """The figure to hold is 1 ms; the bound here leaves room for a busy machine, and a full sort (10 ms) still fails it."""
    vocab = 131_072
    history = [int(t) for t in np.random.default_rng(1).integers(0, vocab, 4000)]
    every = settings_of(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, typical_p=0.95, repetition_penalty=1.1,
                        frequency_penalty=0.1)
    logits = logits_of(0, vocab, 1.0)
    for chosen in (every, settings_of(temperature=0.8, top_p=0.95), settings_of(temperature=0.8)):
        sampler, taken = Sampler(chosen, vocab), []
        for _ in range(40):
            begin = time.perf_counter()
            history.append(sampler.sample(logits, history))
            taken.append(time.perf_counter() - begin)
        assert statistics.median(taken) < 4e-3
