"""Gemma 3, text: Gemma 2 without soft caps, with QK norms and two RoPE tables: one for windowed layers, one for the others.

Multimodal checkpoints hold the same tensors under another prefix.
"""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import GLOBAL, LOCAL, RopeConfig, ropes_by_window
from . import TensorRule, gemma2, llama, with_multimodal_names
from .gemma2 import ACT, gemma_features, softcap

# _sliding_window_pattern repeats layer_types, which it generated.
KEYS_HARMLESS = frozenset({"_sliding_window_pattern", "cache_implementation", "hidden_act", "original_max_position_embeddings"})
REFUSED_UNLESS = {"mlp_bias": False}
# A multimodal checkpoint states of its text part only what differs from these.
SIZES = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=4, head_dim=256, bos=2, eos=(1,), tied=True, act=ACT, sizes=SIZES)
    pattern, layers = keys.integer("sliding_window_pattern", 6), base.size(keys, "num_hidden_layers")
    layer_types = [LOCAL if (layer + 1) % pattern else GLOBAL for layer in range(layers)]
    bidirectional = keys.flag("use_bidirectional_attention", False)
    if bidirectional:  # sliding_window counts both sides together
        keys = keys.with_values(sliding_window=keys.integer("sliding_window", 4096) // 2 + 1)
    features = gemma_features(keys, layer_types, base.size(keys, "hidden_size"))

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        thetas = keys.number("rope_theta", 1_000_000.0, above=1.0), keys.number("rope_local_base_freq", 10_000.0, above=1.0)
        return ropes_by_window(keys, head_dim, positions, thetas, features["windows"])

    return decoder_config(keys, base, ropes, **features, qk_norm=True, bidirectional=bidirectional,
                          final_logit_softcapping=softcap(keys, "final_logit_softcapping", None))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return with_multimodal_names(gemma2.layer_tensors(config, layer))


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return with_multimodal_names(llama.outer_tensors(config))
