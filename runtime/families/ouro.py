"""Ouro (1.4B, 2.6B): looped layers as in Nanbeige, with pre- and post-norms.

An early-exit gate may end a token's loops. Published configs set its threshold to 1, which no sigmoid exceeds, so it never does; another
threshold is refused.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig
from ..config_reader import Keys
from . import TensorRule, llama, nanbeige
from .deepseek_v3 import check_auto_map
from .nanbeige import looped_config, with_loop_norm

LIKE = nanbeige
KEYS_HARMLESS = frozenset({"max_window_layers"})
REFUSED_UNLESS = {"attention_bias": False, "early_exit_step": None, "early_exit_threshold": 1.0, "mlp_bias": False,
                  "skip_loop_final_norm": False, "sliding_window": None, "use_sliding_window": False}
CODE = r"(configuration|modeling)_ouro\.Ouro\w+"
POST_NORMS = {"o_norm": "input_layernorm_2", "down_norm": "post_attention_layernorm_2"}


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=32_768, num_key_value_heads=32)
    return looped_config(keys, base, keys.integer("total_ut_steps", 4, high=MAX_LAYERS))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, prefix = llama.layer_tensors(config, layer % config.stored_layers), f"model.layers.{layer % config.stored_layers}."
    rules |= {role: replace(rules["input_norm"], name=f"{prefix}{name}.weight") for role, name in POST_NORMS.items()}
    return with_loop_norm(config, layer, rules)
