"""GGUF metadata of MiniMax M3: norms with one added, sparse attention in the layers that have experts, and expert width beside the dense
layers' width.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...offload.gguf_header import Value, shown_value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import MAX_LAYERS, ModelConfig
from ..families.minimax_m3_vl_text import FULL, SPARSE_ATTENTION
from .family_context import FamilyContext

FAMILY, NAME = "minimax_m3_vl_text", "minimax-m3"
SIGMOID, SHARED_EXPERT_COUNT, LEADING_DENSE = 2, "expert_shared_count", "leading_dense_block_count"
INDEXER_KEYS = {"head_count": "index_n_heads", "key_length": "index_head_dim", "top_k": "index_topk_blocks",
                "block_size": "index_block_size",
                "local_blocks": "index_local_blocks"}
KEYS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "intermediate_size",
        "feed_forward_length": "dense_intermediate_size", SHARED_EXPERT_COUNT: "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_gating_func": "scoring_func", **{f"attention.indexer.{key}": target for key, target in INDEXER_KEYS.items()}}
REQUIRED = ("attention.key_length", "expert_feed_forward_length", SHARED_EXPERT_COUNT, *(key for key in KEYS if "indexer" in key))
_MOE_PREFIX = "block_sparse_moe."
NAMES = {"exp_probs_b": f"{_MOE_PREFIX}e_score_correction_bias",
         **{f"ffn_{part}_shexp": f"{_MOE_PREFIX}shared_experts.{part}_proj" for part in ("gate", "up", "down")},
         **{f"indexer.{part}_{kind}": f"self_attn.index_{part}_{kind}" for part in "qk" for kind in ("proj", "norm")}}
ROLES = {f"index_{part}{end}": f"indexer.{part}_{kind}" for part in "qk" for end, kind in (("", "proj"), ("_norm", "norm"))}
ARCHITECTURE = {"keys": KEYS, "required_keys": REQUIRED, "layer_names": NAMES, "roles": ROLES, "norm_offset": 1.0, "partial_rotary": True,
                "other_keys": frozenset({"expert_weights_norm", LEADING_DENSE})}


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    context.require_sigmoid_scores(raw)
    header = context.header
    layers, width = raw["num_hidden_layers"], raw["intermediate_size"]
    if type(layers) is not int or not 0 < layers <= MAX_LAYERS:
        damaged(header.path, f"states {NAME}.block_count {shown_value(layers)}")
    if header.metadata.get(f"{NAME}.expert_weights_norm", True) is not True:
        raise CheckpointError(f"{header.path} states {NAME}.expert_weights_norm false, which is not supported",
                              "expert weights of this family are normalized")
    raw |= {"sliding_window": context.window, "shared_intermediate_size": width, "rope_theta": raw.get("rope_theta", 10_000.0),
            "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0), "moe_layer_freq": [
                int(f"blk.{layer}.ffn_gate_inp.weight" in header.tensors) for layer in range(layers)], "layer_types": [
                SPARSE_ATTENTION if f"blk.{layer}.indexer.q_proj.weight" in header.tensors else FULL for layer in range(layers)]}
    raw.setdefault("routed_scaling_factor", 1.0)


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys in addition to those of every model, without the architecture's prefix."""
    moe, index = config.moe, config.indexer.shape
    return {"expert_feed_forward_length": moe.expert_dim, SHARED_EXPERT_COUNT: 1, LEADING_DENSE: min(moe.layers),
            "expert_weights_scale": float(moe.routed_scale),
            "expert_weights_norm": True, "expert_gating_func": SIGMOID, **dict(zip((f"attention.indexer.{key}" for key in INDEXER_KEYS), (
                index.heads, index.width, index.top_k, index.block_size, index.local_blocks), strict=True))}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express, or of what llama.cpp assumes otherwise."""
    moe, layers = config.moe, config.num_hidden_layers
    experts = set(range(min(moe.layers, default=layers), layers))
    yield not experts or set(moe.layers) != experts, "has layers without experts"
    yield (moe.shared_expert_dim != moe.expert_dim,
           f"has an expert of {moe.shared_expert_dim} numbers shared by all tokens beside experts of {moe.expert_dim}")
    indexed = None if config.indexer is None else {
        layer for layer, source in enumerate(config.indexer.source_layers) if source is not None}
    yield indexed != experts, \
        "has sparse attention in other layers than those with experts"
