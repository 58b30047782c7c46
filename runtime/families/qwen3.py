"""Qwen 3 (dense): the Llama block with QK norms per head before RoPE, and an explicit head_dim."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from .qwen2 import qwen_windows

REFUSED_UNLESS = {"mlp_bias": False, "use_mrope": False}


def config(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=32_768, num_key_value_heads=32, head_dim=128)
    return decoder_config(keys, base, windows=qwen_windows(keys), qkv_bias=bias, o_bias=bias, qk_norm=True)
