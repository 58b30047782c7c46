"""The states of a layer with n-gram embeddings, on either backend: its regular state and the n-gram state next to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..runtime.kv.states import LayerStates


class StatesWithNgrams:
    """`own` and `ngrams` have the same number of slots; a slot here is one of each, one after the other."""

    def __init__(self, own: LayerStates, ngrams: LayerStates) -> None:
        self.own, self.ngrams = own, ngrams
        self.words, self.add_ngrams, self.mix = ngrams.words, ngrams.add, own.mix

    def rebuild_slot(self, source: int, target: int, tokens: int) -> None:
        for states in (self.own, self.ngrams):
            states.rebuild_slot(source, target, tokens)

    def read_slot(self, slot: int) -> np.ndarray:
        return np.concatenate([self.own.read_slot(slot), self.ngrams.read_slot(slot)])

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        first = 4 * self.own.shape.slot_floats
        self.own.write_slot(slot, data[:first])
        self.ngrams.write_slot(slot, data[first:])
