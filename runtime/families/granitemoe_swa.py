"""Granite Swash mixtures (3B-A600M): the Granite mixture, with a shared expert or without, seeing as Granite Swash does."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_reader import Keys
from . import TensorRule, granite_swa, granitemoeshared

LIKE = granitemoeshared
REFUSED_UNLESS = {"mlp_bias": False}


def config(keys: Keys) -> ModelConfig:
    return granite_swa.seeing(keys, granitemoeshared.config(keys))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return granitemoeshared.layer_tensors(config, layer) | granite_swa.sinks(config, layer)
