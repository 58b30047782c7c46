"""config.json of Gemma 4: read as transformers reads it, and what is refused by name."""

import json

import numpy as np
import pytest
import torch
from config_samples import refused
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from effllm.quant.kv import codec
from effllm.runtime.config import parse_config
from effllm.runtime.kv.cache_components import layer_codecs
from effllm.runtime.rope import rope_table

ROPES = {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
         "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}
COMMON = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "dtype": "bfloat16", "eos_token_id": 1,
          "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
          "initializer_range": 0.02, "max_position_embeddings": 131072, "model_type": "gemma4_text", "pad_token_id": 0,
          "rms_norm_eps": 1e-06, "rope_parameters": ROPES, "sliding_window": 512, "tie_word_embeddings": True,
          "use_bidirectional_attention": None, "use_cache": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144}
# What the published checkpoints state of their text model.
E2B = {**COMMON, "attention_k_eq_v": False, "enable_moe_block": False, "hidden_size": 1536, "hidden_size_per_layer_input": 256,
       "intermediate_size": 6144, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "moe_intermediate_size": None,
       "num_attention_heads": 8, "num_experts": None, "num_global_key_value_heads": None, "num_hidden_layers": 35,
       "num_key_value_heads": 1, "num_kv_shared_layers": 20, "top_k_experts": None, "use_double_wide_mlp": True,
       "expert_intermediate_size": None}
E4B = {**E2B, "hidden_size": 2560, "intermediate_size": 10240, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
       "num_hidden_layers": 42, "num_key_value_heads": 2, "num_kv_shared_layers": 18, "use_double_wide_mlp": False}
LARGE = {**E2B, "attention_k_eq_v": True, "hidden_size": 5376, "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
         "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "max_position_embeddings": 262144,
         "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
         "num_kv_shared_layers": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False}
MIXTURE = {**LARGE, "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704,
           "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "num_attention_heads": 16, "num_experts": 128,
           "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8, "top_k_experts": 8}
OUTER = {"architectures": ["Gemma4ForConditionalGeneration"], "audio_config": {"model_type": "gemma4_audio"}, "audio_token_id": 258881,
         "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16", "eoa_token_id": 258883, "eoa_token_index": 258883,
         "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880, "initializer_range": 0.02, "model_type": "gemma4",
         "tie_word_embeddings": True, "transformers_version": "5.5.0", "video_token_id": 258884, "vision_config": {"hidden_size": 768},
         "vision_soft_tokens_per_image": 280}


@pytest.mark.parametrize("raw", [E2B, E4B, LARGE, MIXTURE])
def test_published_configs_are_known_to_the_last_key(raw):
    """Strict: an unknown key would be an error. By itself, as the text model of a checkpoint that takes images, and as transformers
    writes it."""
    config = parse_config(raw, strict=True)
    assert not config.warnings and config.norm_kind == "rms" and config.attn_scale == 1.0 and config.hidden_act == "gelu_tanh"
    whole = parse_config({**OUTER, "text_config": raw}, strict=True)
    assert whole.eos_token_ids == (1, 106) and "takes images and audio too" in whole.warnings[0]
    assert "takes images too" in parse_config({**OUTER, "audio_config": None, "text_config": raw}, strict=True).warnings[0]
    again = parse_config(json.loads(Gemma4TextConfig(**raw).to_json_string()), strict=True)
    assert again == config


def test_layers_are_of_two_kinds():
    small, large, mixture = (parse_config(raw) for raw in (E2B, LARGE, MIXTURE))
    assert [small.kv_heads_of(layer) for layer in (3, 4)] == [(1, 256), (1, 512)] and small.windows[3:5] == (512, None)
    assert small.attention_layers == tuple(range(15)) and small.kv_sources[14:21] == (14, 13, 13, 13, 13, 14, 13)
    assert [small.intermediate_size_of(layer) for layer in (14, 15)] == [6144, 12288] and small.widest_intermediate == 12288
    assert (small.per_layer_input_dim, small.per_layer_input_vocab, small.per_layer_input_multiplier) == (256, 262144, 16.0)
    assert not small.k_eq_v_layers
    assert small.embedding_multiplier == float(torch.tensor(1536**0.5).to(torch.bfloat16)) and small.final_logit_softcapping == 30.0
    assert [large.kv_heads_of(layer) for layer in (4, 5)] == [(16, 256),
                                                              (4, 512)] and not large.kv_sources and not large.per_layer_input_dim
    assert large.k_eq_v_layers == tuple(range(5, 60, 6)) and large.moe is None
    assert (mixture.moe.num_experts, mixture.moe.experts_per_token, mixture.moe.expert_dim, mixture.moe.parallel_to_mlp) == (
        128, 8, 704, True)
    assert parse_config(E4B).intermediate_size_of(41) == 10240 and parse_config(E4B).kv_sources[23:30] == (23, 22, 22, 22, 22, 22, 23)


@pytest.mark.parametrize("raw", [E2B, E4B, LARGE, MIXTURE])
def test_heads_of_published_models_can_be_packed(raw):
    """As docs/memory.md says: 4.51 bits a number, whichever of both sizes."""
    heads = parse_config(raw).cache_kv_heads
    layouts = [each.layout(*own) for each, own in zip(layer_codecs(codec("4bit"), heads), heads, strict=True)]
    assert {size for _, size in heads} == {256, 512} == {layout.head_dim for layout in layouts}
    assert all(4.5 < layout.records[0].packed_bits < 4.51 for layout in layouts)


def test_defaults_are_those_of_transformers():
    config, theirs = parse_config({"model_type": "gemma4_text"}), Gemma4TextConfig()
    assert config.windows == tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    assert [config.kv_heads_of(layer) for layer in (4, 5)] == [(4, 256), (4, 512)] and config.per_layer_input_dim == 256
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings"):
        assert getattr(config, name) == getattr(theirs, name), name
    last = parse_config({**LARGE, "layer_types": ["sliding_attention"] * 60})
    assert last.windows[-2:] == (1024, None)  # whatever is stated
    alone = parse_config({**LARGE, "layer_types": ["full_attention"] * 60})
    assert set(alone.cache_kv_heads) == {(4, 512)}


def test_positions_are_those_of_transformers():
    config, theirs = parse_config(E2B), Gemma4TextRotaryEmbedding(Gemma4TextConfig(**E2B))
    for layer, kind in ((0, "sliding_attention"), (4, "full_attention")):
        table = rope_table(config.ropes[layer], config.kv_heads_of(layer)[1], 1024, 131072)
        assert np.allclose(table.inv_freq, getattr(theirs, f"{kind}_inv_freq").numpy(), rtol=1e-6, atol=0)
        assert table.rotary_dim == config.kv_heads_of(layer)[1] and table.attention_scaling == 1.0
    assert (rope_table(config.ropes[4], 512, 1024, 131072).inv_freq > 0).sum() == 64
    halved = {**ROPES, "full_attention": {**ROPES["full_attention"], "factor": 8.0}}
    stretched = rope_table(parse_config({**E2B, "rope_parameters": halved}).ropes[4], 512, 1024, 131072)
    assert np.allclose(stretched.inv_freq * 8, rope_table(config.ropes[4], 512, 1024, 131072).inv_freq)


@pytest.mark.parametrize(("key", "value", "said"), [
    ("use_bidirectional_attention", "all", "use_bidirectional_attention"), ("mlp_bias", True, "mlp_bias"),
    ("layer_types", ["mamba"] * 35, "layer_types"), ("num_kv_shared_layers", 33, "leaves no layer of full_attention"),
    ("num_kv_shared_layers", 36, "num_kv_shared_layers"), ("num_key_value_heads", 3, "3 key-value heads"),
    ("global_head_dim", 511, "of 511"),
    ("rope_parameters", {"full_attention": ROPES["full_attention"]}, "sliding_attention"),
    ("rope_parameters", {**ROPES, "chunked_attention": {}}, "chunked_attention"), ("hidden_size_per_layer_input", -1, "per_layer_input"),
    ("rope_parameters", {**ROPES, "full_attention": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ("per_layer_config", {"4": {"head_dim": 64, "sliding_window": 3}}, "per_layer_config"), ("per_layer_config", {"35": {}}, "35"),
    ("per_layer_config", {"full_attention": {"head_dim": 64}}, "full_attention"), ("per_layer_config", {"4" * 5000: {}}, "444"),
    ("per_layer_config", {"4": {"head_dim": 64}}, "layers of full_attention differ"), ("enable_moe_block", True, "num_experts"),
    ("vocab_size_per_layer_input", 262143, "vocab_size_per_layer_input = 262143"),
    ("rope_parameters", {**ROPES, "full_attention": {**ROPES["full_attention"], "partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
    ("query_pre_attn_scalar", 256, "query_pre_attn_scalar"), ("rope_theta", 1e6, "rope_theta"),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, "rope_scaling"), ("attn_logit_softcapping", 50.0, "attn_logit_softcapping")])
def test_what_it_cannot_do_is_named(key, value, said):
    refused({**E2B, key: value}, said)


def test_experts_that_cannot_be_are_named():
    refused({**MIXTURE, "top_k_experts": 129}, "top_k_experts")
    refused({**MIXTURE, "moe_intermediate_size": None}, "moe_intermediate_size")
