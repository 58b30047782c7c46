"""EXAONE 4: post-norms as in OLMo 2, QK norms per head, and with a sliding window two kinds of layers: windowed ones use RoPE, the
others have full attention and no positions. Without a window all layers use RoPE. EXAONE 4.5's MTP layer is not read."""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import GLOBAL, LOCAL
from . import olmo2
from .qwen2 import layer_windows

LIKE = olmo2
REFUSED_UNLESS = {"attention_bias": False, "mlp_bias": False}


def config(keys: Keys) -> ModelConfig:
    layers, mtp_layers = keys.integer("num_hidden_layers", high=MAX_LAYERS), keys.integer("num_nextn_predict_layers", 0, low=0,
                                                                                          high=MAX_LAYERS)
    listed = keys.raw.get("layer_types")
    if isinstance(listed, list) and len(listed) == layers + max(mtp_layers, 1):  # published configs of 4.5 list the MTP layer too
        keys = keys.with_values(layer_types=listed[:layers])
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else 4096)
    windows = layer_windows(keys, window, default_layer_types(keys, layers, window))

    base = Defaults(max_position_embeddings=2048, num_key_value_heads=32, bos=0, eos=(2,), norm_eps=1e-5)
    rotary_layers = [window is None or layer_window is not None for layer_window in windows]
    return decoder_config(keys, base, windows=windows, rotary_layers=rotary_layers, qk_norm=True, mtp_layers=mtp_layers)


def default_layer_types(keys: Keys, layers: int, window: int | None) -> tuple[str, ...]:
    """Layer types if the config lists none: by sliding_window_pattern, a string of L (local) and G (global) that is repeated, or the
    interval of layers with full attention."""
    keys.mark_known("sliding_window_pattern")
    if window is None:
        return (GLOBAL,) * layers
    pattern = keys.raw.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return tuple(LOCAL if pattern[layer % len(pattern)] == "L" else GLOBAL for layer in range(layers))
    every = 1 if keys.raw.get("layer_types") is not None else keys.integer("sliding_window_pattern", 4)
    return tuple(LOCAL if (layer + 1) % every else GLOBAL for layer in range(layers))
