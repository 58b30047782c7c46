"""Mistral Large 4: which configs are accepted, query scaling, and tensor names. Whole models are in `test_families.py` and
`test_sparse_indexer_models.py`."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_samples import refused
from hybrid_models import IDS, opened
from indexer_models import MODELS
from safetensors.numpy import load_file, save_file
from saved_models import saved
from transformers import CONFIG_MAPPING

from effllm import UsageError
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.latent_shape import LatentShape
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.rope import LOG_POSITIONS

HEADS, DEPTH = 6, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("large") / "model"
    saved(MODELS["mistral_large4"], made)
    return made


@pytest.mark.parametrize("tokens", [1, 40])
def test_queries_that_grow_match_the_reference(tokens: int) -> None:
    """Some of them fall: an offset or a scale may be below zero."""
    rng, pool = np.random.default_rng(3), ThreadPool(2)
    sizes = Dims(96, HEADS, 2, DEPTH, 64, 300, chunk=64, ctx=128, logit_rows=8)
    x = rng.standard_normal((tokens, HEADS * DEPTH), np.float32)
    scales, offsets = rng.standard_normal((2, HEADS), np.float32)
    positions = np.arange(70, 70 + tokens)
    fast, exact = CpuOps(pool, sizes), CpuOps(pool, sizes, default_registry("reference"))
    found = [ops.scale_queries(x.copy(), HEADS, DEPTH, positions, LOG_POSITIONS, (scales, offsets)) for ops in (fast, exact)]
    fast.flush()
    pool.close()
    factors = np.log(positions + 1.0)[:, None] * scales + offsets
    wanted = (x.reshape(tokens, HEADS, DEPTH) * factors[..., None]).reshape(x.shape)
    assert all(np.allclose(each, wanted, rtol=2e-5, atol=1e-5) for each in found)


def test_what_a_config_says_by_saying_nothing() -> None:
    """As transformers' own class has it."""
    config = parse_config({"model_type": "mistral_large4", "architectures": ["MistralLarge4ForConditionalGeneration"], "text_config": {
        "model_type": "mistral_large4_text"}, "vision_config": {"model_type": "pixtral"}}, strict=True)
    theirs = CONFIG_MAPPING["mistral_large4_text"]()
    assert config.num_hidden_layers == 72 and config.moe.layers == {*range(1, 72)} and config.final_logit_softcapping == 30.0
    assert [rope is not None for rope in config.ropes] == list(map(bool, theirs.no_rope_layers))
    assert (config.mla_of(0), config.mla_of(3)) == (LatentShape(512, 64, 64, 128), LatentShape(512, 128, 0, 128))
    assert (config.kv_heads_of(0), config.kv_heads_of(3), config.kv_sources) == ((1, 576), (1, 512), ())
    assert config.indexer.shape.dense_tokens == 2048 and config.context_length == theirs.max_position_embeddings == 2**20
    assert {key: config.rope.params[key] for key in ("factor", "original_max_position_embeddings", "attention_factor")} == {
        key: theirs.rope_parameters[key] for key in ("factor", "original_max_position_embeddings", "attention_factor")}
    assert len(config.warnings) == 1 and config.warnings[0].startswith("'mistral_large4' takes images too")


SIZES = {"model_type": "mistral_large4_text", "vocab_size": 300, "hidden_size": 96, "intermediate_size": 88, "num_hidden_layers": 4,
         "num_attention_heads": 6, "num_key_value_heads": 6}


@pytest.mark.parametrize(("key", "value"), [
    ("attention_bias", True), ("q_lora_rank", 64), ("n_group", 2), ("norm_topk_prob", False), ("index_head_dim", 32),
    ("indexer_rope_interleave", False), ("indexer_types", ["shared", "full", "full", "full"]), ("layer_types", ["full_attention"] * 4),
    ("no_rope_layers", [1, 0, 1]), ("no_rope_layers", [1, 2, 1, 0]), ("kv_source_layers", [0, 1, 2]), ("kv_source_layers", [0, 1, 2, 4]),
    ("kv_source_layers", [0, 0, 0, 0]), ("kv_source_layers", [0, 0, 1, 3]), ("kv_source_layers", [0, 2, 2, 3]),
    ("mlp_layer_types", ["dense", "moe", "sparse", "sparse"]), ("num_key_value_heads", 2)])
def test_what_it_cannot_be_is_named(key: str, value: object) -> None:
    """Among it layers that attend to latents of layers with other positions, or to those of one that has none of its own."""
    refused({**SIZES, key: value}, key)


def test_a_layer_attends_to_the_last_latents_of_its_kind() -> None:
    """As transformers keeps them: of each kind those that were last kept for others."""
    listed = [0, 0, 2, 3, 2, 2, 6, 3]
    made = parse_config({**SIZES, "num_hidden_layers": 8, "kv_source_layers": listed})
    assert made.kv_sources == tuple(listed) and made.attention_layers == (0, 2, 3, 6)
    refused({**SIZES, "num_hidden_layers": 8, "kv_source_layers": [0, 0, 2, 3, 2, 0, 6, 3]}, "kv_source_layers", "layer 5")


def test_names_of_transformers_and_of_the_maker_are_one_model(folder: Path, tmp_path: Path) -> None:
    """transformers writes the maker's; older releases wrote none, and a folder of the text model alone has its own."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    told = {"layers.": "model.language_model.layers.", "norm.": "model.language_model.norm.", "output.": "lm_head.",
            "tok_embeddings.": "model.language_model.embed_tokens.", "lerope.": "model.language_model.rotary_emb."}
    within = {".attention_norm.": ".input_layernorm.", ".ffn_norm.": ".post_attention_layernorm.", ".kv_a_norm.": ".kv_a_layernorm.",
              ".attention.": ".self_attn.", ".feed_forward.": ".mlp.", ".wq.": ".q_proj.", ".wo.": ".o_proj.", ".wkv_b.": ".kv_b_proj.",
              ".wkv_a_with_mqa.": ".kv_a_proj_with_mqa.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.",
              ".ssmax_scaling.s": ".softmax_scaling.scale", ".ssmax_scaling.b": ".softmax_scaling.bias"}
    tensors = {}
    for name, data in load_file(folder / "model.safetensors").items():
        start = next((each for each in told if name.startswith(each)), None)
        if start is None:
            continue
        other = told[start] + name.removeprefix(start)
        for said, meant in within.items():
            other = other.replace(said, meant)
        for part in ("experts", "gate", "shared_experts"):
            place = other.split(".")
            if len(place) > 4 and place[4] == part:
                other = ".".join([*place[:4], "mlp", *place[4:]])
        tensors[other] = data
    save_file(tensors, tmp_path / "model.safetensors")
    rows = []
    for each in (folder, tmp_path):
        engine = opened(each, kv="32bit")
        rows.append(np.concatenate([logits.copy() for _, logits in engine.score(IDS[:40])]))
        engine.close()
    assert np.array_equal(*rows)


def test_latents_that_are_shared_by_turns_stay_in_memory(folder: Path, tmp_path: Path) -> None:
    """Also in a context in which all is seen, where a model without such layers may keep pages on the disk."""
    options = EngineOptions(device="cpu", ctx=64, kv_ram="1M", spill_dir=str(tmp_path))
    with pytest.raises(UsageError, match="share keys and values") as caught:
        prepare(folder, options)
    assert "--kv-ram" in caught.value.hint
    assert read_config(folder).interleaves_shared_kv and not parse_config(SIZES).interleaves_shared_kv
    preset = prepare(folder, replace(options, from_settings=frozenset({"kv_ram"})))
    assert preset.options.kv_ram is None and any("--kv-ram" in notice for notice in map(str, preset.notices))
    preset.store.close()


def test_a_folder_says_which_layers_have_what(folder: Path) -> None:
    config = read_config(folder)
    assert config.attention_layers == (0, 1, 4) and config.indexer.source_layers == (0, 0, 2, 3, 3)
    assert json.loads((folder / "config.json").read_text())["text_config"]["no_rope_layers"] == [1, 0, 1, 0, 1]
    assert replace(config, kv_sources=()).attention_layers == (0, 1, 2, 3, 4)
