"""When to try again: delays that double, with jitter so that many clients do not come back together, never earlier than the server said."""

from __future__ import annotations

import random
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


@dataclass(frozen=True)
class Backoff:
    """`attempts` in a row that may fail; a delay in seconds grows from `first` to `longest`; a server that asks for more than `patience`
    is not waited for."""

    attempts: int = 6
    first: float = 0.5
    longest: float = 30.0
    patience: float = 120.0

    def delay(self, failures: int, asked: float | None = None) -> float:
        """Seconds to wait after the given number of failures in a row; `asked` is what the server said."""
        grown = min(self.longest, self.first * 2 ** (failures - 1))
        return max(asked or 0.0, grown * random.uniform(0.5, 1.0))


def retry_after(text: str | None, now: float) -> float | None:
    """Seconds of a Retry-After header, a number or a date; None where there is none. `now` is a time of day in seconds."""
    if not text:
        return None
    if text.isascii() and text.strip().isdigit():
        return float(text)
    date = moment(text)
    return None if date is None else max(0.0, date - now)


def moment(text: str | None) -> float | None:
    """Seconds since the epoch of a date in a header; None for what is none."""
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except (TypeError, ValueError, OverflowError):
        return None
