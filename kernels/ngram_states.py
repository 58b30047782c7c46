"""The states of a layer that is given rows of n-grams, on either backend: those of its own kind, and beside them what n-grams leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..runtime.kv.states import LayerStates


class StatesWithNgrams:
    """`own` and `ngrams`, whose slots are the same in number: one slot here is one of either, one behind the other."""

    def __init__(self, own: LayerStates, ngrams: LayerStates) -> None:
        self.own, self.ngrams = own, ngrams
        self.words, self.add_ngrams, self.mix = ngrams.words, ngrams.add, own.mix

    def again(self, source: int, target: int, tokens: int) -> None:
        for each in (self.own, self.ngrams):
            each.again(source, target, tokens)

    def read_slot(self, slot: int) -> np.ndarray:
        return np.concatenate([self.own.read_slot(slot), self.ngrams.read_slot(slot)])

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        first = 4 * self.own.shape.slot_floats
        self.own.write_slot(slot, data[:first])
        self.ngrams.write_slot(slot, data[first:])
