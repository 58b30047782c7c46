"""Granite 3 MoE (1B-A400M, 3B-A800M): the Granite block with experts in place of the MLP.

Checkpoints hold the experts of a layer together, which `canonical_names.py` takes apart.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, ModelConfig
from ..config_reader import Keys
from . import TensorRule, granite
from .mixtral import expert_tensors, moe_config
from .qwen3_moe import NAMES

REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "sliding_window": None}


def config(keys: Keys) -> ModelConfig:
    base, layers = granite.granite_config(keys, granite.DEFAULTS), keys.integer("num_hidden_layers", high=MAX_LAYERS)
    moe = moe_config(keys, 8, 2, base.intermediate_size, True, range(layers), routed_scale=base.residual_multiplier)
    return replace(base, moe=moe)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return expert_tensors(config, layer, "block_sparse_moe", NAMES)
