"""Gemma 1: the Llama block with norms stored minus one, a scaled embedding and GELU; attention scores are scaled as usual."""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from .gemma2 import embedding_multiplier

# Some releases repeat hidden_act as hidden_activation.
REFUSED_UNLESS = {"hidden_activation": "gelu_pytorch_tanh", "layer_types": None, "mlp_bias": False, "sliding_window": None,
                  "use_bidirectional_attention": False}


def config(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=8192, num_key_value_heads=16, head_dim=256, bos=2, eos=(1,), tied=True,
                    act=("hidden_act", "gelu_pytorch_tanh"))
    config = decoder_config(keys, base, qkv_bias=bias, o_bias=bias, norm_kind="rms+1",
                            embedding_multiplier=embedding_multiplier(keys, keys.integer("hidden_size")))
    # The first releases name the exact GELU, but were trained with its tanh approximation.
    return replace(config, hidden_act="gelu_tanh") if config.hidden_act == "gelu" else config
