"""How many drafted tokens are worth verifying: acceptance rates by kind of draft, and measured costs of passes of several tokens.

Drafts that no pass verified are compared with the text too, so a kind that was wrong is tried again as soon as it would have been right,
and text without repetition costs no pass. Pass costs are measured, expire, and are assumed low for untried lengths: one pass then corrects
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median
from typing import NamedTuple

from ..prefill_chunks import common_prefix

DECAY = 0.98  # of the old counts of a kind, with every new draft of it
PRIOR_TRIALS = 2.0  # weight of the prior, an acceptance rate of one half
COST_SAMPLES, MAX_COST_AGE = 5, 64  # a cost is the median of the last COST_SAMPLES passes, and forgotten MAX_COST_AGE passes later
MIN_PROBABILITY = 0.01  # later tokens of a draft are ignored
DRAFT_SAMPLES = 9  # a draft model's cost is the median of the last DRAFT_SAMPLES drafts
MAX_CATCH_UP = 16  # tokens between two drafts of a model that drafts for every pass: its own draft, and that of another source
SINGLE_TOKEN_INTERVAL = 32  # passes between two of one token, which keep the reference cost up to date


class DraftThresholds(NamedTuple):
    """Assumptions before any pass was timed, and when to draft."""

    slope: float  # cost of each further token in a pass, relative to a pass of one
    min_gain: float  # tokens in the time of a pass of one; nothing is drafted for less


# On disk, a pass of any length waits for the same reads. In memory a further token costs 0.3 (AVX-512 VNNI, passes of eight) to 0.7 (AVX2,
# the first) of a pass, a wrong draft as much, and drafts of repetitive text are nearly always right: drafting does not start for less.
ON_DISK, IN_MEMORY = DraftThresholds(0.1, 1.03), DraftThresholds(0.4, 1.1)


class AcceptanceRates:
    """Acceptance rate by kind of draft, recent ones weighted most."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, tuple[float, float]] = {}  # accepted and compared tokens, decayed

    def rate(self, kind: Hashable, prior: float = 0.0) -> float:
        """Probability that a token of such a draft is right, given those before it. `prior`: tokens assumed right in addition."""
        right, trials = self._counts.get(kind, (0.0, 0.0))
        return (right + PRIOR_TRIALS / 2 + prior) / (trials + PRIOR_TRIALS + prior)

    def update(self, kind: Hashable, drafted: Sequence[int], actual: Sequence[int]) -> bool:
        """Compare a draft with the actual tokens, up to the first mismatch. Returns whether there was none."""
        right = common_prefix(drafted, actual)
        trials = min(right + 1, len(drafted), len(actual))
        old_right, old_trials = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = DECAY * old_right + right, DECAY * old_trials + trials
        return right == len(drafted)


class PassCosts:
    """Seconds per pass by its number of tokens."""

    def __init__(self, thresholds: DraftThresholds = ON_DISK) -> None:
        self.thresholds = thresholds
        self._samples: dict[int, deque[float]] = {}
        self._median: dict[int, float] = {}  # of the samples, cached: it is read many times between two passes
        self._last_pass: dict[int, int] = {}  # the number of the last pass of each length
        self._passes = 0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Add the time of a pass."""
        self._passes += 1
        samples = self._samples.setdefault(num_tokens, deque(maxlen=COST_SAMPLES))
        samples.append(seconds)
        self._median[num_tokens] = median(samples)
        self._last_pass[num_tokens] = self._passes
        if len(self._last_pass) > 1:
            expired = [length for length, number in self._last_pass.items() if length > 1 and self._passes - number > MAX_COST_AGE]
            for length in expired:
                del self._samples[length], self._median[length], self._last_pass[length]

    @property
    def single_token_is_due(self) -> bool:
        """Whether it is time for a pass of one token."""
        return len(self._samples.get(1, ())) < 2 or self._passes - self._last_pass[1] >= SINGLE_TOKEN_INTERVAL

    def is_known(self, num_tokens: int) -> bool:
        """Whether a pass of this length was timed recently."""
        return num_tokens in self._median

    @property
    def single_token(self) -> float:
        """Seconds of a pass of one token. Raises KeyError before the first."""
        return self._median[1]

    def ratio(self, num_tokens: int) -> float:
        """The cost of a pass of this length in passes of one: measured, or from the longest shorter one."""
        nearest = max(length for length in self._median if length <= num_tokens)
        return self._median[nearest] / self.single_token + self.thresholds.slope * (num_tokens - nearest)


class DraftCosts:
    """Seconds that a draft model takes. Catching up by a few tokens is part of a draft's cost; a prompt, or text generated while it did
    not draft, is prefilled once and counted separately."""

    def __init__(self) -> None:
        self._per_token: deque[float] = deque(maxlen=DRAFT_SAMPLES)
        self._per_prefill_token: deque[float] = deque(maxlen=DRAFT_SAMPLES)

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """It prefilled `tokens`; few of them say nothing about the rate."""
        if tokens > MAX_CATCH_UP:
            self._per_prefill_token.append(seconds / tokens)

    def record_draft(self, tokens: int, seconds: float, caught_up: int, caught_up_s: float) -> None:
        """It drafted `tokens` in `seconds`, after catching up by `caught_up` tokens in `caught_up_s`."""
        if caught_up <= MAX_CATCH_UP:
            self._per_token.append((caught_up_s + seconds) / max(1, tokens))
            return
        self.record_prefill(caught_up, caught_up_s)
        if tokens > 1:
            self._per_token.append(seconds / (tokens - 1))  # the prefill gave the first

    @property
    def per_token(self) -> float:
        """Recent seconds per drafted token; 0 before the first."""
        return median(self._per_token) if self._per_token else 0.0

    def prefill_s(self, tokens: int) -> float:
        """Seconds of prefilling `tokens`; 0 if unknown, or if they are few."""
        return tokens * median(self._per_prefill_token) if self._per_prefill_token and tokens > MAX_CATCH_UP else 0.0


def best_length(rate: float, costs: PassCosts, limit: int, per_token: float = 0.0) -> tuple[int, float]:
    """(tokens to draft, their gain), 0 tokens if drafting does not pay. The gain is the expected tokens in the time of a pass of one.

    rate: acceptance rate of each token, given those before it.
    limit: the most tokens to draft.
    per_token: cost of drafting a token, in passes of one.
    """
    best, best_gain = 0, costs.thresholds.min_gain
    expected = probability = 1.0
    for length in range(1, limit + 1):
        probability *= rate
        if probability < MIN_PROBABILITY:
            break
        expected += probability
        gain = expected / (costs.ratio(1 + length) + per_token * length)
        if gain > best_gain:
            best, best_gain = length, gain
    return best, best_gain
