"""Mixtures of experts without gates (Nemotron 3 Nano): each backend's op against the definition and the other ops' products, calibration
statistics, storage, and plans."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import CASES, text, written
from safetensors.torch import load_file, save_file
from saved_models import saved
from streamed_models import paging
from test_moe import CHUNK, DEPTH, EXPERTS, TOP, WIDTH, Layer, close, inputs, linear

from effllm.kernels import reference, reference_moe
from effllm.kernels.cpu import moe
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cpu.packed import MAX_COLUMNS
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.reference_moe import Routed, Routing
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.offload.checkpoint import TensorStore
from effllm.quant.weight import SharedExpert
from effllm.runtime.calibrate import LayerStats, calibrate
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.families import expert_role
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.stores.container import read_container
from effllm.runtime.tensors import check_tensors

NARROWED = "nemotron_h, experts of fewer numbers"
TOKENS = (1, 2, 5, MAX_COLUMNS, MAX_COLUMNS + 1, 70, CHUNK)
SHARED_WIDTH = 211
ROUTING = Routing(TOP, True, True, 2.5)
STORED = (("f32",), ("bf16",), ("codebook4:16",), ("affine3:64",), ("symmetric8:32",), ("ternary:128",), ("codebook4:16", "bf16"))


class Gateless(Layer):
    """A layer of experts without gates beside a shared one, with corrected scores."""

    def __init__(self, stored: tuple[str, ...], bias: bool = False) -> None:
        super().__init__(stored, bias=bias, router="f32")
        rng = np.random.default_rng(11)
        self.experts = tuple(replace(each, gate=None) for each in self.experts)
        up, down = (linear(rng, *shape, stored[0], bias) for shape in ((SHARED_WIDTH, DEPTH), (DEPTH, SHARED_WIDTH)))
        self.shared = SharedExpert(None, up, down)
        self.correction = rng.uniform(-0.5, 0.5, EXPERTS).astype(np.float32)

    def of(self, ops: CpuOps, x: np.ndarray, act: str = "relu2", see=None) -> np.ndarray:
        stream = ops.from_host(x)
        with ops.collecting():
            ops.moe(stream, self.norm, self.router, self.experts, ROUTING, act, see, self.correction, self.shared)
        return stream.copy()

    def meant(self, x: np.ndarray, act: str = "relu2") -> tuple[np.ndarray, Routed]:
        return reference_moe.moe(x, self.norm, self.router, self.experts, ROUTING, act, self.correction, self.shared)


def dims() -> Dims:
    return Dims(DEPTH, 1, 1, 32, SHARED_WIDTH, 11, CHUNK, 512, 1, EXPERTS, TOP, WIDTH)


@pytest.fixture(scope="module", params=(1, 2, 3), ids=lambda workers: f"{workers} threads")
def ops(request) -> CpuOps:
    pool = ThreadPool(request.param)
    yield CpuOps(pool, dims())
    pool.close()


@pytest.fixture(scope="module", params=(1, 2, 3), ids=lambda workers: f"{workers} threads")
def exact_ops(request) -> CpuOps:
    pool = ThreadPool(request.param)
    yield CpuOps(pool, dims(), default_registry(exact=True))
    pool.close()


def test_the_definition_by_hand() -> None:
    """One expert that all visit with a share of 2.5, squares of what is above zero, and the shared one."""
    layer, x = Gateless(("f32",)), inputs(4)
    layer.experts = layer.experts[:1] * EXPERTS
    n = reference.normalise(x, "rms", layer.norm.weight, None, layer.norm.eps)
    expected = x.astype(np.float64)
    for each, share in ((layer.experts[0], 2.5), (layer.shared, 1.0)):
        up, down = each.up.weight.to_f32().astype(np.float64), each.down.weight.to_f32().astype(np.float64)
        expected += share * np.maximum(n @ up.T, 0) ** 2 @ down.T
    assert np.allclose(layer.meant(x)[0], expected, rtol=1e-9)


@pytest.mark.parametrize("stored", (("f32",), ("f16",), ("bf16", "f32")), ids="+".join)
@pytest.mark.parametrize("act", ("relu2", "gelu"))
def test_raw_weights_match_the_definition(exact_ops: CpuOps, stored: tuple[str, ...], act: str) -> None:
    layer = Gateless(stored, bias=True)
    for tokens in TOKENS:
        x, seen = inputs(tokens), []
        expected, routed = layer.meant(x, act)
        ours = layer.of(exact_ops, x, act, seen.append)
        close(ours, expected, x)
        assert np.array_equal(seen[0].offsets, routed.offsets) and np.array_equal(seen[0].tokens, routed.tokens)
        for own, theirs in ((seen[0].hidden, routed.hidden), (seen[0].shared, routed.shared)):
            assert np.abs(own - theirs).max() <= 1e-5 * np.abs(theirs).max()
        if tokens <= MAX_COLUMNS:
            assert np.array_equal(layer.of(exact_ops, x, act), ours), "a stage that is remembered"


@pytest.mark.parametrize("stored", STORED, ids="+".join)
def test_products_are_those_of_the_other_ops(ops: CpuOps, stored: tuple[str, ...]) -> None:
    """Bit for bit: `_run_stage` on each expert's rows, an activation, `_run_stage` again, in the numerics of as many columns as tokens."""
    layer = Gateless(stored)
    layer.shared = None
    for tokens in TOKENS:
        x, seen = inputs(tokens), []
        ours = layer.of(ops, x, see=seen.append)
        offsets, owners = seen[0].offsets.copy(), seen[0].tokens.copy()
        shares = ops.workspace.take("shares", tokens, TOP).reshape(-1)
        places = np.argsort(np.argsort(owners, kind="stable"))
        shares, out, results = shares[places].copy(), x.copy(), np.zeros((len(owners), DEPTH), np.float32)
        for expert, begin, end in zip(layer.experts, offsets[:-1], offsets[1:]):
            rows, hidden = np.ascontiguousarray(x[owners[begin:end]]), np.zeros((end - begin, WIDTH), np.float32)
            if begin < end:
                ops._run_stage(rows, layer.norm, [expert.up], [hidden], 0, "none", tokens)
                hidden[:] = np.maximum(hidden, 0) * np.maximum(hidden, 0)
                ops._run_stage(hidden, None, [expert.down], [results[begin:end]], 0, "none", tokens)
        for visit in np.argsort(places):
            out[owners[visit]] = np.float64(shares[visit]) * results[visit] + out[owners[visit]]
        assert np.array_equal(ours, out), tokens


@pytest.mark.parametrize("stored", STORED, ids="+".join)
def test_threads_and_other_tokens_change_no_bit(stored: tuple[str, ...]) -> None:
    layer, found = Gateless(stored), []
    for workers in (1, 2):
        pool = ThreadPool(workers)
        ops = CpuOps(pool, dims())
        found.append([layer.of(ops, inputs(tokens)) for tokens in TOKENS])
        pool.close()
    assert all(map(np.array_equal, *found))
    for tokens in (2, 5):
        assert np.array_equal(found[0][TOKENS.index(tokens)][0], found[0][0][0]), "a token of few has the bits of one alone"


def test_the_last_candidate_and_torch_mean_the_same() -> None:
    layer, pool = Gateless(("bf16",)), ThreadPool(1)
    slow, torch_ops = CpuOps(pool, dims(), default_registry("reference")), TorchOps("cpu")
    x = inputs(9)
    expected, routed = layer.meant(x)
    close(layer.of(slow, x), expected, x)
    seen: list[Routed] = []

    def brought(each):
        return None if each is None else replace(each, weight=replace(each.weight, parts={
            "data": torch_ops.put(each.weight.parts["data"], each.weight.spec.scheme)}))

    experts = tuple(replace(each, up=brought(each.up), down=brought(each.down)) for each in layer.experts)
    shared = replace(layer.shared, up=brought(layer.shared.up), down=brought(layer.shared.down))
    norm = replace(layer.norm, weight=torch.from_numpy(layer.norm.weight))
    stream = torch_ops.moe(torch.from_numpy(x.copy()), norm, brought(layer.router), experts, ROUTING, "relu2", seen.append,
                           torch.from_numpy(layer.correction), shared)
    close(stream.numpy(), expected, x, 1e-5)
    assert np.abs(seen[0].hidden.numpy() - routed.hidden).max() <= 1e-5 * np.abs(routed.hidden).max()
    pool.close()


def test_an_expert_without_a_gate_has_half_the_job() -> None:
    """Records hold one matrix, and what activates its outputs runs between the two lists of products."""
    pool = ThreadPool(1)
    ops, layer = CpuOps(pool, dims()), Gateless(("bf16",))
    layer.of(ops, inputs(2))
    (stage,) = ops.mixtures.stages.values()
    assert [job[0] for job in stage.jobs].index(moe.kernels.activate_inputs) == 4 and not stage.table.has_gate
    assert not stage.table.gated[:, 1 + len(moe.fields(layer.experts[0].up)) :].any()
    pool.close()


# ---- folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("nemotron") / "model"
    saved(CASES["nemotron_h, experts"], made)
    return made


def test_what_calibration_sees(folder: Path) -> None:
    model = written(CASES["nemotron_h, experts"], folder.parent / "again")
    found = {each.key: each.roles for each in calibrate(folder, text(model, 300)) if isinstance(each, LayerStats)}
    roles = {role for role in found[0] if role.startswith("experts.")}
    assert roles == {expert_role(e, role) for e in range(12) for role in ("up", "down")} and len(found[0]) == len(set(found[0]))
    assert {"shared.up", "shared.down", "state_in", "state_gate", "state_out"} <= set(found[0]) and "shared.gate" not in found[0]
    assert found[0]["experts.0.up"].hessian.shape == (64, 64) and found[0]["experts.0.down"].hessian.shape == (40, 40)
    assert found[0]["shared.down"].hessian.shape == (56, 56) and "up" in found[3] and "experts.0.up" not in found[3]


def test_of_experts_that_read_fewer_numbers_calibration_sees_these(tmp_path: Path) -> None:
    model = written(CASES[NARROWED], tmp_path / "model")
    found = {each.key: each.roles for each in calibrate(tmp_path / "model", text(model, 300)) if isinstance(each, LayerStats)}
    sizes = {role: found[0][role].hessian.shape[0] for role in ("experts_in", "experts.3.up", "experts.3.down", "experts_out", "shared.up",
                                                                "shared.down")}
    assert sizes == {"experts_in": 64, "experts.3.up": 24, "experts.3.down": 40, "experts_out": 24, "shared.up": 64, "shared.down": 56}
    assert np.array_equal(found[0]["experts_in"].hessian, found[0]["shared.up"].hessian)
    assert len(found[0]) == len(set(found[0])) and "experts_in" not in found[1]


def test_experts_that_read_fewer_numbers_are_quantized(tmp_path: Path) -> None:
    calm = replace(CASES[NARROWED], changes={**CASES[NARROWED].changes, "initializer_range": 0.08})  # no lottery of who is visited
    saved(calm, tmp_path / "model")
    run(tmp_path / "model", tmp_path / "out", options("8bit"))
    config, ids, found = read_config(tmp_path / "out"), list(range(5, 150)), []
    with TensorStore.open(tmp_path / "out") as store:
        tensors = check_tensors(config, store, read_container(tmp_path / "out"))
        assert not any(tensors[0][role].spec.is_raw for role in ("experts_in", "experts_out", "experts.0.up", "shared.down"))
    for each in (tmp_path / "model", tmp_path / "out"):
        engine = list(open_engine(each, EngineOptions(device="cpu", kv="32bit", ctx=256)))[-1]
        found.append(np.concatenate([rows.copy() for _, rows in engine.score(ids)]))
        engine.close()
    assert 0 < np.square(found[1] - found[0]).mean() < 0.01 * np.square(found[0]).mean()


def test_what_modelopt_quantizes_around_them_runs_from_its_codes(tmp_path: Path) -> None:
    """As Nemotron 3 Super is published in four bits: one kind of weights here, another there."""
    saved(CASES[NARROWED], tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "codes")
    tensors, layers = load_file(tmp_path / "plain" / "model.safetensors"), {}
    codes = dict(tensors)
    chosen = ("latent_proj.weight", "shared_experts.up_proj.weight", "mixer.out_proj.weight")
    for name in [name for name in tensors if name.endswith(chosen)]:
        scale = tensors[name].abs().max() / 448
        codes[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[name] = codes[name].float() * scale
        codes[f"{name}_scale"] = scale.float()
        layers[name.removesuffix(".weight")] = {"quant_algo": "FP8"}
    raw = json.loads((tmp_path / "plain" / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (tmp_path / "codes" / "config.json").write_text(json.dumps(raw))
    for folder, held in (("plain", tensors), ("codes", codes)):
        save_file(held, tmp_path / folder / "model.safetensors", {"format": "pt"})
    found = []
    for folder in ("plain", "codes"):
        engine = list(open_engine(tmp_path / folder, EngineOptions(device="cpu", kv="32bit", ctx=256, exact=True)))[-1]
        found.append(np.concatenate([rows.copy() for _, rows in engine.score(list(range(5, 60)))]))
        specs = {engine.model.tensors[0][role].spec.is_raw for role in ("experts_in", "experts_out", "shared.up")}
        assert specs == {folder == "plain"}
        engine.close()
    assert np.abs(found[1] - found[0]).max() < 1e-3 * np.abs(found[0]).max()


def test_experts_that_read_fewer_numbers_come_from_the_disk(tmp_path: Path) -> None:
    """Each as it is needed, with the bits of all in memory."""
    saved(CASES[NARROWED], tmp_path / "model")
    run(tmp_path / "model", tmp_path / "out", options("4bit"))
    found = []
    for engine in (paging(tmp_path / "out", 16, ctx=256, kv="32bit"), list(open_engine(tmp_path / "out", EngineOptions(
            device="cpu", kv="32bit", ctx=256)))[-1]):
        rows = [part.copy() for _, part in engine.score(list(range(40)), pages=8)]
        found.append(np.concatenate([*rows, *(engine.forward_logits([at]).copy() for at in range(20))]))
        engine.close()
    assert np.array_equal(*found)


def test_a_converted_folder_holds_two_matrices_an_expert_side_by_side(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "out", options("4bit"))
    config, container = read_config(tmp_path / "out"), read_container(tmp_path / "out")
    with TensorStore.open(tmp_path / "out") as store:
        tensors = check_tensors(config, store, container)
        for layer in config.moe.layers:
            for expert in range(12):
                up, down = (tensors[layer][expert_role(expert, role)].info for role in ("up", "down"))
                assert up.offset + up.nbytes <= down.offset < up.offset + up.nbytes + 64 and up.file == down.file
    ids, found = list(range(5, 150)), []
    for each in (folder, tmp_path / "out"):
        engine = list(open_engine(each, EngineOptions(device="cpu", kv="32bit", ctx=256)))[-1]
        found.append(np.concatenate([rows.copy() for _, rows in engine.score(ids)]))
        engine.close()
    assert 0 < np.square(found[1] - found[0]).mean() < 0.5 * np.square(found[0]).mean()


def test_a_pass_reads_what_a_token_visits(folder: Path) -> None:
    engine = list(open_engine(folder, EngineOptions(device="cpu", kv="32bit", ctx=256)))[-1]
    experts = sum(tensor.nbytes for roles in engine.model.tensors.values() for role, tensor in roles.items() if role.startswith("experts."))
    assert experts == 2 * 12 * 2 * 40 * 64 * 4
    assert engine.model.bytes_per_pass == engine.model.nbytes - engine.model.tensors["outer"]["embed"].nbytes - experts * 9 // 12
    engine.close()
    prepared = prepare(folder, EngineOptions(device="cpu", kv="32bit", ctx=256))
    assert prepared.placement.weights_bytes >= engine.model.nbytes


def test_a_paged_expert_is_one_read_of_two_matrices(tmp_path: Path) -> None:
    """In a folder that effllm wrote; a plan counts these bytes."""
    saved(CASES["nemotron_h, experts"], tmp_path / "model")
    run(tmp_path / "model", tmp_path / "out", options("4bit"))
    engine = paging(tmp_path / "out", 16, ctx=256)
    pager, tensors, before = engine.model.pager, engine.model.tensors, engine.model.pager.traffic.reads
    for _ in engine.score(list(range(40)), pages=8):
        continue
    chunks = pager.stats.chunk_reads
    assert pager.traffic.reads - before == chunks + 1 <= 25, "and rows of the embedding"
    for at in range(20):
        engine.forward_logits([at])
    tally, read = pager.stats, pager.traffic.reads - before - chunks - 21
    assert tally.uses == 20 * 2 * 3 and 0 <= read - (tally.uses - tally.hits) <= tally.prefetched + tally.prefetch_misses
    nbytes = sum(tensors[0][expert_role(0, role)].nbytes for role in ("up", "down"))
    assert nbytes <= engine.prepared.streaming.parts.read_nbytes < nbytes + 4096, "whole blocks of the file, and no third matrix"
    assert engine.prepared.streaming.work.experts == 12 and engine.prepared.streaming.parts.demand.slot_nbytes >= nbytes
    engine.close()
