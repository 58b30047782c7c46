"""Layers on a GPU, simulated by CPU tensors: placement to the byte, transfers, and the same answer on every tier."""

import gc
import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from bundle_models import RELU, bundled
from conversions import FABLE, options, run
from family_models import Case
from gpu_runs import CTX, card_here, divergence, logits, opened, simulated, typed
from saved_models import saved
from streamed_models import larger_than_memory

from effllm import DoesNotFit, UsageError
from effllm.kernels.cuda.device import SimulatedDevice
from effllm.offload.plan_gpu import LinkRates, copied_from
from effllm.runtime.engine import Engine
from effllm.runtime.planning import devices, plan_request, process_memory
from effllm.runtime.prepare import EngineOptions, prepare

LAYERS, LINK = 6, 2e9


@cache
def on_cpu(**asked: object) -> np.ndarray:
    return logits(opened(FABLE, None, **asked)[0])


@pytest.fixture
def no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets of memory are of the model alone."""
    monkeypatch.setattr(process_memory, "baseline", lambda kinds: 0)


def planned(folder: Path, card: SimulatedDevice | None, **asked: object):
    with card_here(card):
        prepared = prepare(folder, EngineOptions(**{"ctx": CTX, "threads": 1, **asked}))
    prepared.store.close()
    return prepared


# -- the forward pass ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, pytest.param(LAYERS, marks=pytest.mark.slow)])
def test_layers_on_the_gpu_answer_alike_and_the_stream_crosses_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_request, "with_head", lambda placed, head: placed)
    card = simulated()
    engine, said = opened(FABLE, card, gpu_layers=count)
    assert engine.placement.tiers == ("memory",) * (LAYERS - count) + ("gpu",) * count
    assert any(f"{count} of {LAYERS} layers on the GPU" in line for line in said) == (count < LAYERS)
    placed = card.crossed.placed
    assert placed == sum(4 * np.prod(own.shape) if len(own.shape) == 1 else own.nbytes
                         for layer in range(LAYERS - count, LAYERS) for own in engine.model.tensors[layer].values())
    passes = len(list(engine.cache.pieces(300))) + 30
    found = logits(engine)
    assert card.crossed.sends == card.crossed.receives == passes, "once there and once back, whatever the number of layers"
    assert card.crossed.sent == card.crossed.received == 4 * 330 * engine.config.hidden_size
    assert card.crossed.placed == placed, "no weight moves after loading"
    assert 0 < divergence(found, on_cpu()) < 1e-4
    assert np.abs(found - on_cpu()).max() < 2e-3 * np.abs(on_cpu()).max()


@pytest.mark.parametrize("kv", ["32bit", pytest.param("8bit", marks=pytest.mark.slow), "4bit"])
def test_every_cache_lives_where_its_layer_is_computed(kv: str) -> None:
    card = simulated()
    engine, _ = opened(FABLE, card, gpu_layers=3, kv=kv)
    weights = card.allocated - sum(pages.exact.nbytes + pages.sealed.nbytes for pages in on_card(engine))
    assert len(on_card(engine)) == 3 and weights >= engine.placement.gpu.weights_bytes - (1 << 20)
    assert sum(pages.exact.nbytes + on_card_sealed(pages) for pages in on_card(engine)) <= engine.placement.gpu.kv_bytes
    assert divergence(logits(engine), on_cpu(kv=kv)) < 1e-4


def on_card(engine: Engine) -> list:
    return [layer.pages for layer in engine.cache._layers if hasattr(layer.pages, "upload")]


def on_card_sealed(pages) -> int:
    return pages.records.nbytes if hasattr(pages, "records") else pages.sealed.nbytes


@pytest.mark.parametrize("asked", [pytest.param({}, marks=pytest.mark.slow), pytest.param({"device": "cuda"}, marks=pytest.mark.slow),
                                   {"gpu_layers": 2, "exact": True}])
def test_low_bit_layers_run_on_the_gpu_as_codes(tmp_path: Path, asked: dict[str, object]) -> None:
    """As on the CPU with float32 activations (`--exact`); their bytes there are those of the file."""
    run(FABLE, tmp_path / "small", options("4bit"))
    exact = logits(opened(tmp_path / "small", None, exact=True)[0])
    card = simulated()
    engine, _ = opened(tmp_path / "small", card, **asked)
    count = asked.get("gpu_layers", LAYERS)
    low = sum(own.nbytes for layer in range(LAYERS - count, LAYERS) for own in engine.model.tensors[layer].values())
    low += engine.placement.gpu.head_bytes
    assert engine.placement.devices.count("cuda") == count and low <= card.crossed.placed < low * 1.02
    assert divergence(logits(engine), exact) < 1e-4


@pytest.mark.parametrize("case", [Case("llama", RELU, dtype="bfloat16"), Case("llama", {**RELU, "mlp_bias": True}),
                                  Case("opt", {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64}),
                                  Case("olmo2", {"hidden_act": "relu", "hidden_size": 64, "intermediate_size": 128})])
def test_bundles_run_on_the_gpu(case: Case, tmp_path: Path) -> None:
    saved(case, tmp_path / "model")
    bundled(tmp_path / "model", tmp_path / "bundled")
    want, found = (logits(opened(tmp_path / "bundled", card, ctx=400)[0]) for card in (None, simulated()))
    assert divergence(found, want) < 1e-5


# -- beneath the GPU: memory and disk -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return larger_than_memory(tmp_path_factory.mktemp("models") / "large", 4)


@pytest.mark.slow
def test_three_tiers_answer_as_two_do(large: Path, no_baseline: None) -> None:
    """A layer on the GPU, the others partly on disk: the logits of the same split with the others in memory."""
    roomy, _ = opened(large, simulated(), gpu_layers=1)
    budget = roomy.placement.total_bytes - 50_000_000
    tight, said = opened(large, simulated(), gpu_layers=1, ram=str(budget))
    assert tight.placement.tiers[3] == "gpu" and "disk" in tight.placement.tiers[:3] and tight.placement.streamed_bytes > 0
    assert tight.placement.total_bytes <= budget and any("do not fit in memory" in line for line in said)
    np.testing.assert_array_equal(logits(tight, 140, 130), logits(roomy, 140, 130))


def test_pages_spill_beneath_the_gpu(tmp_path: Path) -> None:
    """Pages of the host's layers go to disk, those of the GPU's layers stay there."""
    whole, _ = opened(FABLE, simulated(), gpu_layers=3, ctx=2048)
    spilled, _ = opened(FABLE, simulated(), gpu_layers=3, ctx=2048, kv_ram="3M", spill_dir=str(tmp_path))
    placement = spilled.placement
    assert placement.kv_pages is not None and 0 < placement.kv_disk_bytes < placement.gpu.kv_bytes
    assert spilled.cache.pool.stream is not None and placement.tiers[3:] == ("gpu",) * 3
    np.testing.assert_array_equal(logits(spilled, 1030, 1010), logits(whole, 1030, 1010))


def test_experts_page_beneath_the_gpu(tmp_path: Path, no_baseline: None) -> None:
    saved(Case("qwen3_moe", {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2, "hidden_size": 128,
                               "moe_intermediate_size": 256}, dtype="bfloat16"), tmp_path)
    roomy, _ = opened(tmp_path, simulated(), gpu_layers=1)
    tight, _ = opened(tmp_path, simulated(), gpu_layers=1, ram=str(roomy.placement.total_bytes - 1))
    assert tight.placement.expert_slots is not None and tight.placement.tiers == ("disk",) * 3 + ("gpu",)
    np.testing.assert_array_equal(logits(tight), logits(roomy))


def test_as_many_layers_as_the_gpu_holds(large: Path, no_baseline: None) -> None:
    """auto fills the GPU; the rest is streamed; one byte less of GPU memory is one layer less."""
    full = planned(large, simulated(1 << 40)).placement
    assert full.devices == ("cuda",) * 4 and full.gpu.weights_bytes > 0
    for count in (3, 2, 1):
        placed = planned(large, simulated(1 << 40), gpu_layers=count).placement
        exact = planned(large, simulated(placed.vram_bytes)).placement
        assert exact.devices.count("cuda") == count and exact.vram_bytes <= placed.vram_bytes
        assert planned(large, simulated(placed.vram_bytes - 1)).placement.devices.count("cuda") == count - 1
        tight = planned(large, simulated(placed.vram_bytes), ram=str(placed.total_bytes - 20_000_000)).placement
        assert tight.devices.count("cuda") == count and tight.streamed_bytes > 0 and tight.total_bytes <= tight.budget.ram


def test_what_the_gpu_holds_was_planned(large: Path) -> None:
    """Weights and pages to the byte, but for what each allocation is rounded up by and the turns of a packed cache."""
    for kv in ("16bit", "4bit"):
        card = simulated(1 << 40)
        engine, _ = opened(large, card, gpu_layers=2, kv=kv)
        own = engine.placement.gpu
        engine.close()
        assert 0.98 * (own.weights_bytes + own.kv_bytes) <= card.peak <= own.weights_bytes + own.kv_bytes


def test_a_gpu_that_filled_up_meanwhile_is_one_line(large: Path) -> None:
    card = simulated(1 << 40)
    asked = partial(opened, large, card, gpu_layers=2)
    plan = planned(large, card, gpu_layers=2).placement
    with card_here(card), pytest.raises(DoesNotFit, match="another program has taken some"):
        prepared = prepare(large, EngineOptions(ctx=CTX, threads=1, gpu_layers=2))
        card.memory = plan.gpu.weights_bytes // 2
        list(Engine(prepared).model.load())
    card.memory = 1 << 40
    asked()[0].close()
    gc.collect()
    assert card.allocated == 0, "what was taken is given back when an engine is closed"


# -- what a user is told -----------------------------------------------------------------------------------------------------


def test_the_plan_draws_the_gpu() -> None:
    card = simulated(8 << 30)
    code, out, err = typed("plan", FABLE, "-ngl", 2, "--vram", "1Gi", "-c", 512, "--no-probe", card=card)
    said = out + err
    assert code == 0 and "0-3 in memory, 4-5 on the GPU" in said and "of 1.00 GiB" in said
    assert "2 of 6 layers on the GPU, the rest on the CPU" in said
    found = json.loads(typed("plan", FABLE, "-ngl", 2, "--vram", "1Gi", "-c", 512, "--no-probe", "--json", card=card)[1])
    assert found["layers"] == ["memory"] * 4 + ["gpu"] * 2 and found["vram_bytes"] == 1 << 30
    gpu, memory = found["tiers"]["gpu"], found["tiers"]["memory"]
    assert gpu["total_bytes"] == -(-(gpu["weights_bytes"] + gpu["kv_bytes"] + gpu["other_bytes"]) * 105 // 100)
    whole = json.loads(typed("plan", FABLE, "-c", 512, "--no-probe", "--device", "cpu", "--json")[1])
    assert memory["weights_bytes"] < whole["weights_bytes"] and memory["kv_bytes"] + gpu["kv_bytes"] == whole["kv_bytes"]
    assert whole["layers"] == ["memory"] * 6 and whole["tiers"]["gpu"]["total_bytes"] == 0


def test_a_run_on_the_gpu_says_where_it_was() -> None:
    code, out, err = typed("run", FABLE, "Once upon a time", "-n", 8, "--seed", 1, "-ngl", 3, "--json", card=simulated(8 << 30))
    assert code == 0, err
    assert json.loads(out)["placement"]["layers"] == {"cpu": 3, "cuda": 3} and json.loads(out)["text"]


@pytest.mark.parametrize("words, line", [
    (("-ngl", "2"), "-ngl 2: torch finds no GPU here"),
    (("--vram", "4G"), "--vram 4G: torch finds no GPU here"),
    (("--device", "cuda"), "--device cuda: torch finds no GPU here"),
    (("--device", "cpu", "-ngl", "2"), "-ngl 2 requires a GPU, which --device cpu rules out"),
    (("--device", "cpu", "--vram", "4G"), "--vram 4G requires a GPU, which --device cpu rules out"),
    (("-ngl", "-1"), "--gpu-layers -1 is too small"),
])
@pytest.mark.parametrize("command", ["plan", "run"])
def test_refusals_without_a_gpu(command: str, words: tuple[str, ...], line: str) -> None:
    code, out, err = typed(command, FABLE, *(("hi",) if command == "run" else ("--no-probe",)), *words)
    assert code == 2 and line in err and len(err.strip().splitlines()) <= 2 and not out


def test_refusals_with_one() -> None:
    code, _, err = typed("plan", FABLE, "-ngl", 6, "--vram", "1Mi", "--no-probe", card=simulated(8 << 30))
    assert code == 4 and "of GPU memory (weights" in err and "the budget is 1.00 MiB" in err
    assert typed("plan", FABLE, "--vram", "lots", "--no-probe", card=simulated(8 << 30))[0] == 2


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="-ngl 3 needs torch, which is not installed"):
        devices.gpu(EngineOptions(gpu_layers=3), [])
    notices: list[str] = []
    monkeypatch.setattr(devices, "DRIVER", Path("/dev/null"))
    assert devices.gpu(EngineOptions(), notices) is None and "torch is not installed" in notices[0]
    assert devices.gpu(replace(EngineOptions(), device="cpu"), notices) is None and len(notices) == 1


# -- layers that are copied for a pass -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["fable", pytest.param("4bit", marks=pytest.mark.slow), "mixture"])
def test_long_passes_copy_the_hosts_layers(folder: str, tmp_path: Path) -> None:
    """Prompts are multiplied on the GPU, answers where the weights are; keys and values never move. Every matrix crosses once per pass."""
    path = FABLE
    if folder == "4bit":
        run(FABLE, path := tmp_path / "small", options("4bit"))
    elif folder == "mixture":
        saved(Case("mixtral", {"num_hidden_layers": 4}, dtype="bfloat16"), path := tmp_path)
    card = simulated(4 << 30, LINK)
    engine, said = opened(path, card, gpu_layers=1, exact=True)
    placement, host = engine.placement, engine.config.num_hidden_layers - 1
    assert placement.copied_from is not None and 1 <= placement.copied_from <= 128 and any("copy the CPU's layers" in line for line in said)
    assert placement.gpu.buffers_bytes <= placement.gpu.workspace_bytes and card.peak <= placement.vram_bytes
    long = sum(piece >= placement.copied_from for piece in engine.cache.pieces(300))
    found, matrices = logits(engine), [own.nbytes for layer in range(host) for own in engine.model.tensors[layer].values()
                                       if len(own.shape) > 1]
    assert card.crossed.copies == host * long > 0 and card.crossed.copied >= long * sum(matrices)
    want = logits(opened(path, None, exact=True)[0])
    assert divergence(found, want) < 1e-4


def test_a_pass_that_broke_off_leaves_the_next_one_whole() -> None:
    card = simulated(4 << 30, LINK)
    engine, _ = opened(FABLE, card, gpu_layers=1)
    ids = list(range(5, 260))

    class Stopped(Exception):
        """Something went wrong in the middle of a pass."""

    def tap(name: str, layer: int, value: object) -> None:
        if layer == 2:
            raise Stopped

    with pytest.raises(Stopped):
        engine.model.forward(np.array(ids, np.int64), engine.cache, tap)
    engine.reset()
    assert divergence(logits(engine), on_cpu()) < 1e-4


def test_closing_waits_for_a_copy_that_nobody_came_for() -> None:
    """Its memory would be given to the next model while the copy still writes it."""
    engine, _ = opened(FABLE, simulated(4 << 30, LINK), gpu_layers=1)
    uploader = engine.model.uploader
    with uploader.layer(0):
        uploader._next[1].result()
        assert uploader._lane._pending, "the layer after it is on its way"
    engine.close()
    assert not uploader._lane._pending


def test_what_is_cheaper() -> None:
    """F8: n tokens on the host take max(bytes / memory, n * products / rate), a copy bytes / link and what crosses for each token."""
    slow = LinkRates(products=10e9, memory=10e9, link=10e9)
    assert copied_from(100_000_000, 50_000_000, 0, slow) == 3
    assert copied_from(100_000_000, 50_000_000, 0, replace(slow, link=100e9)) == 1, "the way to the card is wider than the memory"
    assert copied_from(100_000_000, 50_000_000, 60_000_000, slow) is None, "what attends costs more than is saved"
    few = copied_from(100_000_000, 200_000_000, 30_000, replace(slow, products=500e9))
    for tokens, cheaper in ((few - 1, False), (few + 1, True)):
        copy, here = (100_000_000 + tokens * 30_000) / 10e9, max(0.01, tokens * 200_000_000 / 500e9)
        assert (copy < here) == cheaper


def test_copies_need_room_on_both_sides(large: Path, no_baseline: None) -> None:
    """Without it layers of the host are computed there; layers that nobody asked for by number make room."""
    wide = planned(large, simulated(1 << 40, LINK), gpu_layers=2).placement
    assert wide.copied_from is not None
    less = planned(large, simulated(1 << 40, LINK), gpu_layers=2, ram=str(wide.total_bytes - 1)).placement
    assert less.copied_from is None and less.total_bytes < wide.total_bytes and less.devices == wide.devices
    narrow = planned(large, simulated(wide.vram_bytes - 1, LINK), gpu_layers=2).placement
    assert narrow.copied_from is None and narrow.gpu.buffers_bytes == 0
    auto = planned(large, simulated(wide.vram_bytes, LINK)).placement
    assert auto.copied_from is not None and auto.devices == wide.devices and auto.vram_bytes <= wide.vram_bytes
