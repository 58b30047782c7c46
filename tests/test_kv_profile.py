"""KV profiles of a real model, recorded through its own forward pass."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import effllm
from effllm import UsageError
from effllm.kernels.layout import PAGE
from effllm.quant.kv_codec import decode, encode
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice, Progress
from effllm.runtime.kv.kv_profile import Profile
from effllm.runtime.kv.kv_profile_run import record_profile
from effllm.runtime.kv.kv_recording import record
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
CTX = 640
TEXT = built_in_text()[:9000]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    *_, opened = open_engine(FABLE, EngineOptions(device="cpu", kv="32bit", ctx=CTX, chunk=CTX))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    return Tokenizer.load(FABLE, engine.config)


@pytest.fixture(scope="module")
def profile(engine: Engine, tokenizer: Tokenizer) -> Profile:
    *_, made = record(engine, tokenizer, TEXT, "some weights", seconds=1e6)
    return made


class Clock:
    """Seconds that pass with every look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.slow
def test_bits_go_to_the_heads_that_remember(profile: Profile) -> None:
    """Two of fable's twelve heads copy what was said before: at 4 bits on average they get 8, at 8 bits 10, for hardly any of the noise."""
    bits = profile.bits(4)
    sides = np.array(bits)
    assert sides.shape == (6, 2, 2)
    assert 3.9 <= sides.mean() <= 4
    assert (sides[4:, 0] >= 6).all()
    assert sides[1:4].mean() < 4
    assert (np.array(profile.bits(8))[4:, 0] == 10).all()
    even = [[(4, 4)] * 2] * 6
    assert profile.cost(bits) < 0.3 * profile.cost(even)
    for mean in (2, 3, 5, 6, 8):
        assert np.array(profile.bits(mean)).mean() <= mean
        assert profile.cost(profile.bits(mean)) <= profile.cost([[(mean, mean)] * 2] * 6)
    apart = np.array(profile.bits(5, 3))
    assert apart[..., 0].mean() <= 5
    assert apart[..., 1].mean() <= 3


@pytest.mark.slow
def test_a_recording_is_the_same_twice(engine: Engine, tokenizer: Tokenizer, profile: Profile) -> None:
    *_, again = record(engine, tokenizer, TEXT, "some weights", seconds=1e6)
    assert again.hash == profile.hash
    assert again.bits(4) == profile.bits(4)
    *_, other = record(engine, tokenizer, TEXT, "other weights", seconds=1e6)
    assert other.hash != profile.hash


def test_bases_serve_the_codec(profile: Profile) -> None:
    bits = profile.bits(4)
    bases = profile.bases(bits)
    k, v = np.random.default_rng(0).standard_normal((2, 1, PAGE, 64)).astype(np.float32)
    for basis, heads in zip(bases, bits, strict=True):
        for head, (bits_k, bits_v) in enumerate(heads):
            one = basis.head(head)
            records = encode(k, v, bits_k, bits_v, one)
            back = decode(records, 64, one)
            assert one.profile == profile.hash
            assert all(np.isfinite(side).all() for side in back)
    quiet, loud = ((there - k).std() for there, _ in (decode(encode(k, v, b, b, one), 64, one) for b in (8, 2)))
    assert quiet < loud / 10


@pytest.mark.slow
def test_time_that_runs_out_is_reported(engine: Engine, tokenizer: Tokenizer) -> None:
    events = list(record(engine, tokenizer, TEXT, "w", seconds=40, clock=Clock(1.0)))
    (notice,) = (event for event in events if isinstance(event, Notice))
    assert "stopped at its time limit, 40 s, after" in notice.text
    assert "tokens" in notice.text
    assert events[-1].tokens < sum(len(tokenizer.encode(TEXT)) // CTX * [CTX])
    assert any(isinstance(event, Progress) and event.phase == "trying bits" for event in events)


def test_layers_that_were_not_reached_get_the_mean(engine: Engine, tokenizer: Tokenizer) -> None:
    events = list(record(engine, tokenizer, TEXT, "w", seconds=4, clock=Clock(1.0)))
    notice = next(event for event in events if isinstance(event, Notice))
    made = events[-1]
    reached = sum(cost is not None for cost in made.costs)
    assert 0 < reached < 6
    assert f"after {reached} of 6 layers" in notice.text
    assert all(layer == [(4, 4)] * 2 for layer in made.bits(4)[reached:])
    assert made.layers[-1].strength_k is None
    assert len(made.bases(made.bits(4))) == 6


def test_what_cannot_be_recorded_is_refused(engine: Engine, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="too few tokens"):
        list(record(engine, tokenizer, "Once upon a time.", "w"))
    *_, short = open_engine(FABLE, EngineOptions(device="cpu", kv="32bit", ctx=256))
    try:
        with pytest.raises(UsageError, match="never packed"):
            list(record(short, tokenizer, TEXT, "w"))
    finally:
        short.close()


@pytest.mark.slow
def test_the_last_whole_window_is_held_back_for_checks(tmp_path: Path) -> None:
    """What is left of the text behind it is too short to read a packed page."""
    tokenizer = Tokenizer.load(FABLE, read_config(FABLE))
    text = tokenizer.decode(tokenizer.encode(TEXT * 8)[: 2 * 1024 + 100])
    copy = tmp_path / "fable"
    shutil.copytree(FABLE, copy)
    *_, made = record_profile(copy, text, 1e6)
    assert made.tokens == 1024 and made.checks
