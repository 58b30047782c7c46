"""What `transfer` is given and what it tells: files that are wanted, ranges of them that a server sends, or does not, and what has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .partial_file import PartialFile


class Body(Protocol):
    """What a server sends, read as it comes: no bytes more is the end."""

    def readinto(self, view: memoryview) -> int: ...
    def close(self) -> None: ...


class RetryLater(Exception):
    """No bytes now. `after`: seconds that the server asked to be left alone, by all connections."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.after = reason, after


class RestartFile(Exception):
    """What is here of the file cannot be continued. `whole`: the server sends it only from beginning to end."""

    def __init__(self, reason: str, whole: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.whole = reason, whole


@dataclass(frozen=True)
class Download:
    """A file to be completed. `name` is what a person calls it; `xet`: its hash in Xet, once the server has named one."""

    name: str
    part: PartialFile
    xet: Callable[[], str | None] | None = None


OpenRange = Callable[[str, int, int], Body]  # (name, begin, end) -> bytes; raises RetryLater, RestartFile, ConnectionFailed, EffllmError


@dataclass(frozen=True)
class Received:
    """`nbytes` of all files are here, what earlier runs brought included; never less than before."""

    nbytes: int


@dataclass(frozen=True)
class Complete:
    """All bytes of a file are here and their hash is right."""

    wanted: Download


@dataclass(frozen=True)
class Retrying:
    """Something went wrong and is being tried again."""

    text: str
