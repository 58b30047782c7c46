"""The token that a run finds likeliest, by scores of all tokens or of some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..sampler import Sampler, SamplerSettings
from .draft_model import likeliest_under

if TYPE_CHECKING:
    from ..sampling.dry import Breakers


class GreedyChoice:
    """Of a vocabulary of so many tokens, under the penalties of a run."""

    def __init__(self, vocabulary: int) -> None:
        self._greedy = Sampler(SamplerSettings(temperature=0), vocabulary)

    def choose_as(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """As a run with these settings does."""
        self._greedy = likeliest_under(settings, breakers, self._greedy)

    def token(self, logits: np.ndarray, history: Sequence[int], drafted: Sequence[int], numbers: np.ndarray | None = None) -> int:
        """Behind `history` and what was `drafted`, by `logits` [N] of the first tokens, or of those with `numbers`."""
        if not self._greedy.settings.moves or not np.isfinite(logits).all():
            place = int(logits.argmax())
            return place if numbers is None else int(numbers[place])
        every = np.full(self._greedy.vocab_size, -np.inf, np.float32)
        every[slice(len(logits)) if numbers is None else numbers] = logits
        return self._greedy.sample(every, [*history, *drafted])
