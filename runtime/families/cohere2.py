"""Command R7B and Command A (Cohere 2): Cohere's block, of which three in four layers have a sliding window and RoPE; the others have
full attention and no positions."""

from __future__ import annotations

from ..config import MAX_LAYERS, ModelConfig
from ..config_reader import Keys
from ..config_rope import GLOBAL, LOCAL
from . import cohere
from .cohere import cohere_config
from .qwen2 import layer_windows

LIKE = cohere
# Published configs repeat the pattern under another name, and name a cache class.
KEYS_HARMLESS = cohere.KEYS_HARMLESS | {"cache_implementation", "layer_switch"}
REFUSED_UNLESS = {
    **{key: value for key, value in cohere.REFUSED_UNLESS.items() if key not in ("layer_types", "sliding_window")},
    "order_of_interleaved_layers": "local_attn_first"}
DEFAULT_WINDOW, DEFAULT_PATTERN = 4096, 4


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", cohere.SIZES["num_hidden_layers"], high=MAX_LAYERS)
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else DEFAULT_WINDOW)
    every = keys.integer("sliding_window_pattern", DEFAULT_PATTERN)
    windows = layer_windows(keys, window, tuple(LOCAL if (layer + 1) % every else GLOBAL for layer in range(layers)))

    return cohere_config(keys, windows=windows, rotary_layers=[window is not None for window in windows])
