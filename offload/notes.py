"""Messages about decisions; those about fallbacks are marked, because `--strict` refuses them,
and details, because only a plan says them."""

from __future__ import annotations

from collections.abc import Iterable

from .. import UsageError


class Fallback(str):
    """A line that says what runs slower, in a smaller context or with another result than was asked for or than the model is made for."""


class Detail(str):
    """A line about how a file is read that asks nothing of a person and changes no answer: a plan says it, a run does not."""


def refuse_fallbacks(lines: Iterable[str]) -> None:
    """Raises UsageError for the first fallback among `lines`."""
    for line in lines:
        if isinstance(line, Fallback):
            raise UsageError(f"--strict refuses this: {line}", "without --strict it runs this way")
