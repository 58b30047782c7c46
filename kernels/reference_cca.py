"""Reference for compressed convolutional attention's queries, keys and values, in NumPy and float64; shapes as in `cca_shape.py`."""

from __future__ import annotations

import numpy as np

from .cca_shape import CcaShape

EPS = np.finfo(np.float32).eps  # minimum length that a query or key is divided by


def mix(x: np.ndarray, before: np.ndarray, taps: np.ndarray, bias: np.ndarray, by_head: np.ndarray, head_bias: np.ndarray,
        temps: np.ndarray, shape: CcaShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries [T, heads * depth], keys and values [T, kv_heads * depth] from projections x [T, channels + half], following the inputs
    `before` [taps - 1, channels]: taps [first, convolved] and `bias`, by_head [convolved, second, depth] and `head_bias`, temps [kv_heads].
    """
    tokens, depth, group = len(x), shape.depth, shape.heads // shape.kv_heads
    inputs = np.concatenate([before, x[:, : shape.channels]]).astype(np.float64)
    rows = inputs[:, : shape.qk_channels]
    count = len(rows) - shape.first + 1
    once = bias + sum(taps[tap] * rows[tap : tap + count] for tap in range(shape.first))
    split = once.reshape(count, -1, depth)
    weights = by_head.reshape(-1, depth, shape.second, depth)
    twice = head_bias + sum(np.einsum("hoi,thi->tho", weights[:, :, tap], split[tap : tap + tokens]).reshape(tokens, -1)
                            for tap in range(shape.second))
    unconvolved = x[:, : shape.qk_channels].astype(np.float64).reshape(tokens, -1, depth)
    q, k = unconvolved[:, : shape.heads], unconvolved[:, shape.heads :]
    residual = 0.5 * (q + np.repeat(k, group, 1))
    convolved = twice.reshape(tokens, -1, depth)
    q = convolved[:, : shape.heads] + residual
    k = convolved[:, shape.heads :] + residual.reshape(tokens, shape.kv_heads, group, depth).mean(2)
    q, k = (heads * depth**0.5 / np.maximum(np.linalg.norm(heads, axis=2, keepdims=True), EPS) for heads in (q, k))
    delayed = inputs[len(before) - 1 :][:tokens, shape.qk_channels :]
    return q.reshape(tokens, -1), (k * temps[:, None]).reshape(tokens, -1), np.concatenate([x[:, shape.channels :], delayed], 1)
