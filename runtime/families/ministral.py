"""Ministral (8B of 2024): the Mistral block; `layer_types` says which layers have the window."""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import GLOBAL, LOCAL
from .qwen2 import layer_windows

REFUSED_UNLESS = {"attention_bias": False, "mlp_bias": False}


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else 4096)
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, bos=1, eos=(2,))
    return decoder_config(keys, base, windows=layer_windows(keys, window, (GLOBAL if window is None else LOCAL,) * layers))
