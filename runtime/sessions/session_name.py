"""Valid session names, and how to quote them in the commands that messages suggest."""

from __future__ import annotations

from ... import UsageError, typed

MAX_NAME_NBYTES = 100  # bytes: with prefix and suffix, the limit of a file name


def check_name(name: str) -> str:
    """The name, if it is valid. Raises UsageError."""
    length = len(name.encode("utf-8", "replace"))
    if not 0 < length <= MAX_NAME_NBYTES or name[0] in ".-" or not name.isprintable() or set(name) & set("/\\"):
        raise UsageError(f"{name!r} is not a valid session name",
                         f"use printable characters except / and \\, at most {MAX_NAME_NBYTES} bytes, not starting with a dot or dash")
    return name


def is_valid_name(name: str) -> bool:
    try:
        return bool(check_name(name))
    except UsageError:
        return False


def rm_command(*names: str, more: str = "") -> str:
    """The command that removes sessions, with quoted arguments: names may contain spaces and shell metacharacters."""
    return " ".join(("effllm session rm", *map(typed, names), *([more] if more else ())))
