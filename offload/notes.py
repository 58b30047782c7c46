"""Notices about decisions: fallbacks are marked, since `--strict` refuses them, and details too, since only `plan` prints them."""

from __future__ import annotations

from collections.abc import Iterable

from .. import UsageError


class Fallback(str):
    """A notice that something runs slower, in a smaller context or with another result than requested or than the model is designed for."""


class Detail(str):
    """A notice about how a file is read that needs no action and changes no answer: `plan` prints it, a run does not."""


def refuse_fallbacks(lines: Iterable[str]) -> None:
    """Raises UsageError for the first fallback among `lines`."""
    for line in lines:
        if isinstance(line, Fallback):
            raise UsageError(f"--strict refuses this: {line}", "drop --strict to run it anyway")
