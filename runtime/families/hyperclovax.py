"""HyperCLOVA X SEED Think (14B, 32B): the Granite block with post-norms on attention and MLP, and scaled logits."""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig
from ..config_reader import Keys
from . import TensorRule, granite, llama
from .deepseek_v3 import check_auto_map
from .granite import granite_config

LIKE = granite
KEYS_HARMLESS = frozenset({"activation_function", "attn_pdrop", "embd_pdrop", "end_token_id", "summary_first_dropout"})
REFUSED_UNLESS = {**granite.REFUSED_UNLESS, "use_post_norm": True}
CODE = r"(configuration|modeling)_hyperclovax\.HyperCLOVAX\w+"  # of the published ones, which became part of transformers
AFTER = {"o_norm": "post_norm1", "down_norm": "post_norm2"}


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    config = granite_config(keys, Defaults(max_position_embeddings=2048, bos=1, eos=(2,)), mlp_bias=keys.flag("mlp_bias", False))
    scale = keys.number("attention_multiplier", None)  # absent it is the usual root, where Granite's is 1
    return replace(config, attn_scale=scale, logits_scaling=1 / config.logits_scaling)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return llama.layer_tensors(config, layer) | {role: TensorRule(f"model.layers.{layer}.{name}.weight", (config.hidden_size,))
                                                 for role, name in AFTER.items()}
