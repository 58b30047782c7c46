"""LFM2 and LFM2.5 (350M, 700M, 1.2B, 2.6B): gated short convolutions in most layers, attention in the others.

A convolution has three taps per channel, so its state is the last two inputs. Attention layers are Qwen 3's. The config may state the
MLP's width before it is cut to two thirds and rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...kernels.conv_shape import ConvShape
from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config, demand_silu
from ..config_reader import ConfigError, Keys
from . import TensorRule, llama

# Training, and aliases of norm_eps that transformers does not read.
KEYS_HARMLESS = frozenset({"block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init",
                           "conv_use_xavier_init", "rms_norm_eps"})
REFUSED_UNLESS = {"attention_bias": False, "block_use_swiglu": True, "conv_bias": False, "mlp_bias": False, "sliding_window": None,
                  "use_pos_enc": True}
CONV, FULL = "conv", "full_attention"
EQUAL_SIZES = {"block_dim": "hidden_size", "conv_dim": "hidden_size", "conv_dim_out": "hidden_size", "num_heads": "num_attention_heads"}
SIZES = {"vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288, "block_ff_dim": 12_288, "num_hidden_layers": 32,
         "num_attention_heads": 32}
NAMES = {"self_attn.o_proj": "self_attn.out_proj", "self_attn.q_norm": "self_attn.q_layernorm", "self_attn.k_norm": "self_attn.k_layernorm",
         "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
         "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm"}


def config(keys: Keys) -> ModelConfig:
    keys.mark_known("block_ffn_dim_multiplier", "block_multiple_of", "intermediate_size")
    width_key = "intermediate_size" if keys.integer("block_ff_dim", None, high=2**22) is None else "block_ff_dim"
    config = conv_config(keys, replace(DEFAULTS, ffn_key=width_key, sizes=SIZES), reads_full_attn_idxs=True)
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return config
    width, multiple = int(2 * config.intermediate_size / 3), keys.integer("block_multiple_of", 256, high=2**22)
    if (factor := keys.number("block_ffn_dim_multiplier", None if keys.has("block_ffn_dim_multiplier") else 1.0)) is not None:
        width = multiple * -(-int(factor * width) // multiple)
    if not 0 < width <= 2**22:
        raise ConfigError(f"config.json: {width_key} and block_ffn_dim_multiplier make a width of {width}, which no model has")
    return replace(config, intermediate_size=width)


DEFAULTS = Defaults(max_position_embeddings=128_000, num_key_value_heads=8, bos=1, eos=(2,), eps_key="norm_eps", norm_eps=1e-5, tied=True,
                    theta=1e6)


def conv_config(keys: Keys, base: Defaults, reads_full_attn_idxs: bool, **features: object) -> ModelConfig:
    """The config of a model with short convolutions, with a family's defaults. `reads_full_attn_idxs`: it may list the attention layers
    under that key; `features`: further fields of the ModelConfig."""
    layers = keys.integer("num_hidden_layers", base.sizes["num_hidden_layers"], high=MAX_LAYERS)
    full = keys.layers("full_attn_idxs", layers) if reads_full_attn_idxs and keys.has("full_attn_idxs") else range(layers)
    kinds = keys.layer_types("layer_types", layers, (CONV, FULL)) or tuple(FULL if layer in full else CONV for layer in range(layers))
    if FULL not in kinds:
        raise ConfigError("config.json: layer_types without attention are not supported", f"at least one layer must be {FULL}")

    config = decoder_config(keys, base, rotary_layers=[kind == FULL for kind in kinds], qk_norm=True,
                            recurrent_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == CONV), **features)
    demand_silu(keys, config.hidden_act)
    for name, field in EQUAL_SIZES.items():
        if keys.integer(name, getattr(config, field)) != getattr(config, field):
            raise ConfigError(f"config.json: {name} is {keys.raw[name]} and {field} {getattr(config, field)}, which should be the same",
                              "no published model of this family has two widths")
    shape = ConvShape(config.hidden_size, keys.integer("conv_L_cache", 3, high=64))
    return replace(config, recurrent=shape if CONV in kinds else None,
                   tie_word_embeddings=keys.flag("tie_embedding", config.tie_word_embeddings))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return conv_tensors(config, layer, llama.layer_tensors(config, layer))


def conv_tensors(config: ModelConfig, layer: int, rules: Mapping[str, TensorRule],
                 names: Mapping[str, str] = NAMES) -> dict[str, TensorRule]:
    """Tensors of one layer by role, under a family's `names`; convolution layers have a convolution in place of attention."""
    prefix, hidden = f"model.layers.{layer}.", config.hidden_size
    renamed = {role: replace(rule, name=_renamed(rule.name, names)) for role, rule in rules.items()
               if layer not in config.recurrent_layers or ".self_attn." not in rule.name}
    if layer in config.recurrent_layers:
        renamed |= {"state_in": TensorRule(f"{prefix}conv.in_proj.weight", (3 * hidden, hidden)),
                    "state_conv": TensorRule(f"{prefix}conv.conv.weight", (hidden, 1, config.recurrent.taps)),
                    "state_out": TensorRule(f"{prefix}conv.out_proj.weight", (hidden, hidden))}
    return renamed


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for llama_name, stored_name in names.items():
        name = name.replace(f".{llama_name}.", f".{stored_name}.")
    return name


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules = llama.outer_tensors(config)
    return rules | {"norm": replace(rules["norm"], name="model.embedding_norm.weight")}
