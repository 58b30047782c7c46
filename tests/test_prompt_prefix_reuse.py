"""A prompt repeated, or sharing a prefix with the one before, has the bits of prefilling it whole, for any weights: few tokens alone would
go to the decode kernels, which round activations differently."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conversions import options, run, short_fable
from hypothesis import given
from hypothesis import strategies as st
from session_engines import read, tokens

from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prefill_chunks import FEW, chunk_lengths, reusable_tokens
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.speculation.draft_model import DraftModel

ENDS = (FEW + 1, 40, 300, 448 + 40)  # a chunk ends behind 448 tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("repeated")
    raw = short_fable(base / "raw")
    run(raw, base / "4bit", options("4bit"))
    return {"raw": raw, "4bit": base / "4bit"}


@pytest.fixture(scope="module", params=[("raw", "16bit"), ("4bit", "16bit"), ("4bit", "4bit")], ids=" ".join)
def engine(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Engine]:
    weights, kv = request.param
    made = list(open_engine(folders[weights], EngineOptions(device="cpu", ctx=700, kv=kv, kv_window=512 if kv == "4bit" else None)))[-1]
    yield made
    made.close()


def answer(engine: Engine, ids: list[int]) -> None:
    for token in ids:
        engine.forward_logits([token])


def anew(engine: Engine, ids: list[int]) -> np.ndarray:
    engine.reset()
    read(engine, ids)
    return engine._logits.copy()


@pytest.mark.parametrize("length", (5, FEW, *ENDS, 448 + 3))
def test_a_prompt_that_comes_again_has_the_same_bits(engine: Engine, length: int) -> None:
    ids = tokens(length)
    expected = anew(engine, ids)
    for _ in range(2):
        answer(engine, tokens(7, 1))
        read(engine, ids)
        assert np.array_equal(engine._logits, expected) and engine.num_prefilled_tokens <= FEW + 1


@pytest.mark.parametrize("length", (5, FEW, *ENDS, 448 + 3))
@pytest.mark.parametrize("more", (1, FEW))
def test_one_that_begins_as_the_one_before_has_the_bits_of_reading_it_whole(engine: Engine, length: int, more: int) -> None:
    ids = [*tokens(length), *tokens(more, 2)]
    expected = anew(engine, ids)
    anew(engine, tokens(length))
    answer(engine, tokens(7, 1))
    read(engine, ids)
    assert np.array_equal(engine._logits, expected) and engine.num_prefilled_tokens <= 2 * FEW + more


def test_a_short_one_after_a_long_one_that_begins_alike(engine: Engine) -> None:
    """As a server's first questions do, whose beginning is the template's."""
    short, long = [*tokens(3), *tokens(9, 2)], [*tokens(3), *tokens(50, 3)]
    for first, second in ((short, long), (long, short)):
        expected = anew(engine, second)
        anew(engine, first)
        read(engine, second)
        assert np.array_equal(engine._logits, expected)


def test_what_was_answered_is_not_read_again(engine: Engine) -> None:
    """It was multiplied as an answer is, and stays as it is."""
    anew(engine, tokens(60))
    answer(engine, tokens(30, 1))
    read(engine, [*engine.tokens, 5])
    assert engine.num_prefilled_tokens == 1


@given(st.integers(1, 2000), st.integers(0, 2000), st.sampled_from((0, 16, 64, 128)), st.sampled_from((128, 256, 512)))
def test_every_token_goes_where_one_reading_has_it(total: int, held: int, sinks: int, chunk: int) -> None:
    """Also those that are read again, and no more of them than it takes."""
    ids = list(range(total))
    cache = SimpleNamespace(shape=SimpleNamespace(sinks=sinks), reachable_length=lambda n: n, resumable=held)
    back, held = reusable_tokens(cache, ids[:held], ids, total, chunk), min(held, total - 1)

    def few(begin: int) -> list[bool]:
        return [piece <= FEW for piece in chunk_lengths(begin, total, sinks, chunk) for _ in range(piece)]

    assert few(back) == few(0)[back:] and held - FEW <= back <= held


def test_a_draft_model_continues_from_what_it_holds(folders: dict[str, Path]) -> None:
    """What it guesses is nobody's answer: it need not be that of one reading, and each guess would take the longer."""
    prepared = prepare(folders["4bit"], EngineOptions(device="cpu", ctx=256))
    drafts = DraftModel(prepared, prepared.config.vocab_size)
    try:
        for _ in drafts.load():
            continue
        drafts.follow(tokens(60))
        for _ in drafts.read():
            continue
        drafts.follow([*tokens(60), 9])
        assert drafts.propose(3) and drafts._engine.num_prefilled_tokens == 1
    finally:
        drafts.close()
