"""Exponential backoff with jitter, honouring the delay that a server asks for."""

from __future__ import annotations

import random
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


@dataclass(frozen=True)
class Backoff:
    """`attempts` consecutive failures are allowed; delays in seconds double from `first` to `longest`. A server that asks for more than
    `patience` seconds is not retried."""

    attempts: int = 6
    first: float = 0.5
    longest: float = 30.0
    patience: float = 120.0

    def delay(self, failures: int, asked: float | None = None) -> float:
        """Seconds to wait after `failures` consecutive failures; `asked` is the server's Retry-After."""
        grown = min(self.longest, self.first * 2 ** (failures - 1))
        return max(asked or 0.0, grown * random.uniform(0.5, 1.0))


def retry_after(text: str | None, now: float) -> float | None:
    """The seconds of a Retry-After header (a number or a date); None without one. `now` is the time of day in seconds."""
    if not text:
        return None
    if text.isascii() and text.strip().isdigit():
        return float(text)
    date = moment(text)
    return None if date is None else max(0.0, date - now)


def moment(text: str | None) -> float | None:
    """An HTTP date as seconds since the epoch; None if it is not one."""
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except (TypeError, ValueError, OverflowError):
        return None
