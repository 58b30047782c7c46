"""Granite 4 without state spaces (350M, 1B, micro): the Granite block, whose MLP is stored as the expert that all tokens share.

The hybrid ones among them have layers that are no attention, and are refused for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..config import MAX_LAYERS, ModelConfig
from ..config_reader import ConfigError, Keys, show
from . import TensorRule, granite, llama
from .llama import block, outer_tensors

__all__ = ["KEYS_HARMLESS", "KEYS_USED", "REFUSED_UNLESS", "block", "config", "layer_tensors", "outer_tensors"]

KEYS_USED = granite.KEYS_USED - {"mlp_bias"} | {"layer_types", "num_local_experts", "position_embedding_type", "shared_intermediate_size"}
# Of experts and state spaces, which none of these models has; the widths inside both are stated all the same.
KEYS_HARMLESS = frozenset({"init_method", "intermediate_size", "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head",
                           "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "num_experts_per_tok",
                           "output_router_logits", "router_aux_loss_coef", "time_step_limit"})
REFUSED_UNLESS: Mapping[str, object] = {"mlp_bias": False, "normalization_function": "rmsnorm", "num_experts": None, "sliding_window": None}
KINDS = ("attention", "full_attention")


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    others = [kind for kind in keys.words("layer_types", layers) or ("mamba",) if kind not in KINDS]
    if others:
        raise ConfigError(f"config.json: layers of type {show(others[0])} are not supported",
                          "of Granite 4 those without h in their name run: granite-4.0-350m, -1b, -micro")
    if experts := keys.integer("num_local_experts", 8, low=0):
        raise ConfigError(f"config.json: num_local_experts = {experts} beside attention alone is not supported for granitemoehybrid models",
                          "no published one has them")
    kind = keys.text("position_embedding_type", None)
    if kind not in (None, "rope"):
        raise ConfigError(f"config.json: position_embedding_type {show(kind)} is not supported", "known: rope, and null for no positions")
    base = granite.multiplied(keys, replace(granite.USUAL, ffn_key="shared_intermediate_size", sizes={"shared_intermediate_size": 1024}))
    return base if kind == "rope" else replace(base, ropes=(None,) * layers)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, width = llama.layer_tensors(config, layer), config.intermediate_size
    prefix = f"model.layers.{layer}.shared_mlp."
    for i, role in enumerate(("gate", "up")):
        rules[role] = replace(rules[role], part_of=(f"{prefix}input_linear.weight", i * width, 2 * width))
    rules["down"] = replace(rules["down"], name=f"{prefix}output_linear.weight")
    return rules
