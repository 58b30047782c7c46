"""AWQ checkpoints in the `gemm` layout: eight 4-bit outputs in a word, in an order that suits a GPU. Pure functions of arrays."""

from __future__ import annotations

import numpy as np

from .groups import Groups

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of a word holds, from the lowest


def unpack_words(words: np.ndarray) -> np.ndarray:
    """int32 [R, N / 8] -> uint8 [R, N]."""
    nibbles = (words.view(np.uint32)[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    return nibbles[:, :, np.argsort(ORDER)].reshape(len(words), -1).astype(np.uint8)


def decode(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, group: int) -> Groups:
    """int32 [K, N / 8], int32 [G, N / 8], float32 [G, N]. Raises ValueError where they do not fit one another."""
    codes = unpack_words(qweight).T
    found = zeros_and_scales(codes.shape, qzeros, scales, group)
    return Groups(np.ascontiguousarray(codes), *found, np.arange(codes.shape[1]) // group)


def zeros_and_scales(shape: tuple[int, int], qzeros: np.ndarray, scales: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Zero points uint8 and scales float32, both [N, G], of a weight of `shape` [N, K]; arguments and errors are those of `decode`."""
    zeros = unpack_words(qzeros)
    if zeros.shape != scales.shape or shape != (scales.shape[1], len(scales) * group):
        raise ValueError(f"qweight {shape[::-1]}, zeros {zeros.shape} and scales {scales.shape} for groups of {group}")
    return np.ascontiguousarray(zeros.T), np.ascontiguousarray(scales.T)
