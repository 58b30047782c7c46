"""Qwen 3.5 (dense), text: gated delta-rule linear attention in three of four layers, gated attention in the others.

Linear-attention layers convolve q, k and v over the last tokens and keep a matrix per head instead of a KV cache
(`kernels/reference_delta.py`). Attention layers are Qwen 3's, with RoPE on a quarter of each head and an output gate in the second half of
every query. Norm weights are stored minus one, except the output norm of linear attention. Multimodal checkpoints have the same tensors
under another prefix; the three rotary positions of a text token are equal, which is plain RoPE. The MTP layer (`mtp_tensors.py`) has
attention.
"""

from __future__ import annotations

from dataclasses import replace

from ...kernels.delta_shape import DeltaShape
from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config, demand_silu
from ..config_reader import ConfigError, Keys
from . import TensorRule, llama, with_multimodal_names

KEYS_HARMLESS = frozenset({"mamba_ssm_dtype", "mlp_only_layers", "mtp_use_dedicated_embeddings", "unsloth_fixed_mtp"})
REFUSED_UNLESS = {"attn_output_gate": True, "mlp_bias": False, "output_gate_type": "swish", "sliding_window": None}
LINEAR, FULL = "linear_attention", "full_attention"
ROTATED_SHARE = 0.25  # default partial_rotary_factor


def config(keys: Keys) -> ModelConfig:
    return hybrid_config(keys, Defaults(max_position_embeddings=32_768, num_key_value_heads=4, head_dim=256))


def hybrid_config(keys: Keys, base: Defaults, mtp_layers: int = 0, rotated_share: float = ROTATED_SHARE, **features: object) -> ModelConfig:
    """The config of a model with linear attention, with a family's defaults. `mtp_layers`, `rotated_share`: defaults of the number of MTP
    layers and of partial_rotary_factor; `features`: further fields of the ModelConfig. Raises ConfigError."""
    layers, bias = keys.integer("num_hidden_layers", high=MAX_LAYERS), keys.flag("attention_bias", False)
    kinds = layer_types(keys, layers)
    shape = delta_shape(keys)
    base, rotated = replace(base, rope={"partial": True, "share": rotated_share}), [kind == FULL for kind in kinds]
    config = decoder_config(keys, base, rotary_layers=rotated, qkv_bias=bias, o_bias=bias, qk_norm=True, norm_kind="rms+1",
                            output_gate_in_q=True,
                            recurrent=shape, recurrent_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR),
                            mtp_layers=keys.integer("mtp_num_hidden_layers", mtp_layers, low=0, high=MAX_LAYERS), **features)
    demand_silu(keys, config.hidden_act, "its linear attention uses it too")
    return config


def delta_shape(keys: Keys, key_heads: int = 16, value_heads: int = 32) -> DeltaShape:
    """The sizes of linear attention, with defaults of the numbers of its heads. Raises ConfigError."""
    sizes = {"key_heads": ("linear_num_key_heads", key_heads, 4096), "value_heads": ("linear_num_value_heads", value_heads, 4096),
             "key_dim": ("linear_key_head_dim", 128, 1024), "value_dim": ("linear_value_head_dim", 128, 1024),
             "taps": ("linear_conv_kernel_dim", 4, 64)}
    shape = DeltaShape(**{field: keys.integer(name, default, high=high) for field, (name, default, high) in sizes.items()},
                       tiled=keys.flag("linear_value_heads_tiled", False))  # stated in folders converted from GGUF files
    if shape.value_heads % shape.key_heads:
        raise ConfigError(f"config.json: linear_num_value_heads {shape.value_heads} is not a multiple of linear_num_key_heads "
                          f"{shape.key_heads}")
    return shape


def layer_types(keys: Keys, layers: int) -> tuple[str, ...]:
    """LINEAR or FULL by layer. Raises ConfigError for other kinds, and if no layer has attention."""
    interval = keys.integer("full_attention_interval", 4)
    default_kinds = tuple(FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(layers))
    kinds = keys.layer_types("layer_types", layers, (LINEAR, FULL)) or default_kinds
    if FULL not in kinds:
        raise ConfigError("config.json: a model with only linear attention is not supported", "at least one layer must be full_attention")
    return kinds


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return hybrid_tensors(config, layer, llama.layer_tensors(config, layer))


def hybrid_tensors(config: ModelConfig, layer: int, rules: dict[str, TensorRule]) -> dict[str, TensorRule]:
    """Tensors of one layer by role, from `rules`; linear-attention layers have linear attention in place of attention."""
    shape = config.recurrent
    if layer in config.recurrent_layers:
        prefix, hidden = f"model.layers.{layer}.linear_attn.", config.hidden_size
        rules = {role: rule for role, rule in rules.items() if ".self_attn." not in rule.name}
        for role, (name, *dims) in {
                "state_in": ("in_proj_qkv.weight", shape.channels, hidden), "state_gate": ("in_proj_z.weight", shape.values, hidden),
                "state_beta": ("in_proj_b.weight", shape.value_heads, hidden),
                "state_rate": ("in_proj_a.weight", shape.value_heads, hidden),
                "state_conv": ("conv1d.weight", shape.channels, 1, shape.taps), "state_decay": ("A_log", shape.value_heads),
                "state_dt": ("dt_bias", shape.value_heads), "state_norm": ("norm.weight", shape.value_dim),
                "state_out": ("out_proj.weight", hidden, shape.values)}.items():
            rules[role] = TensorRule(prefix + name, tuple(dims))
    return with_multimodal_names(rules)


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return with_multimodal_names(llama.outer_tensors(config))
