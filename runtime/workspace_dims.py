"""The dimensions that size a backend's workspace."""

from __future__ import annotations

from ..kernels.workspace import Dims
from .config import ModelConfig
from .kv.cross_attention_cache import pages_per_sequence


def dims(config: ModelConfig, ctx: int, chunk: int, logit_rows: int, packed_kv: bool = False, bundled: bool = False,
         spilled_kv: bool = False, mtp: bool = False, max_lora_rank: int = 0, draft_state_layers: int = 0) -> Dims:
    """Workspace dimensions of a model.

    chunk: tokens of a prefill chunk.
    logit_rows: rows of logits computed at once.
    mtp: the model's multi-token prediction layer is used.
    draft_state_layers: layers whose inputs are kept for drafts.
    """
    moe = config.moe if config.moe and config.moe.layers else None
    compressed, ngrams = config.compressed_attention, config.ngrams
    kv_heads = config.num_key_value_heads, config.head_dim
    return Dims(
        hidden_size=config.hidden_size,
        num_attention_heads=max(config.layer_query_heads, default=config.num_attention_heads),
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.widest_intermediate,
        vocab_size=config.vocab_size,
        chunk=min(chunk, ctx),
        ctx=ctx,
        logit_rows=logit_rows,
        num_experts=moe.num_experts + moe.zero_experts if moe else 0,
        experts_per_token=moe.experts_per_token if moe else 0,
        expert_dim=moe.widest_expert if moe else 0,
        packed_kv=packed_kv,
        bundled=bundled,
        spilled_kv=spilled_kv,
        recurrent=config.recurrent,
        output_gate_in_q=config.output_gate_in_q,
        mla=config.widest_mla,
        other_kv_heads=tuple(sorted({*config.cache_kv_heads} - {kv_heads})),
        per_layer_input_width=config.num_hidden_layers * config.per_layer_input_dim,
        parallel_to_mlp=config.moe is not None and config.moe.parallel_to_mlp,
        mtp_input_width=2 * config.hidden_size if mtp else 0,
        parallel_hybrid=config.parallel_hybrid,
        output_gate=config.output_gate,
        residual_streams=config.residual_streams,
        low_rank_dim=config.low_rank_dim,
        max_lora_rank=max_lora_rank,
        per_token_scale=config.per_token_scale,
        v_head_dim=config.v_head_dim,
        indexer=config.indexer.shape if config.indexer else None,
        output_group_width=compressed.output_groups * compressed.output_group_rank if compressed else 0,
        num_hash_routed_layers=len(config.moe.hash_routed_layers) if config.moe else 0,
        max_image_key_pages=pages_per_sequence(config),
        residual_gate_rank=config.residual_gate_rank,
        ngrams=ngrams.shape if ngrams else None,
        num_ngram_layers=len(ngrams.layers) if ngrams else 0,
        has_hyper_connections=config.has_hyper_connections,
        num_draft_state_layers=draft_state_layers,
        differential_attention=config.differential_attention,
        gated_norms=config.gated_norm_rank > 0,
        mla_gate_width=config.num_attention_heads * config.mla.value if config.unmixed_streams else 0,
        latent_experts=bool(config.moe and config.moe.latent_dim),
    )
