"""Granite 4: the Granite block with attention, or (the models with h in their name) mostly Mamba 2; the MLP is stored as the shared
expert, with routed experts in h-tiny and h-small."""

from __future__ import annotations

import math
from dataclasses import replace

from ...kernels.mamba2_shape import Mamba2Shape
from ..config import MAX_LAYERS, ModelConfig, demand_silu
from ..config_reader import ConfigError, Keys, show
from . import TensorRule, granite, llama
from .mixtral import expert_tensors, moe_config
from .qwen3_moe import NAMES

KEYS_HARMLESS = frozenset({"init_method", "mamba_chunk_size"})
REFUSED_UNLESS = {"mamba_proj_bias": False, "mlp_bias": False, "normalization_function": "rmsnorm", "sliding_window": None}
ATTENTION, MAMBA = "full_attention", "linear_attention"
PARTS = {"state_gate": "gate_proj", "state_in": "xbc_proj", "state_rate": "dt_proj"}  # of in_proj, by the names that they have apart
NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # of steps, as writers have it


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    kinds = keys.layer_types("layer_types", layers, (ATTENTION, MAMBA)) or (MAMBA,) * layers
    if ATTENTION not in kinds:
        raise ConfigError("config.json: layer_types without attention are not supported", f"at least one layer must be {ATTENTION}")
    turns = keys.text("position_embedding_type", None)
    if turns not in (None, "nope", "rope"):
        raise ConfigError(f"config.json: position_embedding_type {show(turns)} is not supported", "known: rope, and nope or null for none")
    base = granite.granite_config(keys,
                                  replace(granite.DEFAULTS, ffn_key="shared_intermediate_size", sizes={"shared_intermediate_size": 1024}))
    width, shape = keys.integer("intermediate_size", 11_008, high=2**22), mamba_shape(keys, base)
    if keys.integer("num_local_experts", 8, low=0) == 0:
        keys.integer("num_experts", None, low=0), keys.integer("num_experts_per_tok", 2, low=0)  # of none
        moe = None
    else:
        moe = moe_config(keys, 8, 2, width, True, range(layers), routed_scale=base.residual_multiplier,
                         shared_expert_dim=base.intermediate_size)
    states = tuple(layer for layer, kind in enumerate(kinds) if kind == MAMBA)
    if states:
        check_shape(keys, base, shape)
    return replace(base, ropes=tuple(base.ropes[layer] if turns == "rope" and layer not in states else None for layer in range(layers)),
                   moe=moe, recurrent=shape if states else None, recurrent_layers=states)


def mamba_shape(keys: Keys, base: ModelConfig) -> Mamba2Shape:
    """The state of a layer of state spaces. Raises ConfigError."""
    heads, expand = keys.integer("mamba_n_heads", 128, high=4096), keys.integer("mamba_expand", 2, high=64)
    values = expand * base.hidden_size
    keys.has("mamba_d_head")
    stated = None if keys.raw.get("mamba_d_head") == "auto" else keys.integer("mamba_d_head", None, high=4096)
    shape = Mamba2Shape(heads, stated or values // heads, keys.integer("mamba_n_groups", 1, high=4096),
                        keys.integer("mamba_d_state", 256, high=4096), keys.integer("mamba_d_conv", 4, high=64),
                        keys.flag("mamba_conv_bias", True))
    check_steps(keys)
    return shape


def check_steps(keys: Keys) -> None:
    """Raises ConfigError for steps with limits."""
    limit = keys.raw["time_step_limit"] if keys.has("time_step_limit") else None
    if limit is not None and limit not in NO_LIMIT:
        raise ConfigError(f"config.json: time_step_limit {show(limit)} is not supported", "no published model limits its steps")


def check_shape(keys: Keys, base: ModelConfig, shape: Mamba2Shape) -> None:
    """Raises ConfigError for heads that do not make up the width or are in no equal groups, and for an activation that is not SiLU."""
    values = keys.integer("mamba_expand", 2) * base.hidden_size
    if shape.values != values:
        raise ConfigError(f"config.json: mamba_n_heads {shape.heads} times mamba_d_head {shape.head_dim} is not {values}, which is "
                          "mamba_expand times hidden_size")
    if shape.heads % shape.groups:
        raise ConfigError(f"config.json: mamba_n_heads {shape.heads} is not a multiple of mamba_n_groups {shape.groups}")
    demand_silu(keys, base.hidden_act, "its state spaces use it too")


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    mixed, prefix = config.moe is not None, f"model.layers.{layer}."
    if mixed:
        rules = expert_tensors(config, layer, "block_sparse_moe", NAMES)
    else:
        rules = llama.layer_tensors(config, layer)
    width, under = config.intermediate_size, "shared." if mixed else ""
    for i, role in enumerate(("gate", "up")):
        rules[under + role] = replace(rules[under + role], part_of=(f"{prefix}shared_mlp.input_linear.weight", i * width, 2 * width))
    rules[f"{under}down"] = replace(rules[f"{under}down"], name=f"{prefix}shared_mlp.output_linear.weight")
    if layer not in config.recurrent_layers:
        return rules
    return {role: rule for role, rule in rules.items() if ".self_attn." not in rule.name} | mamba_tensors(config, f"{prefix}mamba.")


def mamba_tensors(config: ModelConfig, prefix: str) -> dict[str, TensorRule]:
    """Tensors of state spaces by role: the first product is stored as one matrix."""
    state, hidden = config.recurrent, config.hidden_size
    heights = {"state_gate": state.values, "state_in": state.channels, "state_rate": state.heads}
    whole, first, rules = sum(heights.values()), 0, {}
    for role, rows in heights.items():
        rules[role] = TensorRule(f"{prefix}{PARTS[role]}.weight", (rows, hidden),
                                 part_of=(f"{prefix}in_proj.weight", first, whole))
        first += rows
    rules |= {"state_conv": TensorRule(f"{prefix}conv1d.weight", (state.channels, 1, state.taps)),
              "state_decay": TensorRule(f"{prefix}A_log", (state.heads,)), "state_dt": TensorRule(f"{prefix}dt_bias", (state.heads,)),
              "state_skip": TensorRule(f"{prefix}D", (state.heads,)),
              **({"state_norm": TensorRule(f"{prefix}norm.weight", (state.values,))} if state.normed else {}),
              "state_out": TensorRule(f"{prefix}out_proj.weight", (hidden, state.values))}
    return rules | ({"state_conv_bias": TensorRule(f"{prefix}conv1d.bias", (state.channels,))} if state.biased else {})
