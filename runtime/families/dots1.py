"""dots.llm1: the Qwen 3 block with `glm4_moe`'s MoE, and sliding windows in the upper layers where configured."""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import REQUIRED, Keys
from . import glm4_moe
from .glm4_moe import deepseek_moe_config
from .qwen2 import layer_windows

LIKE = glm4_moe
# Published configs name the routing that all models of the family have.
KEYS_HARMLESS = frozenset({"scoring_func", "topk_method"})
REFUSED_UNLESS = {"mlp_bias": False, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": True}


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", 62, high=MAX_LAYERS)
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else 4096)
    first = keys.integer("max_window_layers", 62, low=0)
    windows = layer_windows(keys, window, ["full_attention" if layer < first or window is None else "sliding_attention"
                                           for layer in range(layers)])
    bias = keys.flag("attention_bias", False)
    sizes = {"vocab_size": 152_064, "hidden_size": 4608, "intermediate_size": 10_944, "num_hidden_layers": 62, "num_attention_heads": 32}
    base = Defaults(max_position_embeddings=2048, num_key_value_heads=32, sizes=sizes)
    return decoder_config(keys, base, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True,
                          moe=deepseek_moe_config(keys, layers, REQUIRED, REQUIRED, 0, False))
