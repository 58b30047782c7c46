"""Code World Model (32B): Llama 3's block with a sliding window in three of four layers."""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import RopeConfig, rope_config
from .qwen2 import layer_windows

REFUSED_UNLESS = {"attention_bias": False}
WINDOW, PATTERN, THETA = 8192, 4, 1_000_000.0  # defaults; the first of every four layers has full attention
ROPE = {"rope_type": "llama3", "rope_theta": THETA, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else WINDOW)
    layer_types = ["sliding_attention" if layer % PATTERN else "full_attention" for layer in range(layers)]

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        stated = keys if keys.section("rope_scaling") or keys.section("rope_parameters") else keys.with_values(rope_parameters=ROPE)
        return (rope_config(stated, head_dim, positions, THETA),) * layers

    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, head_dim=128, bos=128_000, eos=(128_001, 128_008, 128_009),
                    norm_eps=1e-5)
    return decoder_config(keys, base, ropes, windows=layer_windows(keys, window, layer_types), mlp_bias=keys.flag("mlp_bias", False))
