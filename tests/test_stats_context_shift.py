"""Statistics of an answer after context shifts, after an interrupted prefill, and where the plan is compared with the run."""

from pathlib import Path

import pytest

import effllm
from effllm.runtime.engine import open_engine
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
STORY = "Tell me a story about the fox and the king."


@pytest.fixture(scope="module")
def engine():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", ctx=128, overflow="shift")))[-1]
    yield engine
    engine.close()


@pytest.fixture
def session(engine) -> Session:
    engine.reset()
    return Session(engine, Tokenizer.load(FABLE, engine.config), SamplerSettings(seed=1), ignore_eos=True)


def test_a_shift_during_an_answer_leaves_the_prompt_s_figures(session) -> None:
    session.max_tokens = 5
    list(session.ask(STORY))
    session.max_tokens = 300
    stats = list(session.ask("And then?"))[-1].stats
    assert stats.truncated and len(stats.token_ids) == 300
    assert stats.cached_tokens >= 20 and stats.read_tokens == stats.prompt_tokens - stats.cached_tokens < 15
    assert stats.prefill_tps == stats.read_tokens / stats.prefill_s


def test_a_prompt_without_its_middle_counts_what_was_read(session) -> None:
    session.max_tokens = 2
    stats = list(session.ask("the king " * 200))[-1].stats
    assert stats.truncated and stats.prompt_tokens > 400 and stats.read_tokens + stats.cached_tokens == 64
    assert stats.prefill_tps == stats.read_tokens / stats.prefill_s
    assert stats.placement["predicted_prompt_s"] is None or stats.placement["measured_prompt_s"] == stats.prefill_s


def test_a_prompt_that_was_stopped_counts_what_was_read() -> None:
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", ctx=2048, chunk=128)))[-1]
    try:
        session = Session(engine, Tokenizer.load(FABLE, engine.config), SamplerSettings(seed=1), max_tokens=2)
        stopped = False
        for event in session.ask("the king and the fox " * 200):
            if not stopped and type(event).__name__ == "Progress":
                session.cancel()
                stopped = True
            last = event
        assert last.stats.finish_reason == "cancelled" and 0 < last.stats.read_tokens < last.stats.prompt_tokens
    finally:
        engine.close()


def test_the_plan_is_held_against_the_memory_that_came(session) -> None:
    session.max_tokens = 5
    stats = list(session.ask(STORY))[-1].stats
    planned = session.engine.placement.total_bytes
    assert stats.planned_bytes == planned == stats.to_json()["memory"]["planned_bytes"] > stats.weights_bytes
