"""Which kernels multiply a model's weights, as `effllm plan` reports it: those that the run really uses."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conversions import FABLE
from gguf_samples import fable_gguf
from gpu_runs import simulated
from test_gpu_tier import planned

from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.kernels import autotune
from effllm.kernels.autotune import Timing
from effllm.kernels.cpu.stages import LOW_BIT
from effllm.runtime.conversion.bundle_ffn import bundle
from effllm.runtime.engine import open_engine
from effllm.runtime.planning.chosen_kernels import EITHER, ChosenKernels, chosen_kernels
from effllm.runtime.planning.forecast import prepare_quantized
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.weights import lookup_layout

SPARSE = "ternary"  # the one preset whose codes can be looked up


@pytest.fixture
def nothing_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lookup_layout, "LEAST_NBYTES", 0)
    yield


def chosen(spec: str, **options: object) -> tuple[ChosenKernels, ...]:
    return chosen_kernels(prepare_quantized(FABLE, spec, EngineOptions(device="cpu", **options)))


def test_each_stored_type_says_what_runs_it() -> None:
    many, few = chosen("4bit")
    assert (many.stored, few.stored) == ("codebook4:16", "symmetric6:32") and many.nbytes > few.nbytes
    for each in (many, few):
        assert each.device == "cpu" and each.token.name.startswith("dot products") and each.prompt.name.startswith("int8 tiles")
        assert "few tokens" in each.token.because and "many tokens" in each.prompt.because
    assert {each.token.name for each in chosen("4bit", exact=True)} == {"float32 tiles"}


def test_raw_types_are_called_what_they_are(tmp_path: Path) -> None:
    for kind, stored in (("F32", "f32"), ("F16", "f16"), ("Q4_1", "minimum4:32")):
        path = tmp_path / f"{kind}.gguf"
        fable_gguf(path, kind)
        assert {each.stored for each in chosen_kernels(planned(path, None, device="cpu"))} == {stored}
    assert {each.stored for each in chosen_kernels(planned(FABLE, None, device="cpu"))} == {"bf16"}


def test_exact_products_are_no_matter_of_measurement(nothing_small: None) -> None:
    found = {(each.token.name, each.token.because) for each in chosen(SPARSE, exact=True)}
    assert found == {("float32 tiles", "--exact: activations are not quantized")}


def test_bundles_are_multiplied_neuron_by_neuron(tmp_path: Path) -> None:
    assert list(bundle(FABLE.parent / "fable-relu", tmp_path / "made"))
    found = chosen_kernels(planned(tmp_path / "made", None, device="cpu"))
    assert {(each.token.name, each.prompt.name) for each in found} == {
        ("few columns", "register tiles"), ("active neurons", "neurons in groups")}


def test_the_run_takes_what_is_said() -> None:
    *_, engine = open_engine(FABLE, EngineOptions(device="cpu", ctx=256))
    try:
        for _ in engine.prefill(list(range(100, 150))):
            continue
        engine.forward_logits([7])
        taken = {each.candidate.name for call, each in engine.backends["cpu"].registry.choices.items() if call.op in ("matrix", LOW_BIT)}
        (raw,) = chosen_kernels(engine.prepared, engine.model.tensors)
    finally:
        engine.close()
    assert taken == {raw.token.name, raw.prompt.name} and raw.token.name != raw.prompt.name


@pytest.mark.parametrize(("timing", "begins"), ((Timing(1e9, 1.5e9), "table lookup"), (Timing(1e9, 0.8e9), "dot products")))
def test_what_was_measured_decides(timing: Timing, begins: str, nothing_small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    every = next(each for each in chosen(SPARSE) if each.stored.startswith("ternary"))
    assert every.token.name == EITHER and "measured when" in every.token.because, "nothing is known yet"
    monkeypatch.setattr(autotune, "load_timings", lambda: _Every(timing))
    every = next(each for each in chosen(SPARSE) if each.stored.startswith("ternary"))
    assert every.token.name.startswith(begins) and every.token.because == timing.reason
    assert every.prompt.name.startswith("int8 tiles"), "a prompt is expanded either way"


class _Every(dict):
    """One measurement of all kinds."""

    def __init__(self, timing: Timing) -> None:
        super().__init__()
        self.timing = timing

    def __contains__(self, case: object) -> bool:
        return True

    def __getitem__(self, case: object) -> Timing:
        return self.timing


def test_layers_on_a_gpu_are_said_to_run_there() -> None:
    found = chosen_kernels(planned(FABLE, simulated(8 << 30), gpu_layers=3))
    assert {each.device for each in found} == {"cpu", "cuda"}
    assert next(each for each in found if each.device == "cuda").token.name == "widened to float32"


def test_plan_shows_them() -> None:
    def shown(*more: str) -> str:
        world = Environment(io.StringIO(), io.StringIO(), io.StringIO(), {})
        assert main(["plan", "fable:4bit", "--no-probe", "--device", "cpu", *more], world) == 0
        return world.stdout.getvalue()

    assert "kernels      codebook4:16, symmetric6:32: dot products" in shown()
    told = json.loads(shown("--json"))["kernels"]
    assert [each["stored"] for each in told] == ["codebook4:16", "symmetric6:32"] and all(each["token"]["because"] for each in told)
