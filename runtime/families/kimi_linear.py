"""Kimi Linear (48B-A3B): three of four layers are Kimi Delta Attention (a gated delta rule with a decay per key channel), the others MLA
without positions; with DeepSeek V3's MoE.

Checkpoints store q, k and v of linear attention, and their convolutions, separately; the store concatenates them (`tensor_views.py`).
Decays and gates are low-rank projections of the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...kernels.kda_shape import KdaShape
from ..config import Defaults, ModelConfig, demand_silu
from ..config_reader import ConfigError, Keys, show
from . import TensorRule, deepseek_v3, olmo_hybrid
from .deepseek_v3 import NO_ROPE, check_auto_map, mla_config, mla_tensors, with_expert_groups
from .glm4_moe_lite import sparse_layers_after
from .mixtral import MAX_EXPERTS, NAMES, expert_tensors, moe_config
from .qwen3_5_text import FULL, LINEAR

LIKE = deepseek_v3
# transformers' key -> that of published configs, where they differ.
PUBLISHED_KEYS = {"max_position_embeddings": "model_max_length", "n_group": "num_expert_group", "n_shared_experts": "num_shared_experts",
                  "norm_topk_prob": "moe_renormalize", "num_experts_per_tok": "num_experts_per_token"}
# Training, and rotary positions, which no layer has. qk_head_dim is the sum of two keys that are read; use_grouped_topk follows from the
# number of groups.
KEYS_HARMLESS = frozenset({"original_max_position_embeddings", "qk_head_dim", "rope_parameters", "rope_scaling", "rope_theta",
                           "use_grouped_topk"})
REFUSED_UNLESS = {
    "attn_res_block_size": None, "mla_use_nope": True, "mla_use_output_gate": False, "mlp_bias": False, "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid", "num_nextn_predict_layers": 0, "routed_expert_hidden_size": None, "sliding_window": None}
# Of the section linear_attn_config.
LINEAR_ATTENTION_KEYS = frozenset({"full_attn_layers", "head_dim", "kda_layers", "num_heads", "short_conv_kernel_size"})
SIZES = {"vocab_size": 163_840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27, "num_attention_heads": 32}
MLA_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CODE = r"(configuration|modeling)_kimi\.KimiLinear\w+"  # auto_map of published checkpoints; part of transformers now


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    renamed = keys.with_values(**{name: keys.raw[published] for name, published in PUBLISHED_KEYS.items() if keys.has(published)})
    base = Defaults(max_position_embeddings=1_048_576, norm_eps=1e-5, sizes=SIZES, bos=163_584, eos=(163_586,))
    layers = base.size(keys, "num_hidden_layers")
    shape, recurrent_layers = _linear_attention(keys, layers)
    width = keys.integer("moe_intermediate_size", 1024, high=2**22)
    moe = moe_config(renamed, 256, 8, width, renamed.flag("norm_topk_prob", True), sparse_layers_after(keys, layers, 1), sigmoid=True,
                     correction_bias=True, routed_scale=keys.number("routed_scaling_factor", 2.446),
                     shared_expert_dim=width * renamed.integer("n_shared_experts", 1, high=MAX_EXPERTS))
    config = mla_config(renamed, base, MLA_DIMS, None, NO_ROPE, moe=with_expert_groups(renamed, moe, 1, 1), recurrent=shape,
                        recurrent_layers=recurrent_layers)
    demand_silu(keys, config.hidden_act, "its linear attention uses it too")
    return config


def _linear_attention(keys: Keys, layers: int) -> tuple[KdaShape, tuple[int, ...]]:
    """The state of linear-attention layers, and which layers these are. Raises ConfigError."""
    section = dict(keys.section("linear_attn_config") or {})
    for name, value in section.items():
        if name not in LINEAR_ATTENTION_KEYS and value not in (None, False):
            raise ConfigError(f"config.json: linear_attn_config holds {show(name)}, which is not supported",
                              f"known: {', '.join(sorted(LINEAR_ATTENTION_KEYS))}")
    inner = Keys(section, "config.json: linear_attn_config")
    shape = KdaShape.of(*(inner.integer(name, keys.integer(outer, default, high=high), high=high) for name, outer, default, high in (
        ("num_heads", "linear_num_heads", 32, 4096), ("head_dim", "linear_head_dim", 128, 1024),
        ("short_conv_kernel_size", "linear_conv_kernel_dim", 4, 64))))
    kinds = keys.strings("layer_types", layers)
    if kinds is None and {"full_attn_layers", "kda_layers"} <= section.keys():  # layer numbers that count from 1
        full, linear = (inner.layers(name, layers + 1) for name in ("full_attn_layers", "kda_layers"))
        if full | linear != set(range(1, layers + 1)) or full & linear:
            raise ConfigError(f"config.json: full_attn_layers and kda_layers of linear_attn_config do not partition layers 1 to {layers}",
                              "every layer must be in exactly one of the two lists")
        kinds = tuple(FULL if layer in full else LINEAR for layer in range(1, layers + 1))
    elif kinds is None:
        kinds = tuple(FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers))
    return shape, tuple(layer for layer, kind in enumerate(olmo_hybrid.demand_both_kinds(kinds)) if kind == LINEAR)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role. transformers writes a dense MLP under the name of the experts' module."""
    prefix = f"model.layers.{layer}."
    rules = expert_tensors(config, layer, "block_sparse_moe", NAMES)
    for role in NAMES:
        if (shared := f"shared.{role}") in rules:
            rules[shared] = replace(rules[shared], name=f"{prefix}block_sparse_moe.shared_experts.{role}_proj.weight")
        elif role in rules:
            rules[role] = replace(rules[role], also=(rules[role].name.replace(".mlp.", ".block_sparse_moe."),))
    if layer not in config.recurrent_layers:
        return mla_tensors(config, layer, rules)
    return kda_tensors(config, layer, rules, (1, 1, config.recurrent.value_heads, 1))


def kda_tensors(config: ModelConfig, layer: int, rules: Mapping[str, TensorRule], decay: tuple[int, ...]) -> dict[str, TensorRule]:
    """Tensors of one layer by role, `rules` with linear attention in place of attention. `decay`: shape of the decays."""
    prefix, shape, hidden = f"model.layers.{layer}.", config.recurrent, config.hidden_size
    rules = {role: rule for role, rule in rules.items() if ".self_attn." not in rule.name}
    for role, (name, *dims) in {
            "state_in": ("qkv_proj.weight", shape.channels, hidden), "state_gate": ("g_a_proj.weight", shape.value_dim, hidden),
            "state_gate_wide": ("g_b_proj.weight", shape.values, shape.value_dim),
            "state_rate": ("f_a_proj.weight", shape.key_dim, hidden), "state_rate_wide": ("f_b_proj.weight", shape.keys, shape.key_dim),
            "state_beta": ("b_proj.weight", shape.value_heads, hidden), "state_conv": ("conv1d.weight", shape.channels, 1, shape.taps),
            "state_decay": ("A_log", *decay), "state_dt": ("dt_bias", shape.keys),
            "state_norm": ("o_norm.weight", shape.value_dim), "state_out": ("o_proj.weight", hidden, shape.values)}.items():
        rules[role] = TensorRule(f"{prefix}self_attn.{name}", tuple(dims))
    return rules


def joined_rows(config: ModelConfig, layer: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """As OLMo Hybrid's, under the name that every layer's attention has."""
    return olmo_hybrid.joined_rows(config, layer, "self_attn")
