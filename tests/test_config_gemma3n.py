"""config.json of Gemma 3n: read as transformers reads it, and what is refused by name."""

import json

import numpy as np
import pytest
import torch
from config_samples import refused
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRotaryEmbedding

from effllm.runtime import families
from effllm.runtime.config import parse_config
from effllm.runtime.rope import rope_table

# What the published checkpoints state of their text model.
E4B = {"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25, "altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale":
       True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False, "attention_dropout": 0.0,
       "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048,
       "hidden_size_per_layer_input": 256, "initializer_range": 0.02, "intermediate_size": [16384] * 35, "laurel_rank": 64, "layer_types":
       (["sliding_attention"] * 4 + ["full_attention"]) * 7, "max_position_embeddings": 32768, "model_type": "gemma3n_text",
       "num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 2, "num_kv_shared_layers": 15, "rms_norm_eps": 1e-06,
       "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "torch_dtype": "bfloat16",
       "use_cache": True, "vocab_size": 262400, "vocab_size_per_layer_input": 262144}
E2B = {**E4B, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "intermediate_size": [8192] * 30, "layer_types":
       (["sliding_attention"] * 4 + ["full_attention"]) * 6, "num_hidden_layers": 30, "num_kv_shared_layers": 10}
OUTER = {"architectures": ["Gemma3nForConditionalGeneration"], "audio_config": {"model_type": "gemma3n_audio"},
         "audio_soft_tokens_per_image": 188, "audio_token_id": 262273, "boa_token_id": 256000, "boi_token_id": 255999,
         "eoa_token_id": 262272, "eoi_token_id": 262144, "eos_token_id": [1, 106], "image_token_id": 262145, "initializer_range": 0.02,
         "model_type": "gemma3n", "torch_dtype": "bfloat16", "transformers_version": "4.53.0.dev0",
         "vision_config": {"model_type": "gemma3n_vision"}, "vision_soft_tokens_per_image": 256}


@pytest.mark.parametrize("raw", [E2B, E4B])
def test_published_configs_are_known_to_the_last_key(raw):
    """Strict: an unknown key would be an error. By itself, as the text model of a checkpoint with images and audio, and as transformers
    writes it."""
    config = parse_config(raw, strict=True)
    assert not config.warnings and config.norm_kind == "rms" and config.attn_scale == 1.0 and config.hidden_act == "gelu_tanh"
    whole = parse_config({**OUTER, "text_config": raw}, strict=True)
    assert whole.eos_token_ids == (1, 106) and "takes images and audio too" in whole.warnings[0] and whole.tie_word_embeddings
    again = parse_config(json.loads(Gemma3nTextConfig(**raw).to_json_string()), strict=True)
    assert again == config


def test_layers_are_what_is_published():
    small, large = parse_config(E2B), parse_config(E4B)
    assert (small.residual_streams, small.low_rank_dim, small.per_layer_input_dim, small.per_layer_input_vocab, small.vocab_size) == (
        4, 64, 256, 262144, 262400)
    assert small.attention_layers == tuple(range(20)) and small.kv_sources[18:26] == (18, 19, 18, 18, 18, 18, 19, 18)
    assert large.attention_layers == tuple(range(20)) and large.windows[3:5] == (512, None)
    assert small.intermediate_size_of(0) == 8192 and large.widest_intermediate == 16384 and not large.layer_intermediate_sizes
    assert [small.gate_cutoff_of(layer) for layer in (9, 10)] == [pytest.approx(1.6448536), None]
    assert small.embedding_multiplier == float(torch.tensor(2048**0.5).to(torch.bfloat16)) and small.per_layer_input_multiplier == 16.0


@pytest.mark.parametrize(("raw", "published"), [(E2B, 4.46), (E4B, 6.87)])
def test_text_parts_are_as_large_as_is_published(raw, published):
    """Files count keys and values of layers that share another's, which these do not read."""
    config, family = parse_config(raw), families.get("gemma3n_text")
    groups = [family.outer_tensors(config), *(family.layer_tensors(config, layer) for layer in range(config.num_hidden_layers))]
    counted = sum(int(np.prod(rule.shape)) for rules in groups for rule in rules.values())
    counted += (config.num_hidden_layers - len(config.attention_layers)) * (2 * 2 * 256 * 2048 + 256)
    assert round(counted / 1e9, 2) == published


def test_defaults_are_those_of_transformers():
    config, theirs = parse_config({"model_type": "gemma3n_text"}), Gemma3nTextConfig()
    assert config.windows == tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "head_dim",
                 "num_key_value_heads", "final_logit_softcapping"):
        assert getattr(config, name) == getattr(theirs, name), name
    assert [config.intermediate_size_of(layer) for layer in range(35)] == theirs.intermediate_size
    assert [each is not None for each in config.gate_cutoffs] == [each > 0 for each in theirs.activation_sparsity_pattern]
    assert (config.residual_streams, config.low_rank_dim) == (theirs.altup_num_inputs, theirs.laurel_rank)
    few = {"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 0}
    assert not parse_config(few).gate_cutoffs and not any(Gemma3nTextConfig(**few).activation_sparsity_pattern)


def test_positions_are_those_of_transformers():
    config, theirs = parse_config(E2B), Gemma3nRotaryEmbedding(Gemma3nTextConfig(**E2B))
    for layer, kind in ((0, "sliding_attention"), (4, "full_attention")):
        table = rope_table(config.ropes[layer], 256, 1024, 32768)
        assert np.allclose(table.inv_freq, getattr(theirs, f"{kind}_inv_freq").numpy(), rtol=1e-6, atol=0)


def test_a_cut_is_where_transformers_has_it():
    normal = torch.distributions.normal.Normal(0, 1)
    shares = [0.95, 0.5, 0.1, 0.0, 0.999]
    config = parse_config({**E2B, "activation_sparsity_pattern": shares + [0.0] * 25})
    for own, share in zip(config.gate_cutoffs, shares):
        assert own is None if not share else own == pytest.approx(float(normal.icdf(torch.tensor(share))), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("key", "value", "said"), [
    ("use_bidirectional_attention", True, "use_bidirectional_attention"), ("altup_active_idx", 1, "altup_active_idx"),
    ("altup_correct_scale", False, "altup_correct_scale"), ("altup_num_inputs", 1, "altup_num_inputs"), ("altup_num_inputs", 9,
    "altup_num"), ("laurel_rank", 0, "laurel_rank"), ("layer_types", ["mamba"] * 30, "layer_types"), ("mlp_bias", True, "mlp_bias"),
    ("num_kv_shared_layers", 27, "leaves no layer of full_attention"), ("num_kv_shared_layers", 31, "num_kv_shared_layers"),
    ("intermediate_size", [8192] * 29, "intermediate_size"), ("intermediate_size", [8192] * 29 + [0], "intermediate_size"),
    ("activation_sparsity_pattern", [0.95] * 29, "activation_sparsity_pattern"), ("activation_sparsity_pattern", 0.95,
    "activation_sparsity"), ("activation_sparsity_pattern", [1.0] * 30, "activation_sparsity_pattern"), ("hidden_size_per_layer_input", 0,
    "per_layer_input"), ("rope_parameters", {"chunked_attention": {}}, "rope_parameters"), ("attn_logit_softcapping", 50.0,
    "attn_logit_softcapping")])
def test_what_it_cannot_do_is_named(key, value, said):
    refused({**E2B, key: value}, said)
