"""Reference for compressed attention keys (each built from several tokens), in NumPy and float64; shapes as in `compressed_shape.py`."""

from __future__ import annotations

import numpy as np

from .reference import normalise


def empty(width: int) -> np.ndarray:
    """An accumulator without tokens, [3, width]: running maximum, sum, weighted sum."""
    return np.zeros((3, width))


def taken_in(accumulator: np.ndarray, row: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Accumulator `accumulator` [3, width] after one more token's row and logit, [width] each."""
    before = np.where(accumulator[1] > 0, accumulator[0], -np.inf)
    maximum = np.maximum(before, weight)
    old_factor, new_factor = np.exp(before - maximum), np.exp(weight - maximum)
    return np.stack([maximum, accumulator[1] * old_factor + new_factor, accumulator[2] * old_factor + new_factor * row])


def compress(rows: np.ndarray, weights: np.ndarray, bias: np.ndarray, position: int, rate: int, accumulators: np.ndarray,
             after: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(completed keys [n, width], accumulators after the last token, accumulators after `after` tokens) from rows and logits [T, parts *
    width] of tokens from `position` on, before the norm; `bias` [rate, parts * width], `accumulators` [parts, 3, width]: the accumulators
    of the next key and, with overlap, of the one after it."""
    parts, width = len(accumulators), accumulators.shape[-1]
    accumulators, keys, between = accumulators.astype(np.float64), [], accumulators
    for t in range(len(rows)):
        index = (position + t) % rate
        row, weight = (values.astype(np.float64).reshape(parts, width) for values in (rows[t], weights[t] + bias[index]))
        own_part = parts - 1  # a token's row for its own key is the last one
        accumulators = np.stack([taken_in(accumulators[0], row[own_part], weight[own_part]),
                                 *(taken_in(values, row[0], weight[0]) for values in accumulators[1:])])
        if index == rate - 1:
            keys.append(accumulators[0, 2] / accumulators[0, 1])
            accumulators = np.stack([*accumulators[1:], empty(width)])
        if t + 1 == after:
            between = accumulators
    return np.array(keys).reshape(-1, width), accumulators, between


def turned_tails(y: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """y [T, H, D] with rotary embedding on the last channels, in adjacent pairs and in place, by cos and sin [T, R / 2]."""
    y = y.astype(np.float64)
    num_rotary = 2 * cos.shape[1]
    rest, tail = y[..., : y.shape[-1] - num_rotary], y[..., y.shape[-1] - num_rotary :]
    low, high = tail[..., ::2], tail[..., 1::2]
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    return np.concatenate([rest, np.stack([low * c - high * s, high * c + low * s], -1).reshape(tail.shape)], -1)


def finished(keys: np.ndarray, norm: tuple[str, np.ndarray, None, float], cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Keys [n, width] as cached: normed, then rotated by the position of their first token."""
    return turned_tails(normalise(keys, *norm)[:, None], cos, sin)[:, 0] if len(keys) else keys


def attend(q: np.ndarray, near: np.ndarray, keys: np.ndarray, position: int, at: np.ndarray, rate: int, scale: float, window: int,
           sinks: np.ndarray | None, seen: np.ndarray | None) -> np.ndarray:
    """softmax(q @ k * scale) @ k of queries [T, H, D] from `position` on, over the tokens `near` [n, D] at positions `at` within the window
    and the completed `keys` [m, D], restricted by `seen` bool [T, m] if given. `sinks` [H]: as in `reference.attend`."""
    where = position + np.arange(len(q))
    close = (at <= where[:, None]) & (at > where[:, None] - window)
    closed = np.arange(len(keys)) < ((where + 1) // rate)[:, None]
    visible = np.concatenate([close, closed if seen is None else closed & seen], 1)
    both = np.concatenate([near, keys]).astype(np.float64)
    scores = np.where(visible[:, None], np.einsum("thd,nd->thn", q.astype(np.float64), both) * scale, -np.inf)
    ends = np.full((*scores.shape[:2], 1), -np.inf)
    if sinks is not None:
        ends[:] = sinks[:, None]
    scores = np.concatenate([scores, ends], -1)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True))[..., :-1] @ both
