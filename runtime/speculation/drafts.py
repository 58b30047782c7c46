"""Drafts that cost no pass of a model: from the text itself (prompt lookup), and from what past passes found likely (token recycling).

A draft is a chain of tokens. Kernels verify a few tokens of one sequence; a tree would need a mask of its own and gains little over the
likeliest chain for as many columns.
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

PAIR = 2  # tokens that must agree before what followed them is worth a guess
LONGEST = 32  # agreement beyond this is not distinguished
PLACES = 64  # earlier places that are looked at
HEADS, SPREAD = 1 << 16, 0x9E3779B1  # chains of places, and what spreads pairs over them
PLACES_NBYTES = 4 * HEADS
CANDIDATES = 4  # kept for a token
SAME = 32  # tokens by which a text is known to be the one of the pass before: a guess about another would only be wrong


@dataclass(frozen=True)
class Draft:
    """Drafted tokens. `kind` says how they were found: drafts of one kind have similar acceptance rates."""

    tokens: tuple[int, ...]
    kind: Hashable


class Proposer(Protocol):
    """A source of drafts."""

    def follow(self, history: Sequence[int], known: int) -> None:
        """The sequence is now `history`; its first `known` tokens are unchanged since the last call."""

    def propose(self, most: int) -> Draft | None:
        """At most `most` next tokens; None without an idea."""

    def observe(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """A pass over `tokens` gave `logits` [len(tokens), V], which must not be changed."""


class ModelDrafts(Protocol):
    """Drafts by a model or a layer of one. `costs`: of drafting; `failed`: the error that ended it, "" before; `reads`: how many of a
    pass's last hidden states it needs in `saw`, None for all."""

    costs: DraftCosts
    failed: str
    reads: int | None

    def load(self) -> Iterator[Progress]:
        """Load its weights."""

    def choose_as(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Draft what a run with these settings finds likeliest."""

    def saw(self, held: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, certain: bool) -> None:
        """A pass of the target over `ids`, after the first `start` tokens of `held`, ended with the hidden states x float32 [T, D]
        before the final norm. `certain`: none of the tokens is a draft."""

    def follow(self, history: Sequence[int]) -> None:
        """The sequence is now `history`, whose last token was in no pass yet. Runs nothing."""

    def behind(self, tokens: int) -> int:
        """About how many tokens it must catch up on, for a sequence of `tokens`."""

    def read(self, cancelled: Callable[[], bool]) -> Iterator[Progress]:
        """Catch up with the sequence, so that no draft waits for that."""

    def propose(self, most: int, cancelled: Callable[[], bool]) -> Draft | None:
        """Up to `most` next tokens; None without an idea."""

    def reset(self) -> None:
        """Drop the sequence."""

    def close(self) -> None:
        """Free its resources."""


class SuffixMatch:
    """What followed the longest earlier occurrence of the current suffix (prompt lookup, CopySpec); of several, the one that continues the
    last match, else the latest. Without a match the text may be an edited copy: then the draft assumes that the old alignment continues.

    Every bigram hashes to one of HEADS chains of earlier positions. At most PLACES are compared; a hash collision only wastes one of them.
    A long context takes 12 bytes per token.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._tokens = array("q")
        self._latest = array("i", [-1]) * HEADS  # the place of a pair's second token
        self._before = array("i")
        self._shift = 0  # how far back the last match lay; 0: there was none

    def follow(self, history: Sequence[int], known: int) -> None:
        if known < len(self._tokens):
            self._begin()
        tokens, latest, before = self._tokens, self._latest, self._before
        for token in history[len(tokens) :]:
            chain = ((tokens[-1] if tokens else -1) * SPREAD + token) % HEADS
            before.append(latest[chain])
            latest[chain] = len(tokens)
            tokens.append(token)

    def match(self) -> tuple[int, int]:
        """(length, position) of the longest suffix, PAIR to LONGEST tokens, that also ends at an earlier position; (0, -1) for none."""
        tokens, end = self._tokens, len(self._tokens) - 1
        best, found = PAIR - 1, -1
        for place in self._candidates(end):
            if place < best or tokens[place - best] != tokens[end - best]:
                continue  # no longer than the best
            length = self._agreeing(place)
            if length > best:
                best, found = length, place
                if best == LONGEST:
                    break
        if found < 0:
            return 0, -1
        self._shift = end - found
        return best, found

    def _candidates(self, end: int) -> Iterable[int]:
        if self._shift:
            yield end - self._shift
        place = self._before[end] if end >= 0 else -1
        for _ in range(PLACES):
            if place < 0:
                return
            yield place
            place = self._before[place]

    def _agreeing(self, place: int) -> int:
        """How many tokens up to `place` equal those at the end, at most LONGEST."""
        tokens, end, length = self._tokens, len(self._tokens) - 1, 0
        while length < LONGEST and length <= place and tokens[place - length] == tokens[end - length]:
            length += 1
        return length

    def propose(self, most: int) -> Draft | None:
        length, place = self.match()
        if most < 1 or not (length or self._shift):
            return None
        if not length:
            place = len(self._tokens) - 1 - self._shift
        kind = ("match", length.bit_length()) if length else ("resumed", self._agreeing(place))
        drafted = self._from(place, most)
        return Draft(drafted, kind) if drafted else None

    def _from(self, place: int, most: int) -> tuple[int, ...]:
        """What followed `place`, wrapping at the end of the text: what repeated once repeats again. Image tokens are never drafted."""
        drafted = self._tokens[place + 1 : place + 1 + most].tolist()
        period = len(self._tokens) - 1 - place
        while len(drafted) < most:
            drafted.append(drafted[len(drafted) - period])
        return tuple(takewhile(FIRST_MEDIA_ID.__gt__, drafted))

    def observe(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """Only the text counts."""


class RecycledTokens:
    """Token Recycling: the likeliest successors of each token in past passes, rejected drafts included.

    A token keeps CANDIDATES; old scores halve with every pass that contains the token. The draft is the chain of first candidates.
    """

    def __init__(self) -> None:
        self._next: dict[int, dict[int, float]] = {}
        self._last: int | None = None

    def follow(self, history: Sequence[int], known: int) -> None:
        self._last = history[-1] if len(history) else None

    def propose(self, most: int) -> Draft | None:
        drafted: list[int] = []
        token = self._last
        while len(drafted) < most and (found := self._next.get(token)):
            token = max(found, key=found.__getitem__)
            drafted.append(token)
        return Draft(tuple(drafted), "recycled") if drafted else None

    def observe(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        for token, row in zip(tokens, logits, strict=True):
            found = {other: score / 2 for other, score in self._next.get(token, {}).items()}
            for rank, other in enumerate(_likeliest(row)):
                found[other] = found.get(other, 0.0) + 1 / (1 + rank)
            kept = sorted(found, key=lambda other: -found[other])[:CANDIDATES]
            self._next[token] = {other: found[other] for other in kept}


def _likeliest(row: np.ndarray) -> list[int]:
    """The CANDIDATES largest of a row, largest first: a few passes are faster than a partition."""
    found, values = [], []
    for _ in range(min(CANDIDATES, len(row))):
        best = int(row.argmax())
        found.append(best)
        values.append(row[best])
        row[best] = -np.inf
    for place, value in zip(found, values):
        row[place] = value
    return found
