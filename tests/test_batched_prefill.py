"""Several sequences in one pass: each has the bits that it has alone, whatever is next to it."""

from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from bidirectional_models import both_ways
from gguf_samples import fable_gguf
from hypothesis import given
from hypothesis import strategies as st
from packaged_embedder import FABLE

from effllm.runtime.engine import Engine, EngineOptions, open_engine
from effllm.runtime.events import Progress
from effllm.runtime.generation.embedding import LAST, MEAN, embed_text, embed_texts
from effllm.runtime.generation.reranker import Reranker, scores
from effllm.runtime.kv.varlen_cache import MAX_DECODE, VarlenCache, kernel_boundaries, plan_batches, supports_varlen
from effllm.runtime.last_layers import MIN_LAST_TOKENS
from effllm.runtime.prefill_chunks import FEW

LENGTHS = (1, 3, 3, 8, 9, 16, 17, 40, 40, 100, 130, 300, 700)


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = np.random.default_rng(1)
    return [draw.integers(1, 300, length).tolist() for length in lengths]


def made(steps: Generator) -> object:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def engine():
    *_, engine = open_engine(FABLE, EngineOptions(ctx=1024))
    yield engine
    engine.close()


def assert_same(engine: Engine, rows: list[list[int]], way: str) -> None:
    alone = [made(embed_text(engine, row, way, never)) for row in rows]
    for own, other in zip(made(embed_texts(engine, rows, way, never)), alone, strict=True):
        assert np.array_equal(own, other)


@pytest.mark.parametrize("way", [LAST, MEAN])
def test_vectors_have_the_bits_of_a_text_alone(engine: Engine, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    monkeypatch.setattr(engine, "batched_states",
                        lambda rows: passes.append([*map(len, rows)]) or type(engine).batched_states(engine, rows))
    assert supports_varlen(engine) and kernel_boundaries(engine) == (MAX_DECODE,)
    assert_same(engine, texts(), way)
    assert [1, 3, 3] in passes and any(len(each) > 3 for each in passes) and engine.tokens == []


def test_the_state_of_the_last_token_has_the_same_bits_where_others_are_spared_the_last_layer(engine: Engine) -> None:
    (ids,) = texts((700,))
    whole = np.concatenate([states.copy() for _, states in engine.states(ids)])
    found = [(start, states.copy()) for start, states in engine.states(ids, num_last=1)]
    engine.reset()
    assert [len(states) for _, states in found] == [MIN_LAST_TOKENS] * len(found) and found[-1][0] == len(ids) - MIN_LAST_TOKENS
    assert np.array_equal(found[-1][1][-1], whole[-1])


def test_so_have_scores(engine: Engine) -> None:
    ranking, rows = Reranker(5, 9, None), texts()
    assert made(scores(engine, rows, ranking, never)) == [made(scores(engine, [row], ranking, never))[0] for row in rows]


@pytest.mark.parametrize("kv", ["16bit", pytest.param("4bit", marks=pytest.mark.slow)])
def test_so_have_vectors_of_weights_in_few_bits(tmp_path: Path, kv: str) -> None:
    """Whose kernels of an answer reach further."""
    fable_gguf(tmp_path / "m.gguf", "Q8_0")
    *_, engine = open_engine(tmp_path / "m.gguf", EngineOptions(ctx=1024, kv=kv))
    assert kernel_boundaries(engine) == (MAX_DECODE, FEW)
    assert_same(engine, texts(), MEAN)
    engine.close()


@pytest.mark.slow
def test_so_have_those_of_models_that_see_both_ways(tmp_path: Path) -> None:
    *_, engine = open_engine(both_ways(tmp_path / "model"), EngineOptions(ctx=1024))
    assert supports_varlen(engine)
    assert_same(engine, texts(), MEAN)
    engine.close()


def test_what_is_told_of_them(engine: Engine) -> None:
    rows = texts((40,) * 40)
    told = [each for each in embed_texts(engine, rows, LAST, never) if isinstance(each, Progress)]
    assert told and all(each.total == 40 and each.phase == "embedding" for each in told)
    asked = iter([False])
    assert made(embed_texts(engine, rows, LAST, lambda: next(asked, True))) is None and engine.tokens == []
    with pytest.raises(ValueError, match="3 tokens for texts of 9"):
        VarlenCache(engine.cache, engine.config, (4, 5)).begin(3)
    engine.reset()


@given(st.lists(st.integers(1, 600), max_size=60), st.integers(FEW, 512), st.sampled_from([(MAX_DECODE,), (MAX_DECODE, FEW)]))
def test_each_text_is_in_one_pass_of_its_kind(lengths: list[int], most: int, bounds: tuple[int, ...]) -> None:
    passes = plan_batches(lengths, most, bounds)
    assert sorted(place for places in passes for place in places) == list(range(len(lengths)))
    for places in passes:
        own = [lengths[place] for place in places]
        if len(own) > 1:
            assert sum(own) <= most
            assert all((min(own) <= bound) == (max(own) <= bound) == (sum(own) <= bound) for bound in bounds)
