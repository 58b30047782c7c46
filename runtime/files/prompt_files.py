"""Files that the user attaches to a prompt: images and audio."""

from __future__ import annotations

from pathlib import Path

from ... import UsageError


def read_prompt_file(path: Path, max_nbytes: int, what: str) -> bytes:
    """Content of a file, at most `most` + 1 bytes; the decoder rejects anything over the limit. Raises UsageError."""
    try:
        with path.open("rb") as file:
            return file.read(max_nbytes + 1)
    except OSError as error:
        raise unreadable_file(path, error, what) from error


def unreadable_file(path: Path, error: OSError, what: str) -> UsageError:
    """UsageError for a path that cannot be opened; URLs and data URIs get hints of their own, as they are no paths."""
    name = str(path)
    if name.startswith(("http:/", "https:/")):
        return UsageError(f"{name:.80} is a URL, which effllm does not fetch",
                          f"download it first (curl -LO), and give the path of {what}")
    if name.startswith("data:"):
        return UsageError(f"{name:.40}... is {what} itself, not its path", "decode the part after the comma into a file with base64 -d")
    return UsageError(f"{path}: {error.strerror}", f"give the path of {what}")
