"""How much attention later tokens pay to a page, for policies: queries of a few probe tokens, kept until the page is sealed.

A page's probes are the last 16 tokens of the next page, or of the page itself if the exact window is shorter than a page. Attention is
computed over the sinks, the page and the tokens between it and the probes: all that is still exact when the page is sealed. So the result
depends on positions, not on how the prompt was chunked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.layout import PAGE

if TYPE_CHECKING:
    from .cache_shape import AttnSpec, CacheShape

PROBE_TOKENS, BLOCK_TOKENS = 16, 16  # tokens


class AttentionProbes:
    """Queries of probe tokens, by position and layer."""

    def __init__(self, specs: Sequence[AttnSpec], shape: CacheShape, layers: Sequence[int] | None = None) -> None:
        """`specs`: of the layers that have pages; `layers`: indices of these in the model, by default all."""
        self.specs, self.shape = specs, shape
        self._rows_by_layer = {layer: row for row, layer in enumerate(range(len(specs)) if layers is None else layers)}
        self.probe_distance = 1 if shape.window >= PAGE else 0  # distance in pages from a page to its probes
        self._rows: dict[int, list[np.ndarray | None]] = {}
        self._sinks: dict[int, np.ndarray] = {}  # of layers with learned sinks
        self._probe_rows = np.zeros(0, np.int64)
        self._positions = self._probe_rows

    def begin(self, positions: np.ndarray) -> bool:
        """Whether a pass over these positions, int64 [T], contains probe tokens."""
        offsets = positions - self.shape.sinks
        self._probe_rows = np.flatnonzero((offsets >= 0) & (offsets % PAGE >= PAGE - PROBE_TOKENS))
        self._positions = positions[self._probe_rows]
        for position in self._positions.tolist():
            self._rows[position] = [None] * len(self.specs)
        return len(self._probe_rows) > 0

    def see(self, name: str, layer: int, value: object) -> None:
        """A tap: keeps the probes' rows of q [T, heads * D], and a layer's sink logits [heads], which take attention from all keys."""
        if (layer_row := self._rows_by_layer.get(layer)) is None:
            return
        if name == "sinks" and layer_row not in self._sinks:
            self._sinks[layer_row] = np.array(value, np.float32)  # a copy: the layer's memory may be released
        if name == "q":
            for position, query in zip(self._positions.tolist(), np.array(value[self._probe_rows], np.float32), strict=True):
                self._rows[position][layer_row] = query

    def clear(self) -> None:
        self._rows.clear()

    def attention(self, page: int, layers: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
        """The share of attention that the page's probes pay to each 16 of its tokens, float32 [layers, KV heads, PAGE / 16].

        It is the mean over probes and the maximum over the query heads of a group. Queries of earlier pages are dropped.

        layers: for each, K [tokens, KV heads, D] of the sinks, of the page and, if its probes are there, of the next page
        """
        start = self.shape.sinks + PAGE * page
        end = start + PAGE * (1 + self.probe_distance)
        probes = np.arange(end - PROBE_TOKENS, end)
        for position in [position for position in self._rows if position < end - PROBE_TOKENS]:
            del self._rows[position]
        positions = np.concatenate([np.arange(self.shape.sinks), np.arange(start, end)])
        shares = np.zeros((len(layers), max(spec.kv_heads for spec in self.specs), PAGE // BLOCK_TOKENS), np.float32)
        for layer, parts in enumerate(layers):
            rows = [self._rows.get(position, [None] * len(layers))[layer] for position in probes.tolist()]
            if any(row is None for row in rows):
                continue  # a page restored from a file has no probes
            keys = np.concatenate(parts).astype(np.float32)
            layer_shares = self._shares(layer, np.stack(rows), keys, probes, positions)
            shares[layer, : len(layer_shares)] = layer_shares
            shares[layer, len(layer_shares) :] = layer_shares.mean(0)  # so that layers with fewer heads count equally
        return shares

    def _shares(self, layer: int, q: np.ndarray, keys: np.ndarray, probes: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Attention shares of one layer, [KV heads, blocks]."""
        spec, sinks = self.specs[layer], self._sinks.get(layer)
        q = q.reshape(len(q), spec.kv_heads, -1, spec.head_dim)
        scores = np.einsum("phgd,khd->hgpk", q, keys, optimize=True) * np.float32(spec.scale)
        if spec.softcap:
            scores = np.tanh(scores / np.float32(spec.softcap)) * np.float32(spec.softcap)
        visible = positions <= probes[:, None]
        if spec.window:
            visible &= positions > probes[:, None] - spec.window
        scores[:, :, ~visible] = -np.inf
        sink = np.float32(-np.inf) if sinks is None else sinks.reshape(spec.kv_heads, -1, 1, 1)
        maximum = np.maximum(scores.max(-1, keepdims=True), sink)
        weights = np.exp(scores - maximum)
        weights /= weights.sum(-1, keepdims=True) + np.exp(sink - maximum)
        page_weights = weights[..., self.shape.sinks : self.shape.sinks + PAGE].mean(2)
        return page_weights.reshape(*page_weights.shape[:2], -1, BLOCK_TOKENS).sum(-1).max(1)
