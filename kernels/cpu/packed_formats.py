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
from .packed_avx2 import IN_TURN
from .packed_avx2 import columns as columns_in_turn
from .packed_avx2_single import single as single_book
from .packed_avx512 import IN_PAIRS, pairs
from .packed_avx512 import columns as columns_of_pairs
from .packed_loops import columns as columns_abreast
from .packed_loops import expand, single

columns = columns_in_turn if IN_TURN else columns_of_pairs if IN_PAIRS else columns_abreast
# How a scheme's sums are scaled, and how its codes are expanded; the others in both as PLAIN.
WAYS = {"codebook": ways.CODEBOOK, "super": ways.SUPER, "nibble": ways.NIBBLE, "minimum": ways.MINIMA, "nvfp": ways.SMALL,
        "signed": ways.SIGNED, "table": ways.TABLE, "mxfp": ways.EXPONENTS, "block": ways.BLOCKS, "offset": ways.BLOCKS}
EXPANDED = {"codebook": ways.CODEBOOK, "table": ways.TABLE, "mxfp": ways.EXPONENTS, "nvfp": ways.EXPONENTS}
# The largest byte that several columns are multiplied by.
MOST = {ways.CODEBOOK: 127, ways.SUPER: 31, ways.SIGNED: 63, ways.EXPONENTS: 127, ways.SMALL: 127, ways.NIBBLE: 3}
# Slots of a format's table: addresses of the loop of one column, of that for pairs of row blocks (0 where there is none), of what expands
# codes for several columns, and of their loop.
SINGLE, PAIRS, EXPAND, COLUMNS = range(4)
_TABLES: list[np.ndarray] = []  # whose addresses kernels hold


class Loops(NamedTuple):
    """In the order of a format's table."""

    single: Jit
    pairs: Jit | None
    expand: Jit
    columns: Jit

    def functions(self) -> list[Jit]:
        return [each for each in self if each is not None]


def single_for(bits: int, way: str) -> Callable:
    """The loop of one column of a format."""
    return single_book(bits) if IN_TURN and way == ways.CODEBOOK else single(bits, way)


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
def _columns(way: str, most: int) -> Jit:
    loop = columns(way, most)

    def body(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart):
        loop(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)

    return _named(body, f"columns_{way}_{most}", 14)


def _named(body: Callable, name: str, arguments: int) -> Jit:
    body.__name__ = name
    return jit(f"void({', '.join(['int64'] * arguments)})")(body)


def loops_of(scheme: str, bits: int, halves: bool) -> Loops:
    """The loops of a format; `halves`: each half of a tile has its own scale."""
    way = WAYS.get(scheme, ways.PLAIN)
    several = ways.HALVES if halves and way == ways.PLAIN else way
    most = MOST.get(several, 255)
    if IN_TURN and several in (ways.PLAIN, ways.HALVES, ways.MINIMA, ways.BLOCKS) and bits <= 6:
        # with small codes, several quads of which are summed in 16 bits
        most = 63 if bits == 6 or several == ways.HALVES else 31
    return Loops(_single(bits, way), _pairs(bits, way) if IN_PAIRS else None, _expand(bits, EXPANDED.get(scheme, ways.PLAIN)),
                 _columns(several, most))


def functions_of(form: str) -> list[Jit]:
    """The functions compiled for one of `tiles.FORMATS`."""
    scheme, _, bits = form.rpartition("-")
    halves = [False, True] if scheme not in WAYS else [False]
    return list(dict.fromkeys(each for half in halves for each in loops_of(scheme, int(bits), half).functions()))


@cache
def table_at(kind: int, shift: int) -> int:
    """Address of a format's loop table, stored in field `packed_matrix.LOOPS`; `kind` and `shift` as in a matrix's fields. Compiles loops
    as needed."""
    scheme = next(name for name, number in SCHEMES.items() if number == kind & SCHEME_MASK)
    found = loops_of(scheme, kind >> SCHEME_SHIFT, shift < 0)
    _TABLES.append(np.array([0 if each is None else each.address for each in found], np.int64))
    return _TABLES[-1].ctypes.data
