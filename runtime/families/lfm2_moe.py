"""LFM2 MoE (8B-A1B): the LFM2 block with corrected sigmoid routing in all layers but the first."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, ModelConfig
from ..config_reader import Keys
from . import TensorRule, lfm2
from .lfm2 import conv_config, conv_tensors
from .mixtral import NAMES, expert_tensors, moe_config

LIKE = lfm2
KEYS_HARMLESS = frozenset({"conv_use_xavier_init", "rms_norm_eps"})
REFUSED_UNLESS = {**{key: value for key, value in lfm2.REFUSED_UNLESS.items() if not key.startswith("block_")},
                  "block_auto_adjust_ff_dim": False, "full_attn_idxs": None}
SIZES = {**lfm2.SIZES, "hidden_size": 2048, "intermediate_size": 7168}


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", SIZES["num_hidden_layers"], high=MAX_LAYERS)
    moe = moe_config(keys, 32, 4, keys.integer("moe_intermediate_size", 1792, high=2**22), keys.flag("norm_topk_prob", True),
                     range(keys.integer("num_dense_layers", 2, low=0, high=MAX_LAYERS), layers), sigmoid=True,
                     routed_scale=keys.number("routed_scaling_factor", 1.0), correction_bias=keys.flag("use_expert_bias", True))
    return conv_config(keys, replace(lfm2.DEFAULTS, sizes=SIZES), reads_full_attn_idxs=False, moe=moe)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return conv_tensors(config, layer, expert_tensors(config, layer, "feed_forward", NAMES, correction="expert_bias"))
