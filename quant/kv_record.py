"""How the codes of a KV record lie in bytes: for kernels that multiply codes with integers, four of one sum side by side.

    64-byte header            the common one of `kernels/layout.py`; its last 16 bytes are `TAIL`: largest scale of V, flags, bits by group
    K codes                   per group of 16 channels, per plane [4 quads, tokens, 4 channels]; a score is a sum over channels
    K exponents, K zeros      int8 [4 groups of 32 tokens, D] each
    V codes                   per group of 16 channels, per plane [token quads, 16 channels, 4 tokens]; an output is a sum over tokens
    V scales and zeros        bytes [D / 16, 128 tokens]: the scale's step in the low four bits, the zero + 8 in the high four

Every group of 16 channels has its own number of bits; their mean is what the header calls bits of K and of V. Codes of 8, 6, 5 and 3
bits are two planes, high bits first. A byte of a plane of w bits holds 8 / w codes; field f counts from the low bits: of K, token
128·w/8·f + i; of V, tokens 4·f … 4·f + 3 of a unit of 32 / w. So one load, shift and mask gives 16 tokens of a channel quad, or 16
channels of a token quad: one 64-byte vector of dot products. A group of b bits takes 256·b bytes, so groups start on cache lines.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..kernels.layout import HEADER_NBYTES, PAGE, align

PLANES = {8: (4, 4), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}
WIDTHS = tuple(sorted(PLANES))  # bits of a group; a record counts in places of this list
MEAN_BITS = (8, 6, 5, 4, 3, 2)  # bits of a side
GROUP_K, GROUP_V = 32, 16  # tokens of a scale of K, channels of a scale of V
CHANNELS = 16  # channels of one number of bits, K and V
QUAD = 4
TAIL = struct.Struct("<hB12s")  # V's largest scale, flags, 3 bits for every group of K, from bit 48 of V
TAIL_OFFSET = 48
MOST_GROUPS = 16
ROTATED_K, MEAN_K = 1, 2  # flags


@dataclass(frozen=True)
class RecordLayout:
    """Byte offsets in the record of one layer and one KV head. `head_dim` is a multiple of 16, at most 256."""

    head_dim: int
    bits_k: int
    bits_v: int

    def __post_init__(self) -> None:
        if self.head_dim % CHANNELS or not 0 < self.head_dim <= CHANNELS * MOST_GROUPS:
            raise ValueError(f"head_dim {self.head_dim} is not a multiple of {CHANNELS} up to {CHANNELS * MOST_GROUPS}")
        for bits in (self.bits_k, self.bits_v):
            if bits not in MEAN_BITS:
                raise ValueError(f"a KV page of {bits} bits: there are {', '.join(map(str, MEAN_BITS))}")

    @property
    def groups(self) -> int:
        return self.head_dim // CHANNELS

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of K codes, K exponents, K zeros, V codes, V scales and zeros."""
        values = PAGE * self.head_dim
        return (values * self.bits_k // 8, values // GROUP_K, values // GROUP_K, values * self.bits_v // 8, values // GROUP_V)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each of `sizes` begins."""
        return tuple(HEADER_NBYTES + sum(self.sizes[:part]) for part in range(len(self.sizes)))

    @property
    def body_nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def record_nbytes(self) -> int:
        return align(HEADER_NBYTES + self.body_nbytes)

    @property
    def packed_bits(self) -> float:
        """Bits per value of a record, header and alignment included."""
        return 8 * self.record_nbytes / (2 * PAGE * self.head_dim)

    def bits_per_value(self, tokens: int, exact: int, exact_bits: int = 16) -> float:
        """Bits per value of a cache of `tokens`, of which at least `exact` lie in 16-bit slots and the rest in whole pages."""
        pages = max(0, tokens - exact) // PAGE
        return (pages * PAGE * self.packed_bits + (tokens - pages * PAGE) * exact_bits) / tokens


def pack_widths(k: Sequence[int], v: Sequence[int]) -> bytes:
    """Bits of the groups of K and of V as the 12 bytes of `TAIL`."""
    places = [WIDTHS.index(bits) << 3 * (side * MOST_GROUPS + group) for side, row in enumerate((k, v)) for group, bits in enumerate(row)]
    return sum(places).to_bytes(12, "little")


def unpack_widths(raw: bytes, groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What `pack_widths` was given. Raises ValueError for a number that stands for nothing."""
    places = int.from_bytes(raw, "little")
    sides = [[places >> 3 * (side * MOST_GROUPS + group) & 7 for group in range(groups)] for side in range(2)]
    if max(map(max, sides)) >= len(WIDTHS):
        raise ValueError("a KV page with a group of unknown bits")
    return tuple(WIDTHS[place] for place in sides[0]), tuple(WIDTHS[place] for place in sides[1])


def pack_k(codes: np.ndarray, bits: int) -> np.ndarray:
    """Groups uint8 [n, 16, PAGE] -> uint8 [n, 256 · bits], plane after plane."""
    quads = codes.reshape(len(codes), -1, QUAD, PAGE).swapaxes(2, 3)
    return _pack([(plane.reshape(*plane.shape[:2], 8 // width, -1, QUAD), width) for plane, width in _planes(quads, bits)])


def pack_v(codes: np.ndarray, bits: int) -> np.ndarray:
    """Groups uint8 [n, PAGE, 16] -> uint8 [n, 256 · bits]."""
    planes = [(plane.reshape(len(plane), -1, 8 // width, QUAD, CHANNELS), width) for plane, width in _planes(codes, bits)]
    return _pack([(plane.swapaxes(3, 4), width) for plane, width in planes])


def unpack_k(packed: np.ndarray, bits: int) -> np.ndarray:
    """What `pack_k` made, as uint8 [n, 16, PAGE]."""
    codes = np.zeros((len(packed), CHANNELS // QUAD, PAGE, QUAD), np.uint8)
    for plane, width in _stored(packed, bits):
        fields = _split(plane.reshape(len(packed), CHANNELS // QUAD, PAGE * width // 8, QUAD), width)
        codes = codes << width | fields.reshape(codes.shape)
    return codes.swapaxes(2, 3).reshape(len(packed), CHANNELS, PAGE)


def unpack_v(packed: np.ndarray, bits: int) -> np.ndarray:
    """What `pack_v` made, as uint8 [n, PAGE, 16]."""
    codes = np.zeros((len(packed), PAGE, CHANNELS), np.uint8)
    for plane, width in _stored(packed, bits):
        fields = _split(plane.reshape(len(packed), PAGE * width // 32, CHANNELS, QUAD), width)
        codes = codes << width | fields.swapaxes(3, 4).reshape(codes.shape)
    return codes


def pack_scales(steps: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """V's 4-bit steps and zeros of -8 … 7 as bytes of the same shape."""
    return steps.astype(np.uint8) | (zeros.astype(np.int16) + 8).astype(np.uint8) << 4


def unpack_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(steps uint8, zeros int8) of the shape of `packed`."""
    return packed & 15, (packed >> 4).astype(np.int8) - np.int8(8)


def _planes(codes: np.ndarray, bits: int) -> list[tuple[np.ndarray, int]]:
    """High bits first, each with its width."""
    widths = PLANES[bits]
    return [(codes >> sum(widths[place + 1 :]) & ((1 << width) - 1), width) for place, width in enumerate(widths)]


def _stored(packed: np.ndarray, bits: int) -> list[tuple[np.ndarray, int]]:
    starts = np.cumsum((0, *PLANES[bits])) * PAGE * CHANNELS // 8
    return [(packed[:, start:end], width) for start, end, width in zip(starts, starts[1:], PLANES[bits], strict=False)]


def _pack(planes: list[tuple[np.ndarray, int]]) -> np.ndarray:
    """Planes [n, rows, fields, …], the fields of a byte on axis 2, lowest bits first."""
    parts = [np.bitwise_or.reduce(fields << _shifts(width, fields.ndim - 3), 2) for fields, width in planes]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], 1)


def _split(packed: np.ndarray, width: int) -> np.ndarray:
    """Bytes [n, rows, …] as fields [n, rows, 8 / width, …]."""
    return packed[:, :, None] >> _shifts(width, packed.ndim - 2) & ((1 << width) - 1)


def _shifts(width: int, axes: int) -> np.ndarray:
    return np.arange(0, 8, width, dtype=np.uint8).reshape(-1, *(1,) * axes)
