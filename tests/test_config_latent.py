"""config.json of models with latent attention: what published ones state, transformers' defaults for absent keys, tensors, refusals."""

import json
from dataclasses import replace

import pytest
import torch
from config_samples import in_a_file, refused
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig

from effllm.runtime import families
from effllm.runtime.config import ModelConfig, parse_config
from effllm.runtime.stores.composite import text_model_config

SMALL = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 6,
         "num_key_value_heads": 6, "eos_token_id": 7}
EXPERTS = {"n_routed_experts": 12, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 40}
WIDTHS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn"}
TRAINING = {"aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "pretraining_tp": 1, "seq_aux": True, "attention_bias": False}


def code(version: int, file: str) -> dict[str, str]:
    kinds = {"AutoConfig": "configuration", "AutoModel": "modeling", "AutoModelForCausalLM": "modeling"}
    return {task: f"{kind}_{file}.DeepseekV{version}{task.removeprefix('Auto').replace('Model', '', task != 'AutoModel')}"
            for task, kind in kinds.items()}


# What the published checkpoints state, shortened by the sizes that every config has.
PUBLISHED = {
    "V2-Lite": {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "auto_map": code(2, "deepseek"), **TRAINING,
                **WIDTHS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "norm_topk_prob": False,
                "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy", "rope_scaling": YARN, "rope_theta": 10000,
                "max_position_embeddings": 163840},
    "V2": {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "auto_map": code(2, "deepseek"), **TRAINING, **WIDTHS,
           "first_k_dense_replace": 1, "n_group": 6, "topk_group": 3, "q_lora_rank": 1536, "norm_topk_prob": False,
           "routed_scaling_factor": 16.0, "scoring_func": "softmax", "topk_method": "group_limited_greedy", "rope_scaling": YARN,
           "max_position_embeddings": 163840},
    "V3": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": code(3, "deepseek"), **TRAINING, **WIDTHS,
           "first_k_dense_replace": 3, "n_group": 4, "topk_group": 2, "q_lora_rank": 1536, "norm_topk_prob": True,
           "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
           "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "max_position_embeddings": 163840,
           "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}},
    "Moonlight": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {
        **code(3, "deepseek"), "AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}, **TRAINING, **WIDTHS,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "norm_topk_prob": True,
        "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
        "rope_theta": 50000.0, "max_position_embeddings": 8192},
    "Kimi K2": {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": code(3, "deepseek"), **TRAINING, **WIDTHS,
                "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 1536, "norm_topk_prob": True,
                "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
                "rope_scaling": {**YARN, "beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_theta": 50000.0,
                "max_position_embeddings": 131072},
    "GLM-4.7-Flash": {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False,
                      "attention_dropout": 0.0, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 768,
                      "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_group": 1, "topk_group": 1,
                      "norm_topk_prob": True, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rope_scaling": None,
                      "rope_theta": 1000000, "routed_scaling_factor": 1.8, "topk_method": "noaux_tc", "rms_norm_eps": 1e-05,
                      "max_position_embeddings": 202752}}
WRITERS = {"deepseek_v2": DeepseekV2Config, "deepseek_v3": DeepseekV3Config, "glm4_moe_lite": Glm4MoeLiteConfig}


def published(name: str, **changes: object) -> dict[str, object]:
    return {**SMALL, **EXPERTS, **PUBLISHED[name], **changes}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_known_to_the_last_key(name: str) -> None:
    config = parse_config(published(name), strict=True)
    assert config.warnings == () and config.mla.key == config.head_dim == 576 and config.num_key_value_heads == 1
    assert config.mla.query_rank == PUBLISHED[name]["q_lora_rank"] and config.moe.sigmoid == ("V2" not in name)
    assert (config.moe.num_groups, config.moe.top_groups) == {"V2": (6, 3), "V3": (4, 2)}.get(name, (1, 1))
    assert config.rope.interleaved and config.moe.layers == frozenset(range(PUBLISHED[name]["first_k_dense_replace"], 4))


def test_kimi_is_read_as_what_it_is() -> None:
    raw = published("Kimi K2")
    assert parse_config(raw) == parse_config({**raw, "model_type": "deepseek_v3"}) and text_model_config(raw)["model_type"] == "deepseek_v3"


@pytest.mark.parametrize("name", ["V2", "V3", "GLM-4.7-Flash"])
def test_scores_are_scaled_as_in_transformers(name: str) -> None:
    raw = published(name, quantization_config=None)
    config = parse_config(raw)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(WRITERS[config.family](**{key: own for key, own in raw.items() if key != "model_type"}))
    assert config.attn_scale == pytest.approx(model.model.layers[0].self_attn.scaling)


@pytest.mark.parametrize("family", WRITERS)
def test_absent_keys_have_the_defaults_of_transformers(family: str) -> None:
    more = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    full = json.loads(WRITERS[family](**more).to_json_string())
    bare = parse_config({**more, "model_type": family})
    assert replace(bare, warnings=(), dtype="") == replace(parse_config(full, strict=True), warnings=(), dtype="")
    latent = bare.mla
    assert (latent.rank, latent.nope, latent.rope, latent.value, latent.query_rank) == tuple(
        full[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"))


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "q_lora_rank": None, "tie_word_embeddings": True}])
def test_tensors_have_the_names_and_shapes_that_transformers_gives_them(family: str, changes: dict[str, object]) -> None:
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    written = WRITERS[family](**{**SMALL, **EXPERTS, **groups, "v_head_dim": 40, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(written)
    config, module = parse_config(json.loads(written.to_json_string())), families.get(family)
    rules = [*module.outer_tensors(config).values()]
    rules += [rule for layer in range(4) for rule in module.layer_tensors(config, layer).values()]
    there = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    there |= {name: tuple(own.shape) for name, own in model.named_buffers() if name.endswith("e_score_correction_bias")}
    there = dict(part for name, shape in there.items() for part in in_a_file(family, name, shape))
    assert {rule.name: rule.shape for rule in rules} == there


@pytest.mark.parametrize(("name", "key", "value"), [
    ("V2", "norm_topk_prob", True), ("V2", "topk_method", "noaux_tc"), ("V2", "scoring_func", "sigmoid"), ("V2", "moe_layer_freq", 2),
    ("V2", "n_group", 5), ("V2", "topk_group", 7), ("V2", "auto_map", {"AutoModel": "modeling_evil.DeepseekV2Model"}),
    ("V2", "num_key_value_heads", 2), ("V2", "use_mla", False),
    ("V3", "scoring_func", "softmax"), ("V3", "topk_method", "greedy"), ("V3", "n_group", 12),
    ("V3", "qk_rope_head_dim", 63), ("V3", "kv_lora_rank", 1000), ("V3", "layer_types", ["sliding_attention"] * 4),
    ("V3", "auto_map", {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"}), ("V3", "sliding_window", 40),
    ("GLM-4.7-Flash", "auto_map", {"AutoModel": "modeling_deepseek.DeepseekV3Model"}), ("GLM-4.7-Flash", "first_k_dense_replace", 2),
    ("GLM-4.7-Flash", "mlp_layer_types", ["dense", "sparse", "half", "sparse"]), ("GLM-4.7-Flash", "partial_rotary_factor", 0.5)])
def test_what_they_cannot_do_is_named(name: str, key: str, value: object) -> None:
    refused(published(name, **{key: value}), key)


def test_a_token_must_find_its_experts_in_the_groups_that_are_kept() -> None:
    refused(published("V3", n_group=6, topk_group=1, num_experts_per_tok=3), "num_experts_per_tok 3", "topk_group 1")


def test_layers_without_experts() -> None:
    def sparse(**changes: object) -> list[int]:
        found: ModelConfig = parse_config(published("GLM-4.7-Flash", **changes))
        return sorted(found.moe.layers)

    assert sparse() == [1, 2, 3] == sparse(first_k_dense_replace=None)
    assert sparse(first_k_dense_replace=None, mlp_layer_types=["sparse", "dense", "sparse", "dense"]) == [0, 2]
