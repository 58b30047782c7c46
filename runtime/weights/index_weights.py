"""Parameters of a sparse-attention indexer, and token selection with them."""

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


def index_weights(found: RoleSource) -> Indexer | None:
    """The indexer of a layer."""
    if "index_q" not in found.roles:
        return None
    linear, vector, (kind, eps) = found.linear, found.vector, found.config.indexer.norm

    def norm(role: str) -> Norm | None:
        return Norm(kind, vector(role), vector(f"{role}_bias"), eps) if role in found.roles else None

    return Indexer(linear("index_q"), norm("index_q_norm"), linear("index_k"), norm("index_k_norm"), linear("index_weights"),
                 norm("index_entered"), growth(found, "index_"), vector("index_places"))


def growth(found: RoleSource, whose: str = "") -> tuple[object, object] | None:
    """Per-head factors by which queries of a layer, or of its indexer, grow with position."""
    return (found.vector(f"{whose}grow_scale"), found.vector(f"{whose}grow_offset")) if f"{whose}grow_scale" in found.roles else None


def choose(ops: BlockOps, w: Indexer, q: object, k: object, weights: object | None, kv: LayerCache, positions: np.ndarray,
           rope: RopeTable | None, shape: IndexShape) -> None:
    """Select what the tokens of a pass attend to: products with the index matrices, normed and rotated in place; keys that are means over
    several tokens are normed and rotated once complete."""
    table = None if rope is None else rope.index
    if shape.weighted_pooling:
        kv.choose(ops.rope_heads(q, shape.heads, shape.width, positions, table, w.q_norm), k, weights, (w.k_norm, w.pool_bias))
        return
    if shape.pooled:
        kv.choose(ops.rope_heads(q, shape.heads, shape.width, positions, table, w.q_norm), k, weights, (w.k_norm, table))
        return
    k = ops.rope_heads(k, 1, shape.width, positions, table, w.k_norm)
    q = ops.rope_heads(q, shape.heads, shape.width, positions, table, w.q_norm)
    kv.choose(q, k, weights)
