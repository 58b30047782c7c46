"""Granite 3 (dense): the Llama block with multipliers of the embedding, attention scores and branches, and a divisor of the logits."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys

REFUSED_UNLESS = {"layer_types": None, "sliding_window": None}


DEFAULTS = Defaults(max_position_embeddings=2048, bos=1, eos=(2,))


def config(keys: Keys) -> ModelConfig:
    return granite_config(keys, DEFAULTS, mlp_bias=keys.flag("mlp_bias", False))


def granite_config(keys: Keys, usual: Defaults, mlp_bias: bool = False) -> ModelConfig:
    """A Granite model's config; an absent attention_multiplier is 1, not the usual root of the head dimension."""
    bias = keys.flag("attention_bias", False)
    return decoder_config(
        keys, usual, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, attn_scale=keys.number("attention_multiplier", 1.0),
        embedding_multiplier=keys.number("embedding_multiplier", 1.0), residual_multiplier=keys.number("residual_multiplier", 1.0),
        logits_scaling=keys.number("logits_scaling", 1.0))
