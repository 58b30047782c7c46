"""GLM-4-0414: GLM with post-norms on attention and MLP. GLM-OCR's has an MTP layer."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, ModelConfig
from ..config_reader import Keys
from . import TensorRule, glm

LIKE = glm


def config(keys: Keys) -> ModelConfig:
    return replace(glm.config(keys), mtp_layers=keys.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, prefix = glm.layer_tensors(config, layer), f"model.layers.{layer}."
    names = {"o_norm": "post_self_attn_layernorm", "down_norm": "post_mlp_layernorm"}
    return rules | {role: TensorRule(f"{prefix}{name}.weight", rules["input_norm"].shape) for role, name in names.items()}
