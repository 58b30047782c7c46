"""The dimensions that size a backend's workspace."""

from __future__ import annotations

from ..kernels.workspace import Dims
from .config import ModelConfig
from .kv.cross_attention_cache import pages_per_sequence


def dims(config: ModelConfig, ctx: int, chunk: int, rows: int, packed_kv: bool = False, bundled: bool = False,
         spilled_kv: bool = False, mtp: bool = False, lora: int = 0, between: int = 0) -> Dims:
    """Workspace dimensions. `mtp`: with the model's MTP layer; `lora`: the largest adapter rank; `between`: layers whose inputs drafts
    read."""
    own, queries = config.moe, max(config.layer_query_heads, default=config.num_attention_heads)
    mixture = (own.num_experts + own.zero_experts, own.experts_per_token, own.widest_expert) if own and own.layers else (0, 0, 0)
    return Dims(config.hidden_size, queries, config.num_key_value_heads, config.head_dim, config.widest_intermediate,
                config.vocab_size, min(chunk, ctx), ctx, rows, *mixture, packed_kv, bundled, spilled_kv, config.recurrent,
                config.output_gate_in_q,
                config.widest_mla, tuple(sorted({*config.cache_kv_heads} - {(config.num_key_value_heads, config.head_dim)})),
                config.num_hidden_layers * config.per_layer_input_dim, own is not None and own.parallel_to_mlp,
                2 * config.hidden_size if mtp else 0,
                config.parallel_hybrid, config.output_gate, config.residual_streams, config.low_rank_dim, lora, config.per_token_scale,
                config.v_head_dim,
                config.indexer.shape if config.indexer else None,
                config.compressed_attention.output_groups * config.compressed_attention.output_group_rank if config.compressed_attention
                else 0, len(own.hash_routed_layers) if own else 0,
                pages_per_sequence(config), config.residual_gate_rank, config.ngrams and config.ngrams.shape,
                len(config.ngrams.layers) if config.ngrams else 0, config.has_hyper_connections, between, config.differential_attention,
                config.gated_norm_rank > 0,
                config.num_attention_heads * config.mla.value if config.unmixed_streams else 0, bool(own and own.latent_dim))
