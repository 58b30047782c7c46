"""The loops of `packed_loops.py` for every format, and which of them a format's number (`kind`) means."""

from __future__ import annotations

from ..compile import inlined
from ..tiles import BLOCK, CODEBOOK, MXFP, OFFSET, SCHEME_MASK, SCHEME_SHIFT, SIGNED, SUPER
from . import packed_factors as ways
from .packed_loops import columns, expand, single

_book4, _book3, _book2 = (single(bits, ways.CODEBOOK) for bits in (4, 3, 2))
_plain8, _plain6, _plain5, _plain4, _plain3, _plain2 = (single(bits, ways.PLAIN) for bits in (8, 6, 5, 4, 3, 2))
_block8, _block5, _block4 = (single(bits, ways.BLOCKS) for bits in (8, 5, 4))
_super5, _super4 = (single(bits, ways.SUPER) for bits in (5, 4))
_signed6 = single(6, ways.SIGNED)
_exponent4, _expand_exponent4 = single(4, ways.EXPONENTS), expand(4, ways.EXPONENTS)
_expand_book4, _expand_book3, _expand_book2 = (expand(bits, ways.CODEBOOK) for bits in (4, 3, 2))
_expand8, _expand6, _expand5, _expand4, _expand3, _expand2 = (expand(bits, ways.PLAIN) for bits in (8, 6, 5, 4, 3, 2))
_four_book, _one_book = (columns(ways.CODEBOOK, count, 127) for count in (4, 1))
_four_plain, _one_plain = (columns(ways.PLAIN, count, 255) for count in (4, 1))
_four_blocks, _one_block = (columns(ways.BLOCKS, count, 255) for count in (4, 1))
_four_halves, _one_halves = (columns(ways.HALVES, count, 255) for count in (4, 1))
_four_super, _one_super = (columns(ways.SUPER, count, 31) for count in (4, 1))
_four_signed, _one_signed = (columns(ways.SIGNED, count, 63) for count in (4, 1))
_four_exponents, _one_exponents = (columns(ways.EXPONENTS, count, 127) for count in (4, 1))


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
def columns_of(kind, four, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share):
    scheme = kind & SCHEME_MASK
    if scheme == SUPER:
        if four:
            _four_super(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
        else:
            _one_super(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
    elif scheme == SIGNED:
        if four:
            _four_signed(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
        else:
            _one_signed(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
    elif scheme == MXFP:
        if four:
            _four_exponents(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
        else:
            _one_exponents(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
    elif scheme == BLOCK or scheme == OFFSET:
        if four:
            _four_blocks(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
        else:
            _one_block(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
    elif scheme == CODEBOOK:
        if four:
            _four_book(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
        else:
            _one_book(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
    elif shift < 0:
        if four:
            _four_halves(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
        else:
            _one_halves(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
    elif four:
        _four_plain(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
    else:
        _one_plain(quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share)
