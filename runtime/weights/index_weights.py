"""Weights of the indexer of sparse attention, and the selection of tokens with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...quant.weight import Indexer, Norm

if TYPE_CHECKING:
    import numpy as np

    from ...kernels.indexer_shape import IndexShape
    from ..block_ops import BlockOps
    from ..cache import LayerCache
    from ..rope import RopeTable
    from .role_source import RoleSource


def indexer_weights(source: RoleSource) -> Indexer | None:
    """The indexer of a layer, if it has one."""
    if "index_q" not in source.roles:
        return None
    linear, vector = source.linear, source.vector
    kind, eps = source.config.indexer.norm

    def norm(role: str) -> Norm | None:
        return Norm(kind, vector(role), vector(f"{role}_bias"), eps) if role in source.roles else None

    return Indexer(
        q=linear("index_q"),
        q_norm=norm("index_q_norm"),
        k=linear("index_k"),
        k_norm=norm("index_k_norm"),
        weights=linear("index_weights"),
        input_norm=norm("index_entered"),
        query_scaling=query_scaling(source, "index_"),
        pool_bias=vector("index_pool_ape"),
    )


def query_scaling(source: RoleSource, prefix: str = "") -> tuple[object, object] | None:
    """Scales and offsets, by head, of queries by their position: those of a layer, or with a `prefix` of its indexer. None: not scaled."""
    if f"{prefix}query_scale_slope" not in source.roles:
        return None
    return source.vector(f"{prefix}query_scale_slope"), source.vector(f"{prefix}query_scale_offset")


def choose(ops: BlockOps, w: Indexer, q: object, k: object, weights: object | None, kv: LayerCache, positions: np.ndarray,
           rope: RopeTable | None, shape: IndexShape) -> None:
    """Select what the tokens of a pass attend to.

    q, k: index queries and keys before their norms; both are changed in place. Keys that are means over several tokens are normed and
    rotated by the cache, once they are complete.
    weights: of the index heads, per token.
    """
    table = None if rope is None else rope.index
    if not shape.pooled and not shape.weighted_pooling:
        k = ops.rope_heads(k, 1, shape.width, positions, table, w.k_norm)
    q = ops.rope_heads(q, shape.heads, shape.width, positions, table, w.q_norm)
    if shape.weighted_pooling:
        kv.choose(q, k, weights, (w.k_norm, w.pool_bias))
    elif shape.pooled:
        kv.choose(q, k, weights, (w.k_norm, table))
    else:
        kv.choose(q, k, weights)
