"""GGUF metadata of gpt-oss: every other layer has a sliding window, implied by the architecture, and expert biases are stacked in one
tensor. Experts keep the MXFP4 they are published in, also on export.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .family_context import FamilyContext

FAMILY, NAME = "gpt_oss", "gpt-oss"
WINDOW_PERIOD = 2  # every second layer has no sliding window
ARCHITECTURE = {"keys": {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
                         "expert_feed_forward_length": "intermediate_size"}, "window_pattern": True,
                "layer_names": {"post_attention_norm": "post_attention_layernorm"},
                "full_names": {"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp.weight": "mlp.router.weight",
                               "ffn_gate_inp.bias": "mlp.router.bias"},
                "roles": {"post_norm": "post_attention_norm", "sinks": "attn_sinks"}}


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states."""
    raw |= {"sliding_window": context.window, "layer_types": context.layer_types(raw, WINDOW_PERIOD if context.window else 1),
            "attention_bias": context.has("attn_q.bias")}
