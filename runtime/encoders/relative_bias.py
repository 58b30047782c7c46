"""How scores of attention differ by how far apart two tokens are: by numbers of a head (MPNet, ALiBi), or by what the two are as well
(DeBERTa)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class RelativeBias(Protocol):
    """`terms`: kinds of products that are added up in a score, by which it is divided beside the width of a head."""

    terms: int

    def of(self, which: slice) -> RelativeBias:
        """Of these heads alone."""

    def add(self, scores: np.ndarray, q: np.ndarray, k: np.ndarray, apart: np.ndarray, which: slice) -> None:
        """To scores float32 [texts, heads, rows, keys] of heads `which`, which are divided already, of `q` [texts, heads, rows, d] and `k`;
        `apart` int64 [rows, keys]: how far a key is behind its query."""


@dataclass(frozen=True)
class HeadBias:
    """`values`: float32 [heads, 2 * longest - 1], from -longest + 1 on."""

    values: np.ndarray
    terms: int = 1

    def of(self, which: slice) -> HeadBias:
        return HeadBias(self.values[which])

    def add(self, scores: np.ndarray, q: np.ndarray, k: np.ndarray, apart: np.ndarray, which: slice) -> None:
        scores += self.values[which][:, apart + self.values.shape[1] // 2]


@dataclass(frozen=True)
class Disentangled:
    """What distances are to a layer as keys and as queries, float32 [heads, rows, d] each; `rows` int64 [2 * longest - 1]: which of them a
    distance is, from -longest + 1 on (He et al. 2021)."""

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
    """What is added to the scores of keys by how far before or behind the query they are, of `distances` [heads, buckets]: half of the
    buckets to each side, of which half are of one distance each and the others grow by a logarithm."""
    delta = np.arange(1 - longest, longest)
    half = distances.shape[1] // 2
    exact, far = half // 2, np.abs(delta)
    grown = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(furthest / exact))
    grown = grown * np.float32(half - exact)
    bucket = np.where(far < exact, far, np.minimum(exact + np.trunc(grown).astype(np.int64), half - 1))
    return HeadBias(np.ascontiguousarray(distances[:, bucket + half * (delta > 0)]))


def sloping(slopes: np.ndarray, longest: int) -> HeadBias:
    """Less by `slopes` float32 [heads] for each token between (ALiBi)."""
    return HeadBias(-slopes[:, None] * np.abs(np.arange(1 - longest, longest, dtype=np.float32)))


def disentangled_rows(span: int, furthest: int, longest: int) -> np.ndarray:
    """Rows of a table of 2 * `span` for keys from -`longest` + 1 on behind their query: one for each distance, and where `furthest` is not
    0, beyond half of `span` by a logarithm, which ends there. The first rows are of keys that are furthest behind."""
    behind = np.arange(longest - 1, -longest, -1)
    if furthest:
        middle, far = span // 2, np.abs(behind)
        # In float32 and in this order, as the model was trained: what is rounded up is a whole number now and then.
        grown = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(middle)) / np.log(np.float32((furthest - 1) / middle))
        grown = np.ceil(grown * np.float32(middle - 1)).astype(np.int64) + middle
        behind = np.where(far <= middle, behind, grown * np.sign(behind))
    return np.clip(behind + span, 0, 2 * span - 1)
