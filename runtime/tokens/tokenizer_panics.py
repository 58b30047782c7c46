"""Suppresses the backtrace that the `tokenizers` library prints when it panics. The error it raises is reported like any other."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2
_LOCK = threading.Lock()  # two threads that restored stderr in the wrong order would lose it


@contextmanager
def silence_panic() -> Iterator[None]:
    """Context manager: capture file descriptor 2, to which the library writes; output is passed on unless the library panicked."""
    with _LOCK:
        try:
            stderr_copy, captured = os.dup(STDERR), tempfile.TemporaryFile()
        except OSError:  # no stderr, or no disk space: the backtrace is printed
            yield
            return
        has_panicked = False
        try:
            os.dup2(captured.fileno(), STDERR)
            yield
        except BaseException as error:
            has_panicked = is_panic(error)
            raise
        finally:
            os.dup2(stderr_copy, STDERR)
            os.close(stderr_copy)
            with captured:
                captured.seek(0)
                if not has_panicked and (output := captured.read()):
                    os.write(STDERR, output)


def is_panic(error: BaseException) -> bool:
    """Whether an error is the library's panic: a BaseException of a type that cannot be imported."""
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"
