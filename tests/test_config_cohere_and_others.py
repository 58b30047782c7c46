"""config.json and GGUF files of Cohere, Cohere 2, Hunyuan, MiniMax M2 and K-EXAONE: what is read, and what is refused by name."""

import json

import numpy as np
import pytest
from config_samples import LLAMA, SMALL, refused
from transformers import AutoConfig
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding

from effllm import EffllmError
from effllm.runtime import families
from effllm.runtime.config import parse_config
from effllm.runtime.gguf.config_export import export_architecture
from effllm.runtime.rope import rope_table

ALPHA = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"}
# What the published checkpoints state, shortened by the sizes that every config has: nothing in it is unknown.
PUBLISHED = {
    "cohere": {"architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
               "eos_token_id": 255001, "hidden_act": "silu", "initializer_range": 0.02, "layer_norm_eps": 1e-05, "logit_scale": 0.0625,
               "max_position_embeddings": 8192, "model_max_length": 131072, "num_key_value_heads": 6, "pad_token_id": 0,
               "rope_theta": 8000000.0, "torch_dtype": "float16", "use_cache": True, "vocab_size": 256000},
    "cohere2": {"architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
                "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 16, "hidden_act": "silu", "layer_norm_eps": 1e-05,
                "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192, "order_of_interleaved_layers": "local_attn_first",
                "pad_token_id": 0, "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
                "sliding_window": 4096, "sliding_window_pattern": 4, "use_cache": True, "use_embedding_sharing": True,
                "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True, "vocab_size": 256000},
    "hunyuan_v1_dense": {"add_classification_head": False, "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False,
                         "attention_head_dim": 128, "bos_token_id": 1, "cla_share_factor": 2, "class_num": 0, "dense_list": [4096, 0],
                         "eod_token_id": 127967, "eos_token_id": 127960, "head_dim": 128, "hidden_act": "silu", "im_end_id": 5,
                         "im_newline_id": 11, "im_start_id": 4, "kv_lora_rank": None, "mask_init_id": 12,
                         "max_position_embeddings": 32768, "mlp_bias": False, "norm_type": "rms", "org_vocab_size": 128167,
                         "pad_id": 127961, "pool_type": "last", "position_embedding_xdrope": False, "pretraining_tp": 1,
                         "q_lora_rank": None, "rms_norm_eps": 1e-05, "rope_scaling": ALPHA, "rope_theta": 10000.0, "sep_token_id": 127962,
                         "text_end_id": 7, "text_start_id": 6, "tie_word_embeddings": True,
                         "torch_dtype": "bfloat16", "use_cache": True, "use_cla": False,
                         "use_qk_norm": True, "use_rotary_pos_emb": True, "vocab_size": 128167},
    "minimax_m2": {"architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1] * 4, "auto_map": {
        "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config", "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
        "bos_token_id": None, "eos_token_id": None, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
        "max_position_embeddings": 196608, "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1, "num_experts_per_tok": 8,
        "num_local_experts": 256, "num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
        "rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None, "use_cache": True, "use_mtp": True,
        "use_qk_norm": True, "use_routing_bias": True},
    "exaone_moe": {"architectures": ["ExaoneMoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 53,
                   "first_k_dense_replace": 1, "first_last_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
                   "is_moe_layer": [0, 1, 1, 1],
                   "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "max_position_embeddings": 262144,
                   "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "moe_intermediate_size": 2048, "n_group": 1,
                   "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
                   "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
                   "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG",
                   "topk_group": 1, "topk_method": "noaux_tc"},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_is_published_is_known(family: str) -> None:
    config = parse_config({**LLAMA, "model_type": family, **PUBLISHED[family]}, strict=True)
    assert config.family == family and not config.warnings


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_transformers_writes_is_known(family: str) -> None:
    """Sizes that it takes for granted are ours too."""
    theirs = AutoConfig.for_model(family, **({"head_dim": 128} if family == "hunyuan_v1_dense" else {}))
    config = parse_config(json.loads(theirs.to_json_string(use_diff=False)), strict=True)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (
        theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size)
    assert (config.bos_token_id, config.tie_word_embeddings) == (theirs.bos_token_id, theirs.tie_word_embeddings)
    assert config.max_position_embeddings == theirs.max_position_embeddings
    if family in ("cohere", "cohere2", "minimax_m2"):
        bare = parse_config({"model_type": family})
        assert (bare.num_hidden_layers, bare.num_attention_heads, bare.norm_eps, bare.eos_token_ids, bare.num_key_value_heads) == (
            theirs.num_hidden_layers, theirs.num_attention_heads, theirs.layer_norm_eps if "cohere" in family else theirs.rms_norm_eps,
            (theirs.eos_token_id,), theirs.num_key_value_heads)
        assert 1 / bare.logits_scaling == pytest.approx(getattr(theirs, "logit_scale", 1.0))


@pytest.mark.parametrize(("family", "key", "value"), [
    ("cohere", "use_parallel_block", False), ("cohere", "rotary_pct", 0.5),
    ("cohere", "sliding_window", 40), ("cohere", "position_embedding_type", "alibi"), ("cohere", "use_gated_activation", False),
    ("cohere", "logit_scale", 0),
    ("cohere", "head_dim", 32), ("cohere", "mlp_bias", True), ("cohere", "layer_types", ["sliding_attention"] * 4),
    ("cohere2", "use_qk_norm", True), ("cohere2", "order_of_interleaved_layers", "global_attn_first"), ("cohere2", "head_dim", 32),
    ("cohere2", "sliding_window_pattern", "LLLG"), ("cohere2", "layer_types", ["linear_attention"] * 4),
    ("hunyuan_v1_dense", "use_cla", True), ("hunyuan_v1_dense", "use_qk_norm", False), ("hunyuan_v1_dense", "norm_type", "layer"),
    ("hunyuan_v1_dense", "position_embedding_xdrope", True), ("hunyuan_v1_dense", "mlp_bias", True),
    ("hunyuan_v1_dense", "num_experts", 8), ("hunyuan_v1_dense", "kv_lora_rank", 8),
    ("minimax_m2", "attn_type_list", [1, 0, 1, 1]), ("minimax_m2", "scoring_func", "softmax"), ("minimax_m2", "use_qk_norm", False),
    ("minimax_m2", "qk_norm_type", "per_head"), ("minimax_m2", "use_routing_bias", False), ("minimax_m2", "shared_intermediate_size", 8),
    ("minimax_m2", "auto_map", {"AutoModelForCausalLM": "modeling_minimax.MiniMaxForCausalLM"}), ("minimax_m2", "rotary_dim", 200),
    ("minimax_m2", "sliding_window", 40), ("exaone_moe", "scoring_func", "softmax"), ("exaone_moe", "topk_method", "greedy"),
    ("exaone_moe", "attention_bias", True), ("exaone_moe", "n_group", 3), ("exaone_moe", "mlp_layer_types", ["dense", "moe"] * 2),
    ("exaone_moe", "first_k_dense_replace", 5)])
def test_what_a_family_cannot_do_is_named(family: str, key: str, value: object) -> None:
    refused({**LLAMA, "model_type": family, key: value}, key)


def test_alpha_makes_the_base_larger_whatever_the_length() -> None:
    base = {**LLAMA, "model_type": "hunyuan_v1_dense", "head_dim": 16}
    config = parse_config({**base, "rope_theta": 7e3, "rope_scaling": ALPHA}, strict=True)
    theirs = AutoConfig.for_model("hunyuan_v1_dense", **SMALL, head_dim=16, rope_parameters={
        **ALPHA, "rope_type": "dynamic", "rope_theta": 7e3})
    wanted = HunYuanDenseV1RotaryEmbedding(theirs).inv_freq
    for ctx in (64, 100_000):
        table = rope_table(config.rope, 16, ctx, 2048)
        np.testing.assert_allclose(table.inv_freq, wanted.numpy(), rtol=1e-6)
    assert parse_config(json.loads(theirs.to_json_string()), strict=True).ropes == config.ropes
    plain = parse_config({**base, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, strict=True)
    assert plain.rope.kind == "dynamic" and parse_config(base, strict=True).rope.theta == 1e4
    refused({**base, "rope_scaling": {**ALPHA, "alpha": -3.0}}, "alpha")
    refused({**base, "head_dim": 2, "rope_scaling": ALPHA}, "head_dim")
    other = parse_config({**LLAMA, "rope_scaling": {**ALPHA, "factor": 2.0}})
    assert "alpha" in other.warnings[0] and other.rope.kind == "dynamic"


def test_layers_of_cohere2_turn_where_they_have_a_window() -> None:
    def layers(**changes: object) -> list[tuple[bool, int | None]]:
        config = parse_config({**LLAMA, "model_type": "cohere2", **changes}, strict=True)
        assert all(rope is None or rope.interleaved for rope in config.ropes)
        return [(rope is not None, window) for rope, window in zip(config.ropes, config.windows, strict=True)]

    near, far = (True, 32), (False, None)
    assert layers(sliding_window=32) == [near, near, near, far] and layers(sliding_window=32, sliding_window_pattern=2) == [near, far] * 2
    assert layers() == [(True, 4096)] * 3 + [far]
    assert layers(sliding_window=32, layer_types=["full_attention", "sliding_attention"] * 2) == [far, near] * 2
    refused({**LLAMA, "model_type": "cohere2", "sliding_window": None}, "no sliding window")


def test_experts_of_k_exaone_begin_where_it_says() -> None:
    base = {**LLAMA, "model_type": "exaone_moe"}
    assert parse_config(base).moe.layers == {1, 2, 3} and parse_config({**base, "first_k_dense_replace": 3}).moe.layers == {3}
    assert parse_config({**base, "first_last_k_dense_replace": 2}, strict=True).moe.layers == {2, 3}, "as it was called before"
    assert parse_config({**base, "first_last_k_dense_replace": 2, "first_k_dense_replace": 0}).moe.layers == {0, 1, 2, 3}
    listed = parse_config({**base, "mlp_layer_types": ["sparse", "dense"] * 2}, strict=True)
    assert listed.moe.layers == {0, 2} and listed.moe.shared_expert_dim == 1024
    refused({**base, "mlp_layer_types": ["sparse", "dense"] * 2, "first_k_dense_replace": 1}, "first_k_dense_replace")
    rule = families.get("exaone_moe").layer_tensors(listed, 0)["correction"]
    assert rule.name == "model.layers.0.mlp.e_score_correction_bias" and rule.also == ("model.layers.0.mlp.gate.e_score_correction_bias",)


def test_a_share_of_a_head_turns_in_minimax() -> None:
    base = {**LLAMA, "model_type": "minimax_m2", "head_dim": 16}
    assert parse_config(base).rope.partial_rotary_factor == 1.0 and parse_config(base).rope.theta == 5e6
    assert parse_config({**base, "rotary_dim": 4}).rope.partial_rotary_factor == 0.25
    assert parse_config({**base, "rotary_dim": 4, "partial_rotary_factor": 0.5}).rope.partial_rotary_factor == 0.5
    assert parse_config(base).moe.sigmoid and parse_config(base).moe.correction_bias


@pytest.mark.parametrize(("family", "changes", "said"), [
    ("cohere", {"tie_word_embeddings": False}, "untied output head"), ("cohere", {"attention_bias": True}, "biases on o"),
    ("cohere2", {"sliding_window_pattern": 2}, "every 4th layer"), ("cohere2", {"hidden_act": "gelu"}, "gelu where silu"),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "kind dynamic"),
    ("exaone_moe", {"sliding_window_pattern": 2}, "every 4th layer"),
    ("exaone_moe", {"mlp_layer_types": ["sparse", "dense"] * 2}, "without experts")])
def test_what_llamacpp_would_run_as_another_model_is_refused(family: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(EffllmError) as caught:
        export_architecture(parse_config({**LLAMA, "model_type": family, **changes}))
    assert said in caught.value.message and caught.value.hint
