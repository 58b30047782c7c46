"""GGUF metadata of DeepSeek V4: key compression ratio per layer as a number, gate clamps as a list, and integer tables that select
experts. A matrix before o holds the parts of every head group.
"""

from __future__ import annotations

import numpy as np

from ...kernels.layout import SILU_LIMIT
from ...offload.gguf_header import shown_value
from ...offload.safetensors_header import CheckpointError
from ..config import MAX_LAYERS, ModelConfig
from .family_context import FamilyContext

FAMILY, NAME = "deepseek_v4", "deepseek4"
SQRT_SOFTPLUS = 4  # a value of expert_gating_func
COMPRESS_RATIOS, GATING_FUNC, SWIGLU_CLAMPS = "attention.compress_ratios", "expert_gating_func", ("swiglu_clamp_exp", "swiglu_clamp_shexp")
KEYS = {"expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_shared_count": "n_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size", "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob", "attention.q_lora_rank": "q_lora_rank", "attention.output_lora_rank": "o_lora_rank",
        "attention.output_group_count": "o_groups", "attention.compress_rope_freq_base": "compress_rope_theta",
        "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk", "hash_layer_count": "num_hash_layers", "hyper_connection.count": "hc_mult",
        "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters", "hyper_connection.epsilon": "hc_eps",
        "nextn_predict_layers": "num_nextn_predict_layers"}
OTHER_KEYS = frozenset({COMPRESS_RATIOS, GATING_FUNC, *SWIGLU_CLAMPS, "leading_dense_block_count"})
OPTIONAL_KEYS = frozenset({"feed_forward_length"})  # no layer is dense
REQUIRED = (COMPRESS_RATIOS, GATING_FUNC, "attention.key_length", "attention.sliding_window", "rope.dimension_count", *(
    key for key in KEYS if key not in ("hash_layer_count", "nextn_predict_layers")))
NAMES = {"attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "attn_kv": "attn.wkv", "attn_kv_a_norm": "attn.norm", "attn_q_a": "attn.wq_a",
         "attn_q_a_norm": "attn.q_norm", "attn_q_b": "attn.wq_b", "attn_output_b": "attn.wo_b", "exp_probs_b": "ffn.gate.bias",
         "attn_compressor_kv": "attn.compressor.wkv", "attn_compressor_gate": "attn.compressor.wgate",
         "attn_compressor_norm": "attn.compressor.norm", "indexer_compressor_kv": "attn.indexer.compressor.wkv",
         "indexer_compressor_gate": "attn.indexer.compressor.wgate", "indexer_compressor_norm": "attn.indexer.compressor.norm",
         "indexer.attn_q_b": "attn.indexer.wq_b", "indexer.proj": "attn.indexer.weights_proj", **{
             f"ffn_{part}_shexp": f"ffn.shared_experts.{target}" for part, target in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}}
FULL_NAMES = {"attn_sinks.weight": "attn.attn_sink", "attn_compressor_ape.weight": "attn.compressor.ape",
              "indexer_compressor_ape.weight": "attn.indexer.compressor.ape", "ffn_gate_tid2eid.weight": "ffn.gate.tid2eid", **{
             f"hc_{branch}_{part}.weight": f"hc_{branch}_{part}" for branch in ("attn", "ffn") for part in ("fn", "base", "scale")}}
OUTER = {"output.weight": "head.weight", **{f"output_hc_{part}.weight": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")}}
OUTPUT_DOWN = "attn_output_a.weight"


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states. Raises CheckpointError."""
    header = context.header
    layers, ratios = raw["num_hidden_layers"], header.metadata[f"{NAME}.{COMPRESS_RATIOS}"]
    if (gating_func := header.metadata[f"{NAME}.{GATING_FUNC}"]) != SQRT_SOFTPLUS:
        raise CheckpointError(f"{header.path}: {NAME}.{GATING_FUNC} = {shown_value(gating_func)} is not supported for this architecture",
                              "give the folder of the original checkpoint, if its family is supported")
    if type(layers) is not int or not 0 < layers <= MAX_LAYERS or not isinstance(ratios, np.ndarray) or len(ratios) < layers:
        raise CheckpointError(f"{header.path} states {NAME}.{COMPRESS_RATIOS} {shown_value(ratios)} for {shown_value(layers)} layers",
                              "the file is damaged or was converted wrongly: download it again, or use another one")
    mtp_layers = raw.setdefault("num_nextn_predict_layers", 0)
    if type(mtp_layers) is int and 0 <= mtp_layers < layers and f"blk.{layers - 1}.nextn.enorm.weight" in header.tensors:
        raw["num_hidden_layers"] = layers - mtp_layers  # the file's count includes them
    raw |= {"compress_ratios": [int(value) for value in ratios], "sliding_window": context.window, "swiglu_limit": SILU_LIMIT}
    raw.setdefault("num_hash_layers", 0)
    for key in SWIGLU_CLAMPS:
        for bound in context.numbers(key, SILU_LIMIT)[: raw["num_hidden_layers"]]:
            if bound != SILU_LIMIT:
                raw["swiglu_limit"] = bound  # the config reader refuses it


def output_group_names(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Checkpoint names of the parts of the output down-projection, one per group of heads."""
    layer = name.split(".")[1]
    return tuple(f"model.layers.{layer}.attn.wo_a.{group}.weight" for group in range(config.compressed_attention.output_groups))
