"""GLM-4-0414: GLM with norms behind attention and MLP as well."""

from __future__ import annotations

from ..config import ModelConfig
from . import TensorRule, glm
from .glm import KEYS_HARMLESS, KEYS_USED, REFUSED_UNLESS, block, config, outer_tensors

__all__ = ["KEYS_HARMLESS", "KEYS_USED", "REFUSED_UNLESS", "block", "config", "layer_tensors", "outer_tensors"]


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, prefix = glm.layer_tensors(config, layer), f"model.layers.{layer}."
    names = {"o_norm": "post_self_attn_layernorm", "down_norm": "post_mlp_layernorm"}
    return rules | {role: TensorRule(f"{prefix}{name}.weight", rules["input_norm"].shape) for role, name in names.items()}
