"""Granite mixtures with an expert that every token visits: the block of Granite 4's, with attention and positions in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..config import MAX_LAYERS, ModelConfig
from ..config_reader import Keys
from . import TensorRule, granite, granitemoe, granitemoehybrid
from .llama import block, outer_tensors
from .mixtral import mixture
from .qwen3_moe import NAMES

__all__ = ["KEYS_HARMLESS", "KEYS_USED", "NAMES", "REFUSED_UNLESS", "block", "config", "layer_tensors", "outer_tensors"]

KEYS_USED = granitemoe.KEYS_USED | {"shared_intermediate_size"}
KEYS_HARMLESS = granitemoe.KEYS_HARMLESS
REFUSED_UNLESS: Mapping[str, object] = granitemoe.REFUSED_UNLESS


def config(keys: Keys) -> ModelConfig:
    layers, shared = keys.integer("num_hidden_layers", high=MAX_LAYERS), keys.integer("shared_intermediate_size", 0, low=0, high=2**22)
    base = granite.multiplied(keys, granite.USUAL)
    own = mixture(keys, 8, 2, base.intermediate_size, True, range(layers), factor=base.residual_multiplier, shared_width=shared or None)
    return replace(base, intermediate_size=shared or base.intermediate_size, mixture=own)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    made = granitemoe if config.mixture.shared_width is None else granitemoehybrid
    return made.layer_tensors(config, layer)
