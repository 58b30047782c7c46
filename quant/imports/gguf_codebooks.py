"""GGUF block types with codebook levels, 256 weights per block, a half-precision float d and integer scales s. Pure functions of bytes.

    w = part * d * s * levels[code]

with a code of three or four bits, for every 16 of them an s that is odd or has six bits and a sign, and `part` 1, 1/4 or 1/8. This
covers all IQ types but IQ4_NL, Q3_K and the ternary types, whatever their packing: IQ types of one to three bits select four or eight
codes at once by an index into a grid, with separate signs; those of one bit have levels an eighth above or below integers. The grids are
those of ggml's ggml-common.h; they are taken from the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from ..spec import QuantSpec

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)  # IQ4_NL's and IQ4_XS's levels
SIGNED_TWO = np.array([8, 25, 43, 0, -8, -25, -43, 0], np.int8)  # the third bit is the sign
SIGNED_XXS, SIGNED_THREE = (np.array([*each, *(-level for level in each)], np.int8)
                            for each in ((4, 12, 20, 28, 36, 44, 52, 62), (1, 3, 5, 7, 9, 11, 13, 15)))
EIGHTHS = np.array([-7, 1, 9, 0, -9, -1, 7, 0], np.int8)  # -1, 0 and 1, an eighth above; with the third bit an eighth below
TERNARY = np.array([-1, 0, 1, 2, 0, 0, 0, 0], np.int8)
THIRDS = np.arange(-4, 4, dtype=np.int8)


class CodebookBlocks(NamedTuple):
    """codes uint8 [n, 256]; scales int8 [n, 16]; supers uint16 [n], the bits of halves."""

    codes: np.ndarray
    scales: np.ndarray
    supers: np.ndarray


class Kind(NamedTuple):
    """`grid`: the name of the type whose grid it reads, or none."""

    nbytes: int
    bits: int
    levels: np.ndarray
    part: float
    grid: str
    decode: Callable[[np.ndarray], CodebookBlocks]

    @property
    def spec(self) -> QuantSpec:
        """What kernels multiply it as."""
        return QuantSpec(self.bits, 16, "table")


class GridsMissing(Exception):
    """The `gguf` package is not installed, as in an environment older than that dependency."""


@cache
def grid_of(kind: str) -> np.ndarray:
    """The codes that an index names, one in a byte: uint64 [n] of eight, or uint32 [n] of four. Raises GridsMissing."""
    try:
        from gguf import quants
    except ImportError as error:
        raise GridsMissing(kind) from error
    made = getattr(quants, kind)
    made.init_grid()
    grid = made.grid.reshape(made.grid_shape)
    codes = np.searchsorted(np.array(made.grid_map, np.float32), grid).astype(U8)
    return np.ascontiguousarray(codes).view(U64 if grid.shape[1] == 8 else U32).reshape(-1)


def _named(kind: str, indices: np.ndarray) -> np.ndarray:
    """Indices [n, count] -> codes uint8 [n, 256]."""
    return grid_of(kind)[indices].view(U8).reshape(len(indices), 256)


def _words(raw: np.ndarray, kind: type) -> np.ndarray:
    """Bytes [n, k] as little-endian numbers."""
    return np.ascontiguousarray(raw).view(np.dtype(kind).newbyteorder("<"))


def _half(raw: np.ndarray) -> np.ndarray:
    return _words(raw, U16).astype(U16).reshape(-1)


def _pairs(raw: np.ndarray) -> np.ndarray:
    """Bytes [n, k] -> their low and high nibbles in turn, [n, 2k]."""
    return np.stack([raw & U8(15), raw >> U8(4)], axis=2).reshape(len(raw), -1)


def _halves_of_tiles(raw: np.ndarray) -> np.ndarray:
    """[n, 128] -> [n, 256]: 16 bytes hold 32 values, the first half in their low nibbles."""
    tiles = raw.reshape(len(raw), 8, 16)
    return np.concatenate([tiles & U8(15), tiles >> U8(4)], axis=2).reshape(len(raw), 256)


def unpack_crumbs(raw: np.ndarray) -> np.ndarray:
    """[n, 64] -> [n, 256]: in each run of 32 bytes first all lowest two bits, then the next, up to the highest."""
    parts = raw.reshape(len(raw), 2, 1, 32) >> np.array([0, 2, 4, 6], U8)[None, None, :, None]
    return (parts & U8(3)).reshape(len(raw), 256)


def _bits(raw: np.ndarray, weight: int) -> np.ndarray:
    """[n, 32] -> [n, 256], the bit's weight in place."""
    return np.unpackbits(raw, axis=1, bitorder="little") * U8(weight)


def _parity_signs(sevens: np.ndarray, weight: int) -> np.ndarray:
    """Signs of eight values in seven bits, [n, 32] -> [n, 256]: the eighth makes their number even."""
    sevens = sevens.astype(U8)
    odd = sevens ^ sevens >> U8(4)
    odd ^= odd >> U8(2)
    odd ^= odd >> U8(1)
    return _bits(sevens | (odd & U8(1)) << U8(7), weight)


def _odd(codes: np.ndarray, per: int) -> np.ndarray:
    """Scale codes as odd numbers, each of them `per` times: int8 [n, 16]."""
    return np.repeat(2 * codes.astype(np.int8) + np.int8(1), per, axis=1)


def _q3_k(b: np.ndarray) -> CodebookBlocks:
    low = np.concatenate([b[:, 96:104] & U8(15), b[:, 96:104] >> U8(4)], axis=1)  # 16 scales' low four bits
    high = ((b[:, None, 104:108] >> np.array([0, 2, 4, 6], U8)[None, :, None]) & U8(3)).reshape(len(b), 16)
    third = (b[:, None, :32] >> np.arange(8, dtype=U8)[None, :, None]) & U8(1)  # a bit plane per run of 32 values
    codes = unpack_crumbs(b[:, 32:96]) | third.reshape(len(b), 256) << U8(2)
    return CodebookBlocks(codes, (low | high << U8(4)).view(np.int8) - np.int8(32), _half(b[:, 108:]))


def _iq4_xs(b: np.ndarray) -> CodebookBlocks:
    high = _words(b[:, 2:4], U16) >> np.arange(0, 16, 2, dtype=U16)[None] & U16(3)
    scales = (_pairs(b[:, 4:8]) | high.astype(U8) << U8(4)).view(np.int8) - np.int8(32)
    return CodebookBlocks(_halves_of_tiles(b[:, 8:]), np.repeat(scales, 2, axis=1), _half(b[:, :2]))


def _iq3_s(b: np.ndarray) -> CodebookBlocks:
    indices = b[:, 2:66].astype(U16) | np.unpackbits(b[:, 66:74], axis=1, bitorder="little").astype(U16) << U16(8)
    return CodebookBlocks(_named("IQ3_S", indices) | _bits(b[:, 74:106], 8), _odd(_pairs(b[:, 106:]), 2), _half(b[:, :2]))


def _signs_and_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """32 bits for every 32 values: four times seven of signs, then a scale of four; [n, 8] words -> signs [n, 32], scales [n, 8]."""
    signs = b[:, :, None] >> np.array([0, 7, 14, 21], U32)[None, None] & U32(127)
    return signs.reshape(len(b), 32), b >> U32(28)


def _iq3_xxs(b: np.ndarray) -> CodebookBlocks:
    signs, scales = _signs_and_scales(_words(b[:, 66:], U32))
    return CodebookBlocks(_named("IQ3_XXS", b[:, 2:66]) | _parity_signs(signs, 8), _odd(scales, 2), _half(b[:, :2]))


def _iq2_s(b: np.ndarray) -> CodebookBlocks:
    high = (b[:, 66:74, None] >> np.array([0, 2, 4, 6], U8)[None, None] & U8(3)).reshape(len(b), 32)
    indices = b[:, 2:34].astype(U16) | high.astype(U16) << U16(8)
    return CodebookBlocks(_named("IQ2_S", indices) | _bits(b[:, 34:66], 4), _odd(_pairs(b[:, 74:]), 1), _half(b[:, :2]))


def _iq2_xs(b: np.ndarray) -> CodebookBlocks:
    words = _words(b[:, 2:66], U16)
    codes = _named("IQ2_XS", words & U16(511)) | _parity_signs(words >> U16(9), 4)
    return CodebookBlocks(codes, _odd(_pairs(b[:, 66:]), 1), _half(b[:, :2]))


def _iq2_xxs(b: np.ndarray) -> CodebookBlocks:
    words = _words(b[:, 2:], U32).reshape(len(b), 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(U8)
    signs, scales = _signs_and_scales(words[:, :, 1])
    return CodebookBlocks(_named("IQ2_XXS", indices) | _parity_signs(signs, 4), _odd(scales, 2), _half(b[:, :2]))


def _iq1_s(b: np.ndarray) -> CodebookBlocks:
    words = _words(b[:, 34:], U16)
    high = (words[:, :, None] >> np.array([0, 3, 6, 9], U16)[None, None] & U16(7)).reshape(len(b), 32)
    below = np.repeat((words >> U16(15)).astype(U8) << U8(2), 32, axis=1)
    codes = _named("IQ1_S", b[:, 2:34] | high << U16(8)) | below
    return CodebookBlocks(codes, _odd(words >> U16(12) & U16(7), 2), _half(b[:, :2]))


def _iq1_m(b: np.ndarray) -> CodebookBlocks:
    words = _words(b[:, 48:], U16).astype(U16)
    supers = words[:, 0] >> U16(12) | words[:, 1] >> U16(8) & U16(0xF0) | words[:, 2] >> U16(4) & U16(0xF00) | words[:, 3] & U16(0xF000)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], U16)[None, None] & U16(7)).reshape(len(b), 16)
    high = _pairs(b[:, 32:48])
    codes = _named("IQ1_S", b[:, :32] | (high & U8(7)).astype(U16) << U16(8)) | np.repeat((high & U8(8)) >> U8(1), 8, axis=1)
    return CodebookBlocks(codes, _odd(scales, 1), supers)


def _ones(b: np.ndarray) -> np.ndarray:
    return np.ones((len(b), 16), np.int8)


def _tq1_0(b: np.ndarray) -> CodebookBlocks:
    """Five of three values in a byte, as a fraction of 256 whose digits they are."""
    runs = []
    for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        shifted = b[:, None, begin:end] * (3 ** np.arange(count)).astype(U8)[None, :, None]
        runs.append(shifted.reshape(len(b), -1))
    return CodebookBlocks((np.concatenate(runs, axis=1).astype(U16) * U16(3) >> U16(8)).astype(U8), _ones(b), _half(b[:, 52:]))


def _tq2_0(b: np.ndarray) -> CodebookBlocks:
    return CodebookBlocks(unpack_crumbs(b[:, :64]), _ones(b), _half(b[:, 64:]))


KINDS = {
    "Q3_K": Kind(110, 3, THIRDS, 1.0, "", _q3_k), "IQ4_XS": Kind(136, 4, NON_LINEAR, 1.0, "", _iq4_xs),
    "IQ3_S": Kind(110, 4, SIGNED_THREE, 1.0, "IQ3_S", _iq3_s), "IQ3_XXS": Kind(98, 4, SIGNED_XXS, 0.25, "IQ3_XXS", _iq3_xxs),
    "IQ2_S": Kind(82, 3, SIGNED_TWO, 0.125, "IQ2_S", _iq2_s), "IQ2_XS": Kind(74, 3, SIGNED_TWO, 0.125, "IQ2_XS", _iq2_xs),
    "IQ2_XXS": Kind(66, 3, SIGNED_TWO, 0.125, "IQ2_XXS", _iq2_xxs), "IQ1_S": Kind(50, 3, EIGHTHS, 0.125, "IQ1_S", _iq1_s),
    "IQ1_M": Kind(56, 3, EIGHTHS, 0.125, "IQ1_S", _iq1_m), "TQ1_0": Kind(54, 3, TERNARY, 1.0, "", _tq1_0),
    "TQ2_0": Kind(66, 3, TERNARY, 1.0, "", _tq2_0),
}  # fmt: skip
