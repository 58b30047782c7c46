"""ERNIE 4.5 MoE (21B-A3B, 300B-A47B): the ERNIE block with corrected routing and shared experts."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig
from ..config_reader import Keys
from . import TensorRule
from .ernie4_5 import ernie_config
from .glm4_moe_lite import sparse_layers_of
from .mixtral import MAX_EXPERTS, expert_tensors, moe_config
from .qwen3_moe import NAMES

KEYS_HARMLESS = frozenset({"moe_capacity"})  # training only
# moe_norm_min has no effect at this value: no sum of scores is as small.
REFUSED_UNLESS = {"attention_bias": False, "layer_types": None, "mlp_bias": False, "moe_gate": "topk", "moe_gate_act": "softmax",
                  "moe_norm_gate_logits": True, "moe_norm_min": 1e-12, "sliding_window": None, "use_bias": False}


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", 28, high=MAX_LAYERS)
    first, last = keys.integer("moe_layer_start_index", 1, low=0), keys.integer("moe_layer_end_index", -1, low=-1)
    every = keys.integer("moe_layer_interval", 1, high=MAX_LAYERS)
    width = keys.integer("moe_intermediate_size", 1536, high=2**22)
    shared = keys.integer("moe_num_shared_experts", 2, low=0, high=MAX_EXPERTS)
    sparse = [layer for layer in range(layers) if (layer + 1) % every == 0 and first <= layer <= (layers - 1 if last == -1 else last)]
    kinds = keys.strings("mlp_layer_types", layers)
    per_token = keys.integer("moe_k", 6, high=MAX_EXPERTS)
    moe = moe_config(keys, 64, per_token, width, True, sparse if kinds is None else sparse_layers_of(kinds), "moe_num_experts",
                     correction_bias=keys.flag("moe_use_aux_free", True), shared_expert_dim=width * shared if shared else None)
    sizes = {"vocab_size": 103_424, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 28, "num_attention_heads": 20}
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=4, bos=1, eos=(2,), norm_eps=1e-5, tied=True, sizes=sizes)
    return replace(ernie_config(keys, base), moe=moe, mtp_layers=keys.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules = expert_tensors(config, layer, "mlp", NAMES, correction="moe_statics.e_score_correction_bias")
    if "correction" in rules:
        rules["correction"] = replace(rules["correction"], shape=(1, config.moe.num_experts))
    return rules
