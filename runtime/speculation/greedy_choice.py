"""The greedy token under a run's penalties, from the logits of all tokens or of some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..sampler import Sampler, SamplerSettings
from .draft_model import likeliest_under

if TYPE_CHECKING:
    from ..sampling.dry import Breakers


class GreedyChoice:
    """For a vocabulary of this size."""

    def __init__(self, vocabulary: int) -> None:
        self._greedy = Sampler(SamplerSettings(temperature=0), vocabulary)

    def choose_as(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Use the penalties of these settings."""
        self._greedy = likeliest_under(settings, breakers, self._greedy)

    def token(self, logits: np.ndarray, history: Sequence[int], drafted: Sequence[int], numbers: np.ndarray | None = None) -> int:
        """The greedy token after `history` and `drafted`, from `logits` [N] of the first N tokens, or of those with ids `numbers`."""
        if not self._greedy.settings.changes_argmax or not np.isfinite(logits).all():
            place = int(logits.argmax())
            return place if numbers is None else int(numbers[place])
        every = np.full(self._greedy.vocab_size, -np.inf, np.float32)
        every[slice(len(logits)) if numbers is None else numbers] = logits
        return self._greedy.sample(every, [*history, *drafted])
