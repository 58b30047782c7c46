"""A.X K2: gates computed from normed values, queries and gates from a latent, and which configs are accepted. Whole models are in
`test_families.py` and `test_sparse_indexer_models.py`."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from config_samples import SMALL, refused
from conversions import options, run
from export_models import SIZES
from family_models import CASES
from quantization_checks import assert_calibration_is_a_pass
from safetensors.numpy import load_file, save_file
from saved_models import saved
from saved_tokenizers import with_words_of_fable
from streamed_models import paging, streaming
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.latent_shape import LatentShape
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Linear, LowRank, Norm, Weight
from effllm.runtime import families
from effllm.runtime.calibrate import built_in_text, calibration_ids
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.weights import stream_layout

HIDDEN, RANK, QUERIES = 96, 12, 20
PUBLISHED = {**SMALL, "num_key_value_heads": 6, "model_type": "axk2", "architectures": ["AXK2ForCausalLM"], "attention_bias": False,
             "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2, "first_k_dense_replace": 1,
             "gated_norm_rank": 16, "head_dim": 32, "hidden_act": "silu", "index_head_dim": 128, "index_n_heads": 16, "index_topk": 2048,
             "initializer_range": 0.02, "kv_lora_rank": 128, "max_position_embeddings": 131072, "moe_intermediate_size": 512,
             "moe_layer_freq": 1, "n_group": None, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
             "num_experts_per_tok": 8, "pad_token_id": 0, "q_lora_rank": 384, "qk_head_dim": 96, "qk_nope_head_dim": 64,
             "qk_rope_head_dim": 32, "rms_norm_eps": 1e-06, "rope_interleave": True, "rope_parameters": {
                 "rope_theta": 10000.0, "rope_type": "default"}, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
             "tie_word_embeddings": False, "topk_group": None, "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("axk2") / "model"
    calm = {"initializer_range": 0.08, "vocab_size": SIZES["vocab_size"], "max_position_embeddings": 640}
    saved(replace(CASES["axk2"], changes={**CASES["axk2"].changes, **calm}), made)
    return with_words_of_fable(made)


def sizes() -> Dims:
    return Dims(HIDDEN, 4, 1, 64, 64, 300, chunk=64, ctx=128, logit_rows=8, mla=LatentShape(48, 20, 16, 28, QUERIES), gated_norms=True)


def both(put: object, tokens: int, ops: object) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What gates leave of rows, a latent normed and as it is, and the latent behind that."""
    rng = np.random.default_rng(tokens)
    into, out = (rng.standard_normal(shape, np.float32) / 3 for shape in ((RANK, HIDDEN), (HIDDEN, RANK)))
    gates = LowRank(*(Linear(Weight(QuantSpec.raw("f32"), each.shape, {"data": put(each)})) for each in (into, out)))
    y, low = rng.standard_normal((tokens, HIDDEN), np.float32), rng.standard_normal((tokens, QUERIES), np.float32)
    norm = Norm("rms", put(1 + rng.standard_normal(QUERIES).astype(np.float32) / 3), None, 1e-6)
    left, behind = put(y.copy()), put(low.copy())
    opened_rows = ops.gate_rows(left, gates)
    doubled = ops.norm_and_concat(behind, norm)
    if hasattr(ops, "flush"):
        ops.flush()
    return tuple(np.asarray(each) for each in (opened_rows, doubled, behind))


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_gates_and_latents_twice_are_what_they_say(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    into, out = (rng.standard_normal(shape, np.float32) / 3 for shape in ((RANK, HIDDEN), (HIDDEN, RANK)))
    y, low = (rng.standard_normal((tokens, width), np.float32).astype(np.float64) for width in (HIDDEN, QUERIES))
    weight = 1 + rng.standard_normal(QUERIES).astype(np.float32) / 3
    inner = y @ into.T
    gated = y / (1 + np.exp(-(inner / (1 + np.exp(-inner))) @ out.T))
    normed = low / np.sqrt(np.square(low).mean(1, keepdims=True) + 1e-6) * weight
    pool = ThreadPool(2)
    try:
        for ops, put in ((CpuOps(pool, sizes()), np.ascontiguousarray),
                         (CpuOps(pool, sizes(), default_registry("reference")), np.ascontiguousarray),
                         (TorchOps("cpu"), lambda each: torch.from_numpy(np.ascontiguousarray(each)))):
            found = both(put, tokens, ops)
            for each, wanted in zip(found, (gated, np.concatenate([normed, low], 1), normed), strict=True):
                np.testing.assert_allclose(each, wanted, rtol=2e-5, atol=1e-5)
    finally:
        pool.close()


def test_published_keys_are_known_and_defaults_are_those_of_transformers() -> None:
    config = parse_config(PUBLISHED, strict=True)
    assert config.warnings == () and (config.gated_norm_rank, config.output_gate) == (16, True)
    assert config.moe.layers == {1, 2, 3} and config.moe.parallel_to_mlp and config.indexer.shape.heads == 16
    assert (config.moe.num_groups, config.moe.top_groups) == (1, 1) and not config.indexer.interleaved_rope
    full = CONFIG_MAPPING["axk2"]()
    silent, said = parse_config({"model_type": "axk2"}), parse_config(json.loads(full.to_json_string()), strict=True)
    assert replace(silent, dtype=said.dtype) == said and said.num_hidden_layers == 48 and said.mla == LatentShape(128, 64, 32, 64, 384)
    grouped = parse_config({**PUBLISHED, "n_group": 8, "topk_group": 4}, strict=True)
    assert (grouped.moe.num_groups, grouped.moe.top_groups) == (8, 4)
    rules = families.get("axk2").layer_tensors(config, 1)
    assert rules["q_b"].shape == (6 * 96, 768) and rules["attn_gate"].shape == (6 * 64, 768)
    assert rules["post_norm_in"].shape == (16, 96) and "post_norm_in" not in families.get("axk2").layer_tensors(config, 0)


@pytest.mark.parametrize(("key", "value"), [
    ("n_group", 8), ("attention_bias", True), ("q_lora_rank", None), ("gated_norm_rank", 0), ("rope_interleave", False),
    ("layer_types", ["full_attention"] * 4), ("topk_method", "greedy"), ("moe_layer_freq", 2), ("mlp_bias", True),
    ("mlp_layer_types", ["dense", "sparse", "moe", "sparse"]), ("num_key_value_heads", 2)])
def test_what_it_cannot_be_is_named(key: str, value: object) -> None:
    refused({**PUBLISHED, key: value}, key)


def opened(folder: Path, **asked: object) -> Engine:
    return list(open_engine(folder, EngineOptions(device="cpu", ctx=512, **asked)))[-1]


def rows(engine: Engine, ids: list[int]) -> np.ndarray:
    try:
        return np.concatenate([each.copy() for _, each in engine.score(ids)])
    finally:
        engine.close()


IDS = np.random.default_rng(3).integers(0, 301, 120).tolist()


def test_names_of_transformers_own_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    names = {".W_down.": ".mlp.fc1.", ".W_up.": ".mlp.fc2."}
    tensors = load_file(folder / "model.safetensors")
    assert any(".W_down." in name for name in tensors) and any(name.endswith("self_attn.q_b_proj.weight") for name in tensors)
    for old, new in names.items():
        tensors = {name.replace(old, new): each for name, each in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert np.array_equal(*(rows(opened(each, kv="32bit"), IDS) for each in (folder, tmp_path)))


@pytest.mark.slow
def test_quantized_with_and_without_a_text(folder: Path, tmp_path: Path) -> None:
    """Eight bits are near, four less so, and what a text shows of every matrix's inputs helps these."""
    ids = calibration_ids(folder, read_config(folder), built_in_text(), 2448)[2048:]
    expected, off = rows(opened(folder, kv="32bit"), ids), {}
    for spec, method in (("8bit", "rtn"), ("4bit", "rtn"), ("4bit", "gptq")):
        out = tmp_path / f"{spec}-{method}"
        run(folder, out, options(spec, method=method, calibration_tokens=2048))
        got = rows(opened(out, kv="32bit"), ids)
        off[spec, method] = np.square(got - expected).mean() / np.square(expected - expected.mean()).mean()
    assert off["8bit", "rtn"] < 3e-3 and off["4bit", "rtn"] < 0.2, off
    assert off["4bit", "gptq"] < 0.8 * off["4bit", "rtn"], off


@pytest.mark.slow
def test_calibration_is_a_pass_of_the_model(folder: Path) -> None:
    stats = assert_calibration_is_a_pass(folder)
    assert stats[1].roles["attn_gate"] is stats[1].roles["q_b"] and len(stats[1].roles["q_b"].mean_square) == 2 * 36
    assert {"kv_a", "q_a", "o", "shared.gate", "experts.3.up"} <= set(stats[1].roles) and "gate" in stats[0].roles


@pytest.mark.slow
def test_weights_from_the_disk_give_the_bits_of_weights_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 24 << 10)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 512)
    run(folder, tmp_path / "4bit", options("4bit"))
    for each in (folder, tmp_path / "4bit"):
        expected = rows(opened(each), IDS)
        assert np.array_equal(rows(streaming(each, ctx=512), IDS), expected)
        assert np.array_equal(rows(paging(each, 20, ctx=512), IDS), expected)
