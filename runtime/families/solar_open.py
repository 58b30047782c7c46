"""Solar Open (100B): GLM's MoE with experts in all layers, and RoPE on whole heads."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import glm4_moe
from .deepseek_v3 import check_auto_map
from .glm4_moe import deepseek_moe_config

LIKE = glm4_moe
KEYS_HARMLESS = glm4_moe.KEYS_HARMLESS | {"intermediate_size", "num_nextn_predict_layers"}
SIZES = {"vocab_size": 196_608, "hidden_size": 4096, "moe_intermediate_size": 1280, "num_hidden_layers": 48, "num_attention_heads": 64}
CODE = r"(configuration|modeling)_solar_open\.SolarOpen\w+"  # auto_map of the published checkpoint; part of transformers now


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, head_dim=128, norm_eps=1e-5, sizes=SIZES, theta=1e6,
                    ffn_key="moe_intermediate_size")
    moe = deepseek_moe_config(keys, base.size(keys, "num_hidden_layers"), 128, 8, 0, True, width=1280)
    if 0 not in moe.layers:
        raise keys.fail("first_k_dense_replace", "0: every layer of this family has experts")
    return decoder_config(keys, base, qkv_bias=keys.flag("attention_bias", False), moe=moe)
