"""Which tokens a packed cache keeps exact, measured by attention output: on synthetic attention with known targets, and on fable."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_kv_noise_cost import ROWS, SIZE, TOKENS, layer, output

import effllm
from effllm.kernels.kv_layout import GROUP_K
from effllm.quant.kv_basis import KVBasis
from effllm.quant.kv_noise_cost import AttentionParams, rounded
from effllm.quant.kv_sink_split import SINK_SPLITS, choose_sink_split, sink_split_costs
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.kv.kv_profile import Profile
from effllm.runtime.kv.kv_profile_file import identity_of, load_profile, save_profile
from effllm.runtime.kv.kv_recording import record
from effllm.runtime.kv.kv_validation import validate_auto
from effllm.runtime.measuring.evaluate import windows
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
BITS = [(3, 2), (2, 4)]
CTX = 640


@pytest.mark.parametrize(("reading", "sinks"), [
    (AttentionParams(0.125), None), (AttentionParams(0.125, window=300), None), (AttentionParams(0.125, softcap=2.0), None),
    (AttentionParams(0.125), np.array([-9, 4, 6, 8], np.float32)),
])
def test_the_cost_of_ends_is_the_error_of_the_output(reading: AttentionParams, sinks: np.ndarray | None) -> None:
    q, k, v, wo = layer()
    basis = KVBasis.plain(2, SIZE)
    found = sink_split_costs(q, k, v, wo @ wo.swapaxes(1, 2), ROWS, reading, basis, BITS, sinks)
    k_packed, v_packed = k.copy(), v.copy()
    for at, (bits_k, bits_v) in enumerate(BITS):
        one = basis.head(at)
        widths_k, widths_v = one.widths(bits_k, bits_v)
        k_packed[at] = rounded(k[at] @ one.k_matrix[0].T, widths_k[0], GROUP_K) @ one.k_inverse[0].T
        v_packed[at] = rounded(v[at] @ one.v_matrix[0].T, widths_v[0], 1) @ one.v_inverse[0].T
    exact = output(q, k, v, wo, reading, k, v, sinks)
    for (first, newest), cost in zip(SINK_SPLITS, found, strict=True):
        there = output(q, k, v, wo, replace(reading, sinks=first, exact=newest), k_packed, v_packed, sinks)
        assert cost == pytest.approx(np.square(there - exact).sum(2).mean(1).sum(), rel=1e-3)


def looking(where: str, seed: int) -> np.ndarray:
    """What ENDS cost where most queries look at some tokens: the first ones behind 64, those 128 to 192 back, or none in particular."""
    q, k, v, wo = layer(seed=seed)
    q[..., 0] = 12
    if where == "behind":
        k[:, 64:128, 0] += 6
    if where == "back":  # K's first two channels turn with the position, as under RoPE, so that a distance can be looked for
        turn = 2 * np.pi / 512
        k[:, :, 0], k[:, :, 1] = 6 * np.cos(turn * np.arange(TOKENS)), 6 * np.sin(turn * np.arange(TOKENS))
        q[..., 0], q[..., 1] = 12 * np.cos(turn * (ROWS - 176)), 12 * np.sin(turn * (ROWS - 176))
    return sink_split_costs(q, k, v, wo @ wo.swapaxes(1, 2), ROWS, AttentionParams(0.125), KVBasis.plain(2, SIZE), [(3, 3)] * 2)


@pytest.mark.parametrize(("where", "ends"), [("behind", (128, 64)), ("back", (0, 192)), ("nowhere", (64, 128))])
def test_the_tokens_that_are_looked_at_stay_exact(where: str, ends: tuple[int, int]) -> None:
    costs = np.array([looking(where, seed) for seed in range(3)])
    assert SINK_SPLITS[choose_sink_split(costs)] == ends
    assert SINK_SPLITS[choose_sink_split(costs[:2])] == SINK_SPLITS[0]  # two windows prove nothing


def test_a_little_or_what_is_not_sure_changes_nothing() -> None:
    wild, tame = np.geomspace(1, 1e6, 9), np.linspace(0.9, 1.1, 9)
    for costs in (np.stack([wild, 0.93 * wild, wild, wild], 1), np.stack([tame, tame ** 9 * 0.8, tame, tame], 1)):
        assert choose_sink_split(costs) == 0
    assert choose_sink_split(np.stack([wild, 0.8 * wild, wild, wild], 1)) == 1
    assert choose_sink_split(np.zeros((5, len(SINK_SPLITS)))) == 0


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    *_, opened = open_engine(FABLE, EngineOptions(device="cpu", kv="8bit", ctx=CTX, chunk=CTX, exact=True))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def profile(engine: Engine) -> Profile:
    *_, made = record(engine, Tokenizer.load(FABLE, engine.config), built_in_text()[:9000], identity_of(FABLE), seconds=1e6)
    return made


@pytest.mark.slow
def test_ends_are_kept_where_answers_are_better_for_it(engine: Engine, profile: Profile) -> None:
    """Fable at 4 bits: 64 newest tokens are too few (5.0e-6 nats a token in this window, beside 2.9e-6), 192 do (2.1e-6). Read page by
    page, where more tokens are exact than in an answer, both seem better than 128."""
    window = windows(Tokenizer.load(FABLE, engine.config), built_in_text()[9000:], CTX, "the sample")[3]
    assert profile.ends == SINK_SPLITS[0]
    for ends, kept in (((64, 128), True), ((0, 192), True), ((128, 64), False)):
        *_, made = validate_auto(engine, replace(profile, ends=ends), window)
        assert made.ends == (ends if kept else SINK_SPLITS[0])
        assert made.checks and made.auto is not None
    *_, late = validate_auto(engine, replace(profile, ends=(0, 192)), window, until=0.0)
    assert late.ends == SINK_SPLITS[0]  # not validated, so not taken


def test_a_run_keeps_exact_what_the_profile_says(profile: Profile, tmp_path: Path) -> None:
    copy = shutil.copytree(FABLE, tmp_path / "fable")
    save_profile(replace(profile, ends=(0, 192)), copy)
    assert load_profile(copy, read_config(copy)).ends == (0, 192)

    def held(**more: object) -> tuple[int, int, int, int, bool]:
        prepared = prepare(copy, EngineOptions(**{"device": "cpu", "ctx": 1024, "kv": "4bit"} | more))
        prepared.store.close()
        said = any("by this model's profile" in notice and "--kv-sink 0 --kv-window 192" in notice for notice in prepared.notices)
        assert prepared.window == prepared.shape.window and prepared.options.kv_sink == more.get("kv_sink"), "asked and decided are apart"
        return prepared.shape.sinks, prepared.shape.window, prepared.shape.slots, prepared.placement.ctx, said

    assert held() == (0, 192, 9, 1024, True)
    assert held(kv_sink=16) == (16, 128, 8, 1024, False)
    assert held(kv_window=64) == (64, 64, 8, 1024, False)
    assert held(kv_sink=0, kv_window=192) == (0, 192, 9, 1024, False)
    assert held(kv="16bit")[:2] == SINK_SPLITS[0]
