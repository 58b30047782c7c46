"""Qwen 1.5 and 2 MoE (MoE-A2.7B, 57B-A14B): the Qwen 2 block with routed experts and a shared one."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule
from .mixtral import expert_tensors, moe_config
from .qwen3_moe import NAMES, sparse_layers

KEYS_HARMLESS = frozenset({"max_window_layers", "sliding_window"})
# No published model switches windows on, and which layers then have them has changed in transformers.
REFUSED_UNLESS = {"attention_bias": False, "layer_types": None, "mlp_bias": False, "use_mrope": False, "use_sliding_window": False}


def config(keys: Keys) -> ModelConfig:
    moe = moe_config(keys, 60, 4, keys.integer("moe_intermediate_size", 1408, high=2**22), keys.flag("norm_topk_prob", False),
                     sparse_layers(keys), shared_expert_dim=keys.integer("shared_expert_intermediate_size", 5632, high=2**22),
                     shared_expert_gate=True)
    base = Defaults(max_position_embeddings=32_768, num_key_value_heads=16)
    return decoder_config(keys, base, qkv_bias=keys.flag("qkv_bias", True), moe=moe)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return expert_tensors(config, layer, "mlp", NAMES, shared="shared_expert")
