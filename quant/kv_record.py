"""The byte layout of a KV record's codes, for kernels that multiply codes as integers: four of one sum side by side.

    64-byte header            the common one of `kernels/layout.py`; its last 16 bytes are `TAIL`: largest scale of V, flags, bits by group
    64 bytes more             of heads of more than 256 channels alone: bits of their other groups
    K codes                   per group of 16 channels, per plane [4 quads, tokens, 4 channels]; a score is a sum over channels
    K exponents, K zeros      int8 [4 groups of 32 tokens, D] each
    V codes                   per group of 16 channels, per plane [token quads, 16 channels, 4 tokens]; an output is a sum over tokens
    V scales and zeros        bytes [D / 16, 128 tokens]: the scale's step in the low four bits, the zero + 8 in the high four

Every group of 16 channels has its own number of bits; their mean is what the header calls bits of K and of V. Codes of 8, 6, 5 and 3
bits are two planes, those of 10 three, high bits first. A byte of a plane of w bits holds 8 / w codes; field f counts from the low bits:
of K, token 128·w/8·f + i; of V, tokens 4·f … 4·f + 3 of a unit of 32 / w. So one load, shift and mask gives 16 tokens of a channel quad,
or 16 channels of a token quad: one 64-byte vector of dot products. A group of b bits takes 256·b bytes, so groups start on cache lines.
"""

from __future__ import annotations

import numpy as np

from ..kernels.kv_layout import GROUP_CHANNELS, PLANES, QUAD
from ..kernels.layout import PAGE


def pack_k(codes: np.ndarray, bits: int) -> np.ndarray:
    """Groups uint16 [n, 16, PAGE] -> uint8 [n, 256 · bits], plane after plane."""
    quads = codes.reshape(len(codes), -1, QUAD, PAGE).swapaxes(2, 3)
    return _pack([(plane.reshape(*plane.shape[:2], 8 // width, -1, QUAD), width) for plane, width in _planes(quads, bits)])


def pack_v(codes: np.ndarray, bits: int) -> np.ndarray:
    """Groups uint16 [n, PAGE, 16] -> uint8 [n, 256 · bits]."""
    planes = [(plane.reshape(len(plane), -1, 8 // width, QUAD, GROUP_CHANNELS), width) for plane, width in _planes(codes, bits)]
    return _pack([(plane.swapaxes(3, 4), width) for plane, width in planes])


def unpack_k(packed: np.ndarray, bits: int) -> np.ndarray:
    """What `pack_k` made, as uint16 [n, 16, PAGE]."""
    codes = np.zeros((len(packed), GROUP_CHANNELS // QUAD, PAGE, QUAD), np.uint16)
    for plane, width in _stored(packed, bits):
        fields = _split(plane.reshape(len(packed), GROUP_CHANNELS // QUAD, PAGE * width // 8, QUAD), width)
        codes = codes << width | fields.reshape(codes.shape)
    return codes.swapaxes(2, 3).reshape(len(packed), GROUP_CHANNELS, PAGE)


def unpack_v(packed: np.ndarray, bits: int) -> np.ndarray:
    """What `pack_v` made, as uint16 [n, PAGE, 16]."""
    codes = np.zeros((len(packed), PAGE, GROUP_CHANNELS), np.uint16)
    for plane, width in _stored(packed, bits):
        fields = _split(plane.reshape(len(packed), PAGE * width // 32, GROUP_CHANNELS, QUAD), width)
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
    return [((codes >> sum(widths[place + 1 :]) & ((1 << width) - 1)).astype(np.uint8), width) for place, width in enumerate(widths)]


def _stored(packed: np.ndarray, bits: int) -> list[tuple[np.ndarray, int]]:
    starts = np.cumsum((0, *PLANES[bits])) * PAGE * GROUP_CHANNELS // 8
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
