"""Mamba (130M to 2.8B): layers of Mamba 1 only, without MLP and attention.

ModelConfig requires attention heads and an intermediate size; no layer has them, so they get the smallest valid values.
"""

from __future__ import annotations

from dataclasses import replace

from ...kernels.mamba1_shape import Mamba1Shape
from ..config import Defaults, ModelConfig, decoder_config, demand_silu
from ..config_reader import Keys
from ..layer import Layer, narrowing
from . import TensorRule
from .jamba import mamba1_tensors, time_step_rank
from .llama import recurrent_mixer

# Training and runtime settings, aliases, and attention, which no layer has.
KEYS_HARMLESS = frozenset({
    "d_inner", "d_model", "fused_add_norm", "n_layer", "original_max_position_embeddings", "pad_vocab_size_multiple",
    "rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "ssm_cfg",
    "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale", "use_associative_scan", "use_mambapy"})
REFUSED_UNLESS = {"rms_norm": True, "sliding_window": None, "use_bias": False}
SIZES = {"vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 32}
# Of attention and MLP, which no layer has.
PLACEHOLDER_SIZES = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 1}


def config(keys: Keys) -> ModelConfig:
    return mamba1_config(keys, None)


def mamba1_config(keys: Keys, norm_eps: float | None) -> ModelConfig:
    """The config of a model of Mamba 1 layers only. `norm_eps`: epsilon of the norms of dt, B and C; None if it has no such norms.

    Configs state no context length, as the state has the same size for any: the maximum here is nominal.
    """
    base = Defaults(max_position_embeddings=1 << 20, bos=0, eos=(0,), eps_key="layer_norm_epsilon", norm_eps=1e-5, tied=True, sizes=SIZES)
    hidden, layers = (base.size(keys, name) for name in ("hidden_size", "num_hidden_layers"))
    width = keys.integer("intermediate_size", keys.integer("expand", 2, high=64) * hidden, high=2**22)
    shape = Mamba1Shape(width, keys.integer("state_size", 16, high=4096), time_step_rank(keys, "time_step_rank", hidden),
                        keys.integer("conv_kernel", 4, high=64), keys.flag("use_conv_bias", True), norm_eps is not None)
    config = decoder_config(keys.with_values(**PLACEHOLDER_SIZES), base, lambda *_: (None,) * layers, recurrent=shape,
                            recurrent_layers=tuple(range(layers)), layers_without_mlp=tuple(range(layers)))
    demand_silu(keys, config.hidden_act)
    return replace(config, recurrent_norm_eps=norm_eps)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    prefix = f"model.layers.{layer}."
    norm = {"input_norm": TensorRule(f"{prefix}norm.weight", (config.hidden_size,))}
    return norm | mamba1_tensors(config, f"{prefix}mixer.", norm_weights=False)


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    table = (config.vocab_size, config.hidden_size)
    rules = {"embed": TensorRule("model.embeddings.weight", table),
             "norm": TensorRule("model.norm_f.weight", (config.hidden_size,))}
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("lm_head.weight", table)}


@narrowing
def block(x: object, at: Layer) -> object:
    """x[T, D] -> x[T, D], with the taps of `recurrent_mixer`."""
    x = recurrent_mixer(x, at)
    at.tap("block_out", x)
    return x
