"""config.json of Granite Swash, CWM, VaultGemma, LFM3 and Helium: read as transformers reads it, and what is refused by name."""

import json

import pytest
from config_samples import LLAMA, SMALL, refused
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from effllm.runtime import families
from effllm.runtime.config import parse_config
from effllm.runtime.config_rope import RopeConfig

# What checkpoints state, shortened by the sizes that every config has: nothing in it is unknown.
PUBLISHED = {
    "granite_swa": {"architectures": ["GraniteSWAForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attention_multiplier":
                    0.0078125, "bos_token_id": 7, "dtype": "bfloat16", "embedding_multiplier": 12, "eos_token_id": 7, "hidden_act": "silu",
                    "initializer_range": 0.02, "layer_rope_theta": [0, 10000, 10000.0, 500000], "layer_types": [
                        "full_attention", *["sliding_attention"] * 3], "logits_scaling": 8, "max_position_embeddings": 131072, "mlp_bias":
                    False, "pad_token_id": 7, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_parameters": {
                        "rope_theta": 10000, "rope_type": "default"}, "sliding_window": 128, "tie_word_embeddings": True, "use_cache":
                    True},
    "granitemoe_swa": {"architectures": ["GraniteMoeSWAForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
                       "bos_token_id": 7, "embedding_multiplier": 12, "eos_token_id": 7, "layer_rope_theta": None, "layer_types": [
                           "full_attention", *["sliding_attention"] * 3], "logits_scaling": 8, "max_position_embeddings": 131072,
                       "num_experts_per_tok": 8, "num_local_experts": 64, "output_router_logits": False, "residual_multiplier": 0.22,
                       "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}, "router_aux_loss_coef":
                       0.001, "shared_intermediate_size": 0, "sliding_window": 128, "tie_word_embeddings": True},
    "cwm": {"architectures": ["CwmForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [7, 8, 9], "head_dim": 128,
            "hidden_act": "silu", "layer_types": ["full_attention", *["sliding_attention"] * 3], "max_position_embeddings": 131072,
            "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type":
                "llama3"}, "rope_theta": 1000000.0, "sliding_window": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "vaultgemma": {"architectures": ["VaultGemmaForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None, "bos_token_id": 2,
                   "dtype": "bfloat16", "eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 256, "hidden_activation":
                   "gelu_pytorch_tanh", "layer_types": ["full_attention"] * 4, "max_position_embeddings": 1024, "pad_token_id": 0,
                   "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 512, "use_cache": True},
    "lfm3": {"architectures": ["Lfm3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "conv_L_cache": 7,
             "conv_bias": False, "dtype": "bfloat16", "eos_token_id": 7, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
             "layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "max_position_embeddings": 128000, "norm_eps": 1e-05,
             "pad_token_id": 0, "rope_parameters": {
                 "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
                 "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
             "sliding_window": 256, "tie_word_embeddings": True, "use_attention_gate": True, "use_cache": True, "use_sandwich_norm": True},
    "helium": {"architectures": ["HeliumForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16,
               "hidden_act": "silu", "max_position_embeddings": 4096, "mlp_bias": False, "pad_token_id": 3, "rms_norm_eps": 1e-08,
               "rope_theta": 100000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True},
}


def base(family: str) -> dict[str, object]:
    return {**LLAMA, "model_type": family, **PUBLISHED[family]}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_are_known_to_the_last_key(family: str) -> None:
    """Strict: an unknown key would be an error."""
    config = parse_config(base(family), strict=True)
    assert config.family == family and config.warnings == ()


@pytest.mark.parametrize("family", PUBLISHED)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "eos_token_id": [7, 9]}], ids=["defaults", "others"])
def test_what_is_left_out_is_what_transformers_takes(family: str, changes: dict[str, object]) -> None:
    sizes = {**SMALL, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    full = CONFIG_MAPPING[family](**sizes, **changes)
    bare = {"model_type": family, **sizes, **changes}
    silent, said = parse_config(bare), parse_config(json.loads(full.to_json_string()), strict=True)
    assert silent.windows == said.windows and silent.ropes == said.ropes and silent.norm_eps == said.norm_eps == full.rms_norm_eps
    assert silent.tie_word_embeddings == said.tie_word_embeddings == full.tie_word_embeddings
    assert silent.eos_token_ids == tuple(each for each in said.eos_token_ids if each < full.vocab_size)
    assert silent.max_position_embeddings == full.max_position_embeddings and silent.moe == said.moe
    kinds = full.layer_types if family != "helium" else ["full_attention"] * 4
    assert silent.windows == tuple(full.sliding_window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize(("family", "key", "value"), [
    ("granite_swa", "layer_rope_theta", [0, 1e4]), ("granite_swa", "layer_rope_theta", [0, 1e4, 1e4, 0.5]),
    ("granite_swa", "layer_rope_theta", [0, 1e4, 1e4, -1]), ("granite_swa", "layer_rope_theta", [True, 1e4, 1e4, 1e4]),
    ("granite_swa", "layer_rope_theta", "1e4"), ("granite_swa", "layer_types", ["chunked_attention"] * 4),
    ("granite_swa", "sliding_window", None), ("granite_swa", "no_rope_layers", [0, 1, 1, 1]), ("granitemoe_swa", "mlp_bias", True),
    ("granitemoe_swa", "shared_intermediate_size", -1), ("cwm", "attention_bias", True), ("cwm", "sliding_window", -1),
    ("vaultgemma", "use_bidirectional_attention", True), ("vaultgemma", "mlp_bias", True), ("helium", "sliding_window", 512),
    ("lfm3", "conv_bias", True), ("lfm3", "layer_types", ["conv"] * 4), ("lfm3", "layer_types", ["mamba"] * 4),
    ("lfm3", "sliding_window", None), ("lfm3", "rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("lfm3", "conv_L_cache", 65), ("lfm3", "use_attention_gate", 1)])
def test_what_a_family_cannot_do_is_named(family: str, key: str, value: object) -> None:
    if key == "no_rope_layers":  # which transformers passes over
        assert any(key in said for said in parse_config({**base(family), key: value}).warnings)
    else:
        refused({**base(family), key: value}, key if key != "sliding_window" or value is not None else "layer_types")


def test_layers_of_lfm3() -> None:
    config = parse_config(base("lfm3"), strict=True)
    assert config.windows == (None, 256, None, None) and config.recurrent_layers == (0, 3) and config.recurrent.taps == 7
    assert [rope and (rope.kind, rope.theta) for rope in config.ropes] == [None, ("default", 1e4), ("proportional", 1e6), None]
    rules = [families.get("lfm3").layer_tensors(config, layer) for layer in (0, 1)]
    assert rules[1]["attn_gate"].shape == (6, 96) and "q" not in rules[0] and rules[0]["state_conv"].shape == (96, 1, 7)
    assert {"o_norm", "down_norm"} <= rules[0].keys() & rules[1].keys()
    plain = parse_config({**base("lfm3"), "use_sandwich_norm": False, "use_attention_gate": False}, strict=True)
    assert not {"o_norm", "down_norm", "attn_gate"} & families.get("lfm3").layer_tensors(plain, 1).keys()


def test_layers_of_granite_swash() -> None:
    config = parse_config(base("granite_swa"), strict=True)
    assert config.windows == (None, 128, 128, 128) and config.attn_scale == 0.0078125 and config.logits_scaling == 8
    assert config.ropes == (None, *(RopeConfig(theta, "default", {}) for theta in (10_000.0, 10_000.0, 500_000.0)))
    rules = families.get("granite_swa").layer_tensors(config, 2)
    assert rules["sinks"].name == "model.layers.2.self_attn.sinks" and rules["sinks"].shape == (config.num_attention_heads,)
    nowhere = parse_config({**base("granite_swa"), "layer_rope_theta": [0] * 4}, strict=True)
    assert nowhere.ropes == (None,) * 4
    mixture = parse_config(base("granitemoe_swa"), strict=True)
    assert mixture.moe.shared_expert_dim is None and mixture.moe.routed_scale == 0.22 and None not in mixture.ropes
