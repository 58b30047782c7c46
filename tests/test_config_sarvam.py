"""config.json of Sarvam's models, which are other families' with key names of their own, and of Lara 4 Mini."""

import json

import pytest
from config_samples import SMALL, refused
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from effllm.runtime.config import parse_config
from effllm.runtime.families import get

CODE = {"AutoConfig": "configuration_sarvam_moe.Sarvam{}Config", "AutoModelForCausalLM": "modeling_sarvam_moe.Sarvam{}ForCausalLM"}
SARVAM = {**SMALL, "embedding_dropout": 0.0, "first_k_dense_replace": 1, "moe_intermediate_size": 48, "norm_topk_prob": True,
          "num_experts": 12, "num_experts_per_tok": 3, "num_shared_experts": 1, "output_dropout": 0.0, "rms_norm_eps": 1e-6,
          "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "vocab_size": 300}
SARVAM_30B = {**SARVAM, "model_type": "sarvam_moe", "architectures": ["SarvamMoEForCausalLM"], "auto_map": {
    task: name.format("MoE") for task, name in CODE.items()}, "head_dim": 16, "max_position_embeddings": 131072,
    "max_window_layers": 19, "moe_router_enable_expert_bias": True, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
    "rope_scaling": None, "rope_theta": 8000000, "router_dtype": "fp32", "score_function": "sigmoid", "use_bias": False,
    "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True}
SARVAM_105B = {**{key: value for key, value in SARVAM.items() if "dropout" not in key}, "model_type": "sarvam_mla", "architectures": [
    "SarvamMLAForCausalLM"], "auto_map": {task: name.format("MLA") for task, name in CODE.items()}, "head_dim": 576,
    "attention_bias": False, "kv_lora_rank": 512, "max_position_embeddings": 131072, "num_key_value_heads": 6, "num_attention_heads": 6,
    "q_head_dim": 192, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000.0, "rope_scaling": {
        "type": "deepseek_yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096}}
LARA = {**SMALL, "model_type": "lara_mini", "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]}


@pytest.mark.parametrize(("raw", "family"), [(SARVAM_30B, "bailing_moe_v2"), (SARVAM_105B, "deepseek_v3")])
def test_original_configs_are_known_to_the_last_key(raw: dict[str, object], family: str) -> None:
    config = parse_config(raw, strict=True)
    assert config.family == family and config.warnings == () and config.mtp_layers == 0
    assert (config.moe.num_experts, config.moe.experts_per_token, config.moe.shared_expert_dim) == (12, 3, 48)
    assert config.moe.sigmoid and config.moe.correction_bias and config.moe.num_groups == 1
    assert config.rope.partial_rotary_factor == 1.0 and config.rope.kind == ("yarn" if config.mla else "default")


@pytest.mark.parametrize("model_type", ["sarvam_moe", "sarvam_mla", "lara_mini"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "eos_token_id": [7, 9]}], ids=["defaults", "others"])
def test_what_is_left_out_is_what_transformers_takes(model_type: str, changes: dict[str, object]) -> None:
    heads = {"num_key_value_heads": 8} if model_type == "sarvam_mla" else {}
    sizes = {**SMALL, "hidden_size": 128, "num_attention_heads": 8, **heads}
    full = CONFIG_MAPPING[model_type](**sizes, **changes)
    silent = parse_config({"model_type": model_type, **sizes, **changes})
    stated = parse_config(json.loads(full.to_json_string()), strict=True)
    same = ("windows", "ropes", "norm_eps", "max_position_embeddings", "moe", "head_dim", "num_key_value_heads", "attn_scale", "mla",
            "hidden_act", "qk_norm", "qkv_bias", "o_bias", "recurrent", "recurrent_layers", "mtp_layers", "tie_word_embeddings")
    assert {name: getattr(silent, name) for name in same} == {name: getattr(stated, name) for name in same}
    assert stated.tie_word_embeddings == full.tie_word_embeddings


@pytest.mark.parametrize(("raw", "key", "value"), [
    (SARVAM_30B, "use_qkv_bias", True), (SARVAM_30B, "score_function", "softmax"), (SARVAM_30B, "rotary_dim", 17),
    (SARVAM_30B, "auto_map", {"AutoModel": "modeling_other.Model"}), (SARVAM_30B, "num_experts", 0),
    (SARVAM_105B, "auto_map", {"AutoModel": "modeling_other.Model"}), (SARVAM_105B, "num_key_value_heads", 2),
    (LARA, "layer_types", ["chunked_attention"] * 4), (LARA, "hidden_act", "gelu"),
    (LARA, "linear_num_value_heads", 3), (LARA, "sliding_window", 0), (LARA, "mlp_only_layers", [1]), (LARA, "num_experts_per_tok", 129)])
def test_what_they_may_not_have_is_named(raw: dict[str, object], key: str, value: object) -> None:
    assert key in refused({**raw, key: value}).message


def test_layers_of_lara() -> None:
    refused({**LARA, "layer_types": ["linear_attention"] * 4}, "only linear attention")
    config = parse_config(LARA, strict=True)
    assert config.recurrent_layers == (0, 2) and config.windows == (None, 512, None, None)
    assert [rope is not None for rope in config.ropes] == [False, True, False, False]
    layers = [get("lara_mini").layer_tensors(config, layer) for layer in range(4)]
    assert layers[0]["state_gate"].part_of == ("model.layers.0.linear_attn.in_proj.weight", config.recurrent.channels,
                                               config.recurrent.channels + config.recurrent.values + 2 * config.recurrent.value_heads)
    assert "model.layers.2.linear_attn.out_norm.weight" in layers[2]["state_norm"].also
    assert "shared.scale" not in layers[1] and layers[1]["q"].name == "model.layers.1.self_attn.q_proj.weight"
