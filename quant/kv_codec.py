"""Lossy KV page codec: exact K and V of one layer-page to records of 10 to 1 bits, and back. Pure NumPy functions, all heads at once.

K, after RoPE: the static mean, rotated to each position, is subtracted; the rest is multiplied by the basis matrix and quantized in
affine groups of 32 tokens of a channel. V is multiplied by its matrix and quantized in affine groups of 16 channels of a token.
`docs/kv-quality.md` says what each step is worth.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from ..kernels.kv_layout import GROUP_CHANNELS, GROUP_K, MEAN_K, ROTATED_K, TAIL_OFFSET, RecordLayout, pack_tail, unpack_tail
from ..kernels.layout import HEADER_NBYTES, PAGE, PageHeader
from .kv_basis import KVBasis
from .kv_grid import LARGEST, decode_k, decode_v, encode_k, encode_v, first_v
from .kv_record import pack_k, pack_scales, pack_v, unpack_k, unpack_scales, unpack_v

LONE_PAIR = 8.0  # a RoPE pair of this many times the mean power keeps a page's K from being mixed: it would drown the other channels


def encode(k: np.ndarray, v: np.ndarray, bits_k: int, bits_v: int, basis: KVBasis, *, layer: int = 0, first_head: int = 0,
           first_token: int = 0, rotary: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
    """K after RoPE and V, float32 [H, PAGE, D], as records uint8 [H, record_nbytes]. `rotary`: cos and sin [PAGE, D / 2] of the page's
    positions, for a basis that has K's mean. Raises ValueError for shapes or bits that no record has, and for what is not finite."""
    if k.shape != v.shape or k.shape[1] != PAGE:
        raise ValueError(f"a page of K {k.shape} and V {v.shape}: both are [heads, {PAGE}, head_dim]")
    heads, _, size = k.shape
    layout = RecordLayout(size, bits_k, bits_v)
    groups, (at_k, at_exponents, at_zeros, at_v, at_scales) = layout.groups, layout.offsets
    out = np.zeros((heads, layout.record_nbytes), np.uint8)
    widths_k, widths_v = basis.widths(bits_k, bits_v)

    with np.errstate(over="ignore", invalid="ignore"):  # looked for below
        k = k - _mean(basis, rotary)
        mixed = ~_lone_pair(k / basis.k_scale[:, None])
        k = np.where(mixed[:, None, None], k @ basis.k_matrix.swapaxes(1, 2), k / basis.k_scale[:, None])
        v = v @ basis.v_matrix.swapaxes(1, 2)
    widths_k[~mixed] = bits_k
    for side, x in (("K", k), ("V", v)):
        if not (fine := (np.abs(x) < LARGEST).all((1, 2))).all():
            where = f"{side} of layer {layer}, head {first_head + int(fine.argmin())}, tokens {first_token} to {first_token + PAGE - 1}"
            raise ValueError(f"{where}: not finite, or beyond 2^60")

    k = np.ascontiguousarray(k.swapaxes(1, 2)).reshape(heads, groups, GROUP_CHANNELS, -1, GROUP_K)
    scales = np.empty((2, heads, groups, GROUP_CHANNELS, PAGE // GROUP_K), np.int8)
    for bits, where in _by_width(widths_k):
        codes, exponents, zeros = encode_k(k[where], bits)
        scales[(0, *where)], scales[(1, *where)] = exponents[..., 0], zeros[..., 0]
        _put(out, at_k, widths_k, where, pack_k(codes.reshape(-1, GROUP_CHANNELS, PAGE), bits))
    for at, side in zip((at_exponents, at_zeros), scales, strict=True):
        out[:, at : at + layout.sizes[1]] = side.reshape(heads, size, -1).swapaxes(1, 2).reshape(heads, -1).view(np.uint8)

    v = v.reshape(heads, PAGE, groups, GROUP_CHANNELS).swapaxes(1, 2)
    top = np.full(heads, -(1 << 15), np.int32)
    for bits, where in _by_width(widths_v):
        np.maximum.at(top, where[0], first_v(v[where], bits).max((1, 2)))
    for bits, where in _by_width(widths_v):
        codes, steps, zeros = encode_v(v[where], bits, top[where[0], None, None])
        _put(out, at_v, widths_v, where, pack_v(codes, bits))
        _put(out, at_scales, np.full((heads, groups), PAGE), where, pack_scales(steps, zeros)[..., 0], unit=1)

    flags = mixed * ROTATED_K + (basis.k_mean is not None) * MEAN_K
    for head in range(heads):
        tail = pack_tail(int(top[head]), int(flags[head]), widths_k[head].tolist(), widths_v[head].tolist())
        out[head, TAIL_OFFSET:at_k] = np.frombuffer(tail, np.uint8)
        header = PageHeader(layer, first_head + head, first_token, PAGE, bits_k, bits_v, profile=basis.profile,
                            crc32=checksum(out[head], layout))
        out[head, :TAIL_OFFSET] = np.frombuffer(header.pack()[:TAIL_OFFSET], np.uint8)
    return out


def decode(records: np.ndarray, head_dim: int, basis: KVBasis, *,
           rotary: tuple[np.ndarray, np.ndarray] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """K and V float32 [H, PAGE, D] of records uint8 [H, record_nbytes]. Raises ValueError for bytes that changed since `encode`, or were
    made with another basis."""
    headers = [check(record, head_dim) for record in records]
    header, heads = headers[0], len(records)
    page = f"KV page of layer {header.layer}, token {header.first_token}"
    if any((other.bits_k, other.bits_v, other.profile) != (header.bits_k, header.bits_v, basis.profile) for other in headers):
        raise ValueError(f"{page}: written with another profile")
    layout = RecordLayout(head_dim, header.bits_k, header.bits_v)
    groups, (at_k, at_exponents, at_zeros, at_v, at_scales) = layout.groups, layout.offsets
    top, flags, widths = zip(*(unpack_tail(record.tobytes(), groups) for record in records[:, :at_k]), strict=True)
    top, flags = np.array(top), np.array(flags)
    if ((flags & MEAN_K > 0) != (basis.k_mean is not None)).any():
        raise ValueError(f"{page}: written with another mean of K")
    widths_k, widths_v = (np.array(side) for side in zip(*widths, strict=True))

    scales = (records[:, at : at + layout.sizes[1]].view(np.int8).reshape(heads, -1, groups, GROUP_CHANNELS)
              for at in (at_exponents, at_zeros))
    exponents, zeros = (side.transpose(0, 2, 3, 1)[..., None] for side in scales)
    k = np.empty((heads, groups, GROUP_CHANNELS, PAGE), np.float32)
    v = np.empty((heads, groups, PAGE, GROUP_CHANNELS), np.float32)
    for bits, where in _by_width(widths_k):
        codes = unpack_k(_get(records, at_k, widths_k, where), bits).reshape(-1, GROUP_CHANNELS, PAGE // GROUP_K, GROUP_K)
        k[where] = decode_k(codes, exponents[where], zeros[where], bits).reshape(-1, GROUP_CHANNELS, PAGE)
    k = k.reshape(heads, head_dim, PAGE).swapaxes(1, 2)
    k = np.where((flags & ROTATED_K > 0)[:, None, None], k @ basis.k_inverse.swapaxes(1, 2), k * basis.k_scale[:, None])

    steps, zeros = unpack_scales(records[:, at_scales : at_scales + layout.sizes[4]].reshape(heads, groups, PAGE, 1))
    for bits, where in _by_width(widths_v):
        codes = unpack_v(_get(records, at_v, widths_v, where), bits)
        v[where] = decode_v(codes, steps[where], zeros[where], top[where[0], None, None], bits)
    v = v.swapaxes(1, 2).reshape(heads, PAGE, head_dim)
    return k + _mean(basis, rotary), v @ basis.v_inverse.swapaxes(1, 2)


def check(record: np.ndarray, head_dim: int) -> PageHeader:
    """The header of a record [nbytes]. Raises ValueError where it is none, or its bytes have changed."""
    header = PageHeader.unpack(record[:HEADER_NBYTES].tobytes())
    layout = RecordLayout(head_dim, header.bits_k, header.bits_v)
    if len(record) != layout.record_nbytes or checksum(record, layout) != header.crc32:
        raise ValueError(f"KV page of layer {header.layer}, head {header.head}, token {header.first_token}: checksum differs")
    return header


def checksum(record: np.ndarray, layout: RecordLayout) -> int:
    """crc32 of what the header says about scales and bits, and of what is behind it."""
    return zlib.crc32(np.ascontiguousarray(record[TAIL_OFFSET : layout.end]))


def _by_width(widths: np.ndarray) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
    """Every number of bits in use with the (heads, groups) that have it."""
    for bits in np.unique(widths).tolist():
        yield bits, np.nonzero(widths == bits)


def _spans(at: int, widths: np.ndarray, where: tuple[np.ndarray, np.ndarray], unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Index (heads, bytes) of groups in records whose groups of `unit` · width bytes follow one another from `at`."""
    starts = at + unit * (np.cumsum(widths, 1) - widths)
    return where[0][:, None], starts[where][:, None] + np.arange(unit * int(widths[where][0]))


def _put(out: np.ndarray, at: int, widths: np.ndarray, where: tuple[np.ndarray, np.ndarray], packed: np.ndarray, unit: int = 256) -> None:
    out[_spans(at, widths, where, unit)] = packed


def _get(records: np.ndarray, at: int, widths: np.ndarray, where: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return records[_spans(at, widths, where, 256)]


def _mean(basis: KVBasis, rotary: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
    """K's mean at every position of the page, [H, PAGE, D]."""
    if basis.k_mean is None:
        return np.zeros((1, 1, 1), np.float32)
    if rotary is None:
        raise ValueError("a basis with K's mean needs the page's cos and sin")
    cos, sin = rotary
    first, second = (side[:, None] for side in np.split(basis.k_mean, 2, -1))
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _lone_pair(k: np.ndarray) -> np.ndarray:
    """Heads [H] whose K [H, PAGE, D] has a RoPE pair far above the others."""
    power = k.var(1)
    pairs = power[:, : power.shape[-1] // 2] + power[:, power.shape[-1] // 2 :]
    return pairs.max(-1) > LONE_PAIR * pairs.mean(-1)
