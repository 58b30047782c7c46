"""GPTQ checkpoints: decoding of their packed integers (the layout of AutoGPTQ and its successors). Pure functions of arrays.

`qweight` packs values along the inputs, lowest bits first, across word boundaries (so that 3 bits fit); `qzeros` packs zero points along
the outputs. The first version of the format stores a zero point minus one.
"""

from __future__ import annotations

import numpy as np

from .groups import Groups


def unpack_bits(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [W, M] -> uint8 [W * 32 / bits, M]: a stream of bits down every column."""
    raw = np.ascontiguousarray(words.astype("<u4", copy=False).T).view(np.uint8)
    if bits == 8:
        return raw.T
    if bits == 4:
        return np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=2).reshape(len(raw), -1).T
    stream = np.unpackbits(raw, axis=1, bitorder="little")
    values = stream[:, : stream.shape[1] // bits * bits].reshape(len(stream), -1, bits)
    return np.packbits(values, axis=2, bitorder="little")[:, :, 0].T


def decode(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray, bits: int, plus_one: bool) -> Groups:
    """int32 [K * bits / 32, N], int32 [G, N * bits / 32], float32 [G, N], int [K]; `plus_one`: the first version.

    Raises ValueError where the arrays do not fit one another.
    """
    codes = unpack_bits(qweight, bits).T
    return Groups(np.ascontiguousarray(codes), *zeros_and_scales(codes.shape, qzeros, scales, g_idx, bits, plus_one), g_idx)


def zeros_and_scales(shape: tuple[int, int], qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray, bits: int,
           plus_one: bool) -> tuple[np.ndarray, np.ndarray]:
    """Zero points uint8 and scales float32, both [N, G], of a weight of `shape` [N, K]; arguments and errors are those of `decode`."""
    n, depth = shape
    zeros = unpack_bits(qzeros.T, bits).T
    if zeros.shape != scales.shape or scales.shape[1] != n or g_idx.shape != (depth,) or (
            depth and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < len(scales)):
        raise ValueError(f"qweight for {depth} inputs and {n} outputs, zeros {zeros.shape}, scales {scales.shape}, g_idx {g_idx.shape}")
    if plus_one:
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    return np.ascontiguousarray(zeros.T), np.ascontiguousarray(scales.T)
