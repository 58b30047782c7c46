"""The dimensions that size a backend's workspace."""

from __future__ import annotations

from ..kernels.workspace import Dims
from .config import ModelConfig
from .kv.cross_attention_cache import pages_per_sequence


def dims(config: ModelConfig, ctx: int, chunk: int, rows: int, packed_kv: bool = False, bundled: bool = False,
         spilled_kv: bool = False, mtp: bool = False, lora: int = 0, between: int = 0) -> Dims:
    """Workspace dimensions. `mtp`: with the model's MTP layer; `lora`: the largest adapter rank; `between`: layers whose inputs drafts
    read."""
    own, queries = config.mixture, max(config.layer_queries, default=config.num_attention_heads)
    mixture = (own.experts + own.handed, own.per_token, own.widest) if own and own.layers else (0, 0, 0)
    return Dims(config.hidden_size, queries, config.num_key_value_heads, config.head_dim, config.widest,
                config.vocab_size, min(chunk, ctx), ctx, rows, *mixture, packed_kv, bundled, spilled_kv, config.state, config.gated_queries,
                config.widest_latent, tuple(sorted({*config.cache_heads} - {(config.num_key_value_heads, config.head_dim)})),
                config.num_hidden_layers * config.input_width, own is not None and own.apart, 2 * config.hidden_size if mtp else 0,
                config.states_beside, config.gates_apart, config.streams, config.low_rank, lora, config.one_scale, config.narrow,
                config.indexed.shape if config.indexed else None,
                config.compressed.groups * config.compressed.group_rank if config.compressed else 0, len(own.picked) if own else 0,
                pages_per_sequence(config), config.mix_rank, config.ngrams and config.ngrams.shape,
                len(config.ngrams.layers) if config.ngrams else 0, config.says_mixes, between, config.differs, config.norms_gated > 0,
                config.num_attention_heads * config.latent.value if config.streams_kept else 0, bool(own and own.latent))
