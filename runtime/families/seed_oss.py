"""Seed-OSS: the Llama block with biases on q, k and v, and on o if configured."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys

KEYS_HARMLESS = frozenset({"residual_dropout"})


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=524_288, num_key_value_heads=8, head_dim=128, bos=0, eos=(2,))
    return decoder_config(keys, base, qkv_bias=keys.flag("attention_bias", True), o_bias=keys.flag("attention_out_bias", False),
                          mlp_bias=keys.flag("mlp_bias", False))
