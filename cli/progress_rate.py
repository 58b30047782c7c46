"""The rate of progress events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.events import Progress


@dataclass
class ProgressRate:
    """The rate of a phase: what it did in its own time. Work before its first event, and time of other phases in between, do not count.
    `last`: its newest event, `at` that time."""

    last: Progress
    at: float
    done: int = 0
    seconds: float = 0.0

    def take_turn(self, event: Progress, now: float) -> None:
        self.last, self.at = event, now

    def go_on(self, event: Progress, now: float) -> None:
        self.done, self.seconds = self.done + event.done - self.last.done, self.seconds + now - self.at
        self.take_turn(event, now)

    @property
    def per_s(self) -> float:
        return self.done / self.seconds if self.seconds else 0.0


def is_new_operation(event: Progress, before: Progress) -> bool:
    """Whether an event belongs to another operation than the last one of that name: the next prompt, or another save."""
    return event.done < before.done or 0 < before.total <= before.done or (event.unit == "tokens" and event.total != before.total)
