"""GGUF metadata of MiniCPM 3: latent attention by the widths of the expanded heads, and the multipliers of its single size, which no key
states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...offload.gguf_header import Value, shown_value
from ...offload.safetensors_header import damaged
from ..config import ModelConfig
from .family_context import FamilyContext

FAMILY = NAME = "minicpm3"
KEYS = {"attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank"}
REQUIRED = (*KEYS, "attention.key_length", "rope.dimension_count")
EMBEDDING_MULTIPLIER, SCALE_DEPTH, DIM_MODEL_BASE = 12.0, 1.4, 256


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    header, raw["sliding_window"] = context.header, context.window
    query, rope = (header.metadata[f"{NAME}.{key}"] for key in REQUIRED[2:])
    for key, width in zip(REQUIRED[2:], (query, rope)):
        if type(width) is not int or not 0 < width < 1 << 16:
            damaged(header.path, f"states {NAME}.{key} {shown_value(width)}, expected a width")
    if rope >= query:
        damaged(header.path, f"states {NAME}.rope.dimension_count {rope} of heads of {query}")
    raw.pop("head_dim", None)
    raw |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": query - rope, "num_key_value_heads": raw["num_attention_heads"],
            "scale_emb": EMBEDDING_MULTIPLIER, "scale_depth": SCALE_DEPTH, "dim_model_base": DIM_MODEL_BASE}


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of latent attention, without the architecture's prefix."""
    mla = config.mla
    return {"attention.kv_lora_rank": mla.rank, "attention.q_lora_rank": mla.query_rank, "attention.key_length": mla.query,
            "attention.value_length": mla.value, "attention.head_count_kv": config.num_attention_heads, "rope.dimension_count": mla.rope}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    mla, residual_multiplier = config.mla, SCALE_DEPTH / math.sqrt(config.num_hidden_layers)
    yield config.rope.kind == "llama3", "has rotary positions of kind llama3"
    yield mla.query_rank is None, "projects its queries directly"
    yield mla.value * config.num_attention_heads != config.hidden_size, f"has values of {mla.value}"
    yield config.embedding_multiplier != EMBEDDING_MULTIPLIER, "has another embedding multiplier"
    yield not math.isclose(config.residual_multiplier, residual_multiplier, rel_tol=1e-6), "has another residual multiplier"
    yield not math.isclose(config.logits_scaling, config.hidden_size / DIM_MODEL_BASE, rel_tol=1e-6), "has another logits divisor"
