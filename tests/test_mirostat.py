"""Mirostat: against plain definitions of both versions and llama.cpp's samplers, in a run, and its cost."""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from speculative_runs import both_ways

import effllm
from effllm import UsageError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import BANNED_BIAS, Sampler, SamplerSettings
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"


def logits_of(seed: int, vocab: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def settings_of(**changes: object) -> SamplerSettings:
    return SamplerSettings(**{"temperature": 1.0, "mirostat": 2, "seed": 0, **changes})


def left_by_definition(logits: np.ndarray, version: int, bound: float, temperature: float) -> np.ndarray:
    """Probabilities float64 [V] of what is drawn from, by sorting everything."""
    shares = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")
    if version == 2:
        kept = order[: max(1, int((-np.log2(shares[order]) <= bound).sum()))]
    else:
        ahead = shares[order][:100]
        steps = np.array([math.log((place + 2) / (place + 1)) for place in range(len(ahead) - 1)])
        falls = np.array([math.log(ahead[place] / ahead[place + 1]) for place in range(len(ahead) - 1)])
        exponent = (steps * falls).sum() / (steps * steps).sum()
        beyond = exponent - 1
        count = (beyond * 2**bound / (1 - len(logits) ** -beyond)) ** (1 / exponent)
        kept = order[: max(1, min(int(count), len(logits)))]
    found = np.zeros(len(logits))
    found[kept] = shares[kept]
    return found / found.sum()


@given(st.integers(0, 10**6), st.sampled_from((1, 2)), st.floats(0.5, 8), st.floats(0, 1), st.sampled_from((0.6, 1.0, 1.7)),
       st.sampled_from((50, 700)))
def test_the_bound_follows_what_is_drawn(seed: int, version: int, target: float, rate: float, temperature: float, vocab: int) -> None:
    sampler = Sampler(settings_of(mirostat=version, mirostat_tau=target, mirostat_eta=rate, temperature=temperature, seed=seed), vocab)
    random, bound = np.random.Philox(key=seed), 2 * target
    for step in range(12):
        logits = logits_of(seed + step, vocab)
        nudged = [left_by_definition(logits, version, bound + nudge, temperature) for nudge in (-1e-4, 0, 1e-4)]
        if any((each > 0).sum() != (nudged[1] > 0).sum() for each in nudged):
            return  # float32 may take a token for the other side of the bound
        cumulative = np.cumsum(nudged[1])
        uniform = (int(random.random_raw()) >> 11) * 2.0**-53
        token = sampler.sample(logits)
        wanted = int(np.searchsorted(cumulative, uniform, side="right"))
        assert nudged[1][token] > 0 and (token == wanted or abs(cumulative[min(token, wanted)] - uniform) < 1e-5)
        bound -= rate * (-math.log2(nudged[1][token]) - target)
        assert sampler._mirostat.bound == pytest.approx(bound, abs=1e-4)


@pytest.mark.parametrize("version", [1, 2])
def test_surprise_comes_near_its_target(version: int) -> None:
    for target in (2.0, 4.0):
        sampler, surprise = Sampler(settings_of(mirostat=version, mirostat_tau=target, seed=5), 2000), []
        for step in range(1500):
            sampler.sample(logits_of(step % 40, 2000, 2.5))
            before = surprise[-1][0] if surprise else 2 * target
            surprise.append((sampler._mirostat.bound, target - (sampler._mirostat.bound - before) / 0.1))
        assert statistics.mean(each for _, each in surprise[300:]) == pytest.approx(target, abs=0.1)


@pytest.mark.parametrize("version", [1, 2])
def test_odd_logits(version: int) -> None:
    """One token left, few, all alike; a target that lets nothing surprise, and one that lets everything."""
    alone = np.full(300, -np.inf, np.float32)
    alone[7] = 3
    alike = np.zeros(300, np.float32)
    two = np.where(np.arange(300) < 2, 1.0, -np.inf).astype(np.float32)
    for target in (0.0, 5.0, 100.0):
        sampler = Sampler(settings_of(mirostat=version, mirostat_tau=target), 300)
        for _ in range(50):
            assert sampler.sample(alone) == 7 and sampler.sample(two) in (0, 1) and 0 <= sampler.sample(alike) < 300
        assert math.isfinite(sampler._mirostat.bound)
    logits = logits_of(1, 300)
    for more in ({"mirostat_tau": 0.0}, {"temperature": 0.0}, {"temperature": 1e-6}):
        sampler = Sampler(settings_of(mirostat=version, **more), 300)
        assert [sampler.sample(logits) for _ in range(20)] == [int(logits.argmax())] * 20
    assert Sampler(settings_of(mirostat=version), 1).sample(np.zeros(1, np.float32)) == 0
    banned = Sampler(settings_of(mirostat=version, mirostat_tau=50.0, temperature=3.0,
                                 logit_bias=tuple((token, BANNED_BIAS) for token in range(290))), 300)
    assert min(banned.sample(logits) for _ in range(200)) >= 290


def test_it_takes_the_place_of_filters_and_begins_again() -> None:
    logits = logits_of(3, 500)
    plain, filtered = (Sampler(settings_of(**more), 500)
                       for more in ({"top_k": 0, "top_p": 1.0, "min_p": 0.0},
                                    {"top_k": 1, "top_p": 0.1, "min_p": 0.9, "typical_p": 0.1, "top_n_sigma": 0.1, "xtc_probability": 1.0}))
    drawn = [plain.sample(logits) for _ in range(60)]
    assert drawn == [filtered.sample(logits) for _ in range(60)] and len({*drawn}) > 5
    plain.reset(0)
    assert drawn == [plain.sample(logits) for _ in range(60)]
    penalised = Sampler(settings_of(presence_penalty=1000.0), 500)
    assert not {*drawn} & {penalised.sample(logits, drawn) for _ in range(60)}


@pytest.mark.parametrize("changes", [{"mirostat": 3}, {"mirostat": -1}, {"mirostat": 1.5}, {"mirostat": True}, {"mirostat_tau": -1},
                                     {"mirostat_tau": 101}, {"mirostat_eta": 2}, {"mirostat_eta": "x"}], ids=str)
def test_senseless_settings_are_usage_errors(changes: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        SamplerSettings(**changes)


@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_drafts_change_no_answer(version: int) -> None:
    *_, engine = open_engine(FABLE, EngineOptions(device="cpu", ctx=512, spec="off"))
    chosen = settings_of(mirostat=version, mirostat_tau=2.0, seed=9)
    without, drafted = both_ways(engine, Tokenizer.load(FABLE, read_config(FABLE)), chosen, 100)
    assert [step.token for step in without] == [step.token for step in drafted]
    engine.close()


@pytest.mark.parametrize("version", [1, 2])
def test_a_token_costs_little_more(version: int) -> None:
    """Some tenths of a millisecond on a quiet machine; sorting a vocabulary takes 10 ms."""
    vocab, taken = 131_072, []
    logits, sampler = logits_of(0, 131_072, 1.0), Sampler(settings_of(mirostat=version), vocab)
    for _ in range(30):
        begin = time.perf_counter()
        sampler.sample(logits)
        taken.append(time.perf_counter() - begin)
    assert statistics.median(taken) < 4e-3


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_llama_cpp_keeps_as_many(version: int) -> None:
    """It draws by itself, so the first token alone can be compared: how many are left."""
    library = pytest.importorskip("llama_cpp")
    rows = 4000
    for trial in range(60):
        target, logits = (1.0, 3.0, 5.0)[trial % 3], logits_of(trial, rows, (1, 2, 4)[trial // 3 % 3])
        data = (library.llama_token_data * rows)()
        for token, logit in enumerate(logits):
            data[token].id, data[token].logit = token, float(logit)
        array = library.llama_token_data_array(data=ctypes.cast(data, ctypes.POINTER(library.llama_token_data)), size=rows, selected=-1)
        theirs = library.llama_sampler_init_mirostat(rows, 1, target, 0.1, 100) if version == 1 else \
            library.llama_sampler_init_mirostat_v2(1, target, 0.1)
        library.llama_sampler_apply(theirs, ctypes.byref(array))
        library.llama_sampler_free(theirs)
        expected = left_by_definition(logits, version, 2 * target, 1.0)
        assert abs((expected > 0).sum() - array.size) <= 1
        assert expected[array.data[array.selected].id] > 0
