"""How much attention later tokens paid to a page, for policies: the queries of a few probe tokens, kept until the page is sealed.

A page's probes are the newest 16 tokens of the next page; where the exact window is shorter than a page, its own. Attention is taken over
the sinks, the page and what lies between it and the probes, which is all that is still exact when the page is sealed. So the result depends
on positions, not on how the prompt was chunked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.layout import PAGE

if TYPE_CHECKING:
    from .cache_shape import AttnSpec, CacheShape

PROBES, BLOCK = 16, 16  # tokens


class AttentionProbes:
    """Queries of probe tokens by position, one row per layer that has pages; `layers`: their indices in the model, by default all."""

    def __init__(self, specs: Sequence[AttnSpec], shape: CacheShape, layers: Sequence[int] | None = None) -> None:
        self.specs, self.shape = specs, shape
        self._places = {layer: place for place, layer in enumerate(range(len(specs)) if layers is None else layers)}
        self.behind = 1 if shape.window >= PAGE else 0  # distance in pages from a page to its probes
        self._rows: dict[int, list[np.ndarray | None]] = {}
        self._sinks: dict[int, np.ndarray] = {}  # of layers with learned sinks
        self._wanted = np.zeros(0, np.int64)
        self._positions = self._wanted

    def begin(self, positions: np.ndarray) -> bool:
        """Whether a pass over these positions, int64 [T], contains probe tokens."""
        own = positions - self.shape.sinks
        self._wanted = np.flatnonzero((own >= 0) & (own % PAGE >= PAGE - PROBES))
        self._positions = positions[self._wanted]
        for position in self._positions.tolist():
            self._rows[position] = [None] * len(self.specs)
        return len(self._wanted) > 0

    def see(self, name: str, layer: int, value: object) -> None:
        """A tap: keeps the needed rows of q [T, heads * D], and a layer's sink logits [heads], which take attention from every key."""
        if (place := self._places.get(layer)) is None:
            return
        if name == "sinks" and place not in self._sinks:
            self._sinks[place] = np.array(value, np.float32)  # a copy: the layer's memory may be released
        if name == "q":
            for position, row in zip(self._positions.tolist(), np.array(value[self._wanted], np.float32), strict=True):
                self._rows[position][place] = row

    def clear(self) -> None:
        self._rows.clear()

    def attention(self, page: int, layers: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
        """float32 [layers, KV heads, PAGE / 16]: the share of attention that the page's probes pay to each 16 of its tokens; the mean over
        probes, the maximum over the query heads of a group. `layers`: for each, K [tokens, KV heads, D] of the sinks, of the page and, if
        probes lie after it, of the next. Rows of earlier pages are dropped."""
        start = self.shape.sinks + PAGE * page
        end = start + PAGE * (1 + self.behind)
        probes = np.arange(end - PROBES, end)
        for position in [position for position in self._rows if position < end - PROBES]:
            del self._rows[position]
        at = np.concatenate([np.arange(self.shape.sinks), np.arange(start, end)])
        found = np.zeros((len(layers), max(spec.kv_heads for spec in self.specs), PAGE // BLOCK), np.float32)
        for layer, parts in enumerate(layers):
            rows = [self._rows.get(position, [None] * len(layers))[layer] for position in probes.tolist()]
            if any(row is None for row in rows):
                continue  # a page restored from a file has no probes
            keys = np.concatenate(parts).astype(np.float32)
            own = self._shares(layer, np.stack(rows), keys, probes, at)
            found[layer, : len(own)], found[layer, len(own) :] = own, own.mean(0)  # layers with fewer heads count equally
        return found

    def _shares(self, layer: int, q: np.ndarray, keys: np.ndarray, probes: np.ndarray, at: np.ndarray) -> np.ndarray:
        """[KV heads, blocks] of one layer."""
        spec, sinks = self.specs[layer], self._sinks.get(layer)
        q = q.reshape(len(q), spec.kv_heads, -1, spec.head_dim)
        scores = np.einsum("phgd,khd->hgpk", q, keys, optimize=True) * np.float32(spec.scale)
        if spec.softcap:
            scores = np.tanh(scores / np.float32(spec.softcap)) * np.float32(spec.softcap)
        seen = at <= probes[:, None]
        if spec.window:
            seen &= at > probes[:, None] - spec.window
        scores[:, :, ~seen] = -np.inf
        sink = np.float32(-np.inf) if sinks is None else sinks.reshape(spec.kv_heads, -1, 1, 1)
        top = np.maximum(scores.max(-1, keepdims=True), sink)
        weights = np.exp(scores - top)
        weights /= weights.sum(-1, keepdims=True) + np.exp(sink - top)
        own = weights[..., self.shape.sinks : self.shape.sinks + PAGE].mean(2)
        return own.reshape(*own.shape[:2], -1, BLOCK).sum(-1).max(1)
