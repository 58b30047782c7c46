"""The states of a layer with n-gram embeddings, on either backend: its regular state and the n-gram state next to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..runtime.kv.states import LayerStates


class StatesWithNgrams:
    """A slot here is a slot of `base` followed by one of `ngrams`; both have the same number of slots."""

    def __init__(self, base: LayerStates, ngrams: LayerStates) -> None:
        self.base, self.ngrams = base, ngrams
        self.words, self.add_ngrams, self.mix = ngrams.words, ngrams.add, base.mix

    def rebuild_slot(self, source: int, target: int, tokens: int) -> None:
        for states in (self.base, self.ngrams):
            states.rebuild_slot(source, target, tokens)

    def read_slot(self, slot: int) -> np.ndarray:
        return np.concatenate([self.base.read_slot(slot), self.ngrams.read_slot(slot)])

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        first = 4 * self.base.shape.slot_floats
        self.base.write_slot(slot, data[:first])
        self.ngrams.write_slot(slot, data[first:])
