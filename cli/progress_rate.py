"""How fast what is told as progress goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.events import Progress


@dataclass
class ProgressRate:
    """How fast a phase goes: what it did over its own time. What was done before its first event, and what other phases do between its
    turns, are not counted. `last`: its newest event, `at` seconds of the clock."""

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
    """Whether an event is of another operation than the one of the same name before: the next prompt, or saving."""
    return event.done < before.done or 0 < before.total <= before.done or (event.unit == "tokens" and event.total != before.total)
