"""Qwen 2 and 2.5: the Llama block with biases on q, k and v, and sliding windows in the upper layers if enabled."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys

REFUSED_UNLESS = {"mlp_bias": False, "use_mrope": False}


def config(keys: Keys) -> ModelConfig:
    return decoder_config(keys, Defaults(max_position_embeddings=32_768, num_key_value_heads=32), windows=qwen_windows(keys), qkv_bias=True)


def qwen_window(keys: Keys) -> int | None:
    """The sliding window, None if use_sliding_window is off."""
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else 4096)
    return window if keys.flag("use_sliding_window", False) else None


def qwen_windows(keys: Keys) -> tuple[int | None, ...]:
    """Windows by layer: as `layer_types` lists, else in layers from `max_window_layers` on; none unless `use_sliding_window`."""
    layers, window = keys.integer("num_hidden_layers", high=MAX_LAYERS), qwen_window(keys)
    first = keys.integer("max_window_layers", 28, low=0)
    return layer_windows(keys, window, ["full_attention" if layer < first or window is None else "sliding_attention"
                                        for layer in range(layers)])


def layer_windows(keys: Keys, window: int | None, default_kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Each layer's window by its type: as `layer_types` says, otherwise as `default_kinds`."""
    kinds = keys.layer_types("layer_types", len(default_kinds), ("full_attention", "sliding_attention")) or tuple(default_kinds)
    if window is None and "sliding_attention" in kinds:
        raise ConfigError("config.json: layer_types holds sliding_attention, but there is no sliding window",
                          "state its width in sliding_window, and set use_sliding_window, where there is one, to true")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
