"""NumPy's matrix products held to one thread: where they are small, or where our own threads work beside them.

OpenBLAS splits a product of a few million multiplications among all cores and lets its threads spin for each other; beside another busy
process that made products of 128 × 64 × 1024 forty times slower on two cores than one thread alone. NumPy's wheels bring their own
OpenBLAS, which is asked by its own functions; another library is left as it is.
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
    """Within it NumPy's OpenBLAS, where that is what NumPy has, computes on the calling thread alone."""
    functions = _functions()
    if functions is None:
        yield
        return
    get, put = functions
    before = get()
    put(1)
    try:
        yield
    finally:
        put(before)


@cache
def _functions() -> tuple[object, object] | None:
    """OpenBLAS' own "how many threads" and "so many threads", found through the library that links it."""
    library = ctypes.CDLL(_umath_linalg.__file__)
    for prefix in PREFIXES:
        for suffix in SUFFIXES:
            found = [getattr(library, f"{prefix}_{verb}_num_threads{suffix}", None) for verb in ("get", "set")]
            if all(found):
                return found[0], found[1]
    return None
