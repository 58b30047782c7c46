"""Batched decoding: the caches of several sequences, as seen by one pass with one token of each.

The model runs such a pass like one over as many tokens of a single sequence: products are batched, and only caches and states are handled
per sequence. Results are bit-identical to passes of one token, since no kernel lets a token's result depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ... import EffllmError
from ..cache import LayerCache

if TYPE_CHECKING:
    from ...kernels.cpu.states import LayerStates
    from ..cache import KVCache


class RowAwareBackend(Protocol):
    """A backend that is told which row of the pass the following calls belong to."""

    def for_row(self, row: int) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class BatchedStep:
    """Where the tokens of one pass go: int64 [T], one position per sequence. `blocks` is the same object as long as every sequence sees the
    same list of blocks."""

    position: np.ndarray
    blocks: object

    @property
    def positions(self) -> np.ndarray:
        return self.position


@dataclass(frozen=True)
class BatchedLayer:
    """A block's view of the caches: one layer of each, in the order of the pass's tokens."""

    layers: Sequence[LayerCache | LayerStates]
    backend: RowAwareBackend

    def attend(self, q: object, k: object | None, v: object | None, sinks: object | None = None) -> object:
        """As `LayerCache.attend`, row i of each argument with cache i."""
        out = self.layers[0].pages.attended(q)
        for row, layer in enumerate(self.layers):
            own = slice(row, row + 1)
            with self.backend.for_row(row):
                layer.attend(q[own], *(None if each is None else each[own] for each in (k, v)), sinks, out[own])
        return out

    def compress(self, products: Sequence[object], w: object, table: object) -> None:
        """As `LayerCache.compress`, row i of each product with cache i."""
        for row, layer in enumerate(self.layers):
            with self.backend.for_row(row):
                layer.compress([product[row : row + 1] for product in products], w, table)

    def choose(self, q: object, k: object | None, weights: object | None, closing: object | None = None) -> None:
        """As `LayerCache.choose`, row i of each argument with cache i."""
        room = self.layers[0].token_selection.index.room(len(self.layers))
        for row, layer in enumerate(self.layers):
            own = slice(row, row + 1)
            with self.backend.for_row(row):
                layer.choose(q[own], None if k is None else k[own], None if weights is None else weights[own], closing, room[own])

    def words(self, ids: np.ndarray, end: int) -> np.ndarray:
        """As `NgramStates.words`, the id of row i with state i."""
        return np.concatenate([layer.words(ids[row : row + 1], end) for row, layer in enumerate(self.layers)])

    def add_ngrams(self, x: object, products: Sequence[object], w: object) -> object:
        """As `NgramStates.add`, row i of each argument with state i."""
        for row, layer in enumerate(self.layers):
            own = slice(row, row + 1)
            with self.backend.for_row(row):
                layer.add_ngrams(x[own], [product[own] for product in products], w)
        return x

    def shifted(self, x: object, norm: object, mix: object, half: int) -> list[object]:
        """See `kernels/cpu/rwkv7.py`, row i of x with state i."""
        outs = self.layers[0].rows(len(self.layers), mix.size // x.shape[1])
        for row, each in enumerate(self.layers):
            own = slice(row, row + 1)
            with self.backend.for_row(row):
                each.shifted(x[own], norm, mix, half, [out[own] for out in outs])
        return outs

    def products(self, rows: Sequence[object], linears: Sequence[object], w: object, first: object | None) -> list[object]:
        """See `kernels/cpu/rwkv7.py`; all rows at once."""
        return self.layers[0].products(rows, linears, w, first)

    def convolved(self, product: object, w: object) -> list[object]:
        """See `kernels/cpu/cca.py`, row i of the product with state i."""
        outs = self.layers[0].states.places(len(self.layers))
        for row, layer in enumerate(self.layers):
            own = slice(row, row + 1)
            with self.backend.for_row(row):
                layer.states.convolved(product[own], w, [out[own] for out in outs])
        return outs

    def mix(self, products: Sequence[object], w: object) -> object:
        """As `LayerStates.mix`, row i of each product with state i."""
        states = [layer.states if isinstance(layer, LayerCache) else layer for layer in self.layers]
        out = states[0].mixed(len(states))
        for row, each in enumerate(states):
            own = slice(row, row + 1)
            with self.backend.for_row(row):
                each.mix([product[own] for product in products], w, out[own])
        return out


@dataclass
class BatchedCache:
    """Takes the place of a `KVCache` in a pass over one token of each of `caches`, all of them in memory on the CPU. `known` remembers the
    last block lists per number of sequences, so that identical passes are recognised. `failed`: by index, why a cache did not take its
    token."""

    caches: Sequence[KVCache]
    backend: RowAwareBackend
    known: dict[int, tuple[object, ...]]
    failed: Mapping[int, EffllmError] = field(default_factory=dict)
    step: BatchedStep | None = None
    probes: None = None

    def begin(self, tokens: int, prompt: bool = False) -> BatchedStep:
        """Make room for one token in each cache. Raises ValueError for another number of tokens, or beyond a context."""
        if tokens != len(self.caches):
            raise ValueError(f"{tokens} tokens for {len(self.caches)} caches")
        steps = [cache.begin(1, prompt) for cache in self.caches]
        blocks, before = tuple(step.blocks for step in steps), self.known.get(tokens)
        if before is None or any(one is not other for one, other in zip(before, blocks, strict=True)):
            self.known[tokens] = before = blocks
        self.step = BatchedStep(np.array([step.position for step in steps], np.int64), before)
        return self.step

    def layer(self, index: int) -> BatchedLayer:
        """The view of layer `index`."""
        return BatchedLayer([cache.layer(index) for cache in self.caches], self.backend)

    def commit(self) -> None:
        """Commit the token in each cache; those that cannot are in `failed`, without affecting the others."""
        failed = {}
        for place, cache in enumerate(self.caches):
            try:
                cache.commit()
            except EffllmError as error:
                failed[place] = error
        self.failed = failed
