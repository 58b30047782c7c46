"""What a server keeps in memory of what it was asked and answered, so that programs need not send it again: how many bytes of each kind
there may be, which its plan counts from the start, and how they are counted."""

from __future__ import annotations

import sys
from collections.abc import Iterable

KINDS = ("responses", "events of those in the background", "conversations", "threads")
MAX_STORE_NBYTES = 16 << 20  # of each kind; one that is larger is not kept
ALL_STORES_NBYTES = len(KINDS) * MAX_STORE_NBYTES
ENTRY_NBYTES = 512  # bytes of what holds one of them by its name


def nbytes_of(value: object) -> int:
    """What a value of JSON takes in memory, without a copy of it: pictures are megabytes of text. Each letter of a text takes as many bytes
    as its widest, an object more than its letters."""
    return sys.getsizeof(value) + sum(map(nbytes_of, _within(value)))


def _within(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list | tuple) else ()
