"""The output head on a GPU that holds all layers: when it is planned, what is transferred for it, and that its logits equal the CPU's."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import FABLE, options, run
from family_models import CASES, Case
from gpu_runs import CTX, divergence, logits, opened, simulated
from saved_models import saved
from test_device_memory import watched
from test_gpu_tier import planned

from effllm import DoesNotFit
from effllm.cli.plan_report import on_gpu
from effllm.kernels.cuda import matmul, stages
from effllm.kernels.cuda.device import SimulatedDevice


@pytest.mark.parametrize("spec", (None, "4bit", pytest.param("3bit", marks=pytest.mark.slow)))
def test_logits_are_those_of_the_processor(spec: str | None, tmp_path: Path) -> None:
    """With the weights' own numbers, as `--exact` has them there; a text that is scored goes through it in slices."""
    folder = FABLE
    if spec:
        run(FABLE, folder := tmp_path / spec, options(spec))
    card = simulated()
    engine, _ = opened(folder, card)
    layers = sum(4 * np.prod(own.shape) if len(own.shape) == 1 else own.nbytes
                 for key, roles in engine.model.tensors.items() if key != "outer" for own in roles.values())
    outer = engine.model.tensors["outer"]
    assert card.crossed.placed == layers + outer.get("head", outer["embed"]).nbytes + 4 * engine.config.hidden_size
    ids = list(range(7, 60))
    list(engine.prefill(ids))
    before = card.crossed.sends, card.crossed.receives
    engine.forward_logits([5])
    crossed = card.crossed.sends - before[0], card.crossed.receives - before[1]
    assert crossed == (2, 2), "the stream there and back, its last state there and logits back"
    assert divergence(logits(engine, 100, 90), logits(opened(folder, None, exact=True)[0], 100, 90)) < 1e-6


@pytest.mark.parametrize("case", [Case("gemma2"), Case("granite", {"logits_scaling": 3.0}), Case("olmo2", dtype="bfloat16"),
                                  Case("opt", {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64}),
                                  Case("llama", {"tie_word_embeddings": False}, dtype="float16"), Case("phi"),
                                  Case("olmo", {"clip_qkv": 0.7}), CASES["phimoe"], CASES["afmoe"], CASES["gpt_neox"]])
def test_every_kind_of_head(case: Case, tmp_path: Path) -> None:
    saved(case, tmp_path)
    engine, _ = opened(tmp_path, simulated(), ctx=100)
    assert engine.model.gpu_output_head is not None
    assert divergence(logits(engine, 60, 40), logits(opened(tmp_path, None, ctx=100, exact=True)[0], 60, 40)) < 1e-6


def test_it_goes_where_all_layers_are_and_room_is_left() -> None:
    whole = planned(FABLE, simulated(1 << 40)).placement
    assert whole.gpu.head_bytes > 0 and "of that 2.00 MiB the head's" in on_gpu(whole)[1][1]
    assert planned(FABLE, simulated(whole.vram_bytes)).placement.gpu == whole.gpu
    short = planned(FABLE, simulated(whole.vram_bytes - 1)).placement
    assert short.devices == whole.devices and short.gpu.head_bytes == 0 and short.vram_bytes < whole.vram_bytes
    assert short.gpu.weights_bytes + whole.gpu.head_bytes == whole.gpu.weights_bytes and short.ctx == whole.ctx == CTX
    without_program = [placement.total_bytes - placement.baseline_bytes for placement in (whole, short)]
    assert without_program[0] == without_program[1], "the host keeps its own"
    assert planned(FABLE, simulated(1 << 40), gpu_layers=5).placement.gpu.head_bytes == 0
    assert planned(FABLE, None).placement.gpu.head_bytes == 0


def test_what_it_takes_of_the_gpu_was_planned(tmp_path: Path) -> None:
    """Weights when it is loaded, and the working memory of long texts that are scored."""
    run(FABLE, tmp_path / "small", options("4bit"))
    for folder in (FABLE, tmp_path / "small"):
        card = simulated(1 << 40)
        engine, _ = opened(folder, card)
        own = engine.placement.gpu
        assert 0.98 * (own.weights_bytes + own.kv_bytes) <= card.peak <= own.weights_bytes + own.kv_bytes
        with watched() as seen:
            list(engine.score(list(range(5, 305))))
        assert seen.most <= own.workspace_bytes
        engine.close()
        assert engine.model.gpu_output_head is None


def test_without_a_kernel_for_it_the_processor_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's operations it would take thousands."""
    def missing() -> None:
        raise ImportError("triton")

    for module in (matmul, stages):
        monkeypatch.setattr(module, "_kernels", missing)
    saved(Case("llama", {"hidden_size": 32, "intermediate_size": 48}, dtype="bfloat16"), tmp_path)
    engine, said = opened(tmp_path, SimulatedDevice(link=1.0, compiles=True), ctx=100)
    assert engine.placement.gpu.head_bytes > 0 and engine.model.gpu_output_head is None
    assert "Triton is not installed" in " ".join(said)
    assert divergence(logits(engine, 20, 9), logits(opened(tmp_path, None, ctx=100)[0], 20, 9)) < 1e-6


def test_logits_that_the_gpu_has_no_memory_for_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = opened(FABLE, simulated())

    def full(*of: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(engine.backends["cuda"], "logits", full)
    with pytest.raises(DoesNotFit, match="the GPU ran out of memory for logits"):
        list(engine.prefill([1, 2, 3]))
        engine.forward_logits([4])
    engine.close()
