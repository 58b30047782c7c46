"""llama.cpp's infill sampler, which editors use: a completion ends where the model would have to guess.

Among the top tokens, those of which one is a prefix of another count as one. A token with at least a fifth of the probability may follow;
if there is none, or an end token is likely enough, the text ends. Of several the likeliest is taken, where llama.cpp samples.
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
    """For one answer; `ends`: its end tokens."""

    def __init__(self, tokenizer: Tokenizer, ends: Iterable[int], settings: SamplerSettings) -> None:
        self._bytes, self._ends, self._settings = token_bytes_of(tokenizer), sorted(ends), settings

    def narrow(self, logits: np.ndarray) -> None:
        """Leave one token in float32 logits[V], in place."""
        token = self.chosen(logits)
        value = logits[token]
        logits.fill(-np.inf)
        logits[token] = value

    def chosen(self, logits: np.ndarray) -> int:
        """The next token."""
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
        """The top tokens in order, with probabilities normalized among themselves."""
        most = min(self._settings.top_k or LOOKED_AT, len(logits) - 1)
        ids = np.argpartition(-logits, most)[:most]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        chances = np.exp((logits[ids] - logits[ids[0]]).astype(np.float64))
        chances /= chances.sum()
        most = 1 + int(np.searchsorted(chances.cumsum(), self._settings.top_p - 1e-9))
        ids, chances = ids[:most], chances[:most]
        return ids, chances / chances.sum()

    def _merged(self, ids: np.ndarray, chances: np.ndarray) -> np.ndarray:
        """Where one token is a prefix of another, the likelier gets the probability of both."""
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
