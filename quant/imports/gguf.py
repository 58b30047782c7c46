"""GGUF block types decoded to integers and scales, and three types encoded. Pure functions of bytes.

Every type is w = scale * code - minimum, with small integer codes, a float32 scale per group of 16 or 32 and for some a float32 minimum:
products of the stored 16-bit floats with integers of at most 8 bits, all exact in float32. Layouts are those of ggml's block structures
(https://github.com/ggml-org/ggml, ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..codebooks import MXFP
from ..codes import Codes
from ..spec import QuantSpec
from ..weight import to_f32
from . import gguf_codebooks
from .gguf_codebooks import NON_LINEAR, Kind, unpack_crumbs
from .mxfp4 import NOT_A_NUMBER

U8 = np.uint8


@dataclass(frozen=True)
class Blocks:
    """codes int8 [n, values of a block]; scales and minima (or None) float32 [n, groups of a block]."""

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None

    def values(self) -> np.ndarray:
        """float32 [n, values]."""
        n, groups = self.scales.shape
        grouped = self.codes.reshape(n, groups, -1)
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged file's scales; whoever reads it refuses what is no number
            out = self.scales[:, :, None] * grouped
            if self.minima is not None:
                out -= self.minima[:, :, None]
        return out.reshape(n, -1)


def dequantize(raw: np.ndarray, kind: str, width: int) -> np.ndarray:
    """Bytes of whole rows of `width` values -> float32 [rows, width]. Raises KeyError for a type that is not in DECODERS."""
    return decode(raw, kind).values().reshape(-1, width)


def decode(raw: np.ndarray, kind: str) -> Blocks:
    """Bytes of whole blocks as integers and scales."""
    nbytes, decoder = DECODERS[kind]
    with np.errstate(invalid="ignore"):
        return decoder(raw.reshape(-1, nbytes))


def _half(raw: np.ndarray) -> np.ndarray:
    """[n, 2k] bytes -> float32 [n, k]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """[n, k] -> [n, 2k]: all low ones, then all high ones."""
    return np.concatenate([raw & U8(15), raw >> U8(4)], axis=1)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """[n, 4] -> [n, 32], the bit's weight in place."""
    return np.unpackbits(raw, axis=1, bitorder="little") << U8(4)


def _centred(codes: np.ndarray, zero: int) -> np.ndarray:
    return codes.view(np.int8) - np.int8(zero)


def _q8_0(b: np.ndarray) -> Blocks:
    return Blocks(np.ascontiguousarray(b[:, 2:]).view(np.int8), _half(b[:, :2]))


def _q4_0(b: np.ndarray) -> Blocks:
    return Blocks(_centred(_nibbles(b[:, 2:]), 8), _half(b[:, :2]))


def _q4_1(b: np.ndarray) -> Blocks:
    return Blocks(_nibbles(b[:, 4:]).view(np.int8), _half(b[:, :2]), -_half(b[:, 2:4]))


def _q5_0(b: np.ndarray) -> Blocks:
    return Blocks(_centred(_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]), 16), _half(b[:, :2]))


def _q5_1(b: np.ndarray) -> Blocks:
    return Blocks((_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])).view(np.int8), _half(b[:, :2]), -_half(b[:, 2:4]))


def _iq4_nl(b: np.ndarray) -> Blocks:
    return Blocks(NON_LINEAR[_nibbles(b[:, 2:])], _half(b[:, :2]))


def _q2_k(b: np.ndarray) -> Blocks:
    small = b[:, :16]
    d, dmin = _half(b[:, 80:82]), _half(b[:, 82:84])
    return Blocks(unpack_crumbs(b[:, 16:80]).view(np.int8), d * (small & U8(15)), dmin * (small >> U8(4)))


def six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minima of six bits each from 12 bytes, uint8 [n, 8] twice."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & U8(63), (high & U8(15)) | (low >> U8(6)) << U8(4)], axis=1)
    return scales, np.concatenate([mid & U8(63), (high >> U8(4)) | (mid >> U8(6)) << U8(4)], axis=1)


def _k_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales, minima = six_bits(b[:, 4:16])
    return _half(b[:, :2]) * scales, _half(b[:, 2:4]) * minima


def _k_nibbles(raw: np.ndarray) -> np.ndarray:
    """[n, 128] -> [n, 256]: each run of 32 bytes holds 32 values in its low nibbles, the next 32 in its high ones."""
    return _nibbles(raw.reshape(-1, 32)).reshape(len(raw), 256)


def _q4_k(b: np.ndarray) -> Blocks:
    return Blocks(_k_nibbles(b[:, 16:]).view(np.int8), *_k_scales(b))


def _q5_k(b: np.ndarray) -> Blocks:
    fifth = ((b[:, None, 16:48] >> np.arange(8, dtype=U8)[None, :, None]) & U8(1)).reshape(len(b), 256)
    return Blocks((_k_nibbles(b[:, 48:]) | fifth << U8(4)).view(np.int8), *_k_scales(b))


def _q6_k(b: np.ndarray) -> Blocks:
    n = len(b)
    low = _nibbles(b[:, :128].reshape(n * 2, 64)).reshape(n, 256)
    codes = low | unpack_crumbs(b[:, 128:192]) << U8(4)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return Blocks(_centred(codes, 32), _half(b[:, 208:210]) * scales)


def _mxfp4(b: np.ndarray) -> Blocks:
    scales = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    return Blocks(MXFP[_nibbles(b[:, 1:])], np.where(b[:, :1] == NOT_A_NUMBER, np.float32(np.nan), scales))


def _nvfp4_codes(b: np.ndarray) -> np.ndarray:
    """[n, 36] -> [n, 64]: of each group of 16 the first eight are in low nibbles."""
    pairs = b[:, 4:].reshape(len(b), 4, 8)
    return np.concatenate([pairs & U8(15), pairs >> U8(4)], axis=2).reshape(len(b), 64)


def _nvfp4(b: np.ndarray) -> Blocks:
    """Scales are floats of eight bits without a sign, four of exponent; 0x7F is a zero, the eighth bit is not looked at."""
    power, fraction = (b[:, :4] >> U8(3) & U8(15)).astype(np.int32), (b[:, :4] & U8(7)).astype(np.float32)
    scales = np.where(power == 0, np.ldexp(fraction, -10), np.ldexp(fraction + np.float32(8), power - 11))
    return Blocks(MXFP[_nvfp4_codes(b)], np.where(b[:, :4] == 0x7F, np.float32(0), scales))


def _of_levels(kind: Kind) -> Callable[[np.ndarray], Blocks]:
    def decoder(b: np.ndarray) -> Blocks:
        codes, scales, supers = kind.decode(b)
        return Blocks(kind.levels[codes], to_f32(supers, "f16")[:, None] * scales * np.float32(kind.part))

    return decoder


def native_codes(raw: np.ndarray, kind: str) -> Codes:
    """Rows [n, row bytes] as their own codes and scales, without widening. Raises KeyError for a type that is not in NATIVE."""
    spec, rows = NATIVE[kind], len(raw)
    blocks = raw.reshape(-1, DECODERS[kind][0])
    if spec.scheme == "table":
        own = gguf_codebooks.KINDS[kind]
        codes, scales, supers = own.decode(blocks)
        return Codes(codes.reshape(rows, -1), scales.reshape(rows, -1), None, np.full(rows, own.part, np.float32), own.levels,
                     supers=supers.reshape(rows, -1, 1))
    halves = lambda part: np.ascontiguousarray(part).view("<u2").astype(np.uint16, copy=False)  # noqa: E731
    if spec.scheme == "nvfp":  # scales have no sign, and what would be NaN is a zero
        scales = np.where(blocks[:, :4] & U8(127) == U8(127), U8(0), blocks[:, :4] & U8(127))
        return Codes(_nvfp4_codes(blocks).reshape(rows, -1), scales.reshape(rows, -1).view(np.int8), None, np.full(rows, 0.5, np.float32),
                     MXFP)
    if spec.scheme == "mxfp":
        return Codes(_nibbles(blocks[:, 1:]).reshape(rows, -1), blocks[:, 0].reshape(rows, -1), None, np.full(rows, 0.5, np.float32), MXFP)
    decoded = decode(raw, kind).codes.reshape(rows, -1)
    ones = np.ones(rows, np.float32)
    if spec.scheme == "minimum":
        scales, minima = (halves(blocks[:, at : at + 2]).reshape(rows, -1) for at in (0, 2))
        return Codes(decoded.view(np.uint8), scales, None, ones, minima=minima)
    if spec.scheme == "nibble":
        both = blocks[:, :16].reshape(rows, -1)
        return Codes(decoded.view(np.uint8), both & U8(15), None, ones, supers=halves(blocks[:, 80:84]).reshape(rows, -1, 2),
                     minima=both >> U8(4))
    if spec.scheme == "super":
        scales, minima = six_bits(blocks[:, 4:16])
        return Codes(decoded.view(np.uint8), scales.reshape(rows, -1), None, ones, supers=halves(blocks[:, :4]).reshape(rows, -1, 2),
                     minima=minima.reshape(rows, -1))
    codes = decoded.view(np.uint8) + np.uint8(1 << (spec.bits - 1))  # from v up to codes, in eight bits
    if spec.scheme == "signed":
        scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
        return Codes(codes, scales.reshape(rows, -1), None, ones, supers=halves(blocks[:, 208:210]).reshape(rows, -1, 1))
    return Codes(codes, halves(blocks[:, :2]).reshape(rows, -1), None, ones)


# The types whose codes kernels multiply, and what they are there.
NATIVE = {"Q8_0": QuantSpec(8, 32, "block"), "Q5_0": QuantSpec(5, 32, "block"), "Q4_0": QuantSpec(4, 32, "block"),
        "Q5_1": QuantSpec(5, 32, "minimum"), "Q4_1": QuantSpec(4, 32, "minimum"),
        "NVFP4": QuantSpec(4, 16, "nvfp"),
        "IQ4_NL": QuantSpec(8, 32, "block"), "Q2_K": QuantSpec(2, 16, "nibble"), "Q4_K": QuantSpec(4, 32, "super"),
        "Q5_K": QuantSpec(5, 32, "super"), "Q6_K": QuantSpec(6, 16, "signed"), "MXFP4": QuantSpec(4, 32, "mxfp"),
        **{name: kind.spec for name, kind in gguf_codebooks.KINDS.items()}}
# Type -> bytes of a block and its decoder.
DECODERS: dict[str, tuple[int, Callable[[np.ndarray], Blocks]]] = {
    "Q8_0": (34, _q8_0), "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q5_1": (24, _q5_1), "IQ4_NL": (18, _iq4_nl),
    "Q2_K": (84, _q2_k), "Q4_K": (144, _q4_k), "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k),
    "MXFP4": (17, _mxfp4), "NVFP4": (36, _nvfp4), **{name: (kind.nbytes, _of_levels(kind)) for name, kind in gguf_codebooks.KINDS.items()},
}


def quantize(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 [n, K], K a multiple of 32 -> the bytes of its rows, uint8 [n, row bytes], rounded as llama.cpp's reference does."""
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, 32)
    return ENCODERS[kind](blocks).reshape(len(values), -1)


def _inverse(scales: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def _to_half(scales: np.ndarray) -> np.ndarray:
    return scales.astype("<f2").view(U8)


def _to_q8_0(blocks: np.ndarray) -> np.ndarray:
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scales)
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))  # halves away from zero
    return np.concatenate([_to_half(scales), codes.astype(np.int8).view(U8)], axis=1)


def _to_q4_0(blocks: np.ndarray) -> np.ndarray:
    """The value of the largest magnitude becomes -8 of the scale, whatever its sign."""
    top = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scales = top / np.float32(-8)
    codes = np.minimum(np.trunc(blocks * _inverse(scales) + np.float32(8.5)), np.float32(15)).astype(U8)
    return np.concatenate([_to_half(scales), codes[:, :16] | codes[:, 16:] << U8(4)], axis=1)


def _to_mxfp4(blocks: np.ndarray) -> np.ndarray:
    """The power of two by which the largest magnitude is 4 or more and below 8, of which 6 is the largest level: what is levels of some
    power already stays itself."""
    top = np.abs(blocks).max(axis=1, keepdims=True)
    power = np.clip(np.where(top > 0, np.frexp(top)[1] - 3, -127), -127, 127)
    levels = MXFP[:8].astype(np.float32) / 2
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.abs(np.ldexp(blocks, -power))).astype(U8)  # halfway to the smaller
    codes |= (np.signbit(blocks) & (codes > 0)).astype(U8) << U8(3)
    return np.concatenate([(power + 127).astype(U8), codes[:, :16] | codes[:, 16:] << U8(4)], axis=1)


ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Q8_0": _to_q8_0, "Q4_0": _to_q4_0, "MXFP4": _to_mxfp4}
