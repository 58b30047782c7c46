"""Lara 4 Mini: of five layers two have Qwen 3.5's linear attention, two sliding windows with RoPE, one full attention without positions.
Every layer has small experts and an ungated shared one.

Checkpoints fuse the input projections of linear attention into `in_proj`, rows [q | k | v | z | b | a].
"""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config, demand_silu
from ..config_reader import ConfigError, Keys
from ..config_rope import GLOBAL, LOCAL
from . import TensorRule, fused, llama
from .mixtral import expert_tensors, moe_config
from .qwen3_5_text import LINEAR, delta_shape, hybrid_tensors
from .qwen3_moe import NAMES

KEYS_HARMLESS = frozenset({"intermediate_size"})
REFUSED_UNLESS = {"decoder_sparse_step": 1, "mlp_bias": False, "mlp_only_layers": []}
PATTERN = (LINEAR, LOCAL, LINEAR, GLOBAL, LOCAL)  # layer types, where a config lists none
EXPERT_DIM = 512
FUSED = {"linear_attn.in_proj": ("state_in", "state_gate", "state_beta", "state_rate")}


def config(keys: Keys) -> ModelConfig:
    layers, high = keys.integer("num_hidden_layers", 34, high=MAX_LAYERS), 2**22
    kinds = keys.layer_types("layer_types", layers, (LINEAR, LOCAL, GLOBAL)) or [PATTERN[layer % len(PATTERN)] for layer in range(layers)]
    if LOCAL not in kinds and GLOBAL not in kinds:
        raise ConfigError("config.json: a model with only linear attention is not supported", "at least one layer must have attention")
    window, bias = keys.integer("sliding_window", 512), keys.flag("attention_bias", False)
    moe = moe_config(keys, 128, 4, keys.integer("moe_intermediate_size", EXPERT_DIM, high=high), keys.flag("norm_topk_prob", True),
                     range(layers), shared_expert_dim=keys.integer("shared_expert_intermediate_size", EXPERT_DIM, high=high))
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=4, head_dim=128, ffn_key="moe_intermediate_size", tied=True,
                    eos=(151_643,), sizes={"hidden_size": 1024, "moe_intermediate_size": EXPERT_DIM, "num_attention_heads": 16,
                                           "num_hidden_layers": 34, "vocab_size": 151_936})
    config = decoder_config(keys, base, windows=tuple(window if kind == LOCAL else None for kind in kinds),
                            rotary_layers=[kind == LOCAL for kind in kinds], qkv_bias=bias, o_bias=bias, qk_norm=True, moe=moe,
                            recurrent=delta_shape(keys, 8, 16),
                            recurrent_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR))
    demand_silu(keys, config.hidden_act, "its linear attention uses it too")
    return config


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules = hybrid_tensors(config, layer, expert_tensors(config, layer, "mlp", NAMES, shared="shared_expert"))
    if layer not in config.recurrent_layers:
        return rules
    norm = replace(rules["state_norm"], also=(f"model.layers.{layer}.linear_attn.out_norm.weight",))
    return fused({**rules, "state_norm": norm}, layer, FUSED)


outer_tensors = llama.outer_tensors
