"""Apertus (8B, 70B): the Llama block with QK norms and an ungated MLP whose activation has two learned numbers per layer (xIELU, arXiv
2411.13010)."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..layer import Layer
from . import TensorRule, llama
from .llama import attention, decoder_block

CURVES = ("xielu_alpha_p", "xielu_alpha_n")  # of a config that was made of a GGUF file: what checkpoints hold as tensors
KEYS_HARMLESS = frozenset({"post_norm", "qk_norm"})
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
# Of positions where a config has no section about them.
THETA = 12_000_000.0
STRETCHED = {"rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "original_max_position_embeddings": 8192,
             "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ACT = "xielu"


def config(keys: Keys) -> ModelConfig:
    if (act := keys.text("hidden_act", ACT)) != ACT:
        raise ConfigError(f"config.json: hidden_act = {show(act)} is not supported for apertus models", f"known: {ACT}")
    own = {"hidden_act": "silu"}  # which stands for the other until it is put in its place
    if all(keys.raw.get(name) is None for name in ("rope_parameters", "rope_scaling")):
        if (theta := keys.number("rope_theta", THETA, above=1.0)) != THETA:  # which some releases of transformers pass over, others do not
            raise ConfigError(f"config.json: rope_theta = {theta:g} is not supported for apertus models without rope_parameters",
                              f"without a RoPE section the base must be {THETA:g}")
        own["rope_parameters"] = STRETCHED
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=65_536, bos=1, eos=(2,), norm_eps=1e-5, theta=THETA, sizes=SIZES)
    config = decoder_config(keys.saying(**own), base, qkv_bias=bias, o_bias=bias, qk_norm=True)
    above, below = (_numbers(keys, name, config.num_hidden_layers) for name in CURVES)
    if (above is None) != (below is None):
        raise ConfigError(f"config.json: {CURVES[above is not None]} is missing")
    return replace(config, hidden_act=ACT, activation_params=() if above is None else tuple(zip(above, below)))


def _numbers(keys: Keys, name: str, layers: int) -> list[float] | None:
    stated = keys.raw.get(name) if keys.holds(name) else None
    if stated is None:
        return None
    if not isinstance(stated, list) or len(stated) != layers or any(type(each) is not float or not isfinite(each) for each in stated):
        raise ConfigError(f"config.json: {name} is {show(stated)}, expected a number for each of {layers} layers")
    return stated


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules = {role: rule for role, rule in llama.layer_tensors(config, layer).items() if role not in ("gate", "gate_bias")}
    prefix = f"model.layers.{layer}."
    rules |= {"input_norm": TensorRule(f"{prefix}attention_layernorm.weight", rules["input_norm"].shape),
              "post_norm": TensorRule(f"{prefix}feedforward_layernorm.weight", rules["post_norm"].shape)}
    if config.activation_params:
        return rules
    return rules | {"curve_above": TensorRule(f"{prefix}mlp.act_fn.alpha_p", (1,)),
                    "curve_below": TensorRule(f"{prefix}mlp.act_fn.alpha_n", (1,))}


def _second_half(x: object, at: Layer) -> object:
    """An MLP without gates, whose curve each layer has learned."""
    w = at.w
    at.tap("mlp_in", x)
    x = at.ops.mlp(x, w.post_norm, w.up, w.down, "none", at.see("mlp_hidden"), curve=w.xielu)
    at.tap("block_out", x)
    return x


block = decoder_block(attention, _second_half)
