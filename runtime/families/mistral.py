"""Mistral: the Llama block, with one sliding window for all layers (null in the releases after 0.1: full attention).

Multimodal checkpoints have the same tensors under another prefix.
"""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, llama, with_multimodal_names

REFUSED_UNLESS = {"attention_bias": False, "layer_types": None, "mlp_bias": False}


def config(keys: Keys) -> ModelConfig:
    # An absent key means the first release's 4096, null means no window, as in transformers.
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else 4096)
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, bos=1, eos=(2,))
    return decoder_config(keys, base, windows=(window,) * keys.integer("num_hidden_layers", high=MAX_LAYERS))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return with_multimodal_names(llama.layer_tensors(config, layer))


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return with_multimodal_names(llama.outer_tensors(config))
