"""Byte layout of a low-bit weight, the same on disk and in memory. Pure arithmetic; no array is touched here.

A weight `[N, K]` is one blob of 64-byte aligned sections, in this order:

    codes    [N/16 blocks][K/32 tiles][tile]
    scales   8-bit scale codes are the factors themselves, unless stated otherwise
             codebook: [N/16][K/32][16 bytes], the even group's code in the low nibble      others: [N/16][K/group][16 bytes]
             mxfp: each byte the exponent of a power of two, as in a float32
             block, offset: [N/16][K/group][16 half-precision floats]
             super: [N/16][K/256][16 halves d, 16 halves e, then per tile 16 bytes s | (m & 3) << 6 and 8 bytes: m >> 2 of row r in the
             low nibble of byte r, of row r + 8 in the high one]
             nibble: [N/16][K/256][16 halves d, 16 halves e, then per group 16 bytes s | m << 4]
             signed, table: [N/16][K/256][16 halves d, then per group 16 int8 s]
             minimum: [N/16][K/group][16 halves d, 16 halves m]      nvfp: as the others, each byte a float (E4M3)
             float: [N/16][K/group] float32, one for all rows of a block
    zeros    affine and offset only: [N/16][K/group][16 bytes]
    rows     a scale per row, bfloat16 [N]; float, nvfp: float32 [N]
    tables   codebook only: 16 int8 levels, repeated to 16 entries, then 16 uint8 steps, the factor of each scale code; mxfp, nvfp and
             table: levels alone
    sparse   with outliers: uint32 starts[N/16 + 1], uint32 places[m] (row in block << 28 | column), bfloat16 values[m]

A tile is 16 rows x 32 inputs, as bit planes one after the other: 3 bits are planes of 2 + 1, 5 of 4 + 1, 6 of 4 + 2, low bits first.
Within a tile a quad is 16 rows x 4 inputs: 64 bytes when unpacked, in the order [row][input], which is what one dot-product
instruction takes against four broadcast activations. A 4-bit vector of 64 bytes holds quads 2i (low nibbles) and 2i + 1; a 2-bit vector
quads 4i to 4i + 3 from the low bits up; the 1-bit vector quad j in bit j. Rows are padded to 16, inputs to the longer of 32 and a group,
of super-blocks to 256.
Kernels of every instruction set read this layout directly, so a file moves between machines and is never repacked.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import align

ROWS, TILE = 16, 32  # rows of a block, inputs of a tile
PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
CODEBOOK, AFFINE, SYMMETRIC, TERNARY, BLOCK = range(5)
MXFP, OFFSET, SUPER, SIGNED, TABLE, NIBBLE, FLOAT, MINIMUM, NVFP = range(7, 16)
SCHEMES = {"codebook": CODEBOOK, "affine": AFFINE, "symmetric": SYMMETRIC, "ternary": TERNARY, "block": BLOCK, "mxfp": MXFP,
           "offset": OFFSET, "super": SUPER, "signed": SIGNED, "table": TABLE,
           "nibble": NIBBLE, "float": FLOAT, "minimum": MINIMUM, "nvfp": NVFP}
# Formats whose products are compiled separately (`cpu/packed_formats.py`), as kinds of kernels (`warm.py`).
FORMATS = tuple(f"{scheme}-{bits}" for scheme, widths in {
    "codebook": (4, 3, 2), "affine": (8, 6, 5, 4, 3, 2), "symmetric": (8, 6, 5, 4, 3, 2), "ternary": (2,), "block": (8, 5, 4),
    "offset": (8, 4), "super": (5, 4), "nibble": (2,), "minimum": (8, 6, 5, 4, 3, 2), "nvfp": (4,), "signed": (6,), "table": (4, 3),
    "mxfp": (4,)}.items() for bits in widths)
SUPER_BLOCK_SCHEMES = ("super", "nibble", "signed", "table")  # their scales are records of super-blocks
SCHEME_SHIFT, SCHEME_MASK = 4, 15  # kernels receive bits << SCHEME_SHIFT | scheme
CODEBOOK_SCALES = 16  # number of 4-bit scale codes
LEVELS_NBYTES = STEPS_NBYTES = 16
LEVEL_SHIFT = 64  # kernels add it to levels to make them unsigned
MAX_STEP, MAX_LEVEL = 127, 64  # levels are -64 to 63, so that a group's sum times its step is below 2**24, exact in float32
TABLE_LEVEL_SHIFT = 128  # the LEVEL_SHIFT of scheme `table`, whose levels have 8 bits
MAX_TABLE_PRODUCT = 4128  # largest level of a table times largest scale code: the sum of both groups of a tile is then below 2**24
SUPER_BLOCK = 256  # inputs that share a half-precision scale, and a scale of minima
# A record holds the scales of a super-block of 16 rows: a header, then scale codes per tile.
SUPER_HEADER_NBYTES, SUPER_TILE_NBYTES, SIGNED_HEADER_NBYTES, SIGNED_TILE_NBYTES = 4 * ROWS, 24, 2 * ROWS, 2 * ROWS
SUPER_NBYTES, SIGNED_NBYTES = SUPER_HEADER_NBYTES + 8 * SUPER_TILE_NBYTES, SIGNED_HEADER_NBYTES + 8 * SIGNED_TILE_NBYTES
NIBBLE_TILE_NBYTES = 2 * ROWS  # its header is that of `super`
NIBBLE_NBYTES = SUPER_HEADER_NBYTES + 8 * NIBBLE_TILE_NBYTES
MAX_SPARSE_COLUMNS = 1 << 28  # of a weight with outliers, whose column is stored in 28 bits


def unit(scheme: str, group: int) -> int:
    """Input counts are padded to a multiple of this."""
    return SUPER_BLOCK if scheme in SUPER_BLOCK_SCHEMES else max(TILE, group)


def padded(shape: tuple[int, int], scheme: str, group: int) -> tuple[int, int]:
    """Rows and inputs as stored, with padding."""
    return align(shape[0], ROWS), align(shape[1], unit(scheme, group))


def tile_nbytes(bits: int) -> int:
    """Bytes of one tile's codes."""
    return ROWS * TILE * bits // 8


def row_nbytes(scheme: str) -> int:
    """Bytes of one row's scale."""
    return 4 if scheme in ("float", "nvfp") else 2


def scales_nbytes(scheme: str, group: int, depth: int) -> int:
    """Bytes of a row block's scales for `depth` inputs as stored."""
    if scheme == "codebook":
        return depth // TILE * ROWS
    if scheme == "float":
        return depth // group * 4
    if scheme in SUPER_BLOCK_SCHEMES:
        return depth // SUPER_BLOCK * {"super": SUPER_NBYTES, "nibble": NIBBLE_NBYTES}.get(scheme, SIGNED_NBYTES)
    if scheme == "minimum":
        return depth // group * 4 * ROWS
    return depth // group * ROWS * (2 if scheme in ("block", "offset") else 1)


@dataclass(frozen=True)
class Sections:
    """Byte offsets within a blob (-1: no such section) and its size. `rows`, `depth`: the padded shape; `sparse_count` entries."""

    rows: int
    depth: int
    codes: int
    scales: int
    zeros: int
    row_scales: int
    tables: int
    sparse: int
    sparse_count: int
    nbytes: int


def block_nbytes(depth: int, bits: int, scheme: str, group: int) -> dict[str, int]:
    """Bytes of a row block in each section stored row by row; `depth` as stored."""
    nbytes = {"codes": depth // TILE * tile_nbytes(bits), "scales": scales_nbytes(scheme, group, depth)}
    return {**nbytes, "zeros": depth // group * ROWS} if scheme in ("affine", "offset") else nbytes


def sections(shape: tuple[int, int], bits: int, scheme: str, group: int, outliers: float = 0.0) -> Sections:
    """Byte offsets of all sections in a weight's blob."""
    rows, depth = padded(shape, scheme, group)
    blocks, nbytes = rows // ROWS, block_nbytes(depth, bits, scheme, group)
    end = align(blocks * nbytes["codes"])
    scales, zeros, tables, sparse, count = end, -1, -1, -1, 0
    end += align(blocks * nbytes["scales"])
    if "zeros" in nbytes:
        zeros = end
        end += align(blocks * nbytes["zeros"])
    row_scales = end
    end += align(row_nbytes(scheme) * rows)
    if scheme in ("codebook", "mxfp", "table", "nvfp"):
        tables = end
        end += align(LEVELS_NBYTES + STEPS_NBYTES)
    if outliers:
        sparse, count = end, round(shape[0] * shape[1] * outliers)
        end += align(4 * (blocks + 1) + 6 * count)
    return Sections(rows, depth, 0, scales, zeros, row_scales, tables, sparse, count, end)
