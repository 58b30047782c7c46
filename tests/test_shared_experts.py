"""Mixtures with corrected or separate router scores, and shared experts: both backends' ops against the definition, calibration of such
layers, and their entries in a folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from config_samples import LLAMA, refused
from conversions import FABLE, check_whole, options, run
from family_models import CASES, oracle, our_logits, text, written
from saved_tokenizers import with_words_of_fable
from test_moe import CHUNK, DEPTH, EXPERTS, TOP, WIDTH, Layer, close, inputs, linear

from effllm.kernels import reference, reference_moe
from effllm.kernels.cpu import moe
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cpu.packed import MAX_COLUMNS
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.reference_moe import Routed, Routing, route
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.weight import Linear, Norm, SharedExpert, Weight
from effllm.runtime.calibrate import LayerStats, calibrate
from effllm.runtime.config import parse_config, read_config

TOKENS = (1, 3, MAX_COLUMNS, MAX_COLUMNS + 1, 70)
SHARED_WIDTH = 211
NEAR = "near"  # whose choice nothing corrects
ROUTINGS = {"sigmoid": Routing(TOP, True, True, 1.7), "no sum of 1": Routing(TOP, False, True, 0.4), "softmax": Routing(TOP, True),
            "scaled softmax": Routing(TOP, False, False, 2.5), "of inputs": Routing(TOP, False, True, weights_scale_inputs=True),
            "of logits": Routing(TOP, False, True, 0.7, correction_on_logits=True),
            NEAR: Routing(TOP, False, routed_scale=1.3, sparsemixer_margin=0.6)}


class Shared(Layer):
    """A layer with a shared expert, and by request its share and a correction of scores."""

    def __init__(self, stored: tuple[str, ...], scaled: bool, corrected: bool) -> None:
        super().__init__(stored, router="f32")
        rng = np.random.default_rng(11)
        shapes = ((SHARED_WIDTH, DEPTH), (SHARED_WIDTH, DEPTH), (DEPTH, SHARED_WIDTH))
        matrices = [linear(rng, *shape, stored[0]) for shape in shapes]
        self.shared = SharedExpert(*matrices, linear(rng, 1, DEPTH, "bf16") if scaled else None)
        self.correction = rng.uniform(-0.5, 0.5, EXPERTS).astype(np.float32) if corrected else None

    def routed(self, ops: CpuOps, x: np.ndarray, routing: Routing, see=None) -> np.ndarray:
        stream = ops.from_host(x)
        with ops.collecting():
            ops.moe(stream, self.norm, self.router, self.experts, routing, "silu", see, self.correction, self.shared)
        return stream.copy()

    def meant(self, x: np.ndarray, routing: Routing) -> tuple[np.ndarray, Routed]:
        return reference_moe.moe(x, self.norm, self.router, self.experts, routing, "silu", self.correction, self.shared)


def dims() -> Dims:
    return Dims(DEPTH, 1, 1, 32, SHARED_WIDTH, 11, CHUNK, 512, 1, EXPERTS, TOP, WIDTH)


@pytest.fixture(scope="module", params=(1, 2), ids=lambda workers: f"{workers} threads")
def ops(request) -> CpuOps:
    pool = ThreadPool(request.param)
    yield CpuOps(pool, dims())
    pool.close()


@pytest.fixture(scope="module", params=(1, 2), ids=lambda workers: f"{workers} threads")
def exact_ops(request) -> CpuOps:
    pool = ThreadPool(request.param)
    yield CpuOps(pool, dims(), default_registry(exact=True))
    pool.close()


def test_a_correction_chooses_and_does_not_weigh() -> None:
    logits = np.log(np.array([[1.0, 4.0, 2.0, 1.0]]))  # scores of a sigmoid: 1/2, 4/5, 2/3, 1/2
    chosen, shares = route(logits, Routing(2, True, True, 3.0), np.array([0.0, 0.0, 0.0, 1.0]))
    assert chosen.tolist() == [[1, 3]] and np.allclose(shares, [[3 * 0.8 / 1.3, 3 * 0.5 / 1.3]])
    assert np.allclose(route(logits, Routing(2, False, True))[1], [[0.8, 2 / 3]])
    assert np.allclose(route(logits, Routing(1, False), np.array([0.0, 0.0, 9.0, 0.0]))[1], [[0.25]])
    logits = np.array([[8.0, 7.0, 9.0]])  # whose scores are alike, and so the correction would choose alone
    assert route(logits, Routing(1, False, True, correction_on_logits=True), np.array([1.5, 2.0, 0.0]))[0].tolist() == [[0]]
    assert route(logits, Routing(1, False, True), np.array([1.5, 2.0, 0.0]))[0].tolist() == [[1]]
    near = Routing(2, False,
                   sparsemixer_margin=0.5)  # of 4, 3 and 1 the second lies within half of the first, the third within half of neither
    assert np.allclose(route(np.array([[4.0, 3.0, 1.0]]), near)[1], [[1 / (1 + np.exp(-1)), 1.0]])
    assert np.allclose(route(np.array([[1.0, 1.0, 1.0]]), near)[1], [[1 / 3, 1 / 2]]), "of equal ones the lower counts as the larger"
    assert np.array_equal(route(np.full((1, 3), -1e4), Routing(2, True, True))[1], [[0.0, 0.0]]), "no share of nothing"


@pytest.mark.parametrize("routing, scaled, corrected", [
    (routing, scaled, corrected) for routing in ROUTINGS for scaled in (False, True)
    for corrected in ((False,) if routing == NEAR else (False, True))])
def test_raw_weights_match_the_definition(exact_ops, routing: str, scaled: bool, corrected: bool) -> None:
    layer = Shared(("bf16", "f32"), scaled, corrected)
    for tokens in TOKENS:
        x, seen = inputs(tokens, seed=tokens), []
        expected, routed = layer.meant(x, ROUTINGS[routing])
        close(layer.routed(exact_ops, x, ROUTINGS[routing], seen.append), expected, x)
        assert np.array_equal(seen[0].offsets, routed.offsets) and np.array_equal(seen[0].tokens, routed.tokens)
        for name in ("hidden", "shared"):
            ours, theirs = getattr(seen[0], name), getattr(routed, name)
            assert ours.shape == theirs.shape and np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_the_definition_runs_where_no_kernel_does(ops) -> None:
    layer, x, seen = Shared(("f32",), True, True), inputs(5), []
    stream, expected = x.copy(), layer.meant(x, ROUTINGS["sigmoid"])[0]
    moe.run_reference(ops, stream, layer.norm, layer.router, layer.experts, (ROUTINGS["sigmoid"], "silu"), seen.append, layer.correction,
                      layer.shared, None)
    close(stream, expected, x)
    assert seen[0].shared.shape == (5, SHARED_WIDTH)


@pytest.mark.parametrize("corrected", [True, False])
def test_scores_that_are_all_next_to_one(ops, corrected: bool) -> None:
    """Without a correction logits choose, which still tell them apart."""
    layer, x, seen = Shared(("f32",), False, corrected), inputs(40), []
    layer.router.weight.parts["data"][:] *= 400
    expected, routed = layer.meant(x, ROUTINGS["sigmoid"])
    assert (np.abs(reference.linear(x, layer.router.weight.to_f32(), None)) > 40).mean() > 0.5
    ours = layer.routed(ops, x, ROUTINGS["sigmoid"], seen.append)
    if not corrected:
        assert np.array_equal(seen[0].offsets, routed.offsets) and np.array_equal(seen[0].tokens, routed.tokens)
        close(ours, expected, x, 1e-5)
    assert np.isfinite(ours).all()


@pytest.mark.parametrize("stored", ["codebook4:16", "symmetric8:32", "affine3:64"])
def test_low_bit_weights_are_near_the_definition(ops, stored: str) -> None:
    layer = Shared((stored,), True, True)
    for tokens in (1, MAX_COLUMNS, 70):
        x = inputs(tokens)
        expected = layer.meant(x, ROUTINGS["sigmoid"])[0]
        assert np.square(layer.routed(ops, x, ROUTINGS["sigmoid"]) - expected).sum() < 1e-3 * np.square(expected - x).sum()


@pytest.mark.parametrize("routing", ["sigmoid", "of inputs"])
@pytest.mark.parametrize("stored", ["bf16", "codebook4:16"])
def test_a_result_depends_on_neither_threads_nor_neighbours(stored: str, routing: str) -> None:
    layer, x, results = Shared((stored,), True, True), inputs(CHUNK), []
    for workers in (1, 2, 4):
        pool = ThreadPool(workers)
        own = CpuOps(pool, dims())
        results.append([layer.routed(own, x[begin:end], ROUTINGS[routing]) for begin, end in ((0, 1), (0, 5), (0, 40), (0, CHUNK))])
        pool.close()
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))
    one, several, more, many = results[0]
    assert np.array_equal(one, several[:1]) and np.array_equal(more, many[:40])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch finds no GPU here"))])
def test_the_other_backend(routing: str, device: str) -> None:
    layer, ops = Shared(("f32",), True, True), TorchOps(device)

    def placed(each: Linear) -> Linear:
        scheme, shape = each.weight.spec.scheme, each.weight.shape
        return Linear(Weight(each.weight.spec, shape, {"data": ops.put(each.weight.parts["data"], scheme).reshape(shape)}))

    norm = Norm("rms", ops.put(layer.norm.weight, "f32"))
    experts = tuple(type(each)(placed(each.gate), placed(each.up), placed(each.down)) for each in layer.experts)
    shared = SharedExpert(*(placed(getattr(layer.shared, name)) for name in ("gate", "up", "down", "shared_gate")))
    for tokens in (1, 6, 70):
        x, seen = inputs(tokens, seed=tokens), []
        expected, routed = layer.meant(x, ROUTINGS[routing])
        ours = ops.to_host(ops.moe(ops.from_host(x), norm, placed(layer.router), experts, ROUTINGS[routing], "silu", seen.append,
                                   ops.put(layer.correction, "f32"), shared))
        close(ours, expected, x)
        assert np.array_equal(seen[0].offsets, routed.offsets)
        assert np.abs(ops.to_host(seen[0].shared) - routed.shared).max() <= 1e-5 * np.abs(routed.shared).max()


# ---- folders


@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe"])
def test_calibration_shows_what_a_shared_expert_reads(name: str, tmp_path: Path) -> None:
    model = written(CASES[name], tmp_path)
    config = read_config(tmp_path)
    found = [each for each in calibrate(tmp_path, text(model, 600)) if isinstance(each, LayerStats) and each.key != "outer"]
    for each in found:
        assert ("shared.gate" in each.roles) == (each.key in config.moe.layers)
        if "shared.gate" in each.roles:
            assert each.roles["shared.gate"] is each.roles["shared.up"] and each.roles["shared.gate"].tokens == 600
            assert each.roles["shared.down"].hessian.shape == (config.moe.shared_expert_dim,) * 2
            assert {"shared.gate", "shared.up", "shared.down", "q", "experts.0.gate"} <= set(each.roles) and "gate" not in set(each.roles)
            assert len(each.roles) == len(list(each.roles))


@pytest.mark.parametrize("name", ["qwen2_moe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("glm4_moe", "ernie4_5_moe"))])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_converted_model_is_near_the_published_one(name: str, method: str, tmp_path: Path) -> None:
    case = CASES[name]
    vocabulary = json.loads((FABLE / "config.json").read_text())["vocab_size"]
    model = written(replace(case, changes={**case.changes, "vocab_size": vocabulary}), tmp_path / "model")
    with_words_of_fable(tmp_path / "model")
    run(tmp_path / "model", tmp_path / "out", options("8bit", method=method, calibration_tokens=512))
    tensors = check_whole(tmp_path / "out", tmp_path / "model").tensors
    low = {name for name, stored in tensors.items() if not stored.spec.is_raw}
    mine = {name for name in tensors if ".shared_expert" in name and name.endswith("_proj.weight")}
    assert mine and mine <= low
    assert not any("shared_expert_gate" in name or "bias" in name or name.endswith("mlp.gate.weight") for name in low)
    ids = text(model, 200)
    expected, ours = oracle(model, ids), our_logits(tmp_path / "out", ids)
    assert np.square(ours - expected).sum() < 3e-2 * np.square(expected).sum()  # random experts: some tokens go elsewhere


def test_what_a_config_says() -> None:
    glm = {**LLAMA, "model_type": "glm4_moe", "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    own = parse_config(glm, strict=True).moe
    assert (own.num_experts, own.experts_per_token, own.expert_dim, own.shared_expert_dim, own.layers) == (
        6, 2, 24, 24, frozenset({1, 2, 3}))
    assert own.routing == Routing(2, True, True) and own.correction_bias and not own.shared_expert_gate
    assert parse_config(glm).ropes[0].partial_rotary_factor == 0.5
    assert parse_config({**glm, "partial_rotary_factor": 1.0}).ropes[0].partial_rotary_factor == 1.0
    assert parse_config({**glm, "n_shared_experts": 3}).moe.shared_expert_dim == 72
    assert parse_config({**glm, "first_k_dense_replace": 0}).moe.layers == frozenset(range(4))
    for changes, *said in (({"n_group": 2}, "n_group"), ({"topk_group": 4}, "topk_group"), ({"first_k_dense_replace": 5}, "first_k_dense"),
                          ({"routed_scaling_factor": 0}, "routed_scaling_factor"), ({"num_experts_per_tok": 7}, "7", "6 experts"),
                          ({"n_shared_experts": 0}, "n_shared_experts"),
                          ({"num_nextn_predict_layers": 2**31}, "num_nextn_predict_layers")):
        refused({**glm, **changes}, *said)
    qwen = {**LLAMA, "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48}
    own = parse_config(qwen, strict=True).moe
    assert (own.shared_expert_dim, own.shared_expert_gate, own.correction_bias, own.routing) == (48, True, False, Routing(2, False))
    assert parse_config(qwen).qkv_bias and not parse_config({**qwen, "qkv_bias": False}).qkv_bias
    refused({**qwen, "use_sliding_window": True}, "use_sliding_window")
    dots = {**LLAMA, "model_type": "dots1", "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "sliding_window": None}
    assert replace(parse_config(dots, strict=True).moe, routed_scale=2.0).routing.routed_scale == 2.0
    refused({**dots, "moe_layer_freq": 2}, "moe_layer_freq")
    refused({**LLAMA, "model_type": "granitemoe", "mlp_bias": True}, "mlp_bias")
    ernie = {**LLAMA, "model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 2, "moe_norm_min": 1e-12,
             "_attn_implementation": "eager"}
    own = parse_config({**ernie, "moe_layer_interval": 2}, strict=True).moe
    assert (own.layers, own.shared_expert_dim, own.routing) == (frozenset({1, 3}), 3072, Routing(2, True))
    code = {"AutoConfig": "configuration_ernie4_5_moe.Ernie4_5_MoeConfig",
            "AutoModelForCausalLM": "modeling_ernie4_5_moe.Ernie4_5_MoeForCausalLM"}
    assert parse_config({**ernie, "auto_map": code}, strict=True).moe.num_experts == 6
    refused({**ernie, "auto_map": {"AutoModel": "modeling_ernie4_6.Other"}}, "auto_map")
    for changes in ({"use_bias": True}, {"moe_norm_min": 0.5}, {"moe_gate": "sinkhorn"}):
        refused({**ernie, **changes}, *changes)
    for missing in ("n_routed_experts", "num_experts_per_tok", "n_shared_experts"):
        refused({key: value for key, value in dots.items() if key != missing}, missing)
