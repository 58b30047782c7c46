"""Helium 1 (2B): the Llama block with interleaved RoPE."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys

THETA = 100_000.0


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=4096, num_key_value_heads=20, head_dim=128, bos=1, eos=(2,), norm_eps=1e-8, theta=THETA,
                    rope={"interleaved": True})
    return decoder_config(keys, base, qkv_bias=keys.flag("attention_bias", False), mlp_bias=keys.flag("mlp_bias", False))
