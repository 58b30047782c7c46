"""GGUF metadata of models with gated short convolutions (LFM2), and what it cannot express."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...offload.gguf_header import Value
from ..config import ModelConfig
from .family_context import SIGMOID, FamilyContext

CONV, FULL = "conv", "full_attention"
# Key below the architecture's name -> key of config.json.
KEYS = {"shortconv.l_cache": "conv_L_cache", "attention.layer_norm_rms_epsilon": "norm_eps"}
MOE_KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers", "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob", "expert_gating_func": "scoring_func"}
REQUIRED_KEYS, EXPERT_BIAS = ("shortconv.l_cache", "attention.head_count_kv"), "exp_probs_b"
# Tensor of a layer in the file -> in the checkpoint, without kind.
NAMES = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
         "attn_k_norm": "self_attn.k_layernorm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
         "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
         EXPERT_BIAS: "feed_forward.expert_bias"}
# The final norm; llama.cpp and older files name it `token_embd_norm`.
OUTER = {"token_embd_norm.weight": "model.embedding_norm.weight", "output_norm.weight": "model.embedding_norm.weight"}
ROLES = {"norm": "token_embd_norm", "state_in": "shortconv.in_proj", "state_conv": "shortconv.conv", "state_out": "shortconv.out_proj"}


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    raw["sliding_window"] = context.window
    raw.setdefault("rope_theta", 10_000.0)  # llama.cpp's default
    if raw["model_type"] == "lfm2":
        raw["block_auto_adjust_ff_dim"] = False  # files state the adjusted width
        return
    context.require_sigmoid_scores(raw)
    raw["use_expert_bias"] = any(f".{EXPERT_BIAS}." in tensor for tensor in context.header.tensors)


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of a family with short convolutions, without the architecture's prefix."""
    heads = [0 if layer in config.recurrent_layers else config.num_key_value_heads for layer in range(config.num_hidden_layers)]
    keys: dict[str, Value] = {"attention.head_count_kv": np.array(heads, np.int32), "shortconv.l_cache": config.recurrent.taps}
    if (moe := config.moe) is not None:
        keys |= {"expert_feed_forward_length": moe.expert_dim, "expert_gating_func": SIGMOID,
                 "expert_weights_scale": float(moe.routed_scale),
                 "leading_dense_block_count": min(moe.layers, default=config.num_hidden_layers)}
    return keys


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express of a family with short convolutions."""
    yield config.recurrent.taps < 2, "has no convolution over several tokens"
    if (moe := config.moe) is not None:
        yield not moe.correction_bias, "chooses experts by scores that nothing corrects"
        yield moe.routed_scale != 1.0, f"scales its expert weights by {moe.routed_scale:g}"
