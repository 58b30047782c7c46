"""The greedy token under a run's penalties, from the logits of all tokens or of some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..sampler import Sampler, SamplerSettings
from .draft_model import greedy_sampler

if TYPE_CHECKING:
    from ..sampling.dry import Breakers


class GreedyChoice:
    """Chooses tokens of a vocabulary of `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        self._sampler = Sampler(SamplerSettings(temperature=0), vocab_size)

    def set_sampling(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Use the penalties of these settings."""
        self._sampler = greedy_sampler(settings, breakers, self._sampler)

    def token(self, logits: np.ndarray, history: Sequence[int], drafted: Sequence[int], ids: np.ndarray | None = None) -> int:
        """The greedy token after `history` and `drafted`, from `logits` [N] of the first N tokens, or of the tokens `ids`."""
        if not self._sampler.settings.changes_argmax or not np.isfinite(logits).all():
            best = int(logits.argmax())
            return best if ids is None else int(ids[best])
        all_logits = np.full(self._sampler.vocab_size, -np.inf, np.float32)
        all_logits[slice(len(logits)) if ids is None else ids] = logits
        return self._sampler.sample(all_logits, [*history, *drafted])
