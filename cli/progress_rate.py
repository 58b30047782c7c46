"""The rate of progress events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.events import Progress


@dataclass
class ProgressRate:
    """The rate of a phase: work done per second of its own time. Work before its first event and the time of interleaved phases are not
    counted."""

    last: Progress  # its newest event
    at: float  # the time of that event, seconds
    done: int = 0  # units of work counted
    seconds: float = 0.0  # time counted

    def resume(self, event: Progress, now: float) -> None:
        """An event after another phase: the time in between does not count."""
        self.last, self.at = event, now

    def update(self, event: Progress, now: float) -> None:
        """The next event of the current phase."""
        self.done, self.seconds = self.done + event.done - self.last.done, self.seconds + now - self.at
        self.resume(event, now)

    @property
    def per_s(self) -> float:
        return self.done / self.seconds if self.seconds else 0.0


def is_new_operation(event: Progress, before: Progress) -> bool:
    """Whether an event belongs to another operation than the last one of the same phase: the next prompt, or another save."""
    return event.done < before.done or 0 < before.total <= before.done or (event.unit == "tokens" and event.total != before.total)
