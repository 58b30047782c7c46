"""Ling 2 and Ring 2 (mini 16B-A1.4B, flash 100B-A6B): fused QKV, QK norms, RoPE on half of each head, and DeepSeek V3's grouped MoE in
all layers but the first. Sarvam 30B is the same with RoPE on whole heads and one group of experts."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import RopeConfig, rope_config
from . import TensorRule, fused, llama
from .deepseek_v3 import check_auto_map, with_expert_groups
from .mixtral import MAX_EXPERTS, expert_tensors, moe_config
from .qwen3_moe import NAMES

# Training, and windows that are not used.
KEYS_HARMLESS = frozenset({"embedding_dropout", "max_window_layers", "mtp_loss_scaling_factor", "num_token_max", "output_dropout",
                           "router_dtype", "use_sliding_window"})
REFUSED_UNLESS = {
    "layer_types": None, "norm_head": False, "norm_softmax": False, "score_function": "sigmoid", "sliding_window": None,
    "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True, "using_split_qkv_in_self_attention": False}
CODE = r"(configuration|modeling)_(bailing_moe_v2\.BailingMoeV2|sarvam_moe\.SarvamMoE)\w+"
ATTENTION = {"q_norm": "query_layernorm", "k_norm": "key_layernorm", "o": "dense"}
FUSED = {"attention.query_key_value": ("q", "k", "v")}


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    layers, width = keys.integer("num_hidden_layers", high=MAX_LAYERS), keys.integer("moe_intermediate_size", high=2**22)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        share = keys.integer("rotary_dim", head_dim, low=2, high=head_dim) / head_dim
        return (rope_config(keys, head_dim, positions, 600_000.0, partial=True, share=share),) * layers

    first = keys.integer("first_k_dense_replace", 0, low=0, high=layers)
    shared_experts = keys.integer("num_shared_experts", 0, low=0, high=MAX_EXPERTS)
    shared = keys.integer("moe_shared_expert_intermediate_size", width, high=2**22) * shared_experts
    moe = moe_config(keys, 16, 2, width, keys.flag("norm_topk_prob", True), range(first, layers), sigmoid=True,
                     shared_expert_dim=shared or None, correction_bias=keys.flag("moe_router_enable_expert_bias", True),
                     routed_scale=keys.number("routed_scaling_factor", 1.0))
    base = Defaults(max_position_embeddings=16_384)
    return decoder_config(keys, base, ropes, qk_norm=True, moe=with_expert_groups(keys, moe, 1, 1),
                          mtp_layers=keys.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, prefix = expert_tensors(config, layer, "mlp", NAMES, correction="gate.expert_bias"), f"model.layers.{layer}.attention."
    for role, name in ATTENTION.items():
        rules[role] = replace(rules[role], name=f"{prefix}{name}.weight")
    return fused(rules, layer, FUSED)


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules = llama.outer_tensors(config)
    return rules | {"embed": replace(rules["embed"], name="model.word_embeddings.weight")}
