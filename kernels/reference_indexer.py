"""Reference for the lightning indexer, in NumPy and float64. Shapes as in `indexer_shape.py`."""

from __future__ import annotations

import numpy as np

from .indexer_shape import IndexShape
from .reference import normalise, rotate_heads


def scores(q: np.ndarray, k: np.ndarray, weights: np.ndarray | None, position: int, shape: IndexShape) -> np.ndarray:
    """Score of each unit for each token: [T, groups, units], -inf for units of later tokens. q [T, heads * width]; k [n, width], the keys
    of tokens 0 to n - 1, or of `rate` tokens each; weights [T, heads], None if heads select separately or all count alike. T tokens from
    `position` on.

    Only the order of scores matters, so there is no division by square roots of widths or head counts.
    """
    split = q.reshape(len(q), shape.heads, shape.width).astype(np.float64)
    result = np.einsum("thw,nw->thn", split, k.astype(np.float64))
    if not shape.per_head:
        weights = np.ones(result.shape[:2]) if weights is None else weights.astype(np.float64)
        result = np.einsum("thn,th->tn", np.maximum(result, 0), weights)[:, None]
    at = (position + np.arange(len(q)) + 1) // shape.tokens_per_key - 1  # the last complete key
    result = np.where(np.arange(len(k)) > at[:, None, None], -np.inf, result)
    padded = np.full((*result.shape[:2], -(-len(k) // shape.block_size) * shape.block_size), -np.inf)
    padded[..., : len(k)] = result
    best = padded.reshape(*result.shape[:2], -1, shape.block_size).max(-1)
    unit, own_unit = np.arange(best.shape[-1]), (at // shape.block_size)[:, None, None]
    return np.where((unit <= own_unit) & (unit > own_unit - shape.local_blocks), np.inf, best)


def choose(scores: np.ndarray, shape: IndexShape, position: int = 0) -> np.ndarray:
    """The units selected for each token from these scores: int32 [T, groups, listed], ascending; ties go to the earlier unit. `position`:
    of the first token. The unit that has no key yet is always included."""
    best = np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., : shape.top_k], axis=-1)
    if shape.pooled:
        last = (position + np.arange(len(best)) + 1) // shape.tokens_per_key
        best = np.concatenate([best, np.broadcast_to(last[:, None, None], (*best.shape[:2], 1))], axis=-1)
    return best.astype(np.int32)


def means(rows: np.ndarray, norm: tuple[str, np.ndarray, None, float], rate: int, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Keys [n, width] of each complete run of `rate` rows: their mean, normed, then rotated (half-split) by the position of the first row,
    cos and sin [n, R / 2]."""
    complete = len(rows) // rate
    normed = normalise(rows[: complete * rate].astype(np.float64).reshape(complete, rate, -1).mean(1), *norm)
    return rotate_heads(normed[:, None], cos[:complete], sin[:complete])[:, 0]


def pools(rows: np.ndarray, rate: int) -> np.ndarray:
    """Keys [n, width] of each complete run of `rate` rows [tokens, 2 * width]: the mean of their first halves, weighted per channel by a
    softmax over their second halves."""
    complete, width = len(rows) // rate, rows.shape[1] // 2
    split = rows[: complete * rate].astype(np.float64).reshape(complete, rate, 2, width)
    weights = np.exp(split[:, :, 1] - split[:, :, 1].max(1, keepdims=True))
    return (split[:, :, 0] * weights).sum(1) / weights.sum(1)


def seen(chosen: np.ndarray, tokens: int, kv_heads: int, shape: IndexShape) -> np.ndarray:
    """Which of the first `tokens` tokens each query may see: bool [T, kv_heads, tokens]."""
    units = np.zeros((*chosen.shape[:2], shape.units(tokens) + 1), bool)  # a unit may begin after the last token
    np.put_along_axis(units, chosen.astype(np.int64), True, axis=-1)
    return np.repeat(np.repeat(units, shape.unit_tokens, axis=-1)[..., :tokens], kv_heads // chosen.shape[1], axis=1)
