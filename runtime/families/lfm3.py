"""LFM3 (1.7B): LFM2's short convolutions and attention with post-norms on each branch; every second attention layer has a sliding window
and RoPE parameters of its own, and attention outputs are gated per head."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.conv_shape import ConvShape
from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..config_rope import GLOBAL, LOCAL, RopeConfig, ropes_by_layer_type
from . import TensorRule, lfm2, llama
from .lfm2 import CONV, conv_tensors

LIKE = lfm2
KEYS_HARMLESS = frozenset({"rms_norm_eps"})  # an alias of norm_eps that transformers does not read
REFUSED_UNLESS = {"conv_bias": False, "mlp_bias": False}
SIZES = {"vocab_size": 128_000, "hidden_size": 2048, "intermediate_size": 7680, "num_hidden_layers": 24, "num_attention_heads": 16}
ROPES = {LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
         GLOBAL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}}
WINDOW, TAPS, THETA = 256, 7, 10_000.0
NAMES = {"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "input_layernorm":
         "operator_norm", "post_attention_layernorm": "ffn_norm"}


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=128_000, num_key_value_heads=4, head_dim=128, bos=124_894, eos=(124_900,), eps_key="norm_eps",
                    norm_eps=1e-5, tied=True, sizes=SIZES)
    layers = base.size(keys, "num_hidden_layers")
    default_kinds = tuple(GLOBAL if layer % 4 == 2 else LOCAL if layer % 4 == 0 < layer else CONV for layer in range(layers))
    kinds = keys.layer_types("layer_types", layers, (CONV, GLOBAL, LOCAL)) or default_kinds
    if {*kinds} == {CONV}:
        raise ConfigError("config.json: layer_types without attention are not supported", f"at least one layer must be {GLOBAL}")
    keys.mark_known("conv_L_cache")
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else WINDOW)
    if window is None and LOCAL in kinds:
        raise ConfigError("config.json: layer_types holds sliding_attention, but there is no sliding window",
                          "state its width in sliding_window")
    bias = keys.flag("attention_bias", False)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig | None, ...]:
        return ropes_by_layer_type(keys, kinds, ROPES, head_dim, positions, THETA, nope_type=CONV)

    config = decoder_config(keys, base, ropes, windows=tuple(window if kind == LOCAL else None for kind in kinds),
                            qkv_bias=bias, o_bias=bias, qk_norm=True, output_gate=keys.flag("use_attention_gate", True),
                            branch_post_norms=keys.flag("use_sandwich_norm", True),
                            recurrent_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == CONV))
    return replace(config, recurrent=ConvShape(config.hidden_size, keys.integer("conv_L_cache", TAPS, high=64)) if CONV in kinds else None)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role; convolution layers have a convolution in place of attention."""
    prefix, rules = f"model.layers.{layer}.", llama.layer_tensors(config, layer)
    if config.branch_post_norms:
        rules |= {role: TensorRule(f"{prefix}{name}.weight", (config.hidden_size,))
                  for role, name in (("o_norm", "post_operator_norm"), ("down_norm", "post_ffn_norm"))}
    rules = conv_tensors(config, layer, rules, NAMES)
    if config.output_gate and layer not in config.recurrent_layers:
        rules["attn_gate"] = TensorRule(f"{prefix}self_attn.gate_proj.weight", (config.num_attention_heads, config.hidden_size),
                                        (f"{prefix}self_attn.g_proj.weight",))
    return rules
