"""Apertus (8B, 70B) and Apertus 1.5's text part: the Llama block with QK norms and an ungated MLP whose activation has two learned numbers
per layer (xIELU, arXiv 2411.13010).

Apertus 1.5 reads tokens of images and sounds, which it never generates: its embedding has rows for them, its head has none.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..layer import Layer
from . import TensorRule, llama
from .llama import attention, decoder_block

XIELU_KEYS = ("xielu_alpha_p", "xielu_alpha_n")  # in configs read from GGUF files; other checkpoints hold tensors instead
KEYS_HARMLESS = frozenset({"post_norm", "qk_norm"})
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
# RoPE of a config without a section about it.
THETA = 12_000_000.0
DEFAULT_ROPE = {"rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "original_max_position_embeddings": 8192,
             "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ACT = "xielu"


def config(keys: Keys) -> ModelConfig:
    if (act := keys.text("hidden_act", ACT)) != ACT:
        raise ConfigError(f"config.json: hidden_act = {show(act)} is not supported for apertus models", f"known: {ACT}")
    overrides = {"hidden_act": "silu"}  # a placeholder for xIELU until the end of this function
    if all(keys.raw.get(name) is None for name in ("rope_parameters", "rope_scaling")):
        if (theta := keys.number("rope_theta", THETA, above=1.0)) != THETA:  # only some releases of transformers read it
            raise ConfigError(f"config.json: rope_theta = {theta:g} is not supported for apertus models without rope_parameters",
                              f"without a RoPE section the base must be {THETA:g}")
        overrides["rope_parameters"] = DEFAULT_ROPE
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=65_536, bos=1, eos=(2,), norm_eps=1e-5, theta=THETA, sizes=SIZES)
    rows = base.size(keys, "vocab_size")
    overrides["vocab_size"] = keys.integer("output_vocab_size", rows, high=rows)
    config = decoder_config(keys.with_values(**overrides), base, qkv_bias=bias, o_bias=bias, qk_norm=True)
    above, below = (_layer_numbers(keys, name, config.num_hidden_layers) for name in XIELU_KEYS)
    if (above is None) != (below is None):
        raise ConfigError(f"config.json: {XIELU_KEYS[above is not None]} is missing")
    extra = rows - config.vocab_size
    if extra and config.tie_word_embeddings:
        raise ConfigError(f"config.json: output_vocab_size {config.vocab_size} is not vocab_size {rows}, beside tie_word_embeddings = true",
                          "a head with fewer rows than the embedding cannot be the embedding")
    return replace(config, hidden_act=ACT, activation_params=() if above is None else tuple(zip(above, below)), extra_embeddings=extra,
                   extra_embeddings_in_text=extra > 0)


def _layer_numbers(keys: Keys, name: str, layers: int) -> list[float] | None:
    """A number for each layer, None if the key is absent. Raises ConfigError."""
    stated = keys.raw.get(name) if keys.has(name) else None
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


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    """Embedding, with rows for tokens that are never generated, final norm and head."""
    rules = llama.outer_tensors(config)
    return rules | {"embed": replace(rules["embed"], shape=(config.vocab_size + config.extra_embeddings, config.hidden_size))}


def _mlp_half(x: object, at: Layer) -> object:
    """The second half of a block: an MLP without a gate and with xIELU."""
    w = at.w
    at.tap("mlp_in", x)
    x = at.ops.mlp(x, w.post_norm, w.up, w.down, "none", at.observer("mlp_hidden"), xielu=w.xielu)
    at.tap("block_out", x)
    return x


block = decoder_block(attention, _mlp_half)
