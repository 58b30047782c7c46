"""MiniCPM 3 (4B): DeepSeek V2's MLA with half-split RoPE, and multipliers of the embedding, branches and logits."""

from __future__ import annotations

import math

from ..config import Defaults, ModelConfig
from ..config_reader import Keys
from . import TensorRule, deepseek_v3, llama
from .deepseek_v3 import check_auto_map, mla_config, mla_tensors

LIKE = deepseek_v3
KEYS_HARMLESS = frozenset({"qk_head_dim"})  # the sum of two keys that are read
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 73_448, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62, "num_attention_heads": 40}
CODE = r"(configuration|modeling)_minicpm(3)?\.MiniCPM3\w+"  # auto_map of published checkpoints; part of transformers now
QUERY_RANK = 768


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=32_768, sizes=SIZES, bos=1, eos=(2,), tied=True, norm_eps=1e-5)
    v_head_dim = base.size(keys, "hidden_size") // base.size(keys, "num_attention_heads")
    widths = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": v_head_dim}
    return mla_config(keys, base, widths, QUERY_RANK, False, **mup_multipliers(keys, base, 12.0, 1.4, 256))


def mup_multipliers(keys: Keys, base: Defaults, embedding: float, depth: float, width: int) -> dict[str, float]:
    """The muP multipliers as fields of a ModelConfig. `embedding`, `depth`, `width`: defaults of scale_emb, scale_depth and dim_model_base;
    null switches the latter two off."""
    layers, hidden = base.size(keys, "num_hidden_layers"), base.size(keys, "hidden_size")
    depth = keys.number("scale_depth", None if keys.has("scale_depth") else depth)
    width = keys.integer("dim_model_base", hidden if keys.has("dim_model_base") else width)
    return {"embedding_multiplier": keys.number("scale_emb", embedding), "logits_scaling": hidden / width,
            "residual_multiplier": 1.0 if depth is None else depth / math.sqrt(layers)}


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return mla_tensors(config, layer, llama.layer_tensors(config, layer))
