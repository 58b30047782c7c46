"""Hy3 (Hunyuan 3): Qwen 3's attention, corrected sigmoid routing and a shared expert in all layers but the first."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule
from .deepseek_v3 import check_auto_map
from .glm4_moe_lite import sparse_layers
from .mixtral import MAX_EXPERTS, expert_tensors, moe_config
from .qwen3_moe import NAMES

KEYS_HARMLESS = frozenset({"enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine", "expert_hidden_dim",
                           "use_grouped_mm"})  # precision, which is float32 here anyway
# Published configs spell out what all models of the family do.
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True,
                  "qk_norm": True, "route_norm": True, "sliding_window": None}
SIZES = {"vocab_size": 120_832, "hidden_size": 4096, "intermediate_size": 13_312, "num_hidden_layers": 80, "num_attention_heads": 64}
CODE = r"(configuration|modeling)_hy_v3\.HYV3\w+"  # original code of what transformers has adopted
# Published names -> names that other tools write.
OTHER_NAMES = {"mlp.router.gate.weight": "mlp.gate.weight", "mlp.expert_bias": "mlp.e_score_correction_bias",
               "mlp.shared_mlp.": "mlp.shared_experts."}


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, head_dim=128, norm_eps=1e-5, theta=11_158_840.0, sizes=SIZES)
    layers, bias = base.size(keys, "num_hidden_layers"), keys.flag("attention_bias", False)
    width = keys.integer("moe_intermediate_size", 1536, high=2**22)
    first = keys.integer("first_k_dense_replace", 1, low=0, high=layers)
    sparse = range(first, layers) if keys.strings("mlp_layer_types", layers) is None else sparse_layers(keys, layers)
    moe = moe_config(keys, 192, 8, width, True, sparse, sigmoid=True, correction_bias=True,
                     routed_scale=keys.number("router_scaling_factor", 2.826),
                     shared_expert_dim=width * keys.integer("num_shared_experts", 1, high=MAX_EXPERTS))
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, qk_norm=True, moe=moe,
                          mtp_layers=keys.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules = expert_tensors(config, layer, "mlp", NAMES, "shared_mlp", "expert_bias")
    if "router" in rules:
        rules["router"] = replace(rules["router"], name=f"model.layers.{layer}.mlp.router.gate.weight")
    return {role: replace(rule, also=tuple(rule.name.replace(own, other) for own, other in OTHER_NAMES.items() if own in rule.name))
            for role, rule in rules.items()}
