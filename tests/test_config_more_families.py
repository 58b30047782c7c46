"""Published configs of families not in test_config_later_families.py: every key is known, or one is refused by name."""


import pytest
from config_samples import LLAMA, refused

from effllm.runtime import families
from effllm.runtime.config import parse_config
from effllm.runtime.moe_config import MoEConfig

PUBLISHED = {
    "granitemoeshared": {
        "architectures": ["GraniteMoeSharedForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attention_multiplier":
        0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "initializer_range": 0.02,
        "logits_scaling": 6.0, "max_position_embeddings": 4096, "num_experts_per_tok": 8, "num_local_experts": 62, "output_router_logits":
        False, "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10_000,
        "router_aux_loss_coef": 0.001, "shared_intermediate_size": 1024, "tie_word_embeddings": True, "use_cache": True},
    "nemotron": {  # Nemotron Mini 4B
        "architectures": ["NemotronForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 3,
        "head_dim": 128, "hidden_act": "relu2", "initializer_range": 0.0134, "max_position_embeddings": 4096, "mlp_bias": False,
        "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 10_000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True},
    "nemotron_nas": {  # Llama 3.3 Nemotron Super 49B, two of whose layers are as these
        "_attn_implementation_autoset": True, "architectures": ["DeciLMForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig", "AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM"},
        "block_configs": [{"attention": {
            "n_heads_in_group": heads, "no_op": heads is None, "num_sink_tokens": None, "replace_with_linear": False, "sparsify": None,
            "unshifted_sink": False, "use_prefill_window_in_sink_attention": False, "window_length": None}, "ffn": {
            "ffn_mult": times, "no_op": times is None, "replace_with_linear": False, "sparsify": None}}
            for heads, times in ((8, 2.625), (None, 1.0), (4, 5.25), (None, None))], "bos_token_id": 128_000, "eos_token_id": [128_001],
        "hidden_size": 8192, "initializer_range": 0.02, "intermediate_size": None, "max_position_embeddings": 131_072, "mlp_bias": False,
        "model_type": "nemotron-nas", "num_attention_heads": 64, "num_key_value_heads": None, "pretraining_tp": 1, "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type":
            "llama3"}, "rope_theta": 500_000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 128_256},
    "stablelm": {  # StableLM 2 1.6B
        "architectures": ["StableLmForCausalLM"], "bos_token_id": 0, "hidden_act": "silu", "initializer_range": 0.02, "layer_norm_eps":
        1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25, "qk_layernorm": False, "rope_theta": 10_000,
        "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True, "use_parallel_residual": False, "use_qkv_bias": True},
    "cohere": {  # Command R+
        "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5, "eos_token_id":
        255_001, "hidden_size": 192, "layer_norm_eps": 1e-5, "logit_scale": 0.8333333333333334, "max_position_embeddings": 8192,
        "model_max_length": 131_072, "num_attention_heads": 12, "num_key_value_heads": 4, "pad_token_id": 0, "rope_theta": 75_000_000.0,
        "torch_dtype": "float16", "use_cache": True, "use_qk_norm": True, "vocab_size": 256_000},
    "hunyuan_v1_moe": {  # A13B
        "add_classification_head": False, "architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
        "auto_map": {"AutoConfig": "configuration_hunyuan.HunYuanConfig", "AutoModel": "hunyuan.HunYuanModel",
                     "AutoModelForCausalLM": "hunyuan.HunYuanMoEV1ForCausalLM"},
        "attention_head_dim": 128, "bos_token_id": 1, "cla_share_factor": 2, "class_num": 0, "dense_list": [4096, 0], "eod_token_id": 3,
        "eos_token_id": 7, "head_dim": 128, "im_end_id": 5, "im_newline_id": 11, "im_start_id": 4, "intermediate_size": 3072,
        "mask_init_id": 12, "max_position_embeddings": 32_768, "mlp_bias": False, "moe_drop_tokens": False,
        "qk_nope_head_dim": None, "qk_rope_head_dim": None, "use_mla": False, "v_head_dim": None,
        "group_limited_greedy": False, "n_group": False, "routed_scaling_factor": False,
        "moe_intermediate_size": [3072] * 4, "moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": False, "moe_topk": [8] * 4,
        "norm_type": "rms", "num_experts": 64, "num_shared_expert": [1] * 4, "pad_id": 127_961, "pool_type": "last", "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"},
        "rope_theta": 10_000.0, "sep_token_id": 127_962, "text_end_id": 7, "text_start_id": 6, "tie_word_embeddings": True,
        "topk_group": 4, "torch_dtype": "bfloat16", "use_cache": True, "use_cla": False, "use_mixed_mlp_moe": True, "use_qk_norm": True,
        "use_rotary_pos_emb": True},
}


def base(family: str) -> dict[str, object]:
    usual = {key: value for key, value in LLAMA.items() if key != "head_dim"} if family in ("cohere", "nemotron_nas") else LLAMA
    return {**usual, "eos_token_id": 7, "model_type": family, **PUBLISHED[family]}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_are_known_to_the_last_key(family: str) -> None:
    """Strict: an unknown key would be an error."""
    config = parse_config(base(family), strict=True)
    assert config.family == family and config.warnings == ()


@pytest.mark.parametrize(("family", "key", "value"), [
    ("hunyuan_v1_moe", "moe_topk", [8, 8, 8, 4]), ("hunyuan_v1_moe", "moe_topk", [8]), ("hunyuan_v1_moe", "moe_topk", [True] * 4),
    ("granitemoeshared", "shared_intermediate_size", -1), ("granitemoeshared", "layer_types", ["mamba"] * 4),
    ("hunyuan_v1_moe", "num_shared_expert", [2] * 4), ("hunyuan_v1_moe", "moe_intermediate_size", [1536] * 4),
    ("hunyuan_v1_moe", "moe_layer_num_skipped", 1), ("hunyuan_v1_moe", "use_mixed_mlp_moe", False), ("hunyuan_v1_moe", "moe_topk", 65),
    ("nemotron", "rope_percent", 0.25), ("nemotron", "sliding_window", 512), ("stablelm", "sliding_window", 40),
    ("stablelm", "layer_types", ["sliding_attention"] * 4), ("stablelm", "attention_bias", True), ("hunyuan_v1_moe", "num_experts", 0),
    ("hunyuan_v1_moe", "moe_router_use_sigmoid", True), ("hunyuan_v1_moe", "auto_map", {"AutoModel": "modeling_evil.HunYuanModel"}),
    ("hunyuan_v1_moe", "routed_scaling_factor", 2.5), ("hunyuan_v1_moe", "use_mla", True)])
def test_what_a_family_cannot_do_is_named(family: str, key: str, value: object) -> None:
    refused({**base(family), key: value}, "num_experts_per_tok" if value == 65 else key)


def test_hunyuan_says_of_every_layer_what_holds_of_all() -> None:
    config = parse_config(base("hunyuan_v1_moe"), strict=True)
    assert config.moe == MoEConfig(64, 8, 3072, True, frozenset(range(4)), shared_expert_dim=3072) and config.qk_norm
    numbers = {"moe_topk": 8, "moe_intermediate_size": 3072, "num_shared_expert": 1}
    assert parse_config({**base("hunyuan_v1_moe"), **numbers}, strict=True) == config


def test_command_r_plus_norms_every_head_by_weights_of_its_own() -> None:
    config = parse_config(base("cohere"), strict=True)
    assert config.qk_norm and config.qk_norm_per_head and config.norm_kind == "layer"
    rules = families.get("cohere").layer_tensors(config, 0)
    assert rules["q_norm"].shape == (12, 16) and rules["k_norm"].shape == (4, 16)
    refused({**base("cohere"), "use_qk_norm": "yes"}, "use_qk_norm")
    plain = parse_config({**base("cohere"), "use_qk_norm": False}, strict=True)
    assert not plain.qk_norm and "q_norm" not in families.get("cohere").layer_tensors(plain, 0)


def test_what_turns_of_a_head_where_nothing_is_said() -> None:
    for family, share, kind in (("nemotron", 0.5, "layer+1"), ("stablelm", 0.25, "layer")):
        silent = {key: value for key, value in base(family).items() if key != "partial_rotary_factor"}
        config = parse_config(silent, strict=True)
        assert config == parse_config(base(family), strict=True) and config.rope.partial_rotary_factor == share
        assert config.norm_kind == kind and "norm_bias" in families.get(family).outer_tensors(config)


def test_a_shared_expert_of_no_width_is_none() -> None:
    config = parse_config({**base("granitemoeshared"), "shared_intermediate_size": 0}, strict=True)
    assert config.moe.shared_expert_dim is None and config.intermediate_size == config.moe.expert_dim
    assert not any(role.startswith("shared.") for role in families.get("granitemoeshared").layer_tensors(config, 0))
    shared = parse_config(base("granitemoeshared"), strict=True)
    assert shared.moe.shared_expert_dim == shared.intermediate_size == 1024 and shared.moe.routed_scale == 0.22


def test_blocks_of_llama_nemotron() -> None:
    config = parse_config(base("nemotron_nas"), strict=True)
    assert config.layers_without_attention == (1, 3) and config.attention_layers == (0, 2) and config.layers_without_mlp == (3,)
    assert [config.intermediate_size_of(layer) for layer in range(3)] == [14_336, 5632, 28_672] and config.head_dim == 128
    assert [config.kv_heads_of(layer) for layer in (0, 2)] == [(8, 128), (16, 128)] and config.intermediate_size == 28_672
    block = {"attention": {"no_op": False, "num_key_value_heads": 8},
             "ffn": {"hidden_act": "silu", "no_op": False, "intermediate_size": 100}}
    named = parse_config({**base("nemotron_nas"), "block_configs": [block] * 4}, strict=True)
    assert named.num_key_value_heads == 8 and named.intermediate_size == 100
    assert not (named.layer_intermediate_sizes or named.layer_kv_heads)
    for half, key, value in (("attention", "replace_with_linear", True), ("attention", "window_length", 8192), ("ffn", "sparsify", [1]),
                             ("attention", "num_sink_tokens", 4), ("attention", "no_op", 1), ("attention", "num_key_value_heads", 7),
                             ("ffn", "intermediate_size", -1), ("ffn", "gates", 2), ("ffn", "hidden_act", "gelu")):
        changed = {**block, half: {**block[half], key: value}}
        refused({**base("nemotron_nas"), "block_configs": [block, changed, block, block]}, f"block_configs[1].{half}")
    for blocks in (None, [block] * 3, [{**block, "attention": {"no_op": True}}] * 4, [7] * 4):
        refused({**base("nemotron_nas"), "block_configs": blocks}, "block_configs")
