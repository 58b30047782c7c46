"""Guesses of what comes next that cost no pass of any model: from the text itself, and from what past passes thought likely.

A draft is a chain of tokens. The kernels run a few tokens of one sequence side by side; a tree of alternatives would ask them for a mask of
its own, and for as many columns gains little over the chain that follows the likeliest branch.
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
LONGEST = 32  # agreement beyond this is not told apart
PLACES = 64  # earlier places that are looked at
HEADS, SPREAD = 1 << 16, 0x9E3779B1  # chains of places, and what spreads pairs over them
PLACES_NBYTES = 4 * HEADS
CANDIDATES = 4  # kept for a token
SAME = 32  # tokens by which a text is known to be the one of the pass before: a guess about another would only be wrong


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next. `kind` says how it was found: guesses of one kind are right about as often."""

    tokens: tuple[int, ...]
    kind: Hashable


class Proposer(Protocol):
    """Where drafts come from."""

    def follow(self, history: Sequence[int], known: int) -> None:
        """The sequence is `history` now; its first `known` tokens are those that were followed before."""

    def propose(self, most: int) -> Draft | None:
        """At most `most` tokens to come after what was followed; None for no idea."""

    def observe(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """A pass over `tokens` found `logits` [len(tokens), V] behind each. They are read, and are as they were afterwards."""


class ModelDrafts(Protocol):
    """Drafts by a model or a layer of one. `costs`: what its guesses take; `failed`: what ended them, "" before; `reads`: of how many of a
    pass's last tokens it `saw` the states, None for all."""

    costs: DraftCosts
    failed: str
    reads: int | None

    def load(self) -> Iterator[Progress]:
        """Read what it needs."""

    def choose_as(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Guess what a run with these settings finds likeliest."""

    def saw(self, held: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, certain: bool) -> None:
        """A pass of the model that is drafted for over `ids`, behind the first `start` tokens of `held`, ended with the states x float32
        [T, D], before the last norm. `certain`: none of them is a guess."""

    def follow(self, history: Sequence[int]) -> None:
        """The sequence is `history` now, of which the last token was in no pass yet. Nothing is run."""

    def behind(self, tokens: int) -> int:
        """How many of a sequence of so many tokens it would read before its next guess, about."""

    def read(self, cancelled: Callable[[], bool]) -> Iterator[Progress]:
        """Hold the sequence, so that no guess waits for that."""

    def propose(self, most: int, cancelled: Callable[[], bool]) -> Draft | None:
        """Up to `most` tokens behind what is followed; None where it has no idea."""

    def reset(self) -> None:
        """Forget the sequence."""

    def close(self) -> None:
        """Give back what it holds."""


class SuffixMatch:
    """What followed the longest suffix that occurred before (CopySpec, prompt lookup); of several places the one that goes on from the last
    match, else the latest. Where nothing matches, the text may have been changed in one word: then the guess is that it goes on as it went.

    Every pair of neighbours belongs to one of HEADS chains, which knows where its last pair stood, and every place where the one before it
    did. At most PLACES are compared; that another pair may share the chain only costs one of them. A long context takes 12 bytes a token.
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
        """(length, place) of the longest suffix, from PAIR to LONGEST tokens, that also ends at an earlier `place`; (0, -1) for none."""
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
        """Tokens up to `place` that are those at the end, LONGEST at most."""
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
        """What followed `place`; the end of the text follows itself: what came once comes again. A picture is no word that may come."""
        drafted = self._tokens[place + 1 : place + 1 + most].tolist()
        period = len(self._tokens) - 1 - place
        while len(drafted) < most:
            drafted.append(drafted[len(drafted) - period])
        return tuple(takewhile(FIRST_MEDIA_ID.__gt__, drafted))

    def observe(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """The text alone counts."""


class RecycledTokens:
    """Token Recycling: which tokens past passes found likely behind a token, wherever it stood, those of refused drafts included.

    A token keeps CANDIDATES; what was found halves with every pass that sees the token again. The draft is the chain of first candidates.
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
    """The CANDIDATES largest of a row, the largest first: a few passes over it are quicker than a partition."""
    found, values = [], []
    for _ in range(min(CANDIDATES, len(row))):
        best = int(row.argmax())
        found.append(best)
        values.append(row[best])
        row[best] = -np.inf
    for place, value in zip(found, values):
        row[place] = value
    return found
