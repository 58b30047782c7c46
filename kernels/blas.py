"""Restrict NumPy's BLAS to one thread, for small matrix products and where our own thread pool is busy.

OpenBLAS splits a product of a few million multiplications across all cores and lets its threads spin on each other. Next to another busy
process this made products of 128 x 64 x 1024 forty times slower on two cores than on one thread. NumPy's wheels bundle their own
OpenBLAS, whose thread-count functions are called here. Any other BLAS keeps its setting.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from numpy.linalg import _umath_linalg

PREFIXES, SUFFIXES = ("scipy_openblas", "openblas"), ("64_", "")


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: NumPy's OpenBLAS, if that is what NumPy uses, runs on the calling thread only."""
    functions = _functions()
    if functions is None:
        yield
        return
    get_threads, set_threads = functions
    previous = get_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(previous)


@cache
def _functions() -> tuple[object, object] | None:
    """OpenBLAS's get/set thread-count functions, looked up through the library that links it."""
    library = ctypes.CDLL(_umath_linalg.__file__)
    for prefix in PREFIXES:
        for suffix in SUFFIXES:
            functions = [getattr(library, f"{prefix}_{verb}_num_threads{suffix}", None) for verb in ("get", "set")]
            if all(functions):
                return functions[0], functions[1]
    return None
