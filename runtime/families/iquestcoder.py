"""IQuest Coder (7B, 14B, 40B): the Llama block, with its own sizes and special tokens."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import llama
from .deepseek_v3 import check_auto_map

KEYS_HARMLESS = frozenset({"max_window_layers"})
REFUSED_UNLESS = {**llama.REFUSED_UNLESS, "clip_qkv": None, "use_sliding_window": False}
SIZES = {"vocab_size": 76_800, "hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 80, "num_attention_heads": 40}
CODE = r"(configuration|modeling)_iquestcoder\.IQuestCoder\w+"  # auto_map of published checkpoints; part of transformers now


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, head_dim=128, bos=1, eos=(2,), norm_eps=1e-5, sizes=SIZES)
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias", False))
