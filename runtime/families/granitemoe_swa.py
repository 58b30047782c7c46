"""Granite Swash MoE (3B-A600M): the Granite MoE, with or without a shared expert, and Granite Swash's attention."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_reader import Keys
from . import TensorRule, granite_swa, granitemoeshared

LIKE = granitemoeshared
REFUSED_UNLESS = {"mlp_bias": False}


def config(keys: Keys) -> ModelConfig:
    return granite_swa.with_windows_and_ropes(keys, granitemoeshared.config(keys))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return granitemoeshared.layer_tensors(config, layer) | granite_swa.sink_tensors(config, layer)
