"""`eval kld` and `eval recall` count only tokens that read a packed page, whatever the exact window."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import effllm
from effllm import UsageError
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.measuring.evaluate import kld
from effllm.runtime.measuring.recall import SPREADS, recall
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
PROSE = (Path(effllm.__path__[0]) / "runtime" / "calibration.txt").read_text(encoding="utf-8")


def opened(kv: str, **more: object) -> Engine:
    return list(open_engine(FABLE, EngineOptions(device="cpu", kv=kv, ctx=768, **more)))[-1]


@pytest.fixture(scope="module")
def exact() -> Iterator[Engine]:
    engine = opened("32bit")
    yield engine
    engine.close()


@pytest.fixture(params=[pytest.param((0, 64), marks=pytest.mark.slow), (64, 300), pytest.param((16, 17), marks=pytest.mark.slow)], ids=str)
def packed(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """With windows that end within a page."""
    sink, window = request.param
    engine = opened("2bit", kv_sink=sink, kv_window=window)
    yield engine
    engine.close()


def readers(engine: Engine, ids: Sequence[int], by_token: bool = False) -> list[int]:
    """Positions that see a packed page, asked of the blocks that attention is given."""
    return [at for start, logits in engine.score(ids, pages=1, by_token=by_token) for at in range(start, start + len(logits))
            if engine.cache.step.blocks[:, 0].any()]


def test_the_first_token_that_reads_a_packed_page_is_known(packed: Engine, exact: Engine) -> None:
    ids = [1 + (31 * i) % 4000 for i in range(600)]
    pages = readers(packed, ids)
    assert pages == list(range(packed.first_reader(), 600)) and pages[0] % 128 == packed.cache.shape.sinks % 128
    assert readers(packed, ids, by_token=True)[0] == packed.first_reader(by_token=True) == pages[0] - (-packed.cache.shape.window) % 128
    assert exact.first_reader() == 0


def test_a_token_that_reads_none_is_not_scored(packed: Engine, exact: Engine) -> None:
    """Tokens that the window kept exact until their page ended were counted too, and made the divergence far too small."""
    tokenizer, first = Tokenizer.load(FABLE, packed.config), packed.first_reader()
    text = tokenizer.decode(tokenizer.encode(PROSE)[:760])
    width = len(tokenizer.encode(text))
    (result,) = list(kld(packed, exact, tokenizer, text, 768))[-1:]
    assert result.tokens == width - 1 - first and result.kld_median > 1e-5
    with pytest.raises(UsageError, match=f"windows of {first + 1} tokens: none reads a packed page, which needs {first + 2}"):
        list(kld(packed, exact, tokenizer, text, first + 1))
    assert list(kld(packed, exact, tokenizer, text, first + 2))[-1].tokens >= 1


def test_an_answer_that_reads_none_is_not_counted(exact: Engine) -> None:
    tokenizer = Tokenizer.load(FABLE, exact.config)
    for window, ctx in ((300, 512), (128, 320)):
        engine = opened("2bit", kv_window=window)
        try:
            with pytest.raises(UsageError, match=f"a context of {ctx} tokens: no answer in it reads a packed page") as refused:
                list(recall(engine, exact, tokenizer, PROSE, ctx))
            assert refused.value.hint.startswith("a larger -c")
        finally:
            engine.close()
    few, all_ = opened("2bit", kv_window=384), opened("2bit")
    try:
        some, every = (list(recall(engine, exact, tokenizer, PROSE, 640, samples=1))[-1].rows for engine in (few, all_))
    finally:
        few.close()
        all_.close()
    assert len(some) == len(SPREADS) and all(0 < one.tokens < other.tokens for one, other in zip(some, every, strict=True))
