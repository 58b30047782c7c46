"""Granite Swash: the Granite block with attention sinks, a sliding window in three of four layers, and RoPE with a base per layer, or
none."""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig
from ..config_reader import Keys
from . import TensorRule, granite, llama
from .qwen2 import layer_windows

REFUSED_UNLESS = {}
WINDOW, PATTERN = 128, 4  # defaults; the first of every four layers has full attention
DEFAULTS = Defaults(max_position_embeddings=8192, num_key_value_heads=4, bos=100_257, eos=(100_257,), norm_eps=1e-5, tied=True, sizes={
    "vocab_size": 100_352, "hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 20})


def config(keys: Keys) -> ModelConfig:
    return with_windows_and_ropes(keys, granite.granite_config(keys, DEFAULTS, mlp_bias=keys.flag("mlp_bias", False)))


def with_windows_and_ropes(keys: Keys, base: ModelConfig) -> ModelConfig:
    """`base` with the windows and positions of each layer: the section of rotary positions holds for all, its base only where
    `layer_rope_theta` lists none, in which 0 says that a layer has no positions."""
    layers, rope = base.num_hidden_layers, base.rope
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else WINDOW)
    usual = ["sliding_attention" if layer % PATTERN else "full_attention" for layer in range(layers)]
    listed = keys.has("layer_rope_theta") and keys.raw["layer_rope_theta"] is not None
    bases = keys.numbers("layer_rope_theta", layers, or_zero=True) if listed else None
    if bases is not None and any(0 < each <= 1 for each in bases):
        raise keys.fail("layer_rope_theta", "bases above 1, or 0 for a layer without positions")
    ropes = base.ropes if bases is None else tuple(replace(rope, theta=each) if each else None for each in bases)
    return replace(base, windows=layer_windows(keys, window, usual), ropes=ropes)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return llama.layer_tensors(config, layer) | sink_tensors(config, layer)


def sink_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return {"sinks": TensorRule(f"model.layers.{layer}.self_attn.sinks", (config.num_attention_heads,))}
