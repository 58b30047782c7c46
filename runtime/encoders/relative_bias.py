"""Relative position biases of attention scores: a number per head (MPNet, ALiBi), or dependent on content (DeBERTa)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class RelativeBias(Protocol):
    """`terms`: number of products summed in a score, which the scale divides by in addition to the head size."""

    terms: int

    def of(self, which: slice) -> RelativeBias:
        """Restricted to these heads."""

    def add(self, scores: np.ndarray, q: np.ndarray, k: np.ndarray, apart: np.ndarray, which: slice) -> None:
        """Add to scaled scores float32 [texts, heads, rows, keys] of heads `which`, for `q` [texts, heads, rows, d] and `k`; `apart` int64
        [rows, keys]: key position minus query position."""


@dataclass(frozen=True)
class HeadBias:
    """`values`: float32 [heads, 2 * longest - 1], for distances from -longest + 1 on."""

    values: np.ndarray
    terms: int = 1

    def of(self, which: slice) -> HeadBias:
        return HeadBias(self.values[which])

    def add(self, scores: np.ndarray, q: np.ndarray, k: np.ndarray, apart: np.ndarray, which: slice) -> None:
        scores += self.values[which][:, apart + self.values.shape[1] // 2]


@dataclass(frozen=True)
class Disentangled:
    """Disentangled attention (He et al. 2021): relative position keys and queries of a layer, float32 [heads, rows, d] each; `rows` int64
    [2 * longest - 1]: the row of each distance from -longest + 1 on."""

    keys: np.ndarray
    queries: np.ndarray
    rows: np.ndarray
    terms: int = 3

    def of(self, which: slice) -> Disentangled:
        return Disentangled(self.keys[which], self.queries[which], self.rows)

    def add(self, scores: np.ndarray, q: np.ndarray, k: np.ndarray, apart: np.ndarray, which: slice) -> None:
        rows = self.rows[apart + len(self.rows) // 2]
        first, last = int(rows.min()), int(rows.max()) + 1
        rows -= first
        scale = np.float32((q.shape[-1] * self.terms) ** -0.5)
        queries, keys = np.arange(len(rows))[:, None], np.arange(rows.shape[1])
        for_query = q @ self.keys[which, first:last].swapaxes(1, 2)
        for_query *= scale
        scores += for_query[:, :, queries, rows]
        for_key = k @ self.queries[which, first:last].swapaxes(1, 2)
        for_key *= scale
        scores += for_key[:, :, keys, rows]


def leanings(distances: np.ndarray, longest: int, furthest: int = 128) -> HeadBias:
    """Relative position bias per head from `distances` [heads, buckets]: half of the buckets to each side, of which half hold one distance
    each and the rest grow logarithmically (T5 bucketing)."""
    delta = np.arange(1 - longest, longest)
    half = distances.shape[1] // 2
    exact, far = half // 2, np.abs(delta)
    grown = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(furthest / exact))
    grown = grown * np.float32(half - exact)
    bucket = np.where(far < exact, far, np.minimum(exact + np.trunc(grown).astype(np.int64), half - 1))
    return HeadBias(np.ascontiguousarray(distances[:, bucket + half * (delta > 0)]))


def sloping(slopes: np.ndarray, longest: int) -> HeadBias:
    """ALiBi: minus `slopes` float32 [heads] times the distance."""
    return HeadBias(-slopes[:, None] * np.abs(np.arange(1 - longest, longest, dtype=np.float32)))


def disentangled_rows(span: int, furthest: int, longest: int) -> np.ndarray:
    """Row of a table of 2 * `span` rows for each distance from -`longest` + 1 on: one each, or with `furthest` beyond half of `span`
    logarithmic up to it."""
    behind = np.arange(longest - 1, -longest, -1)
    if furthest:
        middle, far = span // 2, np.abs(behind)
        # In float32 and in this order, as the model was trained: what is rounded up is a whole number now and then.
        grown = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(middle)) / np.log(np.float32((furthest - 1) / middle))
        grown = np.ceil(grown * np.float32(middle - 1)).astype(np.int64) + middle
        behind = np.where(far <= middle, behind, grown * np.sign(behind))
    return np.clip(behind + span, 0, 2 * span - 1)
