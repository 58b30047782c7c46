"""Step 3.5 Flash and Step 3.7 Flash (StepFun, 196B-A11B): windowed layers with more query heads and RoPE parameters of their own, per-head
attention gates, and corrected sigmoid routing with a shared expert. Gates of the last layers' experts are clamped.

Checkpoints stack a layer's experts in three tensors. Lists by layer may continue for MTP layers.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, MAX_POSITIONS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import GLOBAL, LOCAL, RopeConfig, rope_from_section
from . import TensorRule
from .deepseek_v3 import check_auto_map
from .glm4_moe_lite import DENSE, SPARSE, sparse_layers_of
from .mixtral import expert_tensors, gate_limits, moe_config
from .qwen2 import layer_windows
from .qwen3_moe import NAMES

# Key of older configs, written for the checkpoints' own code -> transformers' key.
OLD_KEYS = {"moe_num_experts": "n_routed_experts", "moe_top_k": "num_experts_per_tok", "num_attention_groups": "num_key_value_heads",
            "share_expert_dims": "share_expert_dim", "num_mtp_layers": "num_nextn_predict_layers"}
GATE_LIMIT_KEYS = "swiglu_limits", "swiglu_limits_shared"
BY_LAYER_KEYS = "layer_types", "mlp_layer_types", "partial_rotary_factors", "rope_theta", *GATE_LIMIT_KEYS
WINDOWED_ATTENTION_KEY, MOE_LAYERS_KEY = "attention_other_setting", "moe_layers_enum"
# MTP layers, training, and settings of other programs.
KEYS_HARMLESS = frozenset({"max_seq_len", "moe_layer_offset", "mtp_layer_types", "mtp_mlp_layer_types", "need_fp32_gate", "gating"})
REFUSED_UNLESS = {
    "mlp_bias": False, "moe_every_n_layer": 1, "moe_router_activation": "sigmoid", "norm_expert_weight": True, "sink": False,
    "use_bidirectional_attention": False, "use_head_wise_attn_gate": True, "use_mfa": False, "use_moe": True, "use_moe_router_bias": True,
    "use_qk_norm": True, "yarn_only_types": [GLOBAL], "zero_centered": True}
SIZES = {"vocab_size": 128_815, "hidden_size": 4096, "intermediate_size": 11_264, "num_hidden_layers": 45, "num_attention_heads": 64}
CODE = r"(configuration|modeling)_step3p5\.Step3p5\w+"  # auto_map of published checkpoints; part of transformers now
FIRST_SPARSE = 3


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    keys.mark_known(*OLD_KEYS, *BY_LAYER_KEYS, WINDOWED_ATTENTION_KEY, MOE_LAYERS_KEY, "rope_scaling")
    layers = keys.integer("num_hidden_layers", SIZES["num_hidden_layers"], high=MAX_LAYERS)
    mtp_layers = keys.integer("num_nextn_predict_layers", keys.integer("num_mtp_layers", 0, low=0, high=MAX_LAYERS), low=0, high=MAX_LAYERS)
    keys = keys.with_values(**_with_transformers_names(keys, layers, mtp_layers))
    base = Defaults(max_position_embeddings=128_000, num_key_value_heads=8, head_dim=128, norm_eps=1e-5, sizes=SIZES)
    windows = layer_windows(keys, keys.integer("sliding_window", None), [GLOBAL] * layers)
    default_kinds = tuple(DENSE if layer < FIRST_SPARSE else SPARSE for layer in range(layers))
    bias, sparse = keys.flag("attention_bias", False), sparse_layers_of(keys.strings("mlp_layer_types", layers) or default_kinds)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        kinds = tuple(GLOBAL if window is None else LOCAL for window in windows)
        by_kind = {kind: _rope(keys, kind, kinds.index(kind), head_dim, positions) for kind in dict.fromkeys(kinds)}
        return tuple(by_kind[kind] for kind in kinds)

    moe = moe_config(keys, 288, 8, keys.integer("moe_intermediate_size", 1280, high=2**22), True, sparse, "n_routed_experts", sigmoid=True,
                     correction_bias=True, routed_scale=keys.number("moe_router_scaling_factor", 1.0),
                     shared_expert_dim=keys.integer("share_expert_dim", 1280, high=2**22))
    config = decoder_config(keys, base, ropes, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True, norm_kind="rms+1",
                            output_gate=True, output_gate_per_head=True, moe=moe, mtp_layers=mtp_layers,
                            gate_limits=gate_limits(keys, GATE_LIMIT_KEYS, sparse, layers))
    windowed_heads, scale = _windowed_query_heads(keys, config), keys.number("query_pre_attn_scalar", None)
    query_heads = tuple(config.num_attention_heads if window is None else windowed_heads for window in windows)
    return replace(config, layer_query_heads=query_heads if len({*query_heads, config.num_attention_heads}) > 1 else (),
                   attn_scale=None if scale is None else scale**-0.5)


def _with_transformers_names(keys: Keys, layers: int, mtp_layers: int) -> dict[str, object]:
    """An older config's values under transformers' keys; lists by layer are cut to the decoder's layers. Raises ConfigError."""
    renamed = {name: keys.raw[old_name] for old_name, name in OLD_KEYS.items() if keys.has(old_name) and not keys.has(name)}
    for name in BY_LAYER_KEYS:
        value = keys.raw.get(name)
        if isinstance(value, list) and len(value) == layers + mtp_layers:
            renamed[name] = value[:layers]
    stated = keys.raw.get(MOE_LAYERS_KEY)
    if stated is not None and keys.raw.get("mlp_layer_types") is None:
        items = stated.split(",") if isinstance(stated, str) else stated
        if not isinstance(items, list) or not all(str(each).strip().isdecimal() for each in items):
            raise keys.fail(MOE_LAYERS_KEY, "layer indices, as a list or separated by commas")
        sparse = {int(each) for each in items}
        renamed["mlp_layer_types"] = [SPARSE if layer in sparse else DENSE for layer in range(layers)]
    return renamed


def _windowed_query_heads(keys: Keys, config: ModelConfig) -> int:
    """Query heads of layers with a window. Raises ConfigError if these layers differ from the others in more than that."""
    section = keys.section(WINDOWED_ATTENTION_KEY) or {}
    for name, expected in (("num_attention_groups", config.num_key_value_heads), ("head_dim", config.head_dim),
                           ("true_head_dim", config.head_dim), ("attention_type", LOCAL)):
        if (stated := section.get(name, expected)) != expected:
            raise ConfigError(f"config.json: {WINDOWED_ATTENTION_KEY} states {name} {show(stated)} where other layers have "
                              f"{show(expected)}, which is not supported", "layers with a window may differ only in query heads")
    if unknown := sorted(section.keys() - {"num_attention_groups", "head_dim", "true_head_dim", "attention_type", "num_attention_heads"}):
        raise ConfigError(f"config.json: {WINDOWED_ATTENTION_KEY} states {show(unknown[0])}, which is not supported")
    default = Keys(section, f"config.json: {WINDOWED_ATTENTION_KEY}").integer("num_attention_heads", config.num_attention_heads, high=4096)
    heads = keys.integer("num_sliding_attention_heads", default, high=4096)
    if heads % config.num_key_value_heads:
        raise ConfigError(f"config.json: layers with a window have {heads} heads, which is not a multiple of num_key_value_heads "
                          f"{config.num_key_value_heads}")
    by_layer = keys.section("per_layer_config") or {}  # transformers writes this
    if any(each != {"num_attention_heads": heads} for each in by_layer.values()):
        raise ConfigError("config.json: per_layer_config has more than num_sliding_attention_heads, which is not supported",
                          "layers with a window may differ only in query heads")
    return heads


def _rope(keys: Keys, kind: str, first: int, head_dim: int, positions: int) -> RopeConfig:
    """RoPE of the layers of one kind, the first of which is `first`: from the kind's section, else from older keys, in which rope_scaling
    applies to layers without a window only."""
    section = (keys.section("rope_parameters") or {}).get(kind)
    if not isinstance(section, dict):
        section = {name: value[first] if isinstance(value, list) and first < len(value) else value for name, value in (
            ("rope_theta", keys.raw.get("rope_theta")), ("partial_rotary_factor", keys.raw.get("partial_rotary_factors")))
            if value is not None} | ((keys.section("rope_scaling") or {}) if kind == GLOBAL else {})
    original = keys.integer("original_max_position_embeddings", None, high=MAX_POSITIONS)
    return rope_from_section(Keys(section, f"config.json: rotary positions of {kind}"), head_dim, positions, 10_000.0, original,
                             partial=True)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role, under their published names."""
    prefix = f"model.layers.{layer}."
    rules = expert_tensors(config, layer, "moe", NAMES, correction="router_bias")
    rules = {role: replace(rule, name=rule.name.replace(".moe.shared_experts.", ".share_expert.")) for role, rule in rules.items()}
    return rules | {"attn_gate": TensorRule(f"{prefix}self_attn.g_proj.weight", (config.query_heads_of(layer), config.hidden_size))}
