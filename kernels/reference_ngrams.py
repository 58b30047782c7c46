"""Reference for n-gram embeddings added to a token's streams (Qwen 4), in NumPy; sums in float64.

`n` consecutive words, each multiplied by its own odd number, are combined by XOR; the remainder modulo each table's size is the row number
in that table. Words before the start of the text, and before the last end-of-text word, count as that word.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .reference import activate
from .reference_gated_residuals import normed, sigmoid

MIN_MATCH = 1e-6  # lower bound of a match before its square root


def ended(words: np.ndarray, end: int) -> np.ndarray:
    """Windows of words [T, n], latest last, in which words before an `end` (other than the latest) are replaced by it."""
    words = words.copy()
    for back in range(words.shape[1] - 2, -1, -1):
        words[(words[:, back + 1 : -1] == end).any(1), back] = end
    return words


def rows(words: np.ndarray, multipliers: Sequence[int], sizes: Sequence[int], end: int) -> np.ndarray:
    """Row numbers of the n-grams ending windows [T, n], in the concatenation of all tables: int64 [T, tables]. `sizes`: of the consecutive
    tables, equally many for every n-gram length from 2 on."""
    words, tables_per_length = ended(words, end), len(sizes) // (len(multipliers) - 1)
    firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    mixed, row_numbers = words[:, -1] * np.int64(multipliers[0]), []
    for back in range(1, len(multipliers)):
        mixed = mixed ^ (words[:, -1 - back] * np.int64(multipliers[back]))
        tables = slice((back - 1) * tables_per_length, back * tables_per_length)
        row_numbers.append(mixed[:, None] % np.asarray(sizes[tables], np.int64) + firsts[tables])
    return np.concatenate(row_numbers, 1)


def gated(streams: np.ndarray, keys: np.ndarray, values: np.ndarray, norms: Sequence[np.ndarray],
          eps: float) -> tuple[np.ndarray, np.ndarray]:
    """(what is added to streams [T, S, D] directly, what is convolved first), both of that shape, from keys [T, S, D] and values [T, D];
    weights [S * D] of the norms of streams, keys, and of what is convolved."""
    of_streams, of_keys, output_norm = norms
    match = (normed(keys, of_keys, eps) * normed(streams, of_streams, eps)).sum(-1) / np.sqrt(streams.shape[-1])
    gate = sigmoid(np.sqrt(np.maximum(np.abs(match), MIN_MATCH)) * np.sign(match))
    gated_values = gate[..., None] * values[:, None].astype(np.float64)
    return gated_values, normed(gated_values, output_norm, eps)


def convolve(x: np.ndarray, before: np.ndarray, weight: np.ndarray, step: int) -> np.ndarray:
    """SiLU of the causal depthwise convolution of x [T, C], following `before` [(taps - 1) * step, C], with dilation `step`: weight [taps,
    C], the last tap for the token itself."""
    inputs = np.concatenate([before, x]).astype(np.float64)
    return activate(sum(weight[tap] * inputs[tap * step : tap * step + len(x)] for tap in range(len(weight))), "silu")
