"""The loops of `packed_loops.py` for every format, and which of them a format's number (`kind`) means."""

from __future__ import annotations

from collections.abc import Callable

from ..deferred import inlined
from ..tiles import BLOCK, CODEBOOK, MINIMUM, MXFP, NIBBLE, NVFP, OFFSET, SCHEME_MASK, SCHEME_SHIFT, SIGNED, SUPER, TABLE
from . import packed_factors as ways
from .packed_loops import columns as columns_abreast
from .packed_loops import expand, single
from .packed_one import single as single_book
from .packed_pairs import IN_PAIRS, pairs
from .packed_pairs import columns as columns_of_pairs
from .packed_turns import IN_TURN
from .packed_turns import columns as columns_in_turn

columns = columns_in_turn if IN_TURN else columns_of_pairs if IN_PAIRS else columns_abreast



def _of_a_format(loop: Callable) -> Callable:
    """`loop(bits, way)` of every format, and which of them a `kind` means: a function of that and what the loops are given."""
    book4, book3, book2 = (loop(bits, ways.CODEBOOK) for bits in (4, 3, 2))
    plain8, plain6, plain5, plain4, plain3, plain2 = (loop(bits, ways.PLAIN) for bits in (8, 6, 5, 4, 3, 2))
    block8, block5, block4 = (loop(bits, ways.BLOCKS) for bits in (8, 5, 4))
    super5, super4 = (loop(bits, ways.SUPER) for bits in (5, 4))
    minima8, minima6, minima5, minima4, minima3, minima2 = (loop(bits, ways.MINIMA) for bits in (8, 6, 5, 4, 3, 2))
    nibble2, small4 = loop(2, ways.NIBBLE), loop(4, ways.SMALL)
    table4, table3 = loop(4, ways.TABLE), loop(3, ways.TABLE)
    signed6, exponent4 = loop(6, ways.SIGNED), loop(4, ways.EXPONENTS)

    @inlined()
    def run(kind, *given):
        bits, scheme = kind >> SCHEME_SHIFT, kind & SCHEME_MASK
        if scheme == SUPER:
            if bits == 4:
                super4(*given)
            else:
                super5(*given)
        elif scheme == NIBBLE:
            nibble2(*given)
        elif scheme == MINIMUM:
            if bits == 4:
                minima4(*given)
            elif bits == 8:
                minima8(*given)
            elif bits == 5:
                minima5(*given)
            elif bits == 6:
                minima6(*given)
            elif bits == 3:
                minima3(*given)
            else:
                minima2(*given)
        elif scheme == NVFP:
            small4(*given)
        elif scheme == SIGNED:
            signed6(*given)
        elif scheme == TABLE:
            if bits == 4:
                table4(*given)
            else:
                table3(*given)
        elif scheme == MXFP:
            exponent4(*given)
        elif scheme == BLOCK or scheme == OFFSET:
            if bits == 4:
                block4(*given)
            elif bits == 5:
                block5(*given)
            else:
                block8(*given)
        elif scheme == CODEBOOK:
            if bits == 4:
                book4(*given)
            elif bits == 3:
                book3(*given)
            else:
                book2(*given)
        elif bits == 8:
            plain8(*given)
        elif bits == 6:
            plain6(*given)
        elif bits == 5:
            plain5(*given)
        elif bits == 4:
            plain4(*given)
        elif bits == 3:
            plain3(*given)
        else:
            plain2(*given)

    return run


def single_for(bits: int, way: str) -> Callable:
    """The loop of one column of a format."""
    return single_book(bits) if IN_TURN and way == ways.CODEBOOK else single(bits, way)


single_of, pairs_of = _of_a_format(single_for), _of_a_format(pairs)
_expand_exponent4, _expand_table4, _expand_table3 = expand(4, ways.EXPONENTS), expand(4, ways.TABLE), expand(3, ways.TABLE)
_expand_book4, _expand_book3, _expand_book2 = (expand(bits, ways.CODEBOOK) for bits in (4, 3, 2))
_expand8, _expand6, _expand5, _expand4, _expand3, _expand2 = (expand(bits, ways.PLAIN) for bits in (8, 6, 5, 4, 3, 2))
_many_book, _many_super = columns(ways.CODEBOOK, 127), columns(ways.SUPER, 31)
_many_signed, _many_exponents = columns(ways.SIGNED, 63), columns(ways.EXPONENTS, 127)
_many_table, _many_nibble = columns(ways.TABLE, 255), columns(ways.NIBBLE, 3)
_many_minima, _many_small = columns(ways.MINIMA, 255), columns(ways.SMALL, 127)
_many_plain, _many_blocks, _many_halves = (columns(way, 255) for way in (ways.PLAIN, ways.BLOCKS, ways.HALVES))
if IN_TURN:  # with small codes, several quads of which are summed in 16 bits
    _plain_of_six, _plain_of_five, _blocks_of_five = columns(ways.PLAIN, 63), columns(ways.PLAIN, 31), columns(ways.BLOCKS, 31)
    _halves_of_six, _minima_of_six, _minima_of_five = columns(ways.HALVES, 63), columns(ways.MINIMA, 63), columns(ways.MINIMA, 31)
else:
    _plain_of_six = _plain_of_five = _many_plain
    _blocks_of_five, _halves_of_six, _minima_of_six, _minima_of_five = _many_blocks, _many_halves, _many_minima, _many_minima


@inlined()
def expand_of(kind, codes, tables, tiles, out):
    bits = kind >> SCHEME_SHIFT
    if kind & SCHEME_MASK == CODEBOOK:
        if bits == 4:
            _expand_book4(codes, tables, tiles, out)
        elif bits == 3:
            _expand_book3(codes, tables, tiles, out)
        else:
            _expand_book2(codes, tables, tiles, out)
    elif kind & SCHEME_MASK == MXFP or kind & SCHEME_MASK == NVFP:
        _expand_exponent4(codes, tables, tiles, out)
    elif kind & SCHEME_MASK == TABLE:
        if bits == 4:
            _expand_table4(codes, tables, tiles, out)
        else:
            _expand_table3(codes, tables, tiles, out)
    elif bits == 8:
        _expand8(codes, tables, tiles, out)
    elif bits == 6:
        _expand6(codes, tables, tiles, out)
    elif bits == 5:
        _expand5(codes, tables, tiles, out)
    elif bits == 4:
        _expand4(codes, tables, tiles, out)
    elif bits == 3:
        _expand3(codes, tables, tiles, out)
    else:
        _expand2(codes, tables, tiles, out)


@inlined()
def columns_of(kind, count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart):
    scheme, bits = kind & SCHEME_MASK, kind >> SCHEME_SHIFT if IN_TURN else 8
    if scheme == SUPER:
        _many_super(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    elif scheme == SIGNED:
        _many_signed(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    elif scheme == MXFP:
        _many_exponents(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    elif scheme == NIBBLE:
        _many_nibble(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    elif scheme == MINIMUM:
        if bits <= 5:
            _minima_of_five(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
        elif bits <= 6:
            _minima_of_six(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
        else:
            _many_minima(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    elif scheme == NVFP:
        _many_small(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    elif scheme == TABLE:
        _many_table(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    elif scheme == CODEBOOK:
        _many_book(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    elif scheme == BLOCK or scheme == OFFSET:
        if bits <= 5:
            _blocks_of_five(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
        else:
            _many_blocks(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    elif shift < 0:
        if bits <= 6:
            _halves_of_six(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
        else:
            _many_halves(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    elif bits <= 5:
        _plain_of_five(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    elif bits <= 6:
        _plain_of_six(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
    else:
        _many_plain(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)
