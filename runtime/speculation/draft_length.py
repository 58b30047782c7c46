"""How many drafted tokens are worth verifying: acceptance rates by kind of draft, and measured costs of passes of several tokens.

Drafts that are not run are judged against the text too, so a kind that was wrong is tried again as soon as it would have been right, and
text without repetition costs no pass. Pass costs are measured, expire, and are assumed low for untried lengths: one pass then corrects
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median
from typing import NamedTuple

from ..prefill_chunks import common_prefix

FADE = 0.98  # weight of what was seen of a kind when it is seen again
FIRST_TRIALS = 2.0  # weight of the assumption that half of all guesses are right
SAMPLES, OLD = 5, 64  # passes that a cost is the median of, and after how many passes it is not known any more
UNLIKELY = 0.01  # what a token that is no more likely than that adds is not worth counting
GUESSES = 9  # of a draft model, that what they cost is the median of
STEADY = 16  # most tokens that came since the last guess of a draft model that is asked for all: its own, and those of another guess
ALONE_EVERY = 32  # a pass of one token, so that the others are held against what that costs now


class DraftThresholds(NamedTuple):
    """Assumptions before any pass was timed, and when to draft. `slope`: relative cost of each further token in a pass. `worth`: tokens
    per time of one below which nothing is drafted."""

    slope: float
    worth: float


# A disk is waited for alike whatever a pass takes. In memory a further token costs 0.3 (AVX-512 VNNI, passes of eight) to 0.7 of a pass
# (AVX2, the first), a wrong guess as much, and texts that repeat are right nearly always: with less to gain it is not begun.
WAITING, COMPUTING = DraftThresholds(0.1, 1.03), DraftThresholds(0.4, 1.1)


class AcceptanceRates:
    """Acceptance rate by kind of draft, recent ones weighted most."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[float, float]] = {}

    def share(self, kind: Hashable, hope: float = 0.0) -> float:
        """Probability that a token of such a draft is right, given those before it. `hope`: count so many more as right."""
        right, trials = self._seen.get(kind, (0.0, 0.0))
        return (right + FIRST_TRIALS / 2 + hope) / (trials + FIRST_TRIALS + hope)

    def judge(self, kind: Hashable, guessed: Sequence[int], came: Sequence[int]) -> bool:
        """Compare a draft with the tokens that came, up to the first mismatch. Returns whether there was none."""
        right = common_prefix(guessed, came)
        trials = min(right + 1, len(guessed), len(came))
        before = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = FADE * before[0] + right, FADE * before[1] + trials
        return right == len(guessed)


class PassCosts:
    """Seconds per pass by its number of tokens."""

    def __init__(self, pays: DraftThresholds = WAITING) -> None:
        self.pays = pays
        self._seconds: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}  # their medians, asked for many times between two passes
        self._when: dict[int, int] = {}
        self._passes = 0

    def took(self, columns: int, seconds: float) -> None:
        """Record a pass."""
        self._passes += 1
        samples = self._seconds.setdefault(columns, deque(maxlen=SAMPLES))
        samples.append(seconds)
        self._typical[columns] = median(samples)
        self._when[columns] = self._passes
        if len(self._when) > 1:
            for old in [each for each, when in self._when.items() if each > 1 and self._passes - when > OLD]:
                del self._seconds[old], self._typical[old], self._when[old]

    @property
    def alone_is_due(self) -> bool:
        """Is it time for a pass of one token?"""
        return len(self._seconds.get(1, ())) < 2 or self._passes - self._when[1] >= ALONE_EVERY

    def is_known(self, columns: int) -> bool:
        """Was a pass of this length timed recently?"""
        return columns in self._typical

    @property
    def alone(self) -> float:
        """Seconds of a pass of one token. Raises KeyError before the first."""
        return self._typical[1]

    def ratio(self, columns: int) -> float:
        """The cost of a pass of this length in passes of one: measured, or from the longest shorter one."""
        nearest = max(each for each in self._typical if each <= columns)
        return self._typical[nearest] / self.alone + self.pays.slope * (columns - nearest)


class DraftCosts:
    """Seconds that a draft model takes. Catching up by a few tokens is part of a draft's cost; a prompt, or text generated while it was
    not asked, is prefilled once and counted separately."""

    def __init__(self) -> None:
        self._token: deque[float] = deque(maxlen=GUESSES)
        self._read: deque[float] = deque(maxlen=GUESSES)

    def read(self, tokens: int, seconds: float) -> None:
        """It prefilled `tokens`; a few tell nothing."""
        if tokens > STEADY:
            self._read.append(seconds / tokens)

    def guessed(self, tokens: int, seconds: float, read: int, read_s: float) -> None:
        """It drafted `tokens` in `seconds`, after catching up by `read` tokens in `read_s`."""
        if read <= STEADY:
            self._token.append((read_s + seconds) / max(1, tokens))
            return
        self.read(read, read_s)
        if tokens > 1:
            self._token.append(seconds / (tokens - 1))  # the first comes with what was read

    @property
    def token(self) -> float:
        """Recent seconds per drafted token; 0 before the first."""
        return median(self._token) if self._token else 0.0

    def reading(self, tokens: int) -> float:
        """Seconds of prefilling `tokens`; 0 if unknown."""
        return tokens * median(self._read) if self._read and tokens > STEADY else 0.0


def best_length(share: float, costs: PassCosts, most: int, extra: float = 0.0) -> tuple[int, float]:
    """(tokens to draft, expected tokens per time of one): 0 where drafting does not pay. `extra`: cost of drafting each token, in passes
    of one."""
    best, value = 0, costs.pays.worth
    expected = chance = 1.0
    for length in range(1, most + 1):
        chance *= share
        if chance < UNLIKELY:
            break
        expected += chance
        gained = expected / (costs.ratio(1 + length) + extra * length)
        if gained > value:
            best, value = length, gained
    return best, value
