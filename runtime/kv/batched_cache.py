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
    """Where the tokens of one pass are stored, and what they attend to."""

    position: np.ndarray  # one per sequence, int64 [T]
    blocks: object  # the same object as long as every sequence has the same list of blocks

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
            row_slice = slice(row, row + 1)
            with self.backend.for_row(row):
                layer.attend(q[row_slice], *(None if rows is None else rows[row_slice] for rows in (k, v)), sinks, out[row_slice])
        return out

    def compress(self, products: Sequence[object], w: object, table: object) -> None:
        """As `LayerCache.compress`, row i of each product with cache i."""
        for row, layer in enumerate(self.layers):
            with self.backend.for_row(row):
                layer.compress([product[row : row + 1] for product in products], w, table)

    def choose(self, q: object, k: object | None, weights: object | None, closing: object | None = None) -> None:
        """As `LayerCache.choose`, row i of each argument with cache i."""
        out = self.layers[0].token_selection.index.room(len(self.layers))
        for row, layer in enumerate(self.layers):
            row_slice = slice(row, row + 1)
            with self.backend.for_row(row):
                row_k, row_weights = (rows if rows is None else rows[row_slice] for rows in (k, weights))
                layer.choose(q[row_slice], row_k, row_weights, closing, out[row_slice])

    def words(self, ids: np.ndarray, end: int) -> np.ndarray:
        """As `NgramStates.words`, the id of row i with state i."""
        return np.concatenate([layer.words(ids[row : row + 1], end) for row, layer in enumerate(self.layers)])

    def add_ngrams(self, x: object, products: Sequence[object], w: object) -> object:
        """As `NgramStates.add`, row i of each argument with state i."""
        for row, layer in enumerate(self.layers):
            row_slice = slice(row, row + 1)
            with self.backend.for_row(row):
                layer.add_ngrams(x[row_slice], [product[row_slice] for product in products], w)
        return x

    def shifted(self, x: object, norm: object, mix: object, half: int) -> list[object]:
        """See `kernels/cpu/rwkv7.py`, row i of x with state i."""
        outs = self.layers[0].rows(len(self.layers), mix.size // x.shape[1])
        for row, layer in enumerate(self.layers):
            row_slice = slice(row, row + 1)
            with self.backend.for_row(row):
                layer.shifted(x[row_slice], norm, mix, half, [out[row_slice] for out in outs])
        return outs

    def products(self, rows: Sequence[object], linears: Sequence[object], w: object, first: object | None) -> list[object]:
        """See `kernels/cpu/rwkv7.py`; all rows at once."""
        return self.layers[0].products(rows, linears, w, first)

    def convolved(self, product: object, w: object) -> list[object]:
        """See `kernels/cpu/cca.py`, row i of the product with state i."""
        outs = self.layers[0].states.places(len(self.layers))
        for row, layer in enumerate(self.layers):
            row_slice = slice(row, row + 1)
            with self.backend.for_row(row):
                layer.states.convolved(product[row_slice], w, [out[row_slice] for out in outs])
        return outs

    def mix(self, products: Sequence[object], w: object) -> object:
        """As `LayerStates.mix`, row i of each product with state i."""
        states = [layer.states if isinstance(layer, LayerCache) else layer for layer in self.layers]
        out = states[0].mixed(len(states))
        for row, state in enumerate(states):
            row_slice = slice(row, row + 1)
            with self.backend.for_row(row):
                state.mix([product[row_slice] for product in products], w, out[row_slice])
        return out


@dataclass
class BatchedCache:
    """Takes the place of a `KVCache` in a pass over one token of each sequence."""

    caches: Sequence[KVCache]  # in memory, on the CPU
    backend: RowAwareBackend
    known_blocks: dict[int, tuple[object, ...]]  # the last block lists by number of sequences, to recognise identical passes
    failed: Mapping[int, EffllmError] = field(default_factory=dict)  # by index: why a cache could not store its token
    step: BatchedStep | None = None
    probes: None = None

    def begin(self, tokens: int, prompt: bool = False) -> BatchedStep:
        """Make room for one token in each cache. Raises ValueError for another number of tokens, or beyond a context."""
        if tokens != len(self.caches):
            raise ValueError(f"{tokens} tokens for {len(self.caches)} caches")
        steps = [cache.begin(1, prompt) for cache in self.caches]
        blocks, known = tuple(step.blocks for step in steps), self.known_blocks.get(tokens)
        if known is None or any(block is not other for block, other in zip(known, blocks, strict=True)):
            self.known_blocks[tokens] = known = blocks
        self.step = BatchedStep(np.array([step.position for step in steps], np.int64), known)
        return self.step

    def layer(self, index: int) -> BatchedLayer:
        """The view of layer `index`."""
        return BatchedLayer([cache.layer(index) for cache in self.caches], self.backend)

    def commit(self) -> None:
        """Commit the token in each cache; those that cannot are in `failed`, without affecting the others."""
        failed = {}
        for index, cache in enumerate(self.caches):
            try:
                cache.commit()
            except EffllmError as error:
                failed[index] = error
        self.failed = failed
