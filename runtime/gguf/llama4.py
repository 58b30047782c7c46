"""GGUF metadata of Llama 4, and what its files leave implicit: chunked attention, NoPE layers, and layers with QK norms."""

from __future__ import annotations

from collections.abc import Iterator

from ...offload.gguf_header import Value
from ...offload.safetensors_header import CheckpointError
from ..config import ModelConfig
from .family_context import FamilyContext

FAMILY = "llama4_text"
NO_ROPE_PERIOD, CHUNK_LENGTH = 4, 8192  # every fourth layer has no RoPE; tokens of an attention chunk
EXPERTS_WITHOUT_QK_NORM = 128  # number of experts of the one size without QK norms
KEYS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "intermediate_size",
        "feed_forward_length": "intermediate_size_mlp", "interleave_moe_layer_step": "interleave_moe_layer_step"}
NAMES = {**{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
         **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")}}
FULL_NAMES = {"ffn_gate_inp.weight": "feed_forward.router.weight"}
REQUIRED = ("expert_count", "expert_feed_forward_length", "interleave_moe_layer_step")


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states. Raises CheckpointError."""
    header, window = context.header, context.stated_window
    if window is not None:
        raise CheckpointError(f"{header.path} states llama4.attention.sliding_window {window}, which is not supported",
                              "models with chunks of 8192 run, whose files do not state them: give the folder of the original checkpoint")
    heads = raw["num_attention_heads"]
    if isinstance(heads, int) and heads > 0:
        raw.setdefault("head_dim", raw["hidden_size"] // heads)
    raw.setdefault("num_key_value_heads", heads)
    raw.setdefault("rope_theta", 10_000.0)
    raw |= {"attention_bias": "blk.0.attn_q.bias" in header.tensors, "attention_chunk_size": CHUNK_LENGTH, "floor_scale": CHUNK_LENGTH,
            "no_rope_layer_interval": NO_ROPE_PERIOD, "use_qk_norm": raw["num_local_experts"] != EXPERTS_WITHOUT_QK_NORM}


def _moe_layer_step(config: ModelConfig) -> int:
    """The period of layers with experts, assuming that they are evenly spaced."""
    return min(config.moe.layers, default=0) + 1


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of the family, without the architecture's prefix."""
    return {"feed_forward_length": max(config.layer_intermediate_sizes, default=config.intermediate_size),
            "interleave_moe_layer_step": _moe_layer_step(config),
            "expert_feed_forward_length": config.moe.expert_dim}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    layers, moe = range(config.num_hidden_layers), config.moe
    yield moe is None, "has no experts"
    step = _moe_layer_step(config)
    yield moe.layers != frozenset(layers[step - 1 :: step]), f"has experts elsewhere than in every {step}th layer"
    yield [rope is not None for rope in config.ropes] != [(layer + 1) % NO_ROPE_PERIOD != 0 for layer in layers], \
        f"does not leave out RoPE in exactly every {NO_ROPE_PERIOD}th layer"
    yield config.qk_norm_unweighted != (moe.num_experts != EXPERTS_WITHOUT_QK_NORM), \
        f"has {moe.num_experts} experts and {'norms' if config.qk_norm_unweighted else 'no norms'} of queries and keys"
    yield config.max_supported_tokens not in (CHUNK_LENGTH - 1, CHUNK_LENGTH), f"has other chunks of text than of {CHUNK_LENGTH}"
