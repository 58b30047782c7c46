"""Calibration: statistics match the tapped inputs, one layer is in memory at a time, and too little text is reported."""

import weakref
from pathlib import Path

import numpy as np
import pytest

import effllm
from effllm import UsageError
from effllm.kernels.reference import normalise
from effllm.runtime import calibrate as module
from effllm.runtime.calibrate import LayerStats, built_in_text, calibrate, calibration_ids, variety_warning, windows
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Progress
from effllm.runtime.model import Model
from effllm.runtime.prepare import EngineOptions

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
IDS = np.random.default_rng(2).integers(5, 4000, 600).tolist()


@pytest.fixture(scope="module")
def events() -> list:
    return list(calibrate(FABLE, IDS, threads=2))


@pytest.fixture(scope="module")
def engine():
    made = list(open_engine(FABLE, EngineOptions(device="cpu", kv="32bit", ctx=512, exact=True)))[-1]
    yield made
    made.close()


def test_every_layer_comes_in_order_and_the_head_last(events: list) -> None:
    found = [event for event in events if isinstance(event, LayerStats)]
    assert [each.key for each in found] == [0, 1, 2, 3, 4, 5, "outer"]
    assert all(set(each.roles) == {"q", "k", "v", "o", "gate", "up", "down"} for each in found[:-1])
    assert set(found[-1].roles) == {"embed"}
    assert all(stats.tokens == len(IDS) for each in found for stats in each.roles.values())
    assert found[0].roles["q"] is found[0].roles["v"] and found[0].roles["gate"] is found[0].roles["up"]
    progress = [event for event in events if isinstance(event, Progress) and event.phase == "calibrating"]
    assert progress[-1].done == progress[-1].total == 6 * len(IDS)


def test_statistics_are_those_of_the_inputs(events: list, engine) -> None:
    layer, seen = 3, {}

    def tap(name: str, at: int, value: np.ndarray) -> None:
        if at == layer:
            seen.setdefault(name, []).append(value.copy())

    for window in windows(IDS, 512):
        engine.reset()
        engine.model.forward(window, engine.cache, tap)
    with engine.model.pager.lease(layer) as raw:
        weights = engine.model._lease(layer, raw)
    inputs = {"o": np.concatenate(seen["attn_out"]), "down": np.concatenate(seen["mlp_hidden"])}
    for role, tapped, norm in (("q", "block_in", weights.input_norm), ("gate", "mlp_in", weights.post_norm)):
        inputs[role] = normalise(np.concatenate(seen[tapped]), norm.kind, norm.weight, norm.bias, norm.eps)
    found = next(event for event in events if isinstance(event, LayerStats) and event.key == layer)
    for role, x in inputs.items():
        stats, hessian = found.roles[role], x.T.astype(np.float64) @ x / len(x)
        assert np.allclose(stats.hessian, hessian, atol=1e-5 * np.abs(hessian).max())
        assert np.allclose(stats.mean_square, np.square(x).mean(0), rtol=1e-3)


def test_the_hidden_state_reaches_the_head(events: list, engine) -> None:
    states = []
    for window in windows(IDS, 512):
        engine.reset()
        states.append(engine.model.forward(window, engine.cache).copy())
    norm = engine.model.read_norm()
    x = normalise(np.concatenate(states), norm.kind, norm.weight, norm.bias, norm.eps)
    hessian = x.T @ x / len(x)
    tied = hessian + hessian.diagonal().mean() * np.eye(len(hessian))  # looked up as well as read
    assert np.allclose(events[-1].roles["embed"].hessian, tied, atol=1e-5 * np.abs(hessian).max())


def test_one_layers_weights_are_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref] = []
    read = Model.read_layer

    def watched(self: Model, layer: int) -> object:
        assert all(reference() is None for reference in alive)
        weights = read(self, layer)
        alive.append(weakref.ref(weights.down.weight))
        return weights

    monkeypatch.setattr(Model, "read_layer", watched)
    assert sum(isinstance(event, LayerStats) for event in calibrate(FABLE, IDS[:80])) == 7
    assert len(alive) == 6


def test_a_short_last_window_is_left_out() -> None:
    assert [len(window) for window in windows(list(range(1100)), 512)] == [512, 512, 76]
    assert [len(window) for window in windows(list(range(1030)), 512)] == [512, 512]
    assert [len(window) for window in windows(list(range(40)), 16)] == [16, 16]


def test_too_little_text_is_reported_with_both_numbers() -> None:
    config = read_config(FABLE)
    with pytest.raises(UsageError, match=r"has \d+ tokens, at least 512") as caught:
        calibration_ids(FABLE, config, "The fox and the king went into the wood. " * 10)
    assert "--calib" in caught.value.hint
    assert len(calibration_ids(FABLE, config, "The fox and the king went into the wood. " * 400, 700)) == 700


def test_a_text_that_says_little_is_remarked_upon() -> None:
    (said,) = variety_warning([5, 6, 7] * 300)
    assert "only 3 different tokens among 900" in said.text
    assert not list(variety_warning(range(200))) and not list(variety_warning([]))


def test_the_built_in_sample_is_enough_and_varied() -> None:
    ids = calibration_ids(FABLE, read_config(FABLE), built_in_text())
    assert len(ids) == module.TOKENS and len(set(ids)) > 1000
