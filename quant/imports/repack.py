"""Compiled repacking of other tools' quantized weights from file bytes into the kernels' layout, single-threaded per call.

The NumPy code defines the result: `gguf.native_codes`, `mxfp4.unpack_pairs`, `gptq.decode` and so on, then `pack.put_rows`; for FP8,
`fp8.dequantize`. No arrays are allocated besides blob and input, so no chunking is needed. Compiled code does not check bounds: that
happens here.
"""

from __future__ import annotations

import numpy as np

from ...kernels.tiles import ROWS, SUPER_BLOCK, SUPER_BLOCK_SCHEMES, TILE, block_nbytes, row_nbytes
from ...kernels.workspace import address
from ..codebooks import MXFP
from ..codes import Codes
from ..pack import put_factors, put_rows, put_tables
from ..spec import QuantSpec
from . import bitsandbytes, fp8, nvfp4
from .gguf import DECODERS, NATIVE
from .gguf_codebooks import KINDS as LEVELED
from .gguf_codebooks import grid_of

MXFP4 = NATIVE["MXFP4"]
# Layouts of other tools, bits of a code.
WORDS = (("gptq", 4), ("gptq", 8), ("awq", 4), ("packed", 4), ("packed", 8), ("integers", 8), ("bytes by row", 8))
SIGNED = ("integers", "bytes by row")
HALF = 0x3F00  # in bfloat16


def put_gguf_blocks(blob: np.ndarray, kind: str, shape: tuple[int, int], begin: int, raw: np.ndarray, scale: float = 1.0) -> bool:
    """Rows of a GGUF file's tensor of `shape` [N, K] from `begin` on, a multiple of 16, uint8 [n, row bytes], into its blob; n is a
    multiple of 16 unless they are the last. `scale`: what NVFP4 is multiplied by beside its own. Returns False where a scale is NaN
    or infinite. Releases the interpreter lock.

    Raises KeyError for a type that is not in KEPT, ValueError for arrays that do not fit, GridsMissing.
    """
    from ...kernels.cpu import repack_gguf, repack_gguf_codebooks

    spec = NATIVE[kind]
    wide = SUPER_BLOCK if spec.scheme in SUPER_BLOCK_SCHEMES else 2 * TILE if spec.scheme == "nvfp" else TILE
    _check(blob, spec, shape, begin, len(raw))
    if raw.dtype != np.uint8 or raw.shape[1:] != (shape[1] // wide * DECODERS[kind][0],) or not raw.flags.c_contiguous:
        raise ValueError(f"{raw.dtype} {raw.shape} for rows of {shape[1]} inputs in {kind}")
    codes, scales = _places(blob, spec, shape, begin)
    if spec.scheme == "table":
        own = LEVELED[kind]
        grid = address(grid_of(own.grid)) if own.grid else 0
        bad = repack_gguf_codebooks.repack_codebook_blocks(repack_gguf_codebooks.KINDS[kind], spec.bits, own.nbytes, grid, address(raw),
                                                           len(raw), shape[1] // wide, codes, scales)
        _put_row_scales(blob, spec, shape, begin, len(raw), own.part)
        put_tables(blob, spec, shape, own.levels)
        return not bad
    if spec.scheme == "nvfp":
        repack_gguf.repack_nvfp4_blocks(address(raw), len(raw), shape[1] // wide, codes, scales)
        _put_row_scales(blob, spec, shape, begin, len(raw), scale)
        return True
    put = repack_gguf.repack_blocks_of_32 if wide == TILE else repack_gguf.repack_super_blocks
    bad = put(repack_gguf.KINDS[kind], address(raw), len(raw), shape[1] // wide, codes, scales)
    _put_row_scales(blob, spec, shape, begin, len(raw))
    return not bad


def put_mxfp4(blob: np.ndarray, shape: tuple[int, int], begin: int, codes: np.ndarray, scales: np.ndarray) -> bool:
    """As `put_gguf_blocks`, of MXFP4 whose codes uint8 [n, K / 2], two neighbours in a byte, lie apart from their exponents uint8 [n, K /
    32]. Rows of either may lie at any distance."""
    from ...kernels.cpu import repack_words

    n, groups = len(codes), shape[1] // TILE
    _check(blob, MXFP4, shape, begin, n)
    for name, array, width in (("codes", codes, shape[1] // 2), ("scales", scales, groups)):
        if array.dtype != np.uint8 or array.shape != (n, width) or (array.strides[1] != 1 and width > 1):
            raise ValueError(f"{name} of {array.dtype} {array.shape} for {n} rows of {shape[1]} inputs")
    at = _places(blob, MXFP4, shape, begin)
    repack_words.repack_codes(repack_words.PAIRS, address(codes), codes.strides[0], n, groups, at[0])
    bad = repack_words.repack_exponents(address(scales), scales.strides[0], n, groups, at[1])
    _put_row_scales(blob, MXFP4, shape, begin, n)
    return not bad


def put_int32_words(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int], layout: str, words: np.ndarray) -> None:
    """The codes of a whole weight of `shape` [N, K] into its blob, without scales, zero points and row scales. words int32: of "gptq"
    [K * bits / 32, N], of "awq" [K, N / 8], of "packed" [N, K * bits / 32]; int8 of "integers" [N, K] (both of
    compressed-tensors) and of "bytes by row".
    Releases the interpreter lock.

    Raises KeyError for what is not in WORDS, ValueError for arrays that do not fit.
    """
    from ...kernels.cpu import repack_words

    (n, k), eights = shape, (repack_words.NIBBLES_DOWN, repack_words.GROUPED)
    known = {("gptq", 4): (repack_words.NIBBLES_DOWN, (k // 8, n)), ("gptq", 8): (repack_words.BYTES_DOWN, (k // 4, n)),
             ("awq", 4): (repack_words.GROUPED, (k, n // 8)), ("packed", 4): (repack_words.PAIRS, (n, k // 8)),
             ("packed", 8): (repack_words.BYTES, (n, k // 4)),
             **{(bytes_alike, 8): (repack_words.SIGNED_BYTES, (n, k)) for bytes_alike in SIGNED}}
    kind, form = known[layout, spec.bits]
    _check(blob, spec, shape, 0, n)
    if words.dtype != (np.int8 if layout in SIGNED else np.int32) or words.shape != form or not words.flags.c_contiguous or (
            n % 8 and kind in eights):
        raise ValueError(f"words of {words.dtype} {words.shape} for {spec} of shape {shape}")
    repack_words.repack_codes(kind, address(words), words.strides[0], n, k // TILE, address(blob) + spec.sections(shape).codes)


def put_fp8_as_halves(out: np.ndarray, codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> None:
    """E4M3 codes uint8 [N, K] under scales as `fp8.dequantize` takes them -> halves, uint8 [2 * N * K], rounded as NumPy rounds. Releases
    the interpreter lock. Raises ValueError for arrays that do not fit."""
    from ...kernels.cpu import fp8_to_half

    scales, high, wide = fp8.blocks(codes.shape, scales, block)
    scales, (n, k) = np.ascontiguousarray(scales, np.float32), codes.shape
    if codes.dtype != np.uint8 or not codes.flags.c_contiguous or out.dtype != np.uint8 or out.shape != (2 * n * k,) or not (
            out.flags.c_contiguous and out.flags.writeable):
        raise ValueError(f"codes of {codes.dtype} {codes.shape} for {out.shape} bytes")
    fp8_to_half.e4m3_to_half(address(codes), n, k, address(scales), scales.shape[1], high, wide, address(out))


def put_fp8(blob: np.ndarray, spec: QuantSpec, codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> None:
    """FP8 (E4M3) codes uint8 [N, K] under scales as `fp8.dequantize` takes them -> the blob of their weight, losslessly. Releases the
    interpreter lock."""
    from ...kernels.cpu import fp8_to_half, repack_words

    (n, k), own = codes.shape, fp8.factors(codes.shape, scales, spec, block)
    if codes.dtype != np.uint8 or not codes.flags.c_contiguous:
        raise ValueError(f"codes of {codes.dtype} {codes.shape}")
    if fp8_to_half.has_nan(address(codes), codes.size):
        raise ValueError("a weight is NaN")
    if k % TILE:
        put_rows(blob, spec, codes.shape, 0, Codes(codes, own[0], None, own[1]))
        return
    _check(blob, spec, codes.shape, 0, n)
    repack_words.repack_codes(repack_words.BYTES, address(codes), codes.strides[0], n, k // TILE,
                                 address(blob) + spec.sections(codes.shape).codes)
    put_factors(blob, spec, codes.shape, 0, own[0], None, own[1])


def put_nvfp4(blob: np.ndarray, packed: np.ndarray, scales: np.ndarray, scale: np.float32) -> None:
    """NVFP4 as checkpoint folders store it, as `nvfp4.packable` takes it -> the blob of its weight, losslessly. Releases the interpreter
    lock."""
    from ...kernels.cpu import repack_words

    nvfp4.check(packed, scales)
    spec, shape, rows = nvfp4.SPEC, (len(packed), 2 * packed.shape[1]), np.full(len(packed), scale / 2, np.float32)
    if not packed.flags.c_contiguous:
        raise ValueError("codes that are not contiguous")
    if shape[1] % TILE:
        put_rows(blob, spec, shape, 0, nvfp4.packable(packed, scales, scale))
    else:
        _check(blob, spec, shape, 0, len(packed))
        repack_words.repack_codes(repack_words.PAIRS, address(packed), packed.strides[0], shape[0], shape[1] // TILE,
                                     address(blob) + spec.sections(shape).codes)
        put_factors(blob, spec, shape, 0, scales.view(np.int8), None, rows)
    put_tables(blob, spec, shape, MXFP)


def put_bitsandbytes(blob: np.ndarray, shape: tuple[int, int], begin: int, packed: np.ndarray, levels: np.ndarray, scales: np.ndarray,
               block: int) -> None:
    """Rows of a weight of `shape` [N, K] from `begin` on, a multiple of 16, which bitsandbytes made, as `bitsandbytes.packable` takes them,
    into its blob: its codes, under levels and scales that are rounded. A number of rows as of `put_gguf_blocks`. Raises ValueError for
    arrays that do not fit."""
    from ...kernels.cpu import repack_words

    spec, depth = bitsandbytes.SPEC, shape[1]
    own = min(2 * packed.size // depth, shape[0] - begin), depth
    if depth % SUPER_BLOCK:
        put_rows(blob, spec, shape, begin, bitsandbytes.packable(packed, levels, scales, block, own))
    else:
        codes, rows, supers, _ = bitsandbytes.factors(packed, levels, scales, block, own)
        pairs = packed >> 4 | packed << 4
        _check(blob, spec, shape, begin, own[0])
        repack_words.repack_codes(repack_words.PAIRS, address(pairs), depth // 2, own[0], depth // TILE,
                                     _places(blob, spec, shape, begin)[0])
        put_factors(blob, spec, shape, begin, codes, None, rows, supers)
    put_tables(blob, spec, shape, bitsandbytes.integer_levels(levels)[0])


def _check(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int], begin: int, n: int) -> None:
    """Raises ValueError for rows out of range: compiled code checks nothing."""
    if blob.dtype != np.uint8 or blob.shape != (spec.nbytes(shape),) or not blob.flags.c_contiguous or not blob.flags.writeable:
        raise ValueError(f"a blob of {blob.dtype} {blob.shape} for {spec} of shape {shape}")
    if begin % ROWS or begin < 0 or begin + n > shape[0] or (n % ROWS and begin + n < shape[0]) or spec.sections(shape).depth != shape[1]:
        raise ValueError(f"rows {begin} to {begin + n} of a weight of shape {shape}")


def _places(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int], begin: int) -> tuple[int, int]:
    """Addresses at which the row block of row `begin` has its codes and its scales."""
    at = spec.sections(shape)
    nbytes, block = block_nbytes(at.depth, spec.bits, spec.scheme, spec.group), begin // ROWS
    return address(blob) + at.codes + block * nbytes["codes"], address(blob) + at.scales + block * nbytes["scales"]


def _put_row_scales(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int], begin: int, n: int, part: float = 1.0) -> None:
    """Rows have no scales of their own, but for levels that are multiples of what they mean, and for NVFP4's of a tensor; rows that are not
    there have zeros."""
    at = spec.sections(shape)
    rows = blob[at.row_scales : at.row_scales + row_nbytes(spec.scheme) * at.rows].view(np.float32 if spec.scheme == "nvfp" else np.uint16)
    if spec.scheme == "nvfp":
        rows[begin : begin + n] = np.float32(part) / 2
    else:
        rows[begin : begin + n] = HALF if spec.scheme == "mxfp" else np.float32(part).view(np.uint32) >> np.uint32(16)
    if begin + n == shape[0]:
        rows[begin + n :] = 0
    if spec.scheme in ("mxfp", "nvfp"):
        put_tables(blob, spec, shape, MXFP)
