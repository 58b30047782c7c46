"""Ling 3 (tiny 7.9B-A1.3B, and flash): Kimi Delta Attention with bounded decays, latent attention with per-head gates in the last layer of
every group, and DeepSeek V3's MoE.

Decays and gates are projected from the input by full-rank matrices. Checkpoints hold q, k and v of linear attention in separate matrices,
as Kimi Linear's do (`tensor_views.py`). Gates of the experts in flash's last layers are clamped, as in training; the published code and
transformers ignore these limits. Ling 2.5 and 2.6 have the same model_type but are other models, and are refused.
"""

from __future__ import annotations

from dataclasses import replace

from ...kernels.kda_shape import KdaShape
from ..config import MAX_LAYERS, Defaults, ModelConfig, demand_silu
from ..config_reader import ConfigError, Keys, show
from . import TensorRule, kimi_linear, llama, olmo_hybrid
from .deepseek_v3 import check_auto_map, mla_config, mla_tensors, with_expert_groups
from .glm4_moe_lite import sparse_layers_after
from .kimi_linear import PUBLISHED_KEYS
from .mixtral import MAX_EXPERTS, expert_tensors, gate_limits, moe_config
from .qwen3_5_text import FULL, LINEAR
from .qwen3_moe import NAMES

LIKE = kimi_linear
GATE_LIMIT_KEYS = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"  # by layer, 0: no limit
# Training and the MTP layer; rotary_dim and qk_head_dim follow from other keys.
KEYS_HARMLESS = frozenset({"embedding_dropout", "max_window_layers", "mtp_loss_scaling_factor", "mtp_use_kda", "output_dropout",
                           "qk_head_dim", "rotary_dim", "router_dtype"})
REFUSED_UNLESS = {
    "gated_attention_proj_granularity_type": "head_wise", "group_norm_size": 1, "linear_attention": "kda",
    "linear_silu": True, "mlp_bias": False, "moe_router_enable_expert_bias": True, "no_kda_lora": True, "rope_interleave": True,
    "scale_router_input": False, "score_function": "sigmoid", "scoring_func": "sigmoid", "sliding_window": None, "swiglu_limit": None,
    "topk_method": "noaux_tc", "up_proj_norm": False, "use_bias": False, "use_kda_lora": False, "use_mla_nope": False, "use_nGPT": False,
    "use_qk_norm": True, "use_qkv_bias": False, "value_norm": False}
SIZES = {"vocab_size": 157_184, "hidden_size": 2560, "intermediate_size": 6144, "num_hidden_layers": 42, "num_attention_heads": 32}
MLA_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CODE = r"(configuration|modeling)_bailing_(moe_v3|hybrid)\.Bailing(MoeV3|Hybrid)\w+"  # original code
UNSUPPORTED = "MoeV2"  # in `architectures` of models of the same model_type with another linear attention
PLACE = "attention"
NO_BOUND = 0.0


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    keys.number("partial_rotary_factor", None)  # implied by qk_rope_head_dim
    if any(UNSUPPORTED in str(name) for name in keys.raw.get("architectures") or ()):
        raise ConfigError(f"config.json: architectures {show(keys.raw['architectures'])} is not supported for bailing_hybrid models",
                          "its linear attention differs; Ling 2 (bailing_moe_v2) and Ling 3 run")
    named = keys.with_values(**{name: keys.raw[own] for name, own in PUBLISHED_KEYS.items() if keys.has(own)})
    base = Defaults(max_position_embeddings=262_144, eos=(156_895,), theta=6e6, sizes=SIZES)
    layers, heads = base.size(keys, "num_hidden_layers"), base.size(keys, "num_attention_heads")
    lower_bound = keys.raw.get("kda_lower_bound", -5.0)
    bound = -lower_bound if type(lower_bound) in (int, float) else NO_BOUND
    keys.mark_known("kda_lower_bound")
    if not 0 < bound < 1e3:
        raise keys.fail("kda_lower_bound", "a number below 0")
    shape = KdaShape.of(*(keys.integer(own, keys.integer(name, usual, high=high), high=high) for own, name, usual, high in (
        ("linear_num_heads", "num_attention_heads", heads, 4096), ("linear_head_dim", "head_dim", 128, 1024),
        ("linear_conv_kernel_dim", "short_conv_kernel_size", 4, 64))),
        low_rank_gates=False, decay_bound=-float(bound) if keys.flag("kda_safe_gate", True) else None)
    width = keys.integer("moe_intermediate_size", 768, high=2**22)
    shared = keys.integer("moe_shared_expert_intermediate_size", width, high=2**22)
    sparse = sparse_layers_after(keys, layers, 2)
    moe = moe_config(named, 512, 8, width, named.flag("norm_topk_prob", True), sparse, sigmoid=True, correction_bias=True,
                     routed_scale=keys.number("routed_scaling_factor", 2.5),
                     shared_expert_dim=shared * named.integer("n_shared_experts", 1, low=0, high=MAX_EXPERTS) or None)
    mtp_layers = keys.integer("num_nextn_predict_layers", keys.integer("num_mtp_layers", 0, low=0, high=MAX_LAYERS), low=0, high=MAX_LAYERS)
    config = mla_config(named, base, MLA_DIMS, None, True, moe=with_expert_groups(named, moe, 8, 4), recurrent=shape, output_gate=True,
                        output_gate_per_head=True, recurrent_layers=_linear(keys, layers), mtp_layers=mtp_layers,
                        gate_limits=gate_limits(keys, GATE_LIMIT_KEYS, sparse, layers, mtp_layers))
    if config.qkv_bias:
        raise ConfigError("config.json: attention_bias = true is not supported for bailing_hybrid models",
                          "this family runs only with attention_bias = false")
    demand_silu(keys, config.hidden_act, "its linear attention uses it too")
    return config


def _linear(keys: Keys, layers: int) -> tuple[int, ...]:
    """The layers with linear attention: as layer_types lists them, by default all but the last of every group."""
    group = keys.integer("layer_group_size", 6, high=MAX_LAYERS)
    kinds = keys.strings("layer_types", layers)
    if kinds is None and layers % group:
        raise ConfigError(f"config.json: num_hidden_layers {layers} is not a multiple of layer_group_size {group}, which is not supported",
                          "implementations differ on the layers after the last whole group: state them in layer_types")
    kinds = olmo_hybrid.demand_both_kinds(kinds or tuple(LINEAR if (layer + 1) % group else FULL for layer in range(layers)))
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    state, hidden, prefix = config.recurrent, config.hidden_size, f"model.layers.{layer}.{PLACE}."
    rules = expert_tensors(config, layer, "mlp", NAMES, correction="gate.expert_bias")
    if layer not in config.recurrent_layers:
        rules = mla_tensors(config, layer, rules)
        rules = {role: replace(rule, name=rule.name.replace(".self_attn.", f".{PLACE}.")) for role, rule in rules.items()}
        return rules | {"attn_gate": TensorRule(f"{prefix}g_proj.weight", (config.num_attention_heads, hidden)),
                        "o": replace(rules["o"], name=f"{prefix}dense.weight", also=(f"{prefix}o_proj.weight",))}
    rules = {role: rule for role, rule in rules.items() if ".self_attn." not in rule.name}
    for role, (name, *shape) in {
            "state_in": ("qkv_proj.weight", state.channels, hidden), "state_gate": ("g_proj.weight", state.values, hidden),
            "state_rate": ("f_proj.weight", state.keys, hidden), "state_beta": ("b_proj.weight", state.value_heads, hidden),
            "state_conv": ("conv1d.weight", state.channels, 1, state.taps), "state_decay": ("A_log", state.value_heads),
            "state_dt": ("dt_bias", state.keys), "state_norm": ("o_norm.weight", state.value_dim)}.items():
        rules[role] = TensorRule(f"{prefix}{name}", tuple(shape))
    return rules | {"state_out": TensorRule(f"{prefix}dense.weight", (hidden, state.values), also=(f"{prefix}o_proj.weight",))}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules = llama.outer_tensors(config)
    return rules | {"embed": replace(rules["embed"], name="model.word_embeddings.weight")}


def joined_rows(config: ModelConfig, layer: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """As of OLMo Hybrid, with this family's name of attention."""
    return olmo_hybrid.joined_rows(config, layer, PLACE)
