"""Messages about decisions; those about fallbacks are marked, because `--strict` refuses them."""

from __future__ import annotations

from collections.abc import Iterable

from .. import UsageError


class Fallback(str):
    """A line that says what runs slower, in a smaller context or with another result than was asked for or than the model is made for."""


def refuse_fallbacks(lines: Iterable[str]) -> None:
    """Raises UsageError for the first fallback among `lines`."""
    for line in lines:
        if isinstance(line, Fallback):
            raise UsageError(f"--strict refuses what would be said otherwise: {line}", "without --strict it runs like that")
