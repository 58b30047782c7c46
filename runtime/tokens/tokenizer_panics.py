"""Suppresses the backtrace that the `tokenizers` library prints when it panics. The error it raises is reported like any other."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2
_ONE_AT_A_TIME = threading.Lock()  # two that put stderr back in the wrong order would lose it


@contextmanager
def silence_panic() -> Iterator[None]:
    """The library writes to file descriptor 2 itself, so that is redirected meanwhile; other output is passed on."""
    with _ONE_AT_A_TIME:
        try:
            own, kept = os.dup(STDERR), tempfile.TemporaryFile()
        except OSError:  # no stderr, or no space: then it is printed
            yield
            return
        has_panicked = False
        try:
            os.dup2(kept.fileno(), STDERR)
            yield
        except BaseException as error:
            has_panicked = is_panic(error)
            raise
        finally:
            os.dup2(own, STDERR)
            os.close(own)
            with kept:
                kept.seek(0)
                if not has_panicked and (said := kept.read()):
                    os.write(STDERR, said)


def is_panic(error: BaseException) -> bool:
    """The panic is a BaseException of a type that cannot be imported."""
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"
