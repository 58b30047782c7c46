"""Relative position biases of attention scores: per head (MPNet, ALiBi), or dependent on content (DeBERTa)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class RelativeBias(Protocol):
    """Adds a bias to attention scores."""

    num_terms: int  # products summed in a score; scores are divided by the root of head size times this

    def for_heads(self, heads: slice) -> RelativeBias:
        """The bias of these heads alone."""

    def add(self, scores: np.ndarray, q: np.ndarray, k: np.ndarray, distance: np.ndarray, heads: slice) -> None:
        """Add to the scaled scores, float32 [texts, heads, rows, keys], of `heads`.

        q, k: queries [texts, heads, rows, d] and keys [texts, heads, keys, d]
        distance: key position minus query position, int64 [rows, keys]
        """


@dataclass(frozen=True)
class HeadBias:
    """A number per head and distance."""

    values: np.ndarray  # float32 [heads, 2 * max_length - 1], for distances from -max_length + 1 on
    num_terms: int = 1

    def for_heads(self, heads: slice) -> HeadBias:
        return HeadBias(self.values[heads])

    def add(self, scores: np.ndarray, q: np.ndarray, k: np.ndarray, distance: np.ndarray, heads: slice) -> None:
        scores += self.values[heads][:, distance + self.values.shape[1] // 2]


@dataclass(frozen=True)
class Disentangled:
    """Disentangled attention (He et al. 2021)."""

    keys: np.ndarray  # relative position keys and queries of a layer, float32 [heads, table rows, d] each
    queries: np.ndarray
    rows: np.ndarray  # table row of each distance from -max_length + 1 on, int64 [2 * max_length - 1]
    num_terms: int = 3

    def for_heads(self, heads: slice) -> Disentangled:
        return Disentangled(self.keys[heads], self.queries[heads], self.rows)

    def add(self, scores: np.ndarray, q: np.ndarray, k: np.ndarray, distance: np.ndarray, heads: slice) -> None:
        rows = self.rows[distance + len(self.rows) // 2]
        first, last = int(rows.min()), int(rows.max()) + 1
        rows -= first
        scale = np.float32((q.shape[-1] * self.num_terms) ** -0.5)
        queries, keys = np.arange(len(rows))[:, None], np.arange(rows.shape[1])
        content_to_position = q @ self.keys[heads, first:last].swapaxes(1, 2)
        content_to_position *= scale
        scores += content_to_position[:, :, queries, rows]
        position_to_content = k @ self.queries[heads, first:last].swapaxes(1, 2)
        position_to_content *= scale
        scores += position_to_content[:, :, keys, rows]


def bucketed_bias(distances: np.ndarray, max_length: int, max_distance: int = 128) -> HeadBias:
    """Bias from a table `distances` [heads, buckets] (T5 bucketing).

    Half of the buckets are for each side. Half of these hold one distance each; the others grow logarithmically up to `max_distance`.
    """
    distance = np.arange(1 - max_length, max_length)
    half = distances.shape[1] // 2
    exact, absolute = half // 2, np.abs(distance)
    logarithmic = np.log(np.maximum(absolute, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(max_distance / exact))
    logarithmic = logarithmic * np.float32(half - exact)
    bucket = np.where(absolute < exact, absolute, np.minimum(exact + np.trunc(logarithmic).astype(np.int64), half - 1))
    return HeadBias(np.ascontiguousarray(distances[:, bucket + half * (distance > 0)]))


def alibi_bias(slopes: np.ndarray, max_length: int) -> HeadBias:
    """ALiBi: minus `slopes` float32 [heads] times the distance."""
    return HeadBias(-slopes[:, None] * np.abs(np.arange(1 - max_length, max_length, dtype=np.float32)))


def disentangled_rows(span: int, max_distance: int, max_length: int) -> np.ndarray:
    """Row of a table of 2 * span rows for each distance from -max_length + 1 on.

    Each distance has its own row; with `max_distance`, those beyond half of `span` share rows logarithmically up to it.
    """
    distance = np.arange(max_length - 1, -max_length, -1)
    if max_distance:
        exact, absolute = span // 2, np.abs(distance)
        # In float32 and in this order, as in training: some values before ceil are whole numbers, so rounding matters.
        ratio = np.maximum(absolute, 1).astype(np.float32) / np.float32(exact)
        logarithmic = np.log(ratio) / np.log(np.float32((max_distance - 1) / exact))
        logarithmic = np.ceil(logarithmic * np.float32(exact - 1)).astype(np.int64) + exact
        distance = np.where(absolute <= exact, distance, logarithmic * np.sign(distance))
    return np.clip(distance + span, 0, 2 * span - 1)
