"""Packs `Codes` into the blob of `kernels/tiles.py`, and unpacks it, as exact inverses. NumPy only: conversion spends its time
elsewhere.
"""

from __future__ import annotations

import numpy as np

from ..kernels.layout import align
from ..kernels.tiles import (
    CODEBOOK_SCALES,
    LEVELS_NBYTES,
    MAX_LEVEL,
    MAX_STEP,
    MAX_TABLE_PRODUCT,
    PLANES,
    ROWS,
    STEPS_NBYTES,
    SUPER_BLOCK,
    TILE,
    row_nbytes,
    scales_nbytes,
    tile_nbytes,
)
from . import super_blocks
from .codebooks import E4M3
from .codes import Codes, Sparse
from .spec import QuantSpec
from .weight import RAW_NUMPY, from_f32, to_f32

QUADS = TILE // 4
LINE = 8  # 64-bit words of a vector
HALVES = ("block", "offset")  # schemes whose scales are half-precision floats
SCALES = {**dict.fromkeys(HALVES, np.uint16), "signed": np.int8, "table": np.int8, "nvfp": np.int8, "float": np.float32,
          "minimum": np.uint16}  # types, where not uint8
EVERY_BYTE = 0x0101010101010101


def pack(codes: Codes, spec: QuantSpec) -> np.ndarray:
    """The blob of a weight, uint8 [spec.nbytes(shape)]. Raises ValueError for arrays that do not fit the spec."""
    shape = codes.codes.shape
    at = spec.sections(shape)
    _check(codes, spec, at.sparse_count)
    blob = np.zeros(at.nbytes, np.uint8)
    put_rows(blob, spec, shape, 0, codes)
    if codes.levels is not None:
        put_tables(blob, spec, shape, codes.levels, codes.steps)
    if at.sparse >= 0:
        none = np.zeros(0, np.uint32)
        _put(blob, at.sparse, pack_sparse(codes.sparse or Sparse(none, none, none.view(np.float32)), at.rows // ROWS))
    return blob


def put_rows(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int], begin: int, codes: Codes) -> None:
    """Some rows into the blob of a weight of `shape`, but for tables and outliers, so that it can be filled piece by piece, from several
    threads. `begin` is a multiple of 16, and so is the number of rows unless they are the last."""
    at = spec.sections(shape)
    padded = _pad(codes.codes, align(len(codes.codes), ROWS), at.depth)
    _put(blob, at.codes + begin // ROWS * (at.depth // TILE) * tile_nbytes(spec.bits), pack_tiles(padded, spec.bits))
    put_factors(blob, spec, shape, begin, codes.scales, codes.zeros, codes.rows, codes.supers, codes.minima)


def put_factors(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int], begin: int, scales: np.ndarray, zeros: np.ndarray | None,
                rows: np.ndarray, supers: np.ndarray | None = None, minima: np.ndarray | None = None) -> None:
    """As `put_rows`, of all that belongs to some rows but for their codes; the arrays are those of `Codes`."""
    at = spec.sections(shape)
    n, first = len(rows), begin // ROWS
    high, groups = align(n, ROWS), at.depth // spec.group
    scales = _pad(scales, high // ROWS if spec.scheme == "float" else high, groups)
    if spec.scheme == "float":
        part = scales
    elif spec.scheme == "minimum":
        part = np.stack([_by_block(scales), _by_block(_pad(minima, high, groups))], axis=2)
    elif spec.scheme == "codebook":
        part = _pack_small_scales(scales)
    elif supers is not None:
        part = super_blocks.pack(scales, supers, minima, at.depth, spec.scheme)
    else:
        part = _by_block(scales)
    _put(blob, at.scales + first * scales_nbytes(spec.scheme, spec.group, at.depth), part.view(np.uint8))
    if zeros is not None:
        _put(blob, at.zeros + begin * groups, _by_block(_pad(zeros, high, groups)))
    stored = from_f32(np.concatenate([rows, np.zeros(high - n, np.float32)]), _row_type(spec))
    _put(blob, at.row_scales + row_nbytes(spec.scheme) * begin, stored.view(np.uint8))


def _row_type(spec: QuantSpec) -> str:
    """The raw type of row scales."""
    return "f32" if row_nbytes(spec.scheme) == 4 else "bf16"


def put_tables(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int], levels: np.ndarray, steps: np.ndarray | None = None) -> None:
    """Levels and steps into the blob of a weight of `shape`."""
    steps = np.zeros(STEPS_NBYTES, np.uint8) if steps is None else steps
    _put(blob, spec.sections(shape).tables, np.concatenate([np.resize(levels, LEVELS_NBYTES).view(np.uint8), steps]))


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

    supers = minima = None
    if spec.scheme == "codebook":
        scales = _unpack_small_scales(blob[at.scales :], blocks, at.depth // TILE)[:n, :used]
    elif spec.scheme in super_blocks.SCHEMES:
        found = super_blocks.unpack(blob[at.scales :], spec.scheme, at.rows, at.depth)
        supers = found[1][:n, : -(-k // SUPER_BLOCK)]
        scales, minima = (None if each is None else each[:n, :used] for each in (found[0], found[2]))
    elif spec.scheme == "float":
        own = blob[at.scales : at.scales + 4 * blocks * groups].view(np.float32)
        scales = own.reshape(blocks, groups)[:, :used].copy()
    elif spec.scheme == "minimum":
        pairs = blob[at.scales : at.scales + blocks * groups * 4 * ROWS].view(np.uint16).reshape(blocks, groups, 2, ROWS)
        scales, minima = (np.ascontiguousarray(pairs[:, :, i].transpose(0, 2, 1).reshape(-1, groups)[:n, :used]) for i in (0, 1))
    else:
        scales = by_group(at.scales, SCALES.get(spec.scheme, np.uint8))
    kind = _row_type(spec)
    rows = to_f32(blob[at.row_scales : at.row_scales + row_nbytes(spec.scheme) * n].view(RAW_NUMPY[kind]), kind).copy()
    tables = blob[at.tables : at.tables + LEVELS_NBYTES + STEPS_NBYTES] if at.tables >= 0 else None
    levels = None if tables is None else tables[: 1 << spec.bits].view(np.int8).copy()
    steps = tables[LEVELS_NBYTES:].copy() if spec.scheme == "codebook" else None
    sparse = _unpack_sparse(blob[at.sparse :], blocks, at.sparse_count) if at.sparse >= 0 else None
    return Codes(np.ascontiguousarray(codes[:n, :k]), np.ascontiguousarray(scales), by_group(at.zeros) if at.zeros >= 0 else None, rows,
                 levels, steps, sparse, supers, minima)


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
    if codes.scales.shape != (-(-n // ROWS) if spec.scheme == "float" else n, groups) or codes.rows.shape != (n,):
        raise ValueError(f"scales {codes.scales.shape} and rows {codes.rows.shape} for {spec} of shape {(n, k)}")
    if codes.scales.dtype != SCALES.get(spec.scheme, np.uint8):
        raise ValueError(f"scales of {codes.scales.dtype} for {spec}")
    if (codes.supers is None) != (spec.scheme not in super_blocks.SCHEMES) or (
            codes.minima is None) != (spec.scheme not in (*super_blocks.WITH_MINIMA, "minimum")):
        raise ValueError(f"super-blocks and minima do not belong to {spec}, or are missing")
    if codes.supers is not None:
        super_blocks.check(codes.scales, codes.supers, codes.minima, k, spec.scheme)
    if (codes.zeros is None) != (spec.scheme not in ("affine", "offset")) or (codes.steps is None) != (spec.scheme != "codebook") or (
            codes.levels is None) != (spec.scheme not in ("codebook", "mxfp", "table", "nvfp")):
        raise ValueError(f"zeros belong to affine and offset, levels and steps to codebook weights, not to {spec}")
    if codes.zeros is not None and codes.zeros.shape != (n, groups):
        raise ValueError(f"zeros {codes.zeros.shape} for {spec} of shape {(n, k)}")
    for name, table, size in (("levels", codes.levels, 1 << spec.bits), ("steps", codes.steps, STEPS_NBYTES)):
        if table is not None and table.shape != (size,):
            raise ValueError(f"tables of {table.size} {name} for {spec}, expected {size}")
    if spec.scheme == "table" and codes.levels is not None:
        if int(np.abs(codes.levels.astype(int)).max()) * int(np.abs(codes.scales.astype(int)).max(initial=0)) > MAX_TABLE_PRODUCT:
            raise ValueError(f"levels times scale codes above {MAX_TABLE_PRODUCT} for {spec}: they are no longer multiplied exactly")
    elif codes.levels is not None and not -MAX_LEVEL <= int(codes.levels.min()) <= int(codes.levels.max()) < MAX_LEVEL:
        raise ValueError(f"levels of {codes.levels.min()} to {codes.levels.max()} for {spec}, expected -{MAX_LEVEL} to {MAX_LEVEL - 1}")
    if codes.steps is not None and int(codes.steps.max()) > MAX_STEP:
        raise ValueError(f"a step of {codes.steps.max()} for {spec}, at most {MAX_STEP} are multiplied exactly")
    if codes.codes.size and int(codes.codes.max()) > (2 if spec.scheme == "ternary" else (1 << spec.bits) - 1):
        raise ValueError(f"code {codes.codes.max()} does not fit {spec}")
    if spec.scheme == "codebook" and codes.scales.size and int(codes.scales.max()) >= CODEBOOK_SCALES:
        raise ValueError(f"scale code {codes.scales.max()} does not fit {spec}")
    if spec.scheme == "float" and not np.isfinite(E4M3[codes.codes]).all():
        raise ValueError("an FP8 weight is NaN, which kernels do not handle")
    if spec.scheme == "nvfp" and not np.isfinite(E4M3[codes.scales.view(np.uint8)]).all():
        raise ValueError("a scale is NaN, which kernels do not handle")
    if spec.scheme == "minimum" and (codes.minima.dtype != np.uint16 or codes.minima.shape != (n, groups)):
        raise ValueError(f"minima {codes.minima.shape} of {codes.minima.dtype} for {spec} of shape {(n, k)}")
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
