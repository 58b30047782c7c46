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
    """No bytes now. `after`: seconds for which all connections should leave the server alone."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.after = reason, after


class RestartFile(Exception):
    """The partial file cannot be continued. `whole`: the server only sends complete files."""

    def __init__(self, reason: str, whole: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.whole = reason, whole


@dataclass(frozen=True)
class Download:
    """A file to be completed. `name` is shown to the user; `xet`: its Xet hash, once the server has named one."""

    name: str
    part: PartialFile
    xet: Callable[[], str | None] | None = None


OpenRange = Callable[[str, int, int], Body]  # (name, begin, end) -> bytes; raises RetryLater, RestartFile, ConnectionFailed, EffllmError


@dataclass(frozen=True)
class Received:
    """`nbytes` of all files have arrived, earlier runs included; never decreases."""

    nbytes: int


@dataclass(frozen=True)
class Complete:
    """All bytes of a file have arrived and its hash matches."""

    wanted: Download


@dataclass(frozen=True)
class Retrying:
    """Something failed and is being retried."""

    text: str
