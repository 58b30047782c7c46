"""Drafts that cost no pass of a model: from the text itself (prompt lookup), and from the logits of past passes (token recycling).

A draft is a chain of tokens. Kernels verify a few tokens of one sequence; a tree would need its own attention mask and gains little over
the most likely chain of the same size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..images.media import FIRST_MEDIA_ID

if TYPE_CHECKING:
    from ..events import Progress
    from ..sampler import SamplerSettings
    from ..sampling.dry import Breakers
    from .draft_length import DraftCosts

MIN_MATCH = 2  # tokens that must agree with an earlier position
MAX_MATCH = 32  # longer matches are not compared further
MAX_POSITIONS = 64  # earlier positions to compare
NUM_CHAINS, HASH_MULTIPLIER = 1 << 16, 0x9E3779B1  # the hash table of bigrams
TABLE_NBYTES = 4 * NUM_CHAINS
SUCCESSORS = 4  # kept for a token
CHECKED_TOKENS = 32  # last tokens by which a text is recognised as the continuation of the previous pass


@dataclass(frozen=True)
class Draft:
    """Drafted tokens. `kind` is their source: drafts of one kind have similar acceptance rates."""

    tokens: tuple[int, ...]
    kind: Hashable


class Proposer(Protocol):
    """A source of drafts."""

    def follow(self, history: Sequence[int], known: int) -> None:
        """The sequence is now `history`; its first `known` tokens are unchanged since the last call."""

    def propose(self, limit: int) -> Draft | None:
        """At most `limit` next tokens; None if there is no draft."""

    def observe(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """A pass over `tokens` gave `logits` [len(tokens), V], which must not be changed."""


class ModelDrafts(Protocol):
    """Drafts by a model or a layer of one.

    costs: seconds of drafting.
    failed: the error that disabled it, empty if none did.
    num_hidden_states: how many of a pass's last hidden states `add_hidden_states` needs, None for all.
    """

    costs: DraftCosts
    failed: str
    num_hidden_states: int | None

    def load(self) -> Iterator[Progress]:
        """Load its weights."""

    def set_sampling(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Draft the most likely tokens of a run with these settings."""

    def add_hidden_states(self, tokens: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, verified: bool) -> None:
        """The target ran a pass.

        tokens: the sequence before the pass, of which the first `start` count.
        ids: the tokens of the pass, after those.
        x: their hidden states before the final norm, float32 [T, D].
        verified: whether none of them is a draft.
        """

    def follow(self, history: Sequence[int]) -> None:
        """The sequence is now `history`, whose last token was in no pass yet. Runs nothing."""

    def tokens_behind(self, tokens: int) -> int:
        """About how many tokens it must catch up on, for a sequence of `tokens`."""

    def read(self, cancelled: Callable[[], bool]) -> Iterator[Progress]:
        """Catch up with the sequence, so that no draft waits for that."""

    def propose(self, limit: int, cancelled: Callable[[], bool]) -> Draft | None:
        """Up to `limit` next tokens; None if there is no draft."""

    def reset(self) -> None:
        """Drop the sequence."""

    def close(self) -> None:
        """Free its resources."""


class SuffixMatch:
    """Drafts what followed the longest earlier occurrence of the current suffix (prompt lookup, CopySpec); of several, the one that
    continues the last match, else the latest. Without a match the text may be an edited copy: then the draft assumes that the old alignment
    continues.

    Every bigram hashes to one of NUM_CHAINS chains of earlier positions. At most MAX_POSITIONS are compared; a hash collision only wastes
    one of them. A long context takes 12 bytes per token.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._tokens = array("q")
        self._latest = array("i", [-1]) * NUM_CHAINS  # by chain, the latest position of a bigram's second token
        self._previous = array("i")  # by position, the one before it in its chain
        self._shift = 0  # distance of the last match; 0 if there was none

    def follow(self, history: Sequence[int], known: int) -> None:
        if known < len(self._tokens):
            self._begin()
        tokens, latest, previous = self._tokens, self._latest, self._previous
        for token in history[len(tokens) :]:
            chain = ((tokens[-1] if tokens else -1) * HASH_MULTIPLIER + token) % NUM_CHAINS
            previous.append(latest[chain])
            latest[chain] = len(tokens)
            tokens.append(token)

    def match(self) -> tuple[int, int]:
        """(length, position) of the longest suffix, MIN_MATCH to MAX_MATCH tokens, that also ends at an earlier position; (0, -1) for
        none."""
        tokens, end = self._tokens, len(self._tokens) - 1
        best_length, best_position = MIN_MATCH - 1, -1
        for position in self._candidates(end):
            if position < best_length or tokens[position - best_length] != tokens[end - best_length]:
                continue  # no longer than the best
            length = self._match_length(position)
            if length > best_length:
                best_length, best_position = length, position
                if best_length == MAX_MATCH:
                    break
        if best_position < 0:
            return 0, -1
        self._shift = end - best_position
        return best_length, best_position

    def _candidates(self, end: int) -> Iterable[int]:
        if self._shift:
            yield end - self._shift
        position = self._previous[end] if end >= 0 else -1
        for _ in range(MAX_POSITIONS):
            if position < 0:
                return
            yield position
            position = self._previous[position]

    def _match_length(self, position: int) -> int:
        """How many tokens up to `position` equal those at the end, at most MAX_MATCH."""
        tokens, end, length = self._tokens, len(self._tokens) - 1, 0
        while length < MAX_MATCH and length <= position and tokens[position - length] == tokens[end - length]:
            length += 1
        return length

    def propose(self, limit: int) -> Draft | None:
        length, position = self.match()
        if limit < 1 or not (length or self._shift):
            return None
        if not length:
            position = len(self._tokens) - 1 - self._shift
        kind = ("match", length.bit_length()) if length else ("resumed", self._match_length(position))
        drafted = self._copy_after(position, limit)
        return Draft(drafted, kind) if drafted else None

    def _copy_after(self, position: int, limit: int) -> tuple[int, ...]:
        """The tokens after `position`, wrapping at the end of the text: what repeated once repeats again. Image tokens are never
        drafted."""
        drafted = self._tokens[position + 1 : position + 1 + limit].tolist()
        period = len(self._tokens) - 1 - position
        while len(drafted) < limit:
            drafted.append(drafted[len(drafted) - period])
        return tuple(takewhile(FIRST_MEDIA_ID.__gt__, drafted))

    def observe(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """Logits are not used."""


class RecycledTokens:
    """Token Recycling: the most likely successors of each token in past passes, rejected drafts included.

    A token keeps SUCCESSORS of them; old scores halve with every pass that contains the token. The draft is the chain of first successors.
    """

    def __init__(self) -> None:
        self._successors: dict[int, dict[int, float]] = {}  # token -> successor -> score
        self._last: int | None = None

    def follow(self, history: Sequence[int], known: int) -> None:
        self._last = history[-1] if len(history) else None

    def propose(self, limit: int) -> Draft | None:
        drafted: list[int] = []
        token = self._last
        while len(drafted) < limit and (scores := self._successors.get(token)):
            token = max(scores, key=scores.__getitem__)
            drafted.append(token)
        return Draft(tuple(drafted), "recycled") if drafted else None

    def observe(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        for token, row in zip(tokens, logits, strict=True):
            scores = {other: score / 2 for other, score in self._successors.get(token, {}).items()}
            for rank, other in enumerate(_top_tokens(row)):
                scores[other] = scores.get(other, 0.0) + 1 / (1 + rank)
            best = sorted(scores, key=lambda other: -scores[other])[:SUCCESSORS]
            self._successors[token] = {other: scores[other] for other in best}


def _top_tokens(row: np.ndarray) -> list[int]:
    """The SUCCESSORS largest of a row, largest first: a few argmax passes are faster than a partition. Restores the row."""
    top, values = [], []
    for _ in range(min(SUCCESSORS, len(row))):
        best = int(row.argmax())
        top.append(best)
        values.append(row[best])
        row[best] = -np.inf
    for token, value in zip(top, values):
        row[token] = value
    return top
