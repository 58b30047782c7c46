"""Expands tiles of a low-bit weight for the stripes of the int8 product, as LLVM vectors.

`codes_of` writes a tile's codes as bytes, quad after quad; the others start from there. Expansions that also apply scales are in
`gemm_scaled.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from ..tiles import LEVEL_SHIFT, LEVELS_NBYTES, ROWS, TABLE_LEVEL_SHIFT
from .fp8_vectors import small_scales
from .gemm_tiles import FULL_FORM, HALVES, NARROW_FORM, PAIRS, SIGNED_BYTES, STEP, Form
from .int8_ir import (
    BYTES,
    FLOATS,
    I8,
    INSTRUCTION_SET,
    LANES,
    PIECES,
    WIDTH,
    WORDS,
    constant,
    function,
    load,
    look_up,
    offset,
    splat,
    store,
    unpack_tile,
    widen_bytes,
)
from .intrinsics import I16, I32, I64
from .ir_loop import Loop
from .packed_scales import byte_scales, exponent_scales, half_scales

CODE_OFFSET = 128 if SIGNED_BYTES else 0  # subtracted from 8-bit codes
CODEBOOK, LINEAR, BLOCKS, EXPONENTS, SMALL = "codebook", "linear", "blocks", "exponents", "small"
QUADS = 8  # quads of a tile


def codes_of(bits: int):
    @llvm_intrinsic
    def run(builder, source, out):
        """A tile's codes to 512 bytes at `out`."""
        for piece in range(PIECES):
            for j, quad in enumerate(unpack_tile(builder, source, bits, piece)):
                store(builder, quad, offset(builder, out, 64 * j + WIDTH * piece))

    return run


def row_factors(builder: ir.IRBuilder, way: str, address: ir.Value) -> list[ir.Value]:
    """The factors of 16 rows, per piece, from 8-bit scale codes, half-precision scales, exponents or fp8."""
    load_scales = {BLOCKS: half_scales, EXPONENTS: exponent_scales, SMALL: small_scales}.get(way, byte_scales)
    return [load_scales(builder, address, piece) for piece in range(PIECES)]


def table_of(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """16 bytes at an address, for `look_up`."""
    lane = ir.VectorType(I8, 16)
    entries = load(builder, address, lane)
    if INSTRUCTION_SET == "portable":
        return [splat(builder, builder.extract_element(entries, I32(i)), BYTES) for i in range(16)]
    return [builder.shuffle_vector(entries, entries, ir.Constant(ir.VectorType(I32, WIDTH), [i % 16 for i in range(WIDTH)]))]


def steps_table(builder: ir.IRBuilder, tables: ir.Value) -> list[ir.Value]:
    return table_of(builder, offset(builder, tables, LEVELS_NBYTES))


def steps_of(builder: ir.IRBuilder, table: list[ir.Value], address: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
    """The steps of 16 rows as integers, per piece, for both groups of a codebook tile."""
    lane = ir.VectorType(I8, 16)
    raw, vectors = load(builder, address, lane), []
    for codes in (builder.and_(raw, constant(lane, 15)), builder.lshr(raw, constant(lane, 4))):
        codes = builder.shuffle_vector(codes, codes, ir.Constant(ir.VectorType(I32, WIDTH), [i % 16 for i in range(WIDTH)]))
        steps, pieces = look_up(builder, table, codes, 4), []
        for piece in range(PIECES):
            piece_steps = builder.shuffle_vector(steps, steps,
                                                 ir.Constant(ir.VectorType(I32, LANES), [LANES * piece + i for i in range(LANES)]))
            pieces.append(builder.zext(piece_steps, WORDS))
        vectors.append(pieces)
    return vectors[0], vectors[1]


def step_factors(builder: ir.IRBuilder, table: list[ir.Value], address: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
    """The same as factors."""
    first, second = ([builder.uitofp(step, FLOATS) for step in steps] for steps in steps_of(builder, table, address))
    return first, second


class Pair(NamedTuple):
    """WIDTH 16-bit numbers in two vectors, split within every 16 bytes: of four rows the first two are in `low`, the others in `high`.

    This is what byte interleaving produces and packing expects, so nothing crosses 16-byte lanes.
    """

    low: ir.Value
    high: ir.Value


def each_of(operate: Callable[..., ir.Value], *pairs: Pair) -> Pair:
    return Pair(operate(*(pair.low for pair in pairs)), operate(*(pair.high for pair in pairs)))


def interleave(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> Pair:
    """Alternate elements of two vectors within every 16 bytes, as HALVES."""
    per, count, vectors = 16 * first.type.count // WIDTH, first.type.count, []
    for skip in (0, per // 2):
        order = [lane + skip + i + source * count for lane in range(0, count, per) for i in range(per // 2) for source in (0, 1)]
        vectors.append(builder.bitcast(builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, count), order)), HALVES))
    return Pair(*vectors)


def twice(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    """16-bit numbers, one per word -> two copies per word."""
    return builder.or_(words, builder.shl(words, constant(WORDS, 16)))


def four_times(builder: ir.IRBuilder, words: ir.Value) -> Pair:
    """16-bit numbers, one word per row -> four copies per row."""
    both = twice(builder, words)
    return interleave(builder, both, both)


def less(builder: ir.IRBuilder, codes: ir.Value, zeros: Pair) -> Pair:
    """Codes as 16-bit numbers, minus `zeros`."""
    return each_of(builder.sub, interleave(builder, codes, constant(BYTES, 0)), zeros)


def widened(builder: ir.IRBuilder, levels: ir.Value, down: ir.Value) -> Pair:
    """Levels as 16-bit numbers, shifted up by 8 - `down` bits."""
    return each_of(lambda value: builder.ashr(value, down), interleave(builder, constant(BYTES, 0), levels))


def put(builder: ir.IRBuilder, out: ir.Value, quad: int, piece: int, values: Pair, shift: int, step: int = STEP) -> None:
    """Store a quad's values for a piece's rows into the steps at `out`; with byte weights, offset by `shift` and `step` apart."""
    out = offset(builder, out, WIDTH * piece)
    if SIGNED_BYTES:
        lanes = ir.Constant(ir.VectorType(I32, WIDTH), list(range(WIDTH)))
        both = builder.add(builder.shuffle_vector(*values, lanes), constant(ir.VectorType(I16, WIDTH), shift))
        store(builder, builder.trunc(both, BYTES), offset(builder, out, STEP * quad))
        return
    if not PAIRS:
        name = ("llvm.x86.avx512.pack{}swb.512" if WIDTH == 64 else "llvm.x86.avx2.pack{}swb").format("u" if shift else "s")
        shifted = each_of(lambda value: builder.add(value, constant(HALVES, shift)), values) if shift else values
        store(builder, builder.call(function(builder, BYTES, [HALVES] * 2, name), [*shifted]), offset(builder, out, step * quad))
        return
    low, high = (builder.bitcast(value, WORDS) for value in values)
    for step in (0, 1):
        order = [lane + step + i + source * LANES for lane in range(0, LANES, 4) for source in (0, 1) for i in (0, 2)]
        chosen = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, LANES), order))
        store(builder, chosen, offset(builder, out, STEP * (2 * quad + step)))


def _plain(way: str, form: Form = FULL_FORM, lower: int = 0):
    @llvm_intrinsic
    def run(builder, codes, extra, out):
        """Store a tile unscaled into a stripe at `out`: v as 16-bit numbers or, in byte forms, as bytes (levels + LEVEL_SHIFT; codes minus
        `lower`)."""
        table = table_of(builder, extra) if way == CODEBOOK else []
        for piece in range(PIECES):
            if way != CODEBOOK:
                zeros = four_times(builder, widen_bytes(builder, offset(builder, extra, LANES * piece)))
            for quad in range(QUADS):
                raw = load(builder, offset(builder, codes, 64 * quad + WIDTH * piece), BYTES)
                if way == CODEBOOK:
                    levels = widened(builder, look_up(builder, table, raw, 4), constant(HALVES, 8))
                    put(builder, out, quad, piece, levels, LEVEL_SHIFT)
                elif not form.byte_weights:
                    put(builder, out, quad, piece, less(builder, raw, zeros), LEVEL_SHIFT)
                else:
                    raw = builder.xor(raw, constant(BYTES, lower)) if lower else raw
                    store(builder, raw, offset(builder, out, STEP * quad + WIDTH * piece))

    return run


def _factors(way: str):
    @llvm_intrinsic
    def run(builder, scales, tables, out, second):
        """The factors of 16 rows, float32 at `out`; of a codebook's other group at `second`."""
        if way == CODEBOOK:
            groups = step_factors(builder, steps_table(builder, tables), scales)
        else:
            groups = (row_factors(builder, way, scales),)
        for pieces, address in zip(groups, (out, second)):
            for piece, value in enumerate(pieces):
                store(builder, value, offset(builder, address, 4 * LANES * piece), 4)

    return run


def _largest(way: str):
    @llvm_intrinsic
    def run(builder, scales, extra, stride, top, count, out):
        """The largest |f * v| that each of 16 rows can hold, float32 at `out`.

        Codebook: the largest step of `count` tiles; `extra` are the tables, and the caller multiplies by the largest level. Otherwise the
        largest factor * max(zero, top - zero) of `count` groups, with zeros at `extra`, `stride` bytes apart per group.
        """
        table = steps_table(builder, extra) if way == CODEBOOK else []
        top = splat(builder, builder.trunc(top, I32), WORDS)
        loop = Loop(builder, count, [scales, extra, *[constant(FLOATS, 0.0)] * PIECES], "groups")
        scales, zeros, *maxima = loop.values
        larger = lambda a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a)  # noqa: E731
        if way == CODEBOOK:
            first, second = step_factors(builder, table, scales)
            maxima = [larger(larger(old, a), b) for old, a, b in zip(maxima, first, second)]
        else:
            for piece, factor in enumerate(row_factors(builder, way, scales)):
                if way == BLOCKS:  # half-precision scales may be negative
                    factor = builder.call(function(builder, FLOATS, [FLOATS], f"llvm.fabs.v{LANES}f32"), [factor])
                zero = widen_bytes(builder, offset(builder, zeros, LANES * piece))
                span = builder.sub(top, zero)
                bound = builder.select(builder.icmp_signed(">", zero, span), zero, span)
                maxima[piece] = larger(maxima[piece], builder.fmul(factor, builder.sitofp(bound, FLOATS)))
        _, _, *maxima = loop.end([builder.add(scales, I64(2 * ROWS if way == BLOCKS else ROWS)), builder.add(zeros, stride), *maxima])
        for piece, value in enumerate(maxima):
            store(builder, value, offset(builder, out, 4 * LANES * piece), 4)

    return run


def _levels_of(shift: int):
    @llvm_intrinsic
    def run(builder, codes, tables):
        """Codes of a tile at `codes` -> levels + `shift`, in place."""
        table = [builder.add(entry, constant(BYTES, shift)) for entry in table_of(builder, tables)]
        for start in range(0, 64 * QUADS, WIDTH):
            at = offset(builder, codes, start)
            store(builder, look_up(builder, table, load(builder, at, BYTES), 4), at)

    return run


levels_of, wide_levels_of = _levels_of(LEVEL_SHIFT), _levels_of(TABLE_LEVEL_SHIFT)
plain_codebook, plain_linear, narrow_plain = _plain(CODEBOOK), _plain(LINEAR), _plain(LINEAR, NARROW_FORM)
lowered_plain = _plain(LINEAR, lower=CODE_OFFSET) if CODE_OFFSET else plain_linear  # 8-bit codes
codebook_factors, linear_factors, block_factors = (_factors(way) for way in (CODEBOOK, LINEAR, BLOCKS))
exponent_factors, small_factors = _factors(EXPONENTS), _factors(SMALL)
largest_step, largest_linear, largest_block = _largest(CODEBOOK), _largest(LINEAR), _largest(BLOCKS)
