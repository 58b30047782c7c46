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

MAX_BREAKER_BYTES, MAX_TAIL_TOKENS = 40, 20  # of a breaker text, and of the rest of it after the first token
MAX_CACHED_SETS = 8  # sets of breaker texts whose tokens are cached for a vocabulary


@dataclass(frozen=True)
class Breakers:
    """Token sequences, grouped by first token (as in a CSR matrix).

    rows: vocabulary size.
    first: int32 [rows + 1]; the sequences that begin with token t have the numbers first[t] to first[t + 1].
    starts: int32 [sequences + 1]; sequence s goes on with tails[starts[s] : starts[s + 1]].
    tails: int32; a sequence with an empty tail is a token that breaks alone.
    """

    rows: int
    first: np.ndarray
    starts: np.ndarray
    tails: np.ndarray

    def sequences(self) -> list[tuple[int, ...]]:
        """The whole sequences, with their first tokens."""
        return [(token, *map(int, self.tails[self.starts[number] : self.starts[number + 1]]))
                for token in range(self.rows) for number in range(self.first[token], self.first[token + 1])]


def breakers_of(tokenizer: Tokenizer, settings: SamplerSettings) -> Breakers | None:
    """The breakers of the settings as tokens, None if DRY is off. Cached: a large vocabulary takes some tenths of a second."""
    texts = settings.dry_sequence_breakers
    if not settings.has_dry or not texts:
        return None
    token_bytes = token_bytes_of(tokenizer)
    if texts not in token_bytes.breakers:
        if len(token_bytes.breakers) >= MAX_CACHED_SETS:
            token_bytes.breakers.clear()
        token_bytes.breakers[texts] = _tokenize(tokenizer, token_bytes, texts)
    return token_bytes.breakers[texts]


def _tokenize(tokenizer: Tokenizer, token_bytes: TokenBytes, texts: tuple[str, ...]) -> Breakers:
    by_token: dict[int, set[tuple[int, ...]]] = {}
    for text in texts:
        breaker = text.encode("utf-8", "replace")[:MAX_BREAKER_BYTES]
        tails_after = [_tail_tokens(tokenizer, breaker[start:]) for start in range(1, len(breaker))]
        for token, content in token_bytes.all.items():
            if breaker in content:
                by_token.setdefault(token, set()).add(())
                continue
            at = content.find(breaker[:1])  # -1 for most tokens
            while at >= 0:
                if breaker.startswith(content[at:]):
                    by_token.setdefault(token, set()).add(tails_after[len(content) - at - 1])
                at = content.find(breaker[:1], at + 1)
    rows = 1 + max(token_bytes.all, default=-1)
    counts = np.zeros(rows + 1, np.int32)
    for token, tails in by_token.items():
        counts[token + 1] = len(tails)
    tails = [tail for token in sorted(by_token) for tail in sorted(by_token[token])]
    starts = np.cumsum([0, *map(len, tails)]).astype(np.int32)
    return Breakers(rows, np.cumsum(counts).astype(np.int32), starts, np.array([token for tail in tails for token in tail], np.int32))


def _tail_tokens(tokenizer: Tokenizer, rest: bytes) -> tuple[int, ...]:
    """The rest of a breaker as tokens; an incomplete UTF-8 character is dropped."""
    return tuple(tokenizer.encode(rest.decode("utf-8", "ignore"), add_special_tokens=False)[:MAX_TAIL_TOKENS])
