"""Sequence breakers of the DRY sampler (`sampler.py`), as token sequences.

As in llama.cpp, a token that contains the breaker text breaks alone; one that ends in a prefix of it breaks together with the tokens of the
rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..tokens.token_bytes import TokenBytes, token_bytes_of

if TYPE_CHECKING:
    from ..sampler import SamplerSettings
    from ..tokenizer import Tokenizer

MOST_BYTES, MOST_TOKENS = 40, 20  # of a text, and of what follows its first token
MOST_KEPT = 8  # sets of texts whose tokens are kept


@dataclass(frozen=True)
class Breakers:
    """Token sequences grouped by first token, for a vocabulary of `rows`: those of token t are numbered `first`[t] to `first`[t + 1],
    int32 [rows + 1]; sequence s goes on with `tails`, int32, from `starts`[s] to [s + 1], int32. A token with an empty tail breaks
    alone."""

    rows: int
    first: np.ndarray
    starts: np.ndarray
    tails: np.ndarray

    def sequences(self) -> list[tuple[int, ...]]:
        """Each with the token that it begins with."""
        return [(token, *map(int, self.tails[self.starts[each] : self.starts[each + 1]]))
                for token in range(self.rows) for each in range(self.first[token], self.first[token + 1])]


def breakers_of(tokenizer: Tokenizer, settings: SamplerSettings) -> Breakers | None:
    """The breakers of the settings, None where DRY is off. Takes some tenths of a second for a large vocabulary, once."""
    texts = settings.dry_sequence_breakers
    if not settings.breaks_repeats or not texts:
        return None
    own = token_bytes_of(tokenizer)
    if texts not in own.breakers:
        if len(own.breakers) >= MOST_KEPT:
            own.breakers.clear()
        own.breakers[texts] = _found(tokenizer, own, texts)
    return own.breakers[texts]


def _found(tokenizer: Tokenizer, own: TokenBytes, texts: tuple[str, ...]) -> Breakers:
    by_token: dict[int, set[tuple[int, ...]]] = {}
    for text in texts:
        whole = text.encode("utf-8", "replace")[:MOST_BYTES]
        rests = [_tokens(tokenizer, whole[begun:]) for begun in range(1, len(whole))]
        for token, said in own.all.items():
            if whole in said:
                by_token.setdefault(token, set()).add(())
                continue
            at = said.find(whole[:1])  # where most tokens end
            while at >= 0:
                if whole.startswith(said[at:]):
                    by_token.setdefault(token, set()).add(rests[len(said) - at - 1])
                at = said.find(whole[:1], at + 1)
    rows = 1 + max(own.all, default=-1)
    counts = np.zeros(rows + 1, np.int32)
    for token, tails in by_token.items():
        counts[token + 1] = len(tails)
    tails = [tail for token in sorted(by_token) for tail in sorted(by_token[token])]
    starts = np.cumsum([0, *map(len, tails)]).astype(np.int32)
    return Breakers(rows, np.cumsum(counts).astype(np.int32), starts, np.array([token for tail in tails for token in tail], np.int32))


def _tokens(tokenizer: Tokenizer, rest: bytes) -> tuple[int, ...]:
    """The rest of a breaker as tokens; an incomplete UTF-8 character is dropped."""
    return tuple(tokenizer.encode(rest.decode("utf-8", "ignore"), add_special_tokens=False)[:MOST_TOKENS])
