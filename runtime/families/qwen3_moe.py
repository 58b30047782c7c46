"""Qwen 3 MoE (30B-A3B, 235B-A22B): the Qwen 3 block with many small experts in most layers."""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule
from .mixtral import expert_tensors, moe_config
from .qwen2 import qwen_window

# transformers ignores max_window_layers here: all layers have the window, or none.
KEYS_HARMLESS = frozenset({"max_window_layers"})
# Qwen3-Coder's config states some features that all models of the family have, or none.
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_mrope": False,
                  "use_qk_norm": True}
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}  # role of an expert's matrix -> its name in checkpoints


def config(keys: Keys) -> ModelConfig:
    layers, bias = keys.integer("num_hidden_layers", high=MAX_LAYERS), keys.flag("attention_bias", False)
    moe = moe_config(keys, 128, 8, keys.integer("moe_intermediate_size", 768, high=2**22), keys.flag("norm_topk_prob", False),
                     sparse_layers(keys))
    base = Defaults(max_position_embeddings=32_768, num_key_value_heads=4)
    return decoder_config(keys, base, windows=(qwen_window(keys),) * layers, qkv_bias=bias, o_bias=bias, qk_norm=True, moe=moe)


def sparse_layers(keys: Keys) -> list[int]:
    """The layers with experts: every `decoder_sparse_step`th, except those in `mlp_only_layers`."""
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    step, dense = keys.integer("decoder_sparse_step", 1, high=2048), keys.layers("mlp_only_layers", layers)
    return [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return expert_tensors(config, layer, "mlp", NAMES)
