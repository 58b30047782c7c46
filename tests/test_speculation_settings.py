"""Drafts change no token and no log-probability, whatever a request asks of the sampler: logit biases and bans, penalties, DRY, Mirostat, a
seed. Settings are random, and so are the drafts: an answer with errors in it."""

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_speculation import FABLE, Guesser, lookup, opened

from effllm.runtime.engine import Engine, Step
from effllm.runtime.sampler import BANNED_BIAS, Sampler, SamplerSettings
from effllm.runtime.speculation.drafts import RecycledTokens, SuffixMatch
from effllm.runtime.tokenizer import Tokenizer

TOKENS = st.integers(0, 400) | st.integers(0, 4095)  # those that a fable often writes, or any
BIASES = st.dictionaries(TOKENS, st.sampled_from([BANNED_BIAS, -100.0, -2.5, 0.0, 1.5, 4.0, 12.0, 100.0]), max_size=40)
SETTINGS = st.fixed_dictionaries({"temperature": st.sampled_from([0.0, 0.0, 1.0])}, optional={
    "repetition_penalty": st.sampled_from([0.8, 1.3, 2.0]), "presence_penalty": st.sampled_from([-1.0, 0.5]),
    "frequency_penalty": st.sampled_from([-0.5, 1.0]), "penalty_last_n": st.sampled_from([0, 1, 8]),
    "dry_multiplier": st.sampled_from([0.5, 3.0]), "min_p": st.just(0.05), "top_k": st.sampled_from([1, 20]),
    "mirostat": st.sampled_from([1, 2]), "top_n_sigma": st.just(1.0), "xtc_probability": st.just(0.5)})
PROMPT = "The fox was happy, and he ran to the river. " * 3 + "The fox was"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = opened(ctx=128, threads=1)
    yield engine
    engine.close()


def steps_of(engine: Engine, prompt: list[int], settings: SamplerSettings, tells: int | None) -> list[Step]:
    engine.reset()
    for _ in engine.prefill(prompt):
        continue
    sampler = Sampler(settings, engine.config.vocab_size)
    sampler.logprobs = tells
    return [*engine.generate(sampler, 24, frozenset())]


@given(BIASES, SETTINGS, st.sampled_from([0.0, 0.6, 0.95]), st.sampled_from([None, 0, 3]), st.integers(0, 99))
@example({264: BANNED_BIAS, 18: 4.0}, {"temperature": 0.0}, 0.95, 3, 1)
@example({token: 100.0 for token in range(300, 304)}, {"temperature": 0.0}, 0.6, None, 1)
def test_drafts_change_nothing(engine: Engine, biases: dict[int, float], chosen: dict[str, float], right: float, tells: int | None,
                               seed: int) -> None:
    settings = SamplerSettings(**chosen, seed=seed, logit_bias=tuple(biases.items()))
    prompt = Tokenizer.load(FABLE, engine.config).encode(PROMPT, add_special_tokens=False)
    engine.speculation = None
    expected = steps_of(engine, prompt, settings, tells)
    answer = [*prompt, *(step.token for step in expected)]
    for drafters in ((Guesser(answer, right, engine.config.vocab_size),), (SuffixMatch(), RecycledTokens())):
        engine.speculation = lookup(*drafters)
        assert steps_of(engine, prompt, settings, tells) == expected
        if right > 0.9 and isinstance(drafters[0], Guesser):
            assert engine.speculation.counts.accepted > 5, "the drafts were tried"
    banned = {token for token, bias in biases.items() if bias == BANNED_BIAS}
    assert not banned & {step.token for step in expected}
