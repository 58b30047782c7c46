"""Low-bit weights on torch tensors: the blob of `kernels/tiles.py` as stored in files, dequantized some row blocks at a time on the device.

Dequantized blocks are bit-identical to `quant/codes.py`, and activations stay float32: the numerics of the CPU's `--exact`. No full copy of
a matrix is ever held in a wider type than its codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..device_memory import DEQUANTIZE_NBYTES, MAX_DEQUANTIZED
from ..tiles import (
    LEVELS_NBYTES,
    NIBBLE_NBYTES,
    PLANES,
    ROWS,
    SIGNED_HEADER_NBYTES,
    SIGNED_NBYTES,
    SUPER_BLOCK,
    SUPER_BLOCK_SCHEMES,
    SUPER_HEADER_NBYTES,
    SUPER_NBYTES,
    SUPER_TILE_NBYTES,
    TILE,
    Sections,
    block_nbytes,
    row_nbytes,
    tile_nbytes,
)

QUADS = TILE // 4
HALF_SCALE_SCHEMES = ("block", "offset")
CODE_MASK, COLUMN_BITS = 63, 28
OUTLIERS = 1 << 20  # examined at once


@dataclass(frozen=True)
class Format:
    """A blob's format: bits, group and scheme of `quant/spec.py`, the weight's shape, and its sections."""

    bits: int
    group: int
    scheme: str
    shape: tuple[int, int]
    at: Sections


Dequantizer = Callable[[torch.Tensor, Format, int, int], torch.Tensor]


def product(x: torch.Tensor, blob: torch.Tensor, form: Format, bias: torch.Tensor | None,
            values: Dequantizer | None = None) -> torch.Tensor:
    """x float32 [T, K] times the weight [N, K] transposed, plus bias -> [T, N]. `values`: an alternative dequantizer of row blocks, which
    needs memory for the weights only."""
    rows = form.shape[0]
    blocks_at_once = max(1, MAX_DEQUANTIZED * (1 if values is None else DEQUANTIZE_NBYTES // 4) // (ROWS * form.at.depth))
    out = torch.empty(len(x), rows, device=x.device)
    for first in range(0, form.at.rows // ROWS, blocks_at_once):
        end = min(form.at.rows // ROWS, first + blocks_at_once)
        out[:, first * ROWS : end * ROWS] = x @ (values or dequantize)(blob, form, first, end).T
    return out if bias is None else out.add_(bias)


def dequantize(blob: torch.Tensor, form: Format, first: int, end: int) -> torch.Tensor:
    """Row blocks [first, end) of a weight, float32 [rows, K]; the last block without its padding."""
    blocks = _Blocks(blob, form, first, end)
    w = blocks.plain()
    if form.at.sparse_count:
        blocks.correct(w)
    return w


@dataclass(frozen=True)
class _Blocks:
    """Some row blocks of a blob; arrays are [rows, ...] including padding rows, inputs without padding."""

    blob: torch.Tensor
    form: Format
    first: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.first

    def plain(self) -> torch.Tensor:
        """Without outliers; the last block without its padding."""
        v, factors, minima = self.values(), *self.factors()
        w = self.spread(factors).mul_(v)
        if minima is not None:
            w -= self.spread(minima)
        return w.mul_(self.row_scales()[:, None])[: max(0, self.form.shape[0] - self.first * ROWS)]

    def _part(self, name: str) -> torch.Tensor:
        """uint8 [blocks, bytes per block] of a section."""
        form = self.form
        nbytes = block_nbytes(form.at.depth, form.bits, form.scheme, form.group)[name]
        begin = getattr(form.at, name)
        return self.blob[begin + self.first * nbytes : begin + self.end * nbytes].view(self.count, nbytes)

    def _by_group(self, name: str, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        part = self._part(name).view(dtype).view(self.count, -1, ROWS)
        return part.transpose(1, 2).reshape(self.count * ROWS, -1)

    def spread(self, per_group: torch.Tensor) -> torch.Tensor:
        """[rows, G] -> float32 [rows, K]."""
        return per_group.float().repeat_interleave(self.form.group, 1)[:, : self.form.shape[1]]

    def row_scales(self) -> torch.Tensor:
        begin, nbytes = self.form.at.row_scales, row_nbytes(self.form.scheme)
        stored = self.blob[begin + nbytes * ROWS * self.first : begin + nbytes * ROWS * self.end]
        return stored.view(torch.float32 if nbytes == 4 else torch.bfloat16).float()

    def codes(self) -> torch.Tensor:
        """uint8 [rows, K]."""
        form = self.form
        tiles = self._part("codes").reshape(-1, tile_nbytes(form.bits))
        quads = torch.zeros(len(tiles), QUADS * 4 * ROWS, dtype=torch.uint8, device=tiles.device)
        shift = start = 0
        for width in PLANES[form.bits]:
            per = 8 // width
            size = QUADS // per * 4 * ROWS
            packed = tiles[:, start : start + size].reshape(len(tiles), QUADS // per, 1, 4 * ROWS)
            shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=tiles.device)[:, None]
            quads |= ((packed >> shifts & (1 << width) - 1) << shift).flatten(1)
            shift, start = shift + width, start + size
        by_tile = quads.view(self.count, form.at.depth // TILE, QUADS, ROWS, 4)
        return by_tile.permute(0, 3, 1, 2, 4).reshape(self.count * ROWS, -1)[:, : form.shape[1]]

    def values(self) -> torch.Tensor:
        """Integer values of the codes before any scale (floats for fp8), as float32 [rows, K]."""
        scheme, codes, at = self.form.scheme, self.codes(), self.form.at
        if scheme in ("codebook", "mxfp", "nvfp", "table"):
            levels = self.blob[at.tables : at.tables + LEVELS_NBYTES].view(torch.int8).float()
            return levels.index_select(0, codes.flatten().int()).view(codes.shape)
        if scheme == "float":
            return codes.contiguous().view(torch.float8_e4m3fn).float()
        if scheme in ("super", "nibble", "minimum"):
            return codes.float()
        if scheme in ("affine", "offset"):
            return codes.float() - self.spread(self._by_group("zeros"))
        return codes.float() - (1 if scheme == "ternary" else 1 << self.form.bits - 1)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Group factors (without the row scale) and minima, which are subtracted: float32 [rows, G]."""
        scheme, at = self.form.scheme, self.form.at
        if scheme == "codebook":
            part = self._part("scales").view(self.count, -1, 1, ROWS)
            pairs = torch.cat([part & 15, part >> 4], 2).permute(0, 3, 1, 2).reshape(self.count * ROWS, -1)
            steps = self.blob[at.tables + LEVELS_NBYTES :][:16].float()
            return steps.index_select(0, pairs.flatten().int()).view(pairs.shape), None
        if scheme == "float":  # one scale for all rows of a block
            return self._part("scales").view(torch.float32).repeat_interleave(ROWS, 0), None
        if scheme in SUPER_BLOCK_SCHEMES:
            return self._super_factors(scheme)
        if scheme == "minimum":
            pairs = self._part("scales").view(torch.float16).view(self.count, -1, 2, ROWS).float().permute(2, 0, 3, 1)
            return pairs[0].flatten(0, 1), -pairs[1].flatten(0, 1)
        if scheme == "nvfp":
            return self._by_group("scales").contiguous().view(torch.float8_e4m3fn).float(), None
        if scheme in HALF_SCALE_SCHEMES:
            return self._by_group("scales", torch.float16).float(), None
        codes = self._by_group("scales")
        return (codes.int() << 23).view(torch.float32) if scheme == "mxfp" else codes.float(), None

    def _super_factors(self, scheme: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        nbytes = {"super": SUPER_NBYTES, "nibble": NIBBLE_NBYTES}.get(scheme, SIGNED_NBYTES)
        header = SUPER_HEADER_NBYTES if scheme in ("super", "nibble") else SIGNED_HEADER_NBYTES
        records = self._part("scales").view(self.count, -1, nbytes)
        supers = records[:, :, :header].contiguous().view(torch.float16).view(self.count, records.shape[1], -1, ROWS).float()

        def by_row(codes_of_groups: torch.Tensor, which: int) -> torch.Tensor:
            """[block, super-block, group, row] times d or e of its super-block -> [rows, G]."""
            return (supers[:, :, which, None] * codes_of_groups.float()).permute(0, 3, 1, 2).reshape(self.count * ROWS, -1)

        codes = records[:, :, header:]
        if scheme == "nibble":
            nibbles = codes.reshape(self.count, records.shape[1], -1, ROWS)
            return by_row(nibbles & 15, 0), by_row(nibbles >> 4, 1)
        if scheme != "super":
            return by_row(codes.contiguous().view(torch.int8).view(self.count, records.shape[1], -1, ROWS), 0), None
        tiles = codes.reshape(self.count, -1, SUPER_BLOCK // TILE, SUPER_TILE_NBYTES)
        low, high = tiles[..., :ROWS], tiles[..., ROWS:]
        high = torch.cat([high & 15, high >> 4], 3)
        return by_row(low & CODE_MASK, 0), by_row(low >> 6 | high << 2, 1)

    def correct(self, w: torch.Tensor) -> None:
        """Add the outliers of these rows without reading their count from the device: all outliers of the weight are examined, some at a
        time."""
        at, blocks = self.form.at, self.form.at.rows // ROWS
        ends = self.blob[at.sparse + 4 : at.sparse + 4 * (blocks + 1)].view(torch.int32)
        positions_at = at.sparse + 4 * (blocks + 1)
        positions = self.blob[positions_at : positions_at + 4 * at.sparse_count].view(torch.int32)
        corrections_at = positions_at + 4 * at.sparse_count
        corrections = self.blob[corrections_at : corrections_at + 2 * at.sparse_count].view(torch.bfloat16)
        flat = w.as_strided(((len(w) - 1) * w.stride(0) + w.shape[1],), (1,))
        for first in range(0, at.sparse_count, OUTLIERS):
            span = slice(first, min(at.sparse_count, first + OUTLIERS))
            numbers = torch.arange(span.start, span.stop, dtype=torch.int32, device=w.device)
            block = torch.searchsorted(ends, numbers, right=True, out_int32=True)
            inside = (block >= self.first) & (block < self.end)
            position = positions[span].long() & 0xFFFFFFFF
            row = (block - self.first) * ROWS + (position >> COLUMN_BITS)
            # Outliers of other rows add -0.0, which leaves every value as it is; they are spread over many addresses because a GPU
            # serializes additions to one.
            to = torch.where(inside, row * w.stride(0) + (position & (1 << COLUMN_BITS) - 1), numbers.long() % len(flat))
            flat.index_add_(0, to, torch.where(inside, corrections[span].float(), -0.0))
