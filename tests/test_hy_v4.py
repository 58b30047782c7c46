"""Hy 4: hyper-connections with weights per token and without mixing, tensor names, and which configs are accepted. Whole models are in
`test_families.py` and `test_sparse_indexer_models.py`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
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

from effllm.kernels import reference_hyper_connections
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.latent_shape import LatentShape
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.compressed_attention_weights import HyperConnection
from effllm.quant.weight import Linear, Norm, Weight
from effllm.runtime import families
from effllm.runtime.config import parse_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.stores.native_names import translated
from effllm.runtime.weights import stream_layout

PUBLISHED = {**SMALL, "num_key_value_heads": 6, "model_type": "hy_v4", "architectures": ["HYV4ForCausalLM"], "attention_bias": False,
             "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2, "first_k_dense_replace": 1, "hc_eps":
             1e-6, "hc_magnitude": 2.0, "hc_mult": 4, "head_dim": 64, "hidden_act": "silu", "index_head_dim": 128, "index_n_heads": 16,
             "index_topk": 2048, "indexer_types": ["full", "full", "shared", "shared"], "initializer_range": 0.006, "kv_lora_rank": 512,
             "layer_types": ["indexed_attention"] * 4, "learnable_sink_init": 0.0, "max_position_embeddings": 262144, "mlp_layer_types": [
             "dense", "sparse", "sparse", "sparse"], "moe_intermediate_size": 768, "n_group": 1, "n_routed_experts": 256,
             "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "output_router_logits": False, "pad_token_id": 0,
             "q_lora_rank": 1536, "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
             "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "routed_scaling_factor": 2.827, "swiglu_limit": 10.0,
             "tie_word_embeddings": False, "topk_group": 1, "use_cache": True, "v_head_dim": 256}
IDS = np.random.default_rng(3).integers(0, 301, 120).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hy4") / "model"
    calm = {"initializer_range": 0.08, "vocab_size": SIZES["vocab_size"], "max_position_embeddings": 640}
    saved(replace(CASES["hy_v4"], changes={**CASES["hy_v4"].changes, **calm}), made)
    return with_words_of_fable(made)


def opened(folder: Path, **asked: object) -> Engine:
    return list(open_engine(folder, EngineOptions(device="cpu", ctx=512, **asked)))[-1]


def rows(engine: Engine, ids: list[int] = IDS) -> np.ndarray:
    try:
        return np.concatenate([each.copy() for _, each in engine.score(ids)])
    finally:
        engine.close()


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 40])
def test_streams_that_are_kept_are_what_they_say(count: int, tokens: int) -> None:
    width = 72
    rng, pool = np.random.default_rng(count), ThreadPool(2)
    x, branch = rng.standard_normal((tokens, count * width), np.float32), rng.standard_normal((tokens, width), np.float32)
    matrix = rng.standard_normal((2 * count, count * width)).astype(np.float32) / 8
    base, scale = rng.standard_normal(2 * count).astype(np.float32), rng.standard_normal(2).astype(np.float32)
    norm = Norm("rms", np.ones(count * width, np.float32), None, 1e-5)
    hyper = HyperConnection(count, norm, Linear(Weight.raw("f32", matrix.shape, matrix)), base, scale, 0, 1e-2, False)
    say = reference_hyper_connections.said(x.reshape(tokens, count, width), matrix, 1e-5)
    said = 1 / (1 + np.exp(-(say * np.repeat(scale, count) + base)))
    reads, writes = said[:, :count] + 1e-2, 2 * said[:, count:] + 1e-2
    split = x.reshape(tokens, count, width).astype(np.float64)
    read, behind = np.einsum("ts,tsd->td", reads, split), split + writes[..., None] * branch[:, None]
    sizes = Dims(width, 2, 1, 36, 64, 300, chunk=64, ctx=128, logit_rows=8, residual_streams=count, has_hyper_connections=True,
                 mla=LatentShape(48, 20, 16, 28, 20))
    try:
        for registry in (None, default_registry("reference")):
            ops, own = CpuOps(pool, sizes, registry), x.copy()
            got = ops.read_streams(own, hyper)
            ops.flush()
            np.testing.assert_allclose(got, read, rtol=2e-4, atol=2e-4)
            ops.write_streams(own, branch.copy(), hyper)
            ops.flush()
            np.testing.assert_allclose(own.reshape(split.shape), behind, rtol=2e-4, atol=2e-4)
    finally:
        pool.close()


def test_published_keys_are_known_and_defaults_are_those_of_transformers() -> None:
    config = parse_config(PUBLISHED, strict=True)
    assert config.warnings == () and config.indexer.source_layers == (0, 1, 1, 1) and config.indexer.interleaved_rope
    assert (config.residual_streams, config.unmixed_streams, config.sinkhorn) == (4, True, (0, 1e-6))
    assert config.moe.layers == {1, 2, 3} and config.rope.interleaved and config.hidden_act == "silu"
    silent, said = parse_config({"model_type": "hy_v4"}), parse_config(json.loads(CONFIG_MAPPING["hy_v4"]().to_json_string()), strict=True)
    assert replace(silent, dtype=said.dtype) == said and said.num_hidden_layers == 34 and said.context_length == 262_144
    assert [each for each, source in enumerate(said.indexer.source_layers) if source == each] == [0, *range(1, 34, 4)]
    rules = families.get("hy_v4").layer_tensors(config, 1)
    assert rules["attn_gate"].shape == (6 * 256, 96) and rules["sinks"].shape == (6,) and rules["attn_mix"].shape == (8, 4 * 96)
    assert "index_q" not in families.get("hy_v4").layer_tensors(config, 2)


@pytest.mark.parametrize(("key", "value"), [
    ("swiglu_limit", 7.0), ("swiglu_limit", 0), ("hc_magnitude", 1.0), ("hc_mult", 1), ("attention_bias", True), ("hidden_act", "gelu"),
    ("gated_mla", False), ("gating_type", "headwise"), ("learnable_sink", False), ("enable_ihc", False),
    ("indexer_types", ["shared", "full", "full", "full"]), ("n_group", 3),
    ("layer_types", ["full_attention"] * 4), ("mlp_layer_types", ["dense", "sparse", "moe", "sparse"]), ("q_lora_rank", None)])
def test_what_it_cannot_be_is_named(key: str, value: object) -> None:
    refused({**PUBLISHED, key: value}, key)


def test_the_model_that_takes_images_is_a_larger_one_of_the_same_kind() -> None:
    """Several positions of a token are equal in a text."""
    raw = json.loads(CONFIG_MAPPING["hy_v4_vl"]().to_json_string())
    made = parse_config(raw, strict=True)
    assert made.family == "hy_v4" and made.num_hidden_layers == 78 and made.rope.kind == "default" and not made.tie_word_embeddings
    silent = parse_config({"model_type": "hy_v4_vl", "text_config": {"model_type": "hy_v4_vl_text"}})
    assert replace(silent, dtype=made.dtype, warnings=made.warnings) == made


def test_what_the_makers_config_says_beside_that() -> None:
    switched = {"enable_ihc": True, "enable_lm_head_fp32": True, "gated_mla": True, "gating_type": "elementwise", "learnable_sink": True}
    assert parse_config({**PUBLISHED, **switched}, strict=True) == parse_config(PUBLISHED)
    halves = parse_config({**PUBLISHED, "rope_interleave": False}, strict=True)  # as transformers
    assert not halves.rope.interleaved and not halves.indexer.interleaved_rope


def test_each_of_its_names_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    """Those that transformers writes, those of its own modules, and those of the maker's, of which it reads more than it writes."""
    tensors = load_file(folder / "model.safetensors")
    own = {translated(name, "hy_v4"): each for name, each in tensors.items()}
    assert "model.layers.0.attn_hc.fn" in own and "model.hc_head.hc_fn" in own and "model.layers.0.self_attn.sinks" in own
    theirs = {}
    for name, each in own.items():
        name = re.sub(r"\.attn_hc\.(\w+)$", r".hc_attn_layer.hc_pre.hc_\1", name)
        name = re.sub(r"\.ffn_hc\.(\w+)$", r".hc_mlp_layer.hc_pre.hc_\1", name)
        name = re.sub(r"hc_head\.hc_(\w+)$", r"hc_head.hc_pre.hc_head_\1", name).replace("self_attn.gate_proj", "self_attn.linear_gate")
        theirs[name.replace(".sinks", ".learnable_sink_param")] = each
    expected = rows(opened(folder, kv="32bit"))
    for kind, named in (("own", own), ("theirs", theirs)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text((folder / "config.json").read_text())
        save_file(named, tmp_path / kind / "model.safetensors")
        assert np.array_equal(rows(opened(tmp_path / kind, kv="32bit")), expected)


@pytest.mark.slow
def test_quantized_with_and_without_a_text(folder: Path, tmp_path: Path) -> None:
    expected, off = rows(opened(folder, kv="32bit")), {}
    for spec, method in (("8bit", "rtn"), ("4bit", "rtn"), ("4bit", "gptq")):
        run(folder, out := tmp_path / f"{spec}-{method}", options(spec, method=method, calibration_tokens=2048))
        off[spec, method] = np.square(rows(opened(out, kv="32bit")) - expected).mean() / np.square(expected - expected.mean()).mean()
    assert off["8bit", "rtn"] < 1e-2 and off["4bit", "gptq"] < off["4bit", "rtn"] < 0.3, off


@pytest.mark.slow
def test_calibration_is_a_pass_of_the_model(folder: Path) -> None:
    stats = assert_calibration_is_a_pass(folder)
    assert stats[1].roles["attn_gate"] is stats[1].roles["kv_a"] and "gate" in stats[0].roles
    assert {"q_b", "o", "shared.gate", "experts.3.up"} <= set(stats[1].roles)


@pytest.mark.slow
def test_weights_from_the_disk_give_the_bits_of_weights_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 24 << 10)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 512)
    run(folder, tmp_path / "4bit", options("4bit"))
    for each in (folder, tmp_path / "4bit"):
        expected = rows(opened(each))
        assert np.array_equal(rows(streaming(each, ctx=512)), expected)
        assert np.array_equal(rows(paging(each, 20, ctx=512)), expected)
