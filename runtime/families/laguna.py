"""Laguna (Poolside XS, S and M): windowed layers with more query heads and RoPE parameters of their own, softplus attention gates, and
corrected sigmoid routing with a shared expert."""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import GLOBAL, LOCAL, RopeConfig, ropes_by_layer_type
from . import TensorRule
from .deepseek_v3 import check_auto_map
from .glm4_moe_lite import sparse_layers
from .mixtral import expert_tensors, moe_config
from .qwen2 import layer_windows
from .qwen3_moe import NAMES

# Read by other programs in place of the sections of rope_parameters.
KEYS_HARMLESS = frozenset({"qkv_bias", "swa_rope_parameters"})
REFUSED_UNLESS = {
    "decoder_sparse_step": 1, "mlp_bias": False, "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0,
    "norm_topk_prob": True, "swa_attention_sink_enabled": False}
SIZES = {"vocab_size": 100_352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 48}
ROPES = {GLOBAL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
         LOCAL: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}}
CODE = r"(configuration|modeling)_laguna\.Laguna\w+"  # auto_map of published checkpoints; part of transformers now
PER_HEAD, PER_ELEMENT = "per-head", "per-element"
CORRECTION_NAME = "mlp.experts.e_score_correction_bias"  # the correction bias in published checkpoints


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    keys.number("partial_rotary_factor", None)  # each section has its own
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, head_dim=128, sizes=SIZES)
    layers, bias = base.size(keys, "num_hidden_layers"), keys.flag("attention_bias", False)
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else 512, low=0) or None
    windows = layer_windows(keys, window, [GLOBAL] * layers)
    kinds = tuple(GLOBAL if layer_window is None else LOCAL for layer_window in windows)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        return ropes_by_layer_type(keys, kinds, ROPES, head_dim, positions, partial=True)

    sparse = sparse_layers(keys, layers)
    if (dense := keys.layers("mlp_only_layers", layers)) and dense != frozenset(range(layers)) - sparse:
        raise ConfigError("config.json: mlp_only_layers disagrees with mlp_layer_types, one dense layer by default",
                          "mlp_layer_types takes precedence: remove the other key")
    moe = moe_config(keys, 256, 8, keys.integer("moe_intermediate_size", 512, high=2**22), True, sparse, sigmoid=True, correction_bias=True,
                     routed_scale=keys.number("moe_routed_scaling_factor", 1.0),
                     shared_expert_dim=keys.integer("shared_expert_intermediate_size", 512, high=2**22))
    config = decoder_config(keys, base, ropes, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True, output_gate=True,
                            output_gate_softplus=True, output_gate_per_head=_gating(keys, layers) == PER_HEAD, moe=moe)
    return replace(config, layer_query_heads=query_heads_by_layer(keys, config, "num_attention_heads_per_layer"))


def _gating(keys: Keys, layers: int) -> str:
    """PER_HEAD or PER_ELEMENT: one gate for a head, or one for each of its channels. Raises ConfigError."""
    keys.mark_known("gating", "gating_types")
    stated, by_layer = keys.raw.get("gating"), keys.raw.get("gating_types")
    kind = PER_HEAD if stated in (None, True) else stated
    if kind not in (PER_HEAD, PER_ELEMENT):
        raise ConfigError(f"config.json: gating is {show(stated)}, which is not supported", f"known: true, {PER_HEAD}, {PER_ELEMENT}")
    if by_layer is not None and by_layer != [kind] * layers and by_layer != [kind.replace("-", "_")] * layers:
        raise ConfigError(f"config.json: gating_types is {show(by_layer)}, which is not {kind} for each of {layers} layers",
                          "all layers must have the same gating")
    return kind


def query_heads_by_layer(keys: Keys, config: ModelConfig, name: str) -> tuple[int, ...]:
    """Query heads by layer, from the list `name`; empty if all layers have the same number. Raises ConfigError."""
    keys.mark_known(name)
    stated, layers = keys.raw.get(name), config.num_hidden_layers
    if stated is None:
        return ()
    if not isinstance(stated, list) or len(stated) != layers or not all(type(each) is int and 0 < each <= 4096 for each in stated):
        raise keys.fail(name, f"a number of heads for each of {layers} layers")
    if invalid := next((each for each in stated if each % config.num_key_value_heads), None):
        raise ConfigError(f"config.json: {name} holds {invalid}, which is not a multiple of num_key_value_heads "
                          f"{config.num_key_value_heads}")
    return () if set(stated) == {config.num_attention_heads} else tuple(stated)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role, under the published names; those of transformers are alternatives."""
    rules, prefix = expert_tensors(config, layer, "mlp", NAMES, "shared_expert"), f"model.layers.{layer}."
    gates = config.query_heads_of(layer) * (1 if config.output_gate_per_head else config.head_dim)
    rules["attn_gate"] = TensorRule(f"{prefix}self_attn.g_proj.weight", (gates, config.hidden_size))
    if "correction" in rules:
        rules["correction"] = replace(rules["correction"], name=prefix + CORRECTION_NAME, also=(rules["correction"].name,))
    return {role: replace(rule, also=(rule.name.replace(".shared_expert.", ".shared_experts."),)) if role.startswith("shared.") else rule
            for role, rule in rules.items()}
