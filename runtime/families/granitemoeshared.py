"""Granite MoE with a shared expert: Granite 4's block with attention and positions in every layer."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, ModelConfig
from ..config_reader import Keys
from . import TensorRule, granite, granitemoe, granitemoehybrid
from .mixtral import moe_config

LIKE = granitemoe


def config(keys: Keys) -> ModelConfig:
    layers, shared = keys.integer("num_hidden_layers", high=MAX_LAYERS), keys.integer("shared_intermediate_size", 0, low=0, high=2**22)
    base = granite.granite_config(keys, granite.DEFAULTS)
    moe = moe_config(keys, 8, 2, base.intermediate_size, True, range(layers), routed_scale=base.residual_multiplier,
                     shared_expert_dim=shared or None)
    return replace(base, intermediate_size=shared or base.intermediate_size, moe=moe)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    made = granitemoe if config.moe.shared_expert_dim is None else granitemoehybrid
    return made.layer_tensors(config, layer)
