"""Files that the user gives with a prompt: pictures and sounds."""

from __future__ import annotations

from pathlib import Path

from ... import UsageError


def read_given(path: Path, most: int, what: str) -> bytes:
    """The bytes of a file, at most one more than `most`: who decodes them says that these are too many. Raises UsageError."""
    try:
        with path.open("rb") as file:
            return file.read(most + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", f"give the path of {what}") from error
