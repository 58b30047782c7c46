"""The `packed.py` loops of every format. Each is compiled separately, so that only those a model needs are; kernels call them by address.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from ..compile import Jit, jit
from ..tiles import SCHEME_MASK, SCHEME_SHIFT, SCHEMES
from . import packed_scales as ways
from .packed_avx2 import USES_AVX2
from .packed_avx2 import columns as columns_in_turn
from .packed_avx2_single import single as single_book
from .packed_avx512 import USES_AVX512, pairs
from .packed_avx512 import columns as columns_of_pairs
from .packed_loops import columns as columns_abreast
from .packed_loops import expand, single

columns = columns_in_turn if USES_AVX2 else columns_of_pairs if USES_AVX512 else columns_abreast
# How the sums of a scheme are scaled, and how its codes are expanded; PLAIN for the others.
SCALINGS = {"codebook": ways.CODEBOOK, "super": ways.SUPER, "nibble": ways.NIBBLE, "minimum": ways.MINIMA, "nvfp": ways.SMALL,
            "signed": ways.SIGNED, "table": ways.TABLE, "mxfp": ways.EXPONENTS, "block": ways.BLOCKS, "offset": ways.BLOCKS}
EXPANDED = {"codebook": ways.CODEBOOK, "table": ways.TABLE, "mxfp": ways.EXPONENTS, "nvfp": ways.EXPONENTS}
# The largest byte that several columns are multiplied by; 255 for the others.
MAX_WEIGHTS = {ways.CODEBOOK: 127, ways.SUPER: 31, ways.SIGNED: 63, ways.EXPONENTS: 127, ways.SMALL: 127, ways.NIBBLE: 3}
# Slots of a format's table, addresses of: the loop for one column, the loop for pairs of row blocks (0: none), the expansion for several
# columns, and the loop for several columns.
SINGLE, PAIRS, EXPAND, COLUMNS = range(4)
_TABLES: list[np.ndarray] = []  # kept alive: kernels hold their addresses


class Loops(NamedTuple):
    """In the order of a format's table."""

    single: Jit
    pairs: Jit | None
    expand: Jit
    columns: Jit

    def functions(self) -> list[Jit]:
        return [function for function in self if function is not None]


def single_for(bits: int, way: str) -> Callable:
    """The loop of one column of a format."""
    return single_book(bits) if USES_AVX2 and way == ways.CODEBOOK else single(bits, way)


@cache
def _single(bits: int, way: str) -> Jit:
    loop = single_for(bits, way)

    def body(table, tables, x, tiles, shift, zero_shift, sums):
        loop(table, tables, x, tiles, shift, zero_shift, sums)

    return _named(body, f"single_{way}_{bits}", 7)


@cache
def _pairs(bits: int, way: str) -> Jit:
    loop = pairs(bits, way)

    def body(count, together, table, tables, x, tiles, shift, zero_shift, sums):
        loop(count, together, table, tables, x, tiles, shift, zero_shift, sums)

    return _named(body, f"pairs_{way}_{bits}", 9)


@cache
def _expand(bits: int, way: str) -> Jit:
    loop = expand(bits, way)

    def body(codes, tables, tiles, out):
        loop(codes, tables, tiles, out)

    return _named(body, f"expand_{way}_{bits}", 4)


@cache
def _columns(way: str, max_weight: int) -> Jit:
    loop = columns(way, max_weight)

    def body(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart):
        loop(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)

    return _named(body, f"columns_{way}_{max_weight}", 14)


def _named(body: Callable, name: str, arguments: int) -> Jit:
    body.__name__ = name
    return jit(f"void({', '.join(['int64'] * arguments)})")(body)


def loops_of(scheme: str, bits: int, halves: bool) -> Loops:
    """The loops of a format; `halves`: each half of a tile has its own scale."""
    way = SCALINGS.get(scheme, ways.PLAIN)
    columns_way = ways.HALVES if halves and way == ways.PLAIN else way
    max_weight = MAX_WEIGHTS.get(columns_way, 255)
    if USES_AVX2 and columns_way in (ways.PLAIN, ways.HALVES, ways.MINIMA, ways.BLOCKS) and bits <= 6:
        # small codes, several quads of which are summed in 16 bits
        max_weight = 63 if bits == 6 or columns_way == ways.HALVES else 31
    return Loops(_single(bits, way), _pairs(bits, way) if USES_AVX512 else None, _expand(bits, EXPANDED.get(scheme, ways.PLAIN)),
                 _columns(columns_way, max_weight))


def functions_of(form: str) -> list[Jit]:
    """The functions compiled for one of `tiles.FORMATS`."""
    scheme, _, bits = form.rpartition("-")
    halves = [False, True] if scheme not in SCALINGS else [False]
    return list(dict.fromkeys(function for half in halves for function in loops_of(scheme, int(bits), half).functions()))


@cache
def table_at(kind: int, shift: int) -> int:
    """Address of a format's loop table, stored in field `packed_matrix.LOOPS`; `kind` and `shift` as in a matrix's fields. Compiles loops
    as needed."""
    scheme = next(name for name, number in SCHEMES.items() if number == kind & SCHEME_MASK)
    loops = loops_of(scheme, kind >> SCHEME_SHIFT, shift < 0)
    _TABLES.append(np.array([0 if function is None else function.address for function in loops], np.int64))
    return _TABLES[-1].ctypes.data
