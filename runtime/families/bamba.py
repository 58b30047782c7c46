"""Bamba (9B): Mamba 2 in most layers, attention with RoPE on half of each head in a few, and an MLP in every layer."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..config_rope import RopeConfig, rope_config
from . import TensorRule, llama
from .granitemoehybrid import check_shape, mamba_shape, mamba_tensors

KEYS_HARMLESS = frozenset({"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"})
REFUSED_UNLESS = {"mamba_proj_bias": False, "sliding_window": None}
ROTARY_FACTOR = 0.5  # share of a head that is rotated, in all models
# Llama's names -> the family's.
NAMES = {"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm"}
KINDS = ("full_attention", "linear_attention")


def config(keys: Keys) -> ModelConfig:
    layers, bias = keys.integer("num_hidden_layers", 32, high=MAX_LAYERS), keys.flag("attention_bias", False)
    attention_layers = _attention_layers(keys, layers)
    base = Defaults(max_position_embeddings=262_144, num_key_value_heads=8, bos=1, eos=(2,), norm_eps=1e-5, sizes={
        "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32})

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig | None, ...]:
        if keys.number("partial_rotary_factor", ROTARY_FACTOR) != ROTARY_FACTOR:
            raise keys.fail("partial_rotary_factor", f"{ROTARY_FACTOR}, as all models of this family have it")
        if (stated := keys.integer("attn_rotary_emb", None)) not in (None, int(head_dim * ROTARY_FACTOR)):
            raise ConfigError(f"config.json: attn_rotary_emb {stated} of heads of {head_dim} is not supported",
                              "half of the channels are rotated")
        rope = rope_config(keys, head_dim, positions, partial=True, share=ROTARY_FACTOR)
        return tuple(rope if layer in attention_layers else None for layer in range(layers))

    config = decoder_config(keys, base, ropes, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias", False))
    shape, states = mamba_shape(keys, config), tuple(layer for layer in range(layers) if layer not in attention_layers)
    if states:
        check_shape(keys, config, shape)
    return replace(config, recurrent=shape if states else None, recurrent_layers=states)


def _attention_layers(keys: Keys, layers: int) -> frozenset[int]:
    """The layers with attention: those that attn_layer_indices lists. Raises ConfigError if there is none."""
    found, kinds = keys.layers("attn_layer_indices", layers), keys.layer_types("layer_types", layers, KINDS)
    if kinds is not None:
        listed = frozenset(layer for layer, kind in enumerate(kinds) if kind == KINDS[0])
        if listed != found:
            raise ConfigError("config.json: layer_types and attn_layer_indices disagree on which layers have attention",
                          "one of the two is wrong")
    if not found:
        raise ConfigError("config.json: attn_layer_indices names no layer", "at least one layer must have attention")
    return found


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    prefix, rules = f"model.layers.{layer}.", {}
    for role, rule in llama.layer_tensors(config, layer).items():
        first, dot, rest = rule.name.removeprefix(prefix).partition(".")
        rules[role] = replace(rule, name=f"{prefix}{NAMES.get(first, first)}{dot}{rest}")
    if layer not in config.recurrent_layers:
        return rules
    return {role: rule for role, rule in rules.items() if ".self_attn." not in rule.name} | mamba_tensors(config, f"{prefix}mamba.")


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules = llama.outer_tensors(config)
    return rules | {"norm": replace(rules["norm"], name="model.final_layernorm.weight")}
