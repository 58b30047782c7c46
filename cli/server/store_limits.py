"""Memory limits of what the server stores for later requests, so that clients need not send it again. A plan counts them from the start."""

from __future__ import annotations

import sys
from collections.abc import Iterable

KINDS = ("responses", "events of those in the background", "conversations", "threads")
MAX_STORE_NBYTES = 16 << 20  # of each kind; a larger object is not stored
ALL_STORES_NBYTES = len(KINDS) * MAX_STORE_NBYTES
ENTRY_NBYTES = 512  # overhead of a stored object


def nbytes_of(value: object) -> int:
    """The memory of a JSON value, without copying it: images are megabytes of text. Each character takes as many bytes as the widest of its
    string, and objects take more than their text."""
    return sys.getsizeof(value) + sum(map(nbytes_of, _within(value)))


def _within(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list | tuple) else ()
