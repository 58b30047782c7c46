"""GGUF metadata of Cohere's mixtures: MLP width as that of dense layers, sliding windows as one boolean per layer, and shared experts
averaged with the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...offload.gguf_header import Value
from ...offload.safetensors_header import CheckpointError
from ..config import ModelConfig
from .family_context import FamilyContext

FAMILY, NAME = "cohere2_moe", "cohere2moe"
WINDOW_PERIOD = 4  # default: every fourth layer has no sliding window
KEYS = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale", "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok", "expert_shared_count": "num_shared_experts",
        "expert_feed_forward_length": "intermediate_size", "feed_forward_length": "prefix_dense_intermediate_size",
        "leading_dense_block_count": "first_k_dense_replace", "expert_weights_norm": "norm_topk_prob",
        "expert_gating_func": "expert_selection_fn",
        "nextn_predict_layers": "num_nextn_predict_layers"}
REQUIRED = ("logit_scale", "attention.sliding_window", "expert_feed_forward_length", "leading_dense_block_count")
SCORE_FUNCTIONS = {0: "sigmoid", 1: "softmax", 2: "sigmoid"}  # llama.cpp treats 0 and an absent key as sigmoid
RMS_NORM_EPSILON = "attention.layer_norm_rms_epsilon"


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states. Raises CheckpointError."""
    header, kinds = context.header, context.layer_types(raw, WINDOW_PERIOD)
    gating_func, layers = raw.pop("expert_selection_fn", 0), raw["num_hidden_layers"]
    if gating_func not in SCORE_FUNCTIONS or gating_func == 1 and raw.get("norm_topk_prob") is not True:
        raise CheckpointError(f"{header.path}: {NAME}.expert_gating_func = {gating_func} is not supported for this architecture with "
                              f"expert_weights_norm = {raw.get('norm_topk_prob', False)}",
                              "give the folder of the original checkpoint, if its family is supported")
    raw |= {"expert_selection_fn": SCORE_FUNCTIONS[gating_func], "norm_topk_prob": raw.get("norm_topk_prob", False),
            "sliding_window": context.window,
            "attention_bias": "blk.0.attn_q.bias" in header.tensors, "shared_expert_combination_strategy": "average"}
    mtp_layers = raw.setdefault("num_nextn_predict_layers", 0)
    if type(mtp_layers) is int and type(layers) is int and 0 <= mtp_layers < layers:
        raw["num_hidden_layers"] = layers - mtp_layers  # the file's count includes them
        kinds = kinds[: layers - mtp_layers]
    raw["layer_types"] = kinds


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys in addition to those of every mixture of experts, without the architecture's prefix."""
    moe = config.moe
    dense = sum(layer not in moe.layers for layer in range(config.num_hidden_layers))
    keys: dict[str, Value] = {
        "attention.sliding_window": next((window for window in config.windows if window is not None), 0),
        "attention.sliding_window_pattern": np.array([window is not None for window in config.windows], np.int32),
        "feed_forward_length": config.intermediate_size_of(0), "expert_feed_forward_length": moe.expert_dim,
        "leading_dense_block_count": dense,
        "expert_gating_func": 2 if moe.sigmoid else 1, "expert_weights_norm": moe.renormalise,
        "logit_scale": float(1 / config.logits_scaling), "attention.layer_norm_epsilon": float(config.norm_eps)}
    if config.norm_kind == "rms":
        keys[RMS_NORM_EPSILON] = float(config.norm_eps)
    if moe.shared_expert_dim:
        keys |= {"expert_shared_count": moe.shared_expert_dim // moe.expert_dim, "expert_shared_feed_forward_length": moe.shared_expert_dim}
    return keys


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    moe = config.moe
    dense = sum(layer not in moe.layers for layer in range(config.num_hidden_layers))
    has_rope = [each is not None or layer < dense for layer, each in enumerate(config.windows)]
    yield set(config.windows) == {None}, "has no window"
    yield moe.layers != frozenset(range(dense, config.num_hidden_layers)), "has layers without experts after others"
    yield has_rope != [rope is not None for rope in config.ropes], "rotates other layers than those with a window and dense ones"
    yield bool(moe.shared_expert_dim) and config.multiplier("shared.down") == 1.0, "adds the shared expert to the sum of the others"
