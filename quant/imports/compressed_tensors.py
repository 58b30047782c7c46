"""Integers of the compressed-tensors layouts (https://github.com/vllm-project/compressed-tensors), with a scale per group of inputs.

`pack-quantized`: values of 4 or 8 bits in 32-bit words along the inputs, lowest bits first, stored above their middle. `int-quantized`:
signed bytes, whose scales may be one, one per row, or one per block of rows and inputs.
"""

from __future__ import annotations

import numpy as np

from .blocks import block_size
from .groups import Groups

WORD = 32
SHRINK = np.float32([1.0, 0.95, 0.9, 0.85, 0.8, 0.75])  # shares of a group's range that are tried


def check_shape(stated: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raises ValueError where the shape that stands beside words is another one."""
    if stated.reshape(-1).tolist() != list(shape):
        raise ValueError(f"weight_shape says {stated.reshape(-1).tolist()}, the words are for {list(shape)}")


def pack_words(values: np.ndarray, bits: int) -> np.ndarray:
    """int8 [N, K] in -2**(bits-1) .. 2**(bits-1)-1 -> int32 [N, ceil(K * bits / 32)]."""
    per = WORD // bits
    codes = values.astype(np.int64) + (1 << (bits - 1))
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per))).reshape(len(codes), -1, per)
    return (codes << (bits * np.arange(per))).sum(-1).astype(np.uint32).view(np.int32)


def unpack_words(words: np.ndarray, bits: int, width: int) -> np.ndarray:
    """The way back: int8 [N, width]."""
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    codes = (words.view(np.uint32)[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    return (codes.reshape(len(words), -1)[:, :width].astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


def quantize_groups(values: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [N, K], K a multiple of `group` -> int8 [N, K] and scales float32 [N, K / group] that bfloat16 holds, of least error."""
    from ..codes import bf16

    top, n = (1 << (bits - 1)) - 1, len(values)
    grouped = np.ascontiguousarray(values, np.float32).reshape(n, -1, group)
    best = np.full(grouped.shape[:2], np.inf, np.float32)
    kept, scales = np.zeros(grouped.shape, np.int8), np.zeros(grouped.shape[:2], np.float32)
    most = np.abs(grouped).max(-1)
    for share in SHRINK:
        scale = bf16(most * share / np.float32(top))
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        codes = np.clip(np.rint(grouped * inverse[..., None]), -top - 1, top)
        error = np.square(codes * scale[..., None] - grouped).sum(-1)
        better = error < best
        best = np.where(better, error, best)
        kept, scales = np.where(better[..., None], codes.astype(np.int8), kept), np.where(better, scale, scales)
    return kept.reshape(n, -1), scales


def decode(packed: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, groups: np.ndarray | None, bits: int,
           shape: tuple[int, int]) -> Groups:
    """int32 words, float32 scales [N, G], packed zero points int32 [N * bits / 32, G] or None, the group of every input [K] or None.
    Raises ValueError where they do not fit one another."""
    k = shape[1]
    codes = unpack_words(packed, bits, k)
    if codes.shape != shape:
        raise ValueError(f"words {packed.shape} and scales {scales.shape} for a weight of shape {shape}")
    found = zeros_and_scales(shape, scales, zeros, groups, bits)
    order = np.arange(k) // (k // scales.shape[1]) if groups is None else groups
    return Groups(_unsigned(codes, bits), *found, order)


def zeros_and_scales(shape: tuple[int, int], scales: np.ndarray, zeros: np.ndarray | None, groups: np.ndarray | None,
           bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Zero points uint8 and scales float32, both [N, G], of a weight of `shape` [N, K]; arguments and errors are those of `decode`."""
    n, k = shape
    if len(scales) != n or not scales.shape[1] or (groups is None and k % scales.shape[1]) or (
            groups is not None and (groups.shape != (k,) or not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1])):
        raise ValueError(f"scales {scales.shape} for a weight of shape {shape}")
    found = np.zeros(scales.shape, np.int8) if zeros is None else unpack_words(np.ascontiguousarray(zeros.T), bits, n).T
    if found.shape != scales.shape:
        raise ValueError(f"zero points {found.shape} for scales {scales.shape}")
    return _unsigned(found, bits), scales


def _unsigned(values: np.ndarray, bits: int) -> np.ndarray:
    """int8 around zero -> codes, uint8, of so many bits."""
    return (np.ascontiguousarray(values).view(np.uint8) + np.uint8(1 << (bits - 1))) & np.uint8((1 << bits) - 1)


def columns(shape: tuple[int, ...]) -> int:
    """How many scales of such a shape a row has, 0 where it has none that are read: one for all, one per row, or [rows, columns]."""
    if len(shape) < 2:
        return 1
    return shape[1] if len(shape) == 2 else 0


def width(depth: int, count: int) -> int:
    """Inputs of a group where nothing says how many: an equal share, else a power of two. Raises ValueError where there is none."""
    return depth // count if count > 0 and depth % count == 0 else block_size(depth, count)


def decode_bytes(stored: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, groups: np.ndarray | None, bits: int,
                 block: tuple[int, int]) -> Groups:
    """int8 [N, K], float32 scales, int8 zero points of their shape or None, the group of every input [K] or None; `block`: rows and inputs
    that share a scale, 0 where that is not said. Raises ValueError where they do not fit one another."""
    return Groups(_from_bytes(stored, bits), *zeros_and_scales_int8(stored.shape, scales, zeros, groups, bits, block))


def zeros_and_scales_int8(shape: tuple[int, int], scales: np.ndarray, zeros: np.ndarray | None, groups: np.ndarray | None, bits: int,
                block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Zero points uint8 and scales float32, both [N, G], and the group of every input [K] of a weight of `shape` [N, K]; arguments and
    errors are those of `decode_bytes`."""
    n, k = shape
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zero points {zeros.shape} for scales {scales.shape}")
    found = _from_bytes(np.zeros(scales.shape, np.int8) if zeros is None else zeros, bits)
    count = columns(scales.shape)
    if groups is None and count:
        groups = np.arange(k) // (block[1] or width(k, count))
    if count < 1 or groups.shape != (k,) or int(groups.min()) < 0 or int(groups.max()) >= count or (
            block[1] and -(-k // block[1]) != count):
        raise ValueError(f"scales {scales.shape} for a weight of shape {shape}")
    return *(_rows(values.reshape(-1, count), n, block[0]) for values in (found, scales)), groups


def _from_bytes(values: np.ndarray, bits: int) -> np.ndarray:
    """int8 around zero -> codes, uint8. Raises ValueError for what is not of so many bits."""
    low, top = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if values.dtype != np.int8 or (values.size and (int(values.min()) < low or int(values.max()) > top)):
        raise ValueError(f"values beyond the {bits} bits that the config states")
    return (values.astype(np.int16) - low).astype(np.uint8)


def _rows(values: np.ndarray, n: int, high: int) -> np.ndarray:
    """[one, n, or one per block of rows; G] -> [n, G]."""
    if len(values) == 1:
        return np.repeat(values, n, axis=0)
    if len(values) == n and high <= 1:
        return values
    high = high or block_size(n, len(values))
    if -(-n // high) != len(values):
        raise ValueError(f"{len(values)} rows of scales for {n} rows")
    return np.repeat(values, high, axis=0)[:n]
