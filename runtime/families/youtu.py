"""Youtu-LLM (2B): DeepSeek V3's MLA with an MLP in every layer."""

from __future__ import annotations

from ..config import Defaults, ModelConfig
from ..config_reader import Keys
from . import TensorRule, deepseek_v3, llama
from .deepseek_v3 import MLA_DIMS, check_auto_map, mla_config, mla_tensors

LIKE = deepseek_v3
KEYS_HARMLESS = frozenset({"embedding_initializer_range", "qk_head_dim"})
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "n_routed_experts": None, "sliding_window": None}
SIZES = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16}
CODE = r"(configuration|modeling)_youtu\.Youtu\w+"  # auto_map of published checkpoints; part of transformers now


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=131_072, sizes=SIZES, bos=128_000, eos=(128_001,), tied=True)
    return mla_config(keys, base, MLA_DIMS, deepseek_v3.QUERY_RANK, keys.flag("rope_interleave", True))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return mla_tensors(config, layer, llama.layer_tensors(config, layer))
