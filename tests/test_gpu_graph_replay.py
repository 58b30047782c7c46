"""Passes of few tokens on a GPU, recorded as graphs and replayed: the results of passes that are launched afresh."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import FABLE, options, run
from family_models import GROWING, Case
from gpu_runs import divergence, opened, simulated
from saved_models import saved
from torch.utils._python_dispatch import TorchDispatchMode

from effllm.kernels.cuda.device import SimulatedDevice
from effllm.kernels.cuda.graph_replay import GraphCache
from effllm.runtime.engine import Engine

IDS = np.random.default_rng(5).integers(0, 4096, 400).tolist()
LENGTHS = (300, 120, 290, 301, 129, 128, 127, 400)  # of prompts that begin alike: pages are opened, sealed, and cut back to


def answers(engine: Engine) -> np.ndarray:
    """Logits of single tokens and of several at once, behind prompts of several lengths."""
    rows = []
    for length in LENGTHS:
        list(engine.prefill(IDS[:length]))
        rows += [engine.forward_logits([token]).copy() for token in IDS[:9]]
        rows += [engine.forward_logits(IDS[:4]).copy() for _ in range(4)]
    engine.close()
    return np.concatenate(rows)


@pytest.mark.parametrize("layers", (pytest.param(6, marks=pytest.mark.slow), 2))
def test_recorded_passes_have_the_numbers_of_passes_run_again(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = opened(FABLE, simulated(), gpu_layers=layers)
    replayed = 0
    repeats, recorded = engine.backends["cuda"].repeats, engine.backends["cuda"].on.recorded

    def counted(run: object) -> tuple:
        again, out = recorded(run)

        def counting() -> None:
            nonlocal replayed
            replayed += 1
            again()

        return counting, out

    engine.backends["cuda"].on.recorded = counted
    found = answers(engine)
    assert replayed > 60 and not repeats.broken
    monkeypatch.setattr(GraphCache, "run", lambda self, blocks, positions, x, layers: layers(self._device.to_device(x)))
    anew = answers(opened(FABLE, simulated(), gpu_layers=layers)[0])
    assert np.array_equal(found, anew)
    assert divergence(found, answers(opened(FABLE, None)[0])) < 1e-6


def test_queries_that_grow_do_so_in_recorded_passes(tmp_path: Path) -> None:
    """Keys and queries have tables of their own, and both follow the position."""
    saved(Case("ministral3", {"vocab_size": 4096, "rope_parameters": GROWING}), tmp_path)
    engine, _ = opened(tmp_path, simulated(), gpu_layers=3)
    repeats = engine.backends["cuda"].repeats
    found = answers(engine)
    assert not repeats.broken and all(known.replay is not None for known in repeats._graphs.values())
    assert divergence(found, answers(opened(tmp_path, None)[0])) < 1e-6


def test_a_pass_that_cannot_be_recorded_is_run_and_told_once() -> None:
    engine, _ = opened(FABLE, simulated(), gpu_layers=6)

    def refused(run: object) -> tuple:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    engine.backends["cuda"].on.recorded = refused
    list(engine.prefill(IDS[:20]))
    found = np.concatenate([engine.forward_logits([token]).copy() for token in IDS[:5]])
    said = engine.announcements()
    assert said == ["GPU kernels are launched one by one instead of as a graph, which takes several times as long: "
                    "operation not permitted when stream is capturing"]
    assert engine.announcements() == []
    engine.close()
    host, _ = opened(FABLE, None)
    list(host.prefill(IDS[:20]))
    assert divergence(found, np.concatenate([host.forward_logits([token]).copy() for token in IDS[:5]])) < 1e-6
    host.close()


@pytest.mark.parametrize("case, kv", [(Case("mistral", {"sliding_window": 40}), "16bit"), (Case("qwen3_moe"), "16bit"), (None, "4bit")])
def test_what_the_host_decides_for_every_token_is_not_recorded(case: Case | None, kv: str, tmp_path: Path) -> None:
    folder = FABLE if case is None else tmp_path
    if case is not None:
        saved(case, folder)
    engine, _ = opened(folder, simulated(), kv=kv)
    engine.backends["cuda"].on.recorded = None  # never called
    list(engine.prefill([1] * 20))
    for _ in range(4):
        engine.forward_logits([1])
    assert not engine.backends["cuda"].repeats.broken
    engine.close()


def test_arrays_come_from_the_host_by_which_array_they_are() -> None:
    """Two that hold the same now need not do so later."""
    repeats, blocks, first, second = GraphCache(simulated()), np.zeros((1, 4), np.int64), np.ones(1, np.float32), np.ones(1, np.float32)
    x, positions = np.zeros((1, 1), np.float32), np.array([0])

    def layers(stream: torch.Tensor) -> torch.Tensor:
        return stream + 10 * repeats.array(first) + repeats.array(second) + repeats.of_positions("at", positions, lambda at: at * 100)

    assert [repeats.run(blocks, np.array([at]), x + at, layers).item() for at in (0, 1, 2)] == [11, 112, 213]
    second[:] = 5
    assert repeats.run(blocks, np.array([3]), x, layers).item() == 315
    assert repeats.run(blocks.copy(), np.array([0]), x, layers).item() == 15


class Waiting(TorchDispatchMode):
    """Refuses operations that would wait for a GPU, as graph capture does."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        if "_local_scalar_dense" in str(op) or "nonzero" in str(op):
            raise RuntimeError(f"operation not permitted when stream is capturing: {op}")
        return op(*args, **(kwargs or {}))


class Recording(SimulatedDevice):
    def recorded(self, run):  # noqa: ANN001, ANN201
        with Waiting():
            out = run()
        return lambda: out.copy_(run()), out


@pytest.mark.parametrize("made", ({}, {"spec": "4bit"}, pytest.param(
        {"spec": "4bit+0.5%", "method": "spqr"}, marks=pytest.mark.slow)))
def test_nothing_of_a_recorded_pass_waits_for_the_gpu(made: dict[str, str], tmp_path: Path) -> None:
    folder = FABLE
    if made:
        run(FABLE, folder := tmp_path / "small", options(**made))
    engine, _ = opened(folder, Recording(link=1.0), gpu_layers=6, exact=True)
    list(engine.prefill(IDS[:20]))
    found = np.concatenate([engine.forward_logits([token]).copy() for token in IDS[:5]])
    assert engine.backends["cuda"].repeats.broken == "" and engine.announcements() == []
    engine.close()
    plain, _ = opened(folder, None, exact=True)
    list(plain.prefill(IDS[:20]))
    assert divergence(found, np.concatenate([plain.forward_logits([token]).copy() for token in IDS[:5]])) < 1e-4
    plain.close()


@pytest.mark.parametrize("layer", (0, 2))
def test_a_pass_that_breaks_off_is_no_reason_to_record_none(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = opened(FABLE, simulated(), gpu_layers=6)
    list(engine.prefill(IDS[:20]))
    repeats, block, left = engine.backends["cuda"].repeats, engine.model.block, layer

    def breaking(*args: object, **more: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return block(*args, **more)

    monkeypatch.setattr(engine.model, "block", breaking)
    with pytest.raises(KeyboardInterrupt):
        engine.forward_logits([5])
    monkeypatch.undo()
    for token in (5, 6, 7):
        engine.forward_logits([token])
    assert repeats.broken == "" and engine.announcements() == [] and repeats._graphs[1].replay is not None
    engine.close()
