"""`Codes` <-> the blob of `kernels/tiles.py`, exact inverses. NumPy only: conversion spends its time elsewhere."""

from __future__ import annotations

import numpy as np

from ..kernels.layout import align
from ..kernels.tiles import CODEBOOK_SCALES, LEVELS_NBYTES, PLANES, ROWS, STEPS_NBYTES, TILE, tile_nbytes
from .codes import Codes, Sparse
from .levels import MXFP
from .spec import QuantSpec
from .weight import from_f32, to_f32

QUADS = TILE // 4
LINE = 8  # 64-bit words of a vector
EVERY_BYTE = 0x0101010101010101


def pack(codes: Codes, spec: QuantSpec) -> np.ndarray:
    """The blob of a weight, uint8 [spec.nbytes(shape)]. Raises ValueError for arrays that do not fit the spec."""
    shape = codes.codes.shape
    at = spec.sections(shape)
    _check(codes, spec, at.sparse_count)
    blob = np.zeros(at.nbytes, np.uint8)
    rows, depth = at.rows, at.depth
    tiles = pack_tiles(_pad(codes.codes, rows, depth), spec.bits)
    blob[: tiles.size] = tiles
    groups = depth // spec.group
    scales = _pad(codes.scales, rows, groups)
    _put(blob, at.scales, _pack_small_scales(scales) if spec.scheme == "codebook" else _by_block(scales).view(np.uint8))
    if spec.scheme == "affine":
        _put(blob, at.zeros, _by_block(_pad(codes.zeros, rows, groups)))
    _put(blob, at.row_scales, from_f32(np.concatenate([codes.rows, np.zeros(rows - shape[0], np.float32)]), "bf16").view(np.uint8))
    if codes.levels is not None:
        steps = np.zeros(STEPS_NBYTES, np.uint8) if codes.steps is None else codes.steps
        _put(blob, at.tables, np.concatenate([np.resize(codes.levels, LEVELS_NBYTES).view(np.uint8), steps]))
    if at.sparse >= 0:
        none = np.zeros(0, np.uint32)
        _put(blob, at.sparse, pack_sparse(codes.sparse or Sparse(none, none, none.view(np.float32)), rows // ROWS))
    return blob


def put_rows(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int], begin: int, values: np.ndarray, scales: np.ndarray) -> None:
    """Some rows of a block format into the blob of a weight of `shape`, so that it can be filled piece by piece, from several threads.

    values int8 [n, K] are v, not codes; scales float32 [n, K / 32] that half precision holds. `begin` is a multiple of 16.
    """
    at, groups = spec.sections(shape), shape[1] // spec.group
    rows = align(len(values), ROWS)
    codes = (values.view(np.uint8) + np.uint8(1 << (spec.bits - 1))) & np.uint8((1 << spec.bits) - 1)
    for start, step, part in (
        (at.codes, at.depth // TILE * tile_nbytes(spec.bits), pack_tiles(_pad(codes, rows, at.depth), spec.bits)),
        (at.scales, 2 * groups * ROWS, _by_block(_pad(from_f32(scales, "f16"), rows, groups)).view(np.uint8)),
        (at.row_scales, 2 * ROWS, from_f32(np.repeat(np.float32([1, 0]), [len(values), rows - len(values)]), "bf16").view(np.uint8)),
    ):
        _put(blob, start + begin // ROWS * step, part)


def put_exponent_rows(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int], begin: int, codes: np.ndarray, scales: np.ndarray) -> None:
    """`put_rows` for mxfp: codes uint8 [n, K] and scales uint8 [n, K / 32] as they are."""
    at, rows = spec.sections(shape), align(len(codes), ROWS)
    for start, step, part in (
        (at.codes, at.depth // TILE * tile_nbytes(spec.bits), pack_tiles(_pad(codes, rows, at.depth), spec.bits)),
        (at.scales, at.depth // spec.group * ROWS, _by_block(_pad(scales, rows, at.depth // spec.group))),
        (at.row_scales, 2 * ROWS, from_f32(np.repeat(np.float32([0.5, 0]), [len(codes), rows - len(codes)]), "bf16").view(np.uint8)),
    ):
        _put(blob, start + begin // ROWS * step, part)
    _put(blob, at.tables, MXFP.view(np.uint8))


def unpack(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int]) -> Codes:
    """The arrays of a blob, padding dropped. Raises ValueError when the blob's size is not the shape's."""
    at = spec.sections(shape)
    if blob.nbytes != at.nbytes:
        raise ValueError(f"{blob.nbytes} bytes for {spec} of shape {shape}, expected {at.nbytes}")
    n, k = shape
    blocks, groups, used = at.rows // ROWS, at.depth // spec.group, -(-k // spec.group)
    codes = unpack_tiles(blob[: blocks * (at.depth // TILE) * tile_nbytes(spec.bits)], spec.bits, at.rows, at.depth)

    def by_group(start: int, dtype: type = np.uint8) -> np.ndarray:
        part = blob[start : start + blocks * groups * ROWS * np.dtype(dtype).itemsize].view(dtype).reshape(blocks, groups, ROWS)
        return np.ascontiguousarray(part.transpose(0, 2, 1).reshape(at.rows, groups)[:n, :used])

    if spec.scheme == "codebook":
        scales = _unpack_small_scales(blob[at.scales :], blocks, at.depth // TILE)[:n, :used]
    else:
        scales = by_group(at.scales, np.uint16 if spec.scheme == "block" else np.uint8)
    rows = to_f32(blob[at.row_scales : at.row_scales + 2 * n].view(np.uint16), "bf16")
    tables = blob[at.tables : at.tables + LEVELS_NBYTES + STEPS_NBYTES] if at.tables >= 0 else None
    levels = None if tables is None else tables[: 1 << spec.bits].view(np.int8).copy()
    steps = tables[LEVELS_NBYTES:].copy() if spec.scheme == "codebook" else None
    sparse = _unpack_sparse(blob[at.sparse :], blocks, at.sparse_count) if at.sparse >= 0 else None
    return Codes(np.ascontiguousarray(codes[:n, :k]), np.ascontiguousarray(scales), by_group(at.zeros) if at.zeros >= 0 else None, rows,
                 levels, steps, sparse)


def pack_tiles(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 [N, K], both padded -> the bytes of their tiles. Four inputs move as one word, and eight codes are shifted in one."""
    rows, depth = codes.shape
    words = np.ascontiguousarray(codes).view(np.uint32).reshape(rows // ROWS, ROWS, depth // TILE, QUADS)
    quads = np.ascontiguousarray(words.transpose(0, 2, 3, 1)).view(np.uint64).reshape(-1, QUADS, LINE)
    out = np.empty((len(quads), tile_nbytes(bits) // 8), np.uint64)
    shift = start = 0
    for width in PLANES[bits]:
        per = 8 // width  # quads in a vector
        plane = quads if width == bits else (quads >> np.uint64(shift)) & np.uint64(((1 << width) - 1) * EVERY_BYTE)
        vectors = plane.reshape(len(quads), QUADS // per, per, LINE)
        packed = out[:, start : start + QUADS // per * LINE].reshape(len(quads), QUADS // per, LINE)
        packed[:] = vectors[:, :, 0]
        for i in range(1, per):
            packed |= vectors[:, :, i] << np.uint64(width * i)
        shift, start = shift + width, start + QUADS // per * LINE
    return out.view(np.uint8).reshape(-1)


def unpack_tiles(raw: np.ndarray, bits: int, rows: int, depth: int) -> np.ndarray:
    """The inverse of `pack_tiles`."""
    tiles = raw.reshape(-1, tile_nbytes(bits))
    quads = np.zeros((len(tiles), QUADS, 4 * ROWS), np.uint8)
    shift = start = 0
    for width in PLANES[bits]:
        per = 8 // width
        size = QUADS // per * 4 * ROWS
        packed = tiles[:, start : start + size].reshape(len(tiles), QUADS // per, 1, 4 * ROWS)
        shifts = (width * np.arange(per, dtype=np.uint8))[None, None, :, None]
        quads |= (((packed >> shifts) & ((1 << width) - 1)) << shift).astype(np.uint8).reshape(quads.shape)
        shift, start = shift + width, start + size
    return quads.reshape(rows // ROWS, depth // TILE, QUADS, ROWS, 4).transpose(0, 3, 1, 2, 4).reshape(rows, depth)


def _check(codes: Codes, spec: QuantSpec, sparse_count: int) -> None:
    n, k = codes.codes.shape
    groups = -(-k // spec.group)
    if codes.scales.shape != (n, groups) or codes.rows.shape != (n,):
        raise ValueError(f"scales {codes.scales.shape} and rows {codes.rows.shape} for {spec} of shape {(n, k)}")
    if (codes.scales.dtype == np.uint16) != (spec.scheme == "block"):
        raise ValueError(f"scales of {codes.scales.dtype} for {spec}")
    if (codes.zeros is None) != (spec.scheme != "affine") or (codes.levels is None) != (spec.scheme not in ("codebook", "mxfp")) or (
            codes.steps is None) != (spec.scheme != "codebook"):
        raise ValueError(f"zeros belong to affine, levels and steps to codebook weights, not to {spec}")
    if codes.zeros is not None and codes.zeros.shape != (n, groups):
        raise ValueError(f"zeros {codes.zeros.shape} for {spec} of shape {(n, k)}")
    for name, table, size in (("levels", codes.levels, 1 << spec.bits), ("steps", codes.steps, STEPS_NBYTES)):
        if table is not None and table.shape != (size,):
            raise ValueError(f"tables of {table.size} {name} for {spec}, expected {size}")
    if codes.codes.size and int(codes.codes.max()) > (2 if spec.scheme == "ternary" else (1 << spec.bits) - 1):
        raise ValueError(f"code {codes.codes.max()} does not fit {spec}")
    if spec.scheme == "codebook" and codes.scales.size and int(codes.scales.max()) >= CODEBOOK_SCALES:
        raise ValueError(f"scale code {codes.scales.max()} does not fit {spec}")
    if (0 if codes.sparse is None else len(codes.sparse.row)) != sparse_count:
        raise ValueError(f"{spec} of shape {(n, k)} has {sparse_count} outliers")
    if sparse_count:
        places = codes.sparse.row.astype(np.int64) * k + codes.sparse.col
        if codes.sparse.col.max() >= k or places[-1] >= n * k or (np.diff(places) <= 0).any():
            raise ValueError(f"outliers of a weight of shape {(n, k)} must lie within it, in order, each once")


def _pad(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    if array.shape == (rows, columns):
        return array
    out = np.zeros((rows, columns), array.dtype)
    out[: array.shape[0], : array.shape[1]] = array
    return out


def _put(blob: np.ndarray, start: int, part: np.ndarray) -> None:
    blob[start : start + part.size] = part.reshape(-1)


def _by_block(per_group: np.ndarray) -> np.ndarray:
    rows, groups = per_group.shape
    return np.ascontiguousarray(per_group.reshape(rows // ROWS, ROWS, groups).transpose(0, 2, 1))


def _pack_small_scales(scales: np.ndarray) -> np.ndarray:
    """Four-bit codes [N, K/16] -> [N/16][K/32][16 bytes]: two groups of a tile as nibbles."""
    rows, groups = scales.shape
    pairs = scales.reshape(rows // ROWS, ROWS, groups // 2, 2).transpose(0, 2, 3, 1)  # block, tile, group, row
    return pairs[:, :, 0] | pairs[:, :, 1] << 4


def _unpack_small_scales(raw: np.ndarray, blocks: int, count: int) -> np.ndarray:
    part = raw[: blocks * count * ROWS].reshape(blocks, count, 1, ROWS)
    pairs = np.concatenate([part & 15, part >> 4], axis=2)
    return pairs.transpose(0, 3, 1, 2).reshape(blocks * ROWS, count * 2)


def pack_sparse(sparse: Sparse, blocks: int) -> np.ndarray:
    starts = np.searchsorted(sparse.row, np.arange(blocks + 1) * ROWS).astype("<u4")
    places = ((sparse.row % ROWS).astype(np.uint32) << 28 | sparse.col.astype(np.uint32)).astype("<u4")
    return np.concatenate([starts.view(np.uint8), places.view(np.uint8), from_f32(sparse.value, "bf16").view(np.uint8)])


def _unpack_sparse(raw: np.ndarray, blocks: int, count: int) -> Sparse:
    starts = raw[: 4 * (blocks + 1)].view("<u4")
    places = raw[4 * (blocks + 1) :][: 4 * count].view("<u4")
    values = to_f32(raw[4 * (blocks + 1) + 4 * count :][: 2 * count].view(np.uint16), "bf16")
    block = np.repeat(np.arange(blocks, dtype=np.uint32), np.diff(starts))
    return Sparse(block * ROWS + (places >> 28), places & ((1 << 28) - 1), values)
