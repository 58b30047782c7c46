"""A.X K1 (SK Telecom, 519B-A33B): DeepSeek V3 with one post-norm on the sum of routed and shared experts.

Published checkpoints have no correction bias, but select groups by their two best experts all the same. They also hold the post-norm of
dense layers, which is not used. The shared expert is loaded as the MLP of a layer with experts, because one post-norm follows the sum.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig
from ..config_reader import Keys
from . import TensorRule, deepseek_v3, llama
from .deepseek_v3 import NAMES, check_auto_map, mla_config, mla_tensors, with_expert_groups
from .glm4_moe import deepseek_moe_config
from .glm4_moe_lite import sparse_layers_after
from .mixtral import moe_tensors

LIKE = deepseek_v3
KEYS_HARMLESS = deepseek_v3.KEYS_HARMLESS | {"num_mtp_layers", "num_nextn_predict_layers"}
REFUSED_UNLESS = {key: value for key, value in deepseek_v3.REFUSED_UNLESS.items() if key != "topk_method"}
SIZES = {"vocab_size": 163_840, "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61, "num_attention_heads": 64}
MLA_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CODE = r"(configuration|modeling)_axk1\.AXK1\w+"  # original code of what transformers has adopted
QUERY_RANK = 1536


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=32_768, sizes=SIZES, bos=163_691, eos=(163_691,))
    layers, ffn = base.size(keys, "num_hidden_layers"), base.size(keys, "intermediate_size")
    moe = with_expert_groups(keys, deepseek_moe_config(keys, layers, 192, 8, 1, True, 2.5, 2048), 8, 4)
    sparse = sparse_layers_after(keys, layers, 1)
    widths = tuple((moe.shared_expert_dim or 0) if layer in sparse else ffn for layer in range(layers))
    return mla_config(keys, base, MLA_DIMS, QUERY_RANK, keys.flag("rope_interleave", True), layer_intermediate_sizes=widths,
                      moe=replace(moe, layers=sparse, parallel_to_mlp=True, shared_expert_dim=None))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role; the shared expert is the MLP of a layer with experts."""
    rules, prefix = mla_tensors(config, layer, llama.layer_tensors(config, layer)), f"model.layers.{layer}."
    if layer not in config.moe.layers:
        return rules
    experts = moe_tensors(config, f"{prefix}mlp.", NAMES)
    if "correction" in experts:
        experts["correction"] = replace(experts["correction"], optional=True)
    norm = TensorRule(f"{prefix}post_mlp_layernorm.weight", (config.hidden_size,), also=(f"{prefix}mlp.post_mlp_layernorm.weight",))
    return rules | experts | {"down_norm": norm} | {
        role: TensorRule(f"{prefix}mlp.shared_experts.{name}.weight", rules[role].shape) for role, name in NAMES.items()}
