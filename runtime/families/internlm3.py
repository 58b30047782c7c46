"""InternLM 3 (8B): the Llama block, with biases configured by keys of its own."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from .deepseek_v3 import check_auto_map

SIZES = {"vocab_size": 128_512, "hidden_size": 4096, "intermediate_size": 10_240, "num_hidden_layers": 48, "num_attention_heads": 32}
CODE = r"(configuration|modeling)_internlm3\.InternLM3\w+"  # auto_map of published checkpoints; part of transformers now


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    qkv_bias = keys.flag("qkv_bias", keys.flag("attention_bias", False))  # the second is transformers' name
    bias = keys.flag("bias", keys.flag("mlp_bias", False))  # of o and the MLP
    base = Defaults(max_position_embeddings=32_768, num_key_value_heads=2, head_dim=128, bos=1, eos=(2,), norm_eps=1e-5, sizes=SIZES)
    return decoder_config(keys, base, qkv_bias=qkv_bias, o_bias=bias, mlp_bias=bias)
