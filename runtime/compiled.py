"""Kernels that a piece of work needs, compiled for this processor and able to run on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import UsageError
from .events import Progress


def compiled(kinds: Sequence[str]) -> Iterator[Progress]:
    """Compile what is cold of `kinds` (`warm.KINDS`). Raises UsageError where a target is forced that this processor cannot run: the first
    kernel would end the process without a word."""
    from ..kernels import trial, warm

    if warm.is_cold(kinds):
        for done, total in warm.warm(kinds):
            yield Progress("compiling kernels (first run only)", done, total, "kernels")
    if (target := trial.forced()) and not trial.runs(kinds):
        raise UsageError(f"{target}: this processor lacks instructions of that target",
                         "unset it, and kernels are compiled for this processor")
