"""Mamba 2 (130M to 2.8B, Mamba Codestral 7B): layers of Mamba 2 only, without MLP and attention."""

from __future__ import annotations

from ...kernels.mamba2_shape import Mamba2Shape
from ..config import Defaults, ModelConfig, decoder_config, demand_silu
from ..config_reader import ConfigError, Keys
from . import TensorRule, mamba
from .granitemoehybrid import check_steps, mamba_tensors
from .mamba import PLACEHOLDER_SIZES

LIKE = mamba
KEYS_HARMLESS = mamba.KEYS_HARMLESS | {"chunk_size", "norm_before_gate", "time_step_rank"}
SIZES = {"vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64}


def config(keys: Keys) -> ModelConfig:
    """Configs state no context length, as the state has the same size for any: the maximum here is nominal."""
    base = Defaults(max_position_embeddings=1 << 20, bos=0, eos=(2,), eps_key="layer_norm_epsilon", norm_eps=1e-5, sizes=SIZES)
    hidden, layers = (base.size(keys, name) for name in ("hidden_size", "num_hidden_layers"))
    shape = Mamba2Shape(keys.integer("num_heads", 128, high=4096), keys.integer("head_dim", 64, high=4096),
                        keys.integer("n_groups", 8, high=4096), keys.integer("state_size", 128, high=4096),
                        keys.integer("conv_kernel", 4, high=64), keys.flag("use_conv_bias", True))
    expand = keys.integer("expand", 2, high=64)
    if shape.values != expand * hidden:
        raise ConfigError(f"config.json: num_heads {shape.heads} times head_dim {shape.head_dim} is not {expand * hidden}, which is expand "
                          "times hidden_size")
    if shape.heads % shape.groups:
        raise ConfigError(f"config.json: num_heads {shape.heads} is not a multiple of n_groups {shape.groups}")
    check_steps(keys)
    config = decoder_config(keys.with_values(**PLACEHOLDER_SIZES), base, lambda *_: (None,) * layers, recurrent=shape,
                            recurrent_layers=tuple(range(layers)), layers_without_mlp=tuple(range(layers)))
    demand_silu(keys, config.hidden_act)
    return config


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    prefix = f"model.layers.{layer}."
    return {"input_norm": TensorRule(f"{prefix}norm.weight", (config.hidden_size,)), **mamba_tensors(config, f"{prefix}mixer.")}
