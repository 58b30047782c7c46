"""The loops of `packed_loops.py` for every format, and which of them a format's number (`kind`) means."""

from __future__ import annotations

from ..deferred import inlined
from ..tiles import BLOCK, CODEBOOK, MXFP, OFFSET, SCHEME_MASK, SCHEME_SHIFT, SIGNED, SUPER
from . import packed_factors as ways
from .packed_loops import columns as columns_abreast
from .packed_loops import expand, single
from .packed_pairs import IN_PAIRS, pairs
from .packed_pairs import columns as columns_of_pairs
from .packed_turns import IN_TURN
from .packed_turns import columns as columns_in_turn

columns = columns_in_turn if IN_TURN else columns_of_pairs if IN_PAIRS else columns_abreast

_book4, _book3, _book2 = (single(bits, ways.CODEBOOK) for bits in (4, 3, 2))
_plain8, _plain6, _plain5, _plain4, _plain3, _plain2 = (single(bits, ways.PLAIN) for bits in (8, 6, 5, 4, 3, 2))
_block8, _block5, _block4 = (single(bits, ways.BLOCKS) for bits in (8, 5, 4))
_super5, _super4 = (single(bits, ways.SUPER) for bits in (5, 4))
_signed6 = single(6, ways.SIGNED)
_exponent4, _expand_exponent4 = single(4, ways.EXPONENTS), expand(4, ways.EXPONENTS)
_pair_book4, _pair_book3, _pair_book2 = (pairs(bits, ways.CODEBOOK) for bits in (4, 3, 2))
_pair8, _pair6, _pair5, _pair4, _pair3, _pair2 = (pairs(bits, ways.PLAIN) for bits in (8, 6, 5, 4, 3, 2))
_pair_block8, _pair_block5, _pair_block4 = (pairs(bits, ways.BLOCKS) for bits in (8, 5, 4))
_pair_super5, _pair_super4 = (pairs(bits, ways.SUPER) for bits in (5, 4))
_pair_signed6, _pair_exponent4 = pairs(6, ways.SIGNED), pairs(4, ways.EXPONENTS)
_expand_book4, _expand_book3, _expand_book2 = (expand(bits, ways.CODEBOOK) for bits in (4, 3, 2))
_expand8, _expand6, _expand5, _expand4, _expand3, _expand2 = (expand(bits, ways.PLAIN) for bits in (8, 6, 5, 4, 3, 2))
_many_book, _many_super = columns(ways.CODEBOOK, 127), columns(ways.SUPER, 31)
_many_signed, _many_exponents = columns(ways.SIGNED, 63), columns(ways.EXPONENTS, 127)
_many_plain, _many_blocks, _many_halves = (columns(way, 255) for way in (ways.PLAIN, ways.BLOCKS, ways.HALVES))
if IN_TURN:  # with small codes, several quads of which are summed in 16 bits
    _plain_of_six, _plain_of_five, _blocks_of_five = columns(ways.PLAIN, 63), columns(ways.PLAIN, 31), columns(ways.BLOCKS, 31)
    _halves_of_six = columns(ways.HALVES, 63)
else:
    _plain_of_six = _plain_of_five = _many_plain
    _blocks_of_five, _halves_of_six = _many_blocks, _many_halves


@inlined()
def single_of(kind, table, tables, x, tiles, shift, zero_shift, out):
    bits, scheme = kind >> SCHEME_SHIFT, kind & SCHEME_MASK
    if scheme == SUPER:
        if bits == 4:
            _super4(table, tables, x, tiles, shift, zero_shift, out)
        else:
            _super5(table, tables, x, tiles, shift, zero_shift, out)
    elif scheme == SIGNED:
        _signed6(table, tables, x, tiles, shift, zero_shift, out)
    elif scheme == MXFP:
        _exponent4(table, tables, x, tiles, shift, zero_shift, out)
    elif scheme == BLOCK or scheme == OFFSET:
        if bits == 4:
            _block4(table, tables, x, tiles, shift, zero_shift, out)
        elif bits == 5:
            _block5(table, tables, x, tiles, shift, zero_shift, out)
        else:
            _block8(table, tables, x, tiles, shift, zero_shift, out)
    elif scheme == CODEBOOK:
        if bits == 4:
            _book4(table, tables, x, tiles, shift, zero_shift, out)
        elif bits == 3:
            _book3(table, tables, x, tiles, shift, zero_shift, out)
        else:
            _book2(table, tables, x, tiles, shift, zero_shift, out)
    elif bits == 8:
        _plain8(table, tables, x, tiles, shift, zero_shift, out)
    elif bits == 6:
        _plain6(table, tables, x, tiles, shift, zero_shift, out)
    elif bits == 5:
        _plain5(table, tables, x, tiles, shift, zero_shift, out)
    elif bits == 4:
        _plain4(table, tables, x, tiles, shift, zero_shift, out)
    elif bits == 3:
        _plain3(table, tables, x, tiles, shift, zero_shift, out)
    else:
        _plain2(table, tables, x, tiles, shift, zero_shift, out)


@inlined()
def pairs_of(kind, count, together, table, tables, x, tiles, shift, zero_shift, sums):
    bits, scheme = kind >> SCHEME_SHIFT, kind & SCHEME_MASK
    if scheme == SUPER:
        if bits == 4:
            _pair_super4(count, together, table, tables, x, tiles, shift, zero_shift, sums)
        else:
            _pair_super5(count, together, table, tables, x, tiles, shift, zero_shift, sums)
    elif scheme == SIGNED:
        _pair_signed6(count, together, table, tables, x, tiles, shift, zero_shift, sums)
    elif scheme == MXFP:
        _pair_exponent4(count, together, table, tables, x, tiles, shift, zero_shift, sums)
    elif scheme == BLOCK or scheme == OFFSET:
        if bits == 4:
            _pair_block4(count, together, table, tables, x, tiles, shift, zero_shift, sums)
        elif bits == 5:
            _pair_block5(count, together, table, tables, x, tiles, shift, zero_shift, sums)
        else:
            _pair_block8(count, together, table, tables, x, tiles, shift, zero_shift, sums)
    elif scheme == CODEBOOK:
        if bits == 4:
            _pair_book4(count, together, table, tables, x, tiles, shift, zero_shift, sums)
        elif bits == 3:
            _pair_book3(count, together, table, tables, x, tiles, shift, zero_shift, sums)
        else:
            _pair_book2(count, together, table, tables, x, tiles, shift, zero_shift, sums)
    elif bits == 8:
        _pair8(count, together, table, tables, x, tiles, shift, zero_shift, sums)
    elif bits == 6:
        _pair6(count, together, table, tables, x, tiles, shift, zero_shift, sums)
    elif bits == 5:
        _pair5(count, together, table, tables, x, tiles, shift, zero_shift, sums)
    elif bits == 4:
        _pair4(count, together, table, tables, x, tiles, shift, zero_shift, sums)
    elif bits == 3:
        _pair3(count, together, table, tables, x, tiles, shift, zero_shift, sums)
    else:
        _pair2(count, together, table, tables, x, tiles, shift, zero_shift, sums)


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
    elif kind & SCHEME_MASK == MXFP:
        _expand_exponent4(codes, tables, tiles, out)
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
