"""What a model is sure of, as llama.cpp's sampler for infilling has it, which editors ask for: a suggestion that nobody asked for ends
where the model would guess.

Of the likeliest tokens those that begin alike count as one, as the ways to cut one text. What has a fifth of all chances may come; where
nothing has, or where an end is likely enough, the text ends. Of several the likeliest is taken, where llama.cpp draws one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..sampler import SamplerSettings
from ..tokenizer import Tokenizer
from ..tokens.token_bytes import token_bytes_of

LEAST = 0.2  # of the chances of those that are looked at
ENDING = 3  # an end is likely enough with this, times the tokens that are looked at
LOOKED_AT = 40  # tokens, where nobody says how many


class InfillSampler:
    """Of one answer; `ends`: the tokens that end it."""

    def __init__(self, tokenizer: Tokenizer, ends: Iterable[int], settings: SamplerSettings) -> None:
        self._bytes, self._ends, self._settings = token_bytes_of(tokenizer), sorted(ends), settings

    def narrow(self, logits: np.ndarray) -> None:
        """Leave one token of float32 logits[V], in place."""
        token = self.chosen(logits)
        value = logits[token]
        logits.fill(-np.inf)
        logits[token] = value

    def chosen(self, logits: np.ndarray) -> int:
        """The token that comes next."""
        ids, chances = self._looked_at(logits)
        ends = [end for end in self._ends if end < len(logits)]
        is_end = np.isin(ids, ends)
        end, text = float(chances[is_end].sum()), float(chances[~is_end].sum())
        if ENDING * end * len(ids) > text:
            return int(ids[is_end][0])
        chances = self._merged(ids, chances)
        kept = (chances >= LEAST) | is_end & (chances > 0)
        if not ends or not (kept & ~is_end).any():
            return ends[int(logits[ends].argmax())] if ends else int(ids[0])
        return int(ids[kept][chances[kept].argmax()])

    def _looked_at(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest tokens in order, with their chances among themselves."""
        most = min(self._settings.top_k or LOOKED_AT, len(logits) - 1)
        ids = np.argpartition(-logits, most)[:most]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        chances = np.exp((logits[ids] - logits[ids[0]]).astype(np.float64))
        chances /= chances.sum()
        most = 1 + int(np.searchsorted(chances.cumsum(), self._settings.top_p - 1e-9))
        ids, chances = ids[:most], chances[:most]
        return ids, chances / chances.sum()

    def _merged(self, ids: np.ndarray, chances: np.ndarray) -> np.ndarray:
        """Of two tokens of which one begins the other the likelier has the chances of both."""
        merged, texts = chances.copy(), [self._bytes(int(each)) for each in ids]
        gone = np.isin(ids, self._ends)  # have no text
        for first in range(len(ids)):
            for second in range(len(ids)):
                if first == second or gone[first] or gone[second] or not texts[first] or not texts[second].startswith(texts[first]):
                    continue
                wins, loses = (second, first) if merged[second] > merged[first] else (first, second)
                merged[wins] += merged[loses]
                merged[loses], gone[loses] = 0.0, True
        return merged
