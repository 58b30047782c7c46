"""GGUF metadata of GLM 5.3 (GLM 5 Next): KDA layers as Kimi Linear's (`kimi_delta_attention.py`), latent attention without positions,
and an indexer whose pooled keys are made by two tensors beside the key's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...kernels.layout import SILU_LIMIT
from ...offload.gguf_header import Value, shown_value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import MAX_LAYERS, ModelConfig
from . import kimi_delta_attention, sparse_indexer
from .family_context import FamilyContext
from .latent_attention import MLA_LENGTHS

FAMILY, NAME = "glm5_next_text", "glm5-next"
SELECT_TAIL, SWIGLU_CLAMPS = "attention.indexer.kpool_select_tail", ("swiglu_clamp_exp", "swiglu_clamp_shexp")
KEYS = {"expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob", "expert_gating_func": "scoring_func",
        "expert_group_count": "n_group", "expert_group_used_count": "topk_group", "attention.kv_lora_rank": "kv_lora_rank",
        "attention.q_lora_rank": "q_lora_rank", kimi_delta_attention.CONV_KERNEL: "linear_conv_kernel_dim",
        kimi_delta_attention.HEAD_DIM: "linear_head_dim", kimi_delta_attention.GATE_LOWER_BOUND: "linear_lower_bound",
        **sparse_indexer.KEYS, "attention.indexer.kpool": "index_kpool",
        "hyper_connection.count": "hc_mult", "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
        "hyper_connection.epsilon": "hc_eps", "nextn_predict_layers": "num_nextn_predict_layers"}
REQUIRED = ("attention.kv_lora_rank", "attention.q_lora_rank", "attention.head_count_kv", *MLA_LENGTHS, kimi_delta_attention.CONV_KERNEL,
            kimi_delta_attention.HEAD_DIM, "expert_feed_forward_length", "expert_shared_count", *sparse_indexer.KEYS,
            "attention.indexer.kpool", "hyper_connection.count", "hyper_connection.sinkhorn_iterations", "hyper_connection.epsilon")
# Epsilon of the indexer's key norm, the same in every model.
INDEXER_NORM_EPSILON = "attention.layer_norm_epsilon"
OTHER_KEYS = frozenset((*MLA_LENGTHS, sparse_indexer.INDEXER_TYPES, SELECT_TAIL, *SWIGLU_CLAMPS, kimi_delta_attention.SAFE_GATE,
                        INDEXER_NORM_EPSILON))
_INDEXER = "self_attn.indexer."
NAMES = {**kimi_delta_attention.NAMES[kimi_delta_attention.KIMI], "attn_qkv": "self_attn.qkv_proj",
         "exp_probs_b": "mlp.gate.e_score_correction_bias", **sparse_indexer.NAMES,
         **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}}
FULL_NAMES = {**kimi_delta_attention.FULL_NAMES[kimi_delta_attention.KIMI],
              **{f"hc_{branch}_{part}.weight": f"hc_{branch}_{part}" for branch in ("attn", "ffn") for part in ("fn", "base", "scale")},
         # under either of two names
              **{f"{before}{part}.weight": f"{_INDEXER}index_kpool_compress_{part}" for before in ("indexer_compressor_", "indexer.kpool_")
                 for part in ("ape", "gate")}}
ROLES = {**kimi_delta_attention.ROLES, **sparse_indexer.ROLES,
         "index_pool_ape": "indexer_compressor_ape", **{
             f"{role}{end}": f"hc_{branch}_{part}" for role, branch in (("attn_mix", "attn"), ("mlp_mix", "ffn"))
             for end, part in (("", "fn"), ("_base", "base"), ("_scale", "scale"))}}
ARCHITECTURE = {"keys": KEYS, "required_keys": REQUIRED, "other_keys": OTHER_KEYS, "layer_names": NAMES, "full_names": FULL_NAMES,
                "layer_kinds": kimi_delta_attention.LAYER_TYPES,
        "roles": ROLES, "split_tensors": {**kimi_delta_attention.SPLIT_TENSORS, "index_k": ("indexer.attn_k", "indexer_compressor_gate")}}
RESIDUAL_STREAMS = 4  # how many of a token llama.cpp runs


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    context.require_sigmoid_scores(raw)
    header, name, raw["sliding_window"] = context.header, context.name, context.window
    data, path, blocks = header.metadata, header.path, raw["num_hidden_layers"]
    widths = [data[f"{name}.{key}"] for key in MLA_LENGTHS]
    for key, width in zip(MLA_LENGTHS, widths, strict=True):
        if type(width) is not int or not 0 < width < 1 << 16:
            damaged(path, f"states {name}.{key} {shown_value(width)}, expected a width")
    if type(rope_dims := data.get(f"{name}.rope.dimension_count", 0)) is not int or rope_dims:
        raise CheckpointError(f"{path} states {name}.rope.dimension_count {shown_value(rope_dims)}, which is not supported",
                              "models of this family have no positions")
    heads = raw["num_attention_heads"]
    raw |= {"qk_rope_head_dim": 0, "qk_nope_head_dim": widths[0], "v_head_dim": widths[1], "num_key_value_heads": heads,
            "linear_num_heads": heads, "index_kpool_always_select_tail": data.get(f"{name}.{SELECT_TAIL}", True)}
    for key in ("head_dim", "rope_theta", "sliding_window"):
        raw.pop(key, None)
    for key, default in (("first_k_dense_replace", 0), ("routed_scaling_factor", 1.0), ("norm_topk_prob", False), ("n_group", 1),
                         ("topk_group", 1), ("linear_lower_bound", None)):
        raw.setdefault(key, default)
    mtp_layers = raw.setdefault("num_nextn_predict_layers", 0)
    if type(mtp_layers) is not int or type(blocks) is not int or not 0 <= mtp_layers < blocks <= MAX_LAYERS:
        damaged(path, f"states {name}.nextn_predict_layers {shown_value(mtp_layers)} of {shown_value(blocks)} blocks")
    layers = raw["num_hidden_layers"] = blocks - mtp_layers  # the file's count includes them
    if isinstance(kinds := raw.get("layer_types"), list):
        raw["layer_types"] = kinds[:layers]
    sparse_indexer.add_layer_types(header, name, raw, blocks)
    clamps = [each for key in SWIGLU_CLAMPS for each in context.numbers(key, SILU_LIMIT)[:layers] if each != SILU_LIMIT]
    raw["swiglu_limit"] = clamps[0] if clamps else SILU_LIMIT  # the config reader refuses another value


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of this family, without the architecture's prefix."""
    indexer, layers = config.indexer, config.num_hidden_layers
    return kimi_delta_attention.export_keys(config) | sparse_indexer.export_keys(config) | {
        "attention.indexer.kpool": indexer.shape.tokens_per_key, SELECT_TAIL: True, INDEXER_NORM_EPSILON: float(indexer.norm[1]),
        "hyper_connection.count":
        config.residual_streams, "hyper_connection.sinkhorn_iterations": config.sinkhorn_iterations,
        "hyper_connection.epsilon": float(config.sinkhorn_eps), **{key: np.full(layers, SILU_LIMIT, np.float32) for key in SWIGLU_CLAMPS}}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    yield from kimi_delta_attention.export_limits(config)
    yield config.residual_streams != RESIDUAL_STREAMS, \
        f"has {config.residual_streams} streams of a token, of which llama.cpp runs {RESIDUAL_STREAMS}"
