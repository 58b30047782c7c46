"""Passes of several tokens replayed as recorded, one recording per number of tokens: with the bits of passes prepared afresh."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conversions import options, run
from family_models import CASES
from family_sizes import OF_ALL_KINDS
from saved_models import saved
from streamed_models import FABLE, paging
from test_moe_models import mixture_model
from test_recorded_passes import Counted, opened

from effllm.kernels.layout import MAX_DECODE_TOKENS
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prepare import EngineOptions

PASSES = 120
FIRST = {case.family: name for name, case in reversed(CASES.items())}  # of each family the first
QUICK = {name for family, name in FIRST.items() if family in OF_ALL_KINDS}


def passes(engine: Engine, seed: int, most: int) -> list[np.ndarray]:
    """The states of passes of 1 to `most` tokens, of which some are held, as drafts are; now and then the text is cut."""
    rng, states = np.random.default_rng(seed), []
    model, cache, vocabulary = engine.model, engine.cache, engine.config.vocab_size
    for number in range(PASSES):
        count = int(rng.integers(1, most + 1))
        states.append(model.forward(rng.integers(0, vocabulary, count), cache, commit=False).copy())
        cache.commit(int(rng.integers(1, count + 1)))
        if number % 40 == 39:
            cache.truncate(cache.n - 5)
    return states


def plain(folder: Path, **more: object) -> Engine:
    *_, engine = open_engine(folder, EngineOptions(device="cpu", **{"ctx": 1024, **more}))
    return engine


def check(make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch, repeats: bool = True) -> None:
    recorded, anew = make(), make()
    monkeypatch.setattr(anew.model.backends["cpu"], "replay", lambda *more: False)
    counted = Counted(recorded, monkeypatch)
    for most in (MAX_DECODE_TOKENS, MAX_DECODE_TOKENS + 2):  # longer ones are prepared anew, and all others after them
        assert all(np.array_equal(a, b) for a, b in zip(passes(recorded, most, most), passes(anew, most, most), strict=True))
        for engine in (recorded, anew):
            engine.reset()
        in_python = counted.count / (PASSES * recorded.config.num_hidden_layers)
        if most == MAX_DECODE_TOKENS:
            assert in_python < 0.5 if repeats else in_python > 0.6, "the share of passes that were prepared in Python"
    for engine in (recorded, anew):
        engine.close()


@pytest.mark.parametrize("kv, more", [("16bit", {}), pytest.param("4bit", {}, marks=pytest.mark.slow),
                                      pytest.param("8bit", {"kv_sink": 0, "kv_window": 0}, marks=pytest.mark.slow),
                                      ("4bit+mikv", {"kv_window": 0, "force": True})])
def test_caches(kv: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda: plain(FABLE, kv=kv, **more), monkeypatch)


@pytest.mark.parametrize("bits", ["4bit", pytest.param("8bit", marks=pytest.mark.slow)])
def test_low_bit_weights(bits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(FABLE, tmp_path / "low", options(bits))
    check(lambda: plain(tmp_path / "low"), monkeypatch)


@pytest.mark.slow
def test_a_mixture_in_memory_and_one_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(mixture_model(tmp_path / "bf16"), tmp_path / "4bit", options("4bit"))
    check(lambda: plain(tmp_path / "bf16", ctx=512), monkeypatch)
    check(lambda: plain(tmp_path / "4bit", ctx=512), monkeypatch)
    check(lambda: paging(tmp_path / "4bit", 8, ctx=512), monkeypatch)


@pytest.mark.slow
def test_pages_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda: opened(FABLE, 1, spill_dir=str(tmp_path)), monkeypatch, repeats=False)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES])
def test_families(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(CASES[name], tmp_path)
    recorded, anew = (plain(tmp_path, ctx=None) for _ in range(2))
    monkeypatch.setattr(anew.model.backends["cpu"], "replay", lambda *more: False)
    assert all(np.array_equal(a, b) for a, b in zip(passes(recorded, 3, 3), passes(anew, 3, 3), strict=True))
    for engine in (recorded, anew):
        engine.close()
