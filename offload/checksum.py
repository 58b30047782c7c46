"""CRC-32 of a record whose parts are written in another order than they lie: each part has its own sum, and the sums are joined.

Joining is arithmetic over GF(2), as in zlib's crc32_combine: appending n zero bytes to a message multiplies its sum by a fixed 32 x 32 bit
matrix, and the matrices of 1, 2, 4, ... bytes are made once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

POLYNOMIAL = 0xEDB88320
LONGEST = 48  # bits of a length


def join(parts: Iterable[tuple[int, int]]) -> int:
    """The sum of a message from (sum, length in bytes) of its parts, in order."""
    total = 0
    for crc, nbytes in parts:
        for bit in range(nbytes.bit_length()):
            if nbytes >> bit & 1:
                total = _times(_matrices()[bit], total)
        total ^= crc
    return total


def word_sums(memory: np.ndarray) -> np.ndarray:
    """Of each row of a uint8 array [N, M] the sum of its little-endian 64-bit words and of the bytes behind the last whole one, modulo
    2^64: uint64 [N]. For bytes that are read again and again: six times as fast as a CRC-32. It tells a word that was altered, bytes that
    are others' or were never written; not words that changed places."""
    whole = memory.shape[1] // 8 * 8
    sums = np.add.reduce(memory[:, :whole].view("<u8"), axis=1, dtype=np.uint64)
    return sums if whole == memory.shape[1] else sums + np.add.reduce(memory[:, whole:], axis=1, dtype=np.uint64)


def _times(matrix: tuple[int, ...], vector: int) -> int:
    total, row = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector >>= 1
        row += 1
    return total


@cache
def _matrices() -> tuple[tuple[int, ...], ...]:
    """The operators of 1, 2, 4, ... zero bytes."""
    one_bit = (POLYNOMIAL, *(1 << bit for bit in range(31)))
    matrix = one_bit
    for _ in range(3):  # 8 bits
        matrix = tuple(_times(matrix, row) for row in matrix)
    found = [matrix]
    for _ in range(LONGEST - 1):
        matrix = tuple(_times(matrix, row) for row in matrix)
        found.append(matrix)
    return tuple(found)
