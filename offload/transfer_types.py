"""Inputs and events of `transfer`: files to download, ranges that a server sends or refuses, progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .partial_file import PartialFile


class Body(Protocol):
    """A response body, read as it arrives; 0 bytes at the end."""

    def readinto(self, view: memoryview) -> int: ...
    def close(self) -> None: ...


class RetryLater(Exception):
    """The server sends nothing at the moment. `after`: seconds for which all connections should leave it alone, None if it did not say."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.after = reason, after


class RestartFile(Exception):
    """The partial file cannot be resumed. `whole`: the server only sends complete files."""

    def __init__(self, reason: str, whole: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.whole = reason, whole


@dataclass(frozen=True)
class Download:
    """A file to be completed."""

    name: str  # as shown to the user
    part: PartialFile
    xet: Callable[[], str | None] | None = None  # returns its Xet hash, None until the server has named one


OpenRange = Callable[[str, int, int], Body]  # (name, begin, end) -> bytes; raises RetryLater, RestartFile, ConnectionFailed, EffllmError


@dataclass(frozen=True)
class Received:
    """Progress."""

    nbytes: int  # of all files, earlier runs included; never decreases


@dataclass(frozen=True)
class Complete:
    """All bytes of a file have arrived and its hash matches."""

    download: Download


@dataclass(frozen=True)
class Retrying:
    """Something failed and is being retried."""

    text: str
