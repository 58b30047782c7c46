"""SmolLM 3: the Llama block without positions in every fourth layer (or as listed); only those layers may have a sliding window."""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from .qwen2 import layer_windows

KEYS_HARMLESS = frozenset({"max_window_layers"})
REFUSED_UNLESS = {}
THETA = 2_000_000.0


def config(keys: Keys) -> ModelConfig:
    bias, rotated = keys.flag("attention_bias", False), rotated_layers(keys)
    window = keys.integer("sliding_window", None)
    window = window if keys.flag("use_sliding_window", False) else None

    base = Defaults(max_position_embeddings=32_768, num_key_value_heads=4, bos=128_000, eos=(128_001,), tied=True, theta=THETA)
    default_kinds = ["full_attention" if is_rotated or window is None else "sliding_attention" for is_rotated in rotated]
    return decoder_config(keys, base, rotary_layers=rotated, windows=layer_windows(keys, window, default_kinds), qkv_bias=bias, o_bias=bias,
                          mlp_bias=keys.flag("mlp_bias", False))


def rotated_layers(keys: Keys) -> tuple[bool, ...]:
    """By layer, whether it has RoPE: as `no_rope_layers` lists (in which, despite its name, 1 means RoPE), else all but the last of every
    `no_rope_layer_interval`."""
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    interval = keys.integer("no_rope_layer_interval", 4)
    switches = keys.flags("no_rope_layers", layers)
    return switches or tuple((layer + 1) % interval != 0 for layer in range(layers))
