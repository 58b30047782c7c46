"""Packs the scales of super-blocks (256 inputs) into the records of `kernels/tiles.py`, and unpacks them. NumPy only."""

from __future__ import annotations

import numpy as np

from ..kernels.tiles import (
    NIBBLE_NBYTES,
    ROWS,
    SIGNED_HEADER_NBYTES,
    SIGNED_NBYTES,
    SUPER_BLOCK,
    SUPER_BLOCK_SCHEMES,
    SUPER_HEADER_NBYTES,
    SUPER_NBYTES,
    SUPER_TILE_NBYTES,
    TILE,
)

SCHEMES = SUPER_BLOCK_SCHEMES
WITH_MINIMA = ("super", "nibble")
TILES = SUPER_BLOCK // TILE  # of a super-block
MOST = {"super": 63, "nibble": 15}  # a scale or minimum code


def check(scales: np.ndarray, supers: np.ndarray, minima: np.ndarray | None, depth: int, scheme: str) -> None:
    """Raises ValueError for arrays that do not fit one another, or codes that do not fit their bits."""
    if supers.shape != (len(scales), -(-depth // SUPER_BLOCK), 1 if minima is None else 2) or supers.dtype != np.uint16:
        raise ValueError(f"super-blocks {supers.shape} of {supers.dtype} for {len(scales)} rows of {depth} inputs")
    if minima is not None and (minima.shape != scales.shape or max(scales.max(initial=0), minima.max(initial=0)) > MOST[scheme]):
        raise ValueError(f"minima {minima.shape} and scales {scales.shape}: codes are up to {MOST[scheme]} in {scheme} formats")


def pack(scales: np.ndarray, supers: np.ndarray, minima: np.ndarray | None, depth: int, scheme: str) -> np.ndarray:
    """scales [rows, groups] padded; supers [n, S, 1 or 2], minima [n, G] or None -> uint8 [records, their bytes]."""
    rows, groups = scales.shape
    count = depth // SUPER_BLOCK
    halves = np.zeros((rows, count, supers.shape[2]), np.uint16)
    halves[: len(supers), : supers.shape[1]] = supers
    blocks = rows // ROWS
    head = halves.reshape(blocks, ROWS, count, -1).transpose(0, 2, 3, 1)  # block, super-block, d or e, row
    head = np.ascontiguousarray(head).view(np.uint8).reshape(blocks, count, -1)

    def by_group(values: np.ndarray) -> np.ndarray:
        """uint8 [block, super-block, group, row]."""
        return values.view(np.uint8).reshape(blocks, ROWS, count, groups // count).transpose(0, 2, 3, 1)

    if minima is None:
        return np.concatenate([head, by_group(scales).reshape(blocks, count, -1)], axis=2)
    wide = np.zeros(scales.shape, np.uint8)
    wide[: len(minima), : minima.shape[1]] = minima
    low, least = by_group(scales), by_group(wide)
    if scheme == "nibble":
        return np.concatenate([head, (low | least << 4).reshape(blocks, count, -1)], axis=2)
    high = least >> 2
    tiles = np.concatenate([low | (least & 3) << 6, high[..., : ROWS // 2] | high[..., ROWS // 2 :] << 4], axis=3)
    return np.concatenate([head, tiles.reshape(blocks, count, -1)], axis=2)


def unpack(raw: np.ndarray, scheme: str, rows: int, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The way back: scales [rows, groups], supers [rows, super-blocks, 1 or 2], minima [rows, groups] or None."""
    blocks, count = rows // ROWS, depth // SUPER_BLOCK
    nbytes = {"super": SUPER_NBYTES, "nibble": NIBBLE_NBYTES}.get(scheme, SIGNED_NBYTES)
    head = SUPER_HEADER_NBYTES if scheme in WITH_MINIMA else SIGNED_HEADER_NBYTES
    records = raw[: blocks * count * nbytes].reshape(blocks, count, nbytes)
    halves = np.ascontiguousarray(records[:, :, :head]).view(np.uint16).reshape(blocks, count, -1, ROWS)
    supers = np.ascontiguousarray(halves.transpose(0, 3, 1, 2)).reshape(rows, count, -1)

    def by_row(values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2)).reshape(rows, -1)

    codes = records[:, :, head:]
    if scheme not in WITH_MINIMA:
        return by_row(codes.reshape(blocks, count, -1, ROWS)).view(np.int8), supers, None
    if scheme == "nibble":
        own = codes.reshape(blocks, count, -1, ROWS)
        return by_row(own & 15), supers, by_row(own >> 4)
    tiles = codes.reshape(blocks, count, TILES, SUPER_TILE_NBYTES)
    low, high = tiles[..., :ROWS], tiles[..., ROWS:]
    high = np.concatenate([high & 15, high >> 4], axis=3)
    return by_row(low & MOST["super"]), supers, by_row(low >> 6 | high << 2)
