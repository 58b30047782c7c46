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

MIN_PROBABILITY = 0.2  # of a token that may follow, among the top tokens
END_FACTOR = 3  # the text ends if P(end) * END_FACTOR * number of top tokens > P(text)
DEFAULT_TOP_K = 40


class InfillSampler:
    """The infill sampler of one answer. `ends`: its end tokens."""

    def __init__(self, tokenizer: Tokenizer, ends: Iterable[int], settings: SamplerSettings) -> None:
        self._token_bytes, self._ends, self._settings = token_bytes_of(tokenizer), sorted(ends), settings

    def mask_logits(self, logits: np.ndarray) -> None:
        """Leave one token in float32 logits[V], in place."""
        token = self.select(logits)
        value = logits[token]
        logits.fill(-np.inf)
        logits[token] = value

    def select(self, logits: np.ndarray) -> int:
        """The next token."""
        ids, probabilities = self._top_tokens(logits)
        ends = [end for end in self._ends if end < len(logits)]
        is_end = np.isin(ids, ends)
        p_end, p_text = float(probabilities[is_end].sum()), float(probabilities[~is_end].sum())
        if END_FACTOR * p_end * len(ids) > p_text:
            return int(ids[is_end][0])
        probabilities = self._merge_prefixes(ids, probabilities)
        kept = (probabilities >= MIN_PROBABILITY) | is_end & (probabilities > 0)
        if not ends or not (kept & ~is_end).any():
            return ends[int(logits[ends].argmax())] if ends else int(ids[0])
        return int(ids[kept][probabilities[kept].argmax()])

    def _top_tokens(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that top-k and top-p keep, in order, with probabilities normalized among themselves."""
        count = min(self._settings.top_k or DEFAULT_TOP_K, len(logits) - 1)
        ids = np.argpartition(-logits, count)[:count]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        probabilities = np.exp((logits[ids] - logits[ids[0]]).astype(np.float64))
        probabilities /= probabilities.sum()
        count = 1 + int(np.searchsorted(probabilities.cumsum(), self._settings.top_p - 1e-9))
        ids, probabilities = ids[:count], probabilities[:count]
        return ids, probabilities / probabilities.sum()

    def _merge_prefixes(self, ids: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """Where one token is a prefix of another, the likelier gets the probability of both."""
        merged, texts = probabilities.copy(), [self._token_bytes(int(token)) for token in ids]
        excluded = np.isin(ids, self._ends)  # they have no text
        for first in range(len(ids)):
            for second in range(len(ids)):
                is_prefix = texts[first] and texts[second].startswith(texts[first])
                if first == second or excluded[first] or excluded[second] or not is_prefix:
                    continue
                winner, loser = (second, first) if merged[second] > merged[first] else (first, second)
                merged[winner] += merged[loser]
                merged[loser], excluded[loser] = 0.0, True
        return merged
