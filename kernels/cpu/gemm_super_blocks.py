"""Scale factors of super-blocks for products with many columns, and tiles as float32: the float counterpart of `gemm_expand.py`."""

from __future__ import annotations

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from ..tiles import ROWS
from .gemm_expand import QUADS
from .int8_ir import I8, LANES, PIECES, WORDS, constant, load, offset, splat, store, to_floats, widen_bytes
from .intrinsics import F32, I16, I32, I64
from .ir_loop import Loop
from .packed_scales import half_scales, signed_bytes, six_bits


@llvm_intrinsic
def super_factors(builder, record, codes, out, minima):
    """d * s of 16 rows, float32 at `out`, and minus e * m at `minima`. record, codes: of a super-block and of a tile in it (`tiles.py`)."""
    for piece in range(PIECES):
        factor, minimum = (half_scales(builder, offset(builder, record, 2 * ROWS * i), piece) for i in (0, 1))
        scales, codes_of_minima = six_bits(builder, codes, piece)
        store(builder, builder.fmul(factor, to_floats(builder, scales)), offset(builder, out, 4 * LANES * piece), 4)
        minimum = builder.fneg(builder.fmul(minimum, to_floats(builder, codes_of_minima)))
        store(builder, minimum, offset(builder, minima, 4 * LANES * piece), 4)


@llvm_intrinsic
def minima_factors(builder, scales, out, minima):
    """d of 16 rows, float32 at `out`, and m at `minima`. scales: their halves."""
    for piece in range(PIECES):
        for i, address in enumerate((out, minima)):
            value = half_scales(builder, offset(builder, scales, 2 * ROWS * i), piece)
            store(builder, value, offset(builder, address, 4 * LANES * piece), 4)


@llvm_intrinsic
def nibble_factors(builder, record, codes, out, minima, stride):
    """d * s of 16 rows, float32 at `out`, and minus e * m at `minima`; of a tile's other group `stride` bytes further."""
    for piece in range(PIECES):
        factor, minimum = (half_scales(builder, offset(builder, record, 2 * ROWS * i), piece) for i in (0, 1))
        for half in (0, 1):
            both = widen_bytes(builder, offset(builder, codes, ROWS * half + LANES * piece))
            scales, codes_of_minima = builder.and_(both, constant(WORDS, 15)), builder.lshr(both, constant(WORDS, 4))
            further = builder.mul(stride, I64(half))
            at = builder.add(offset(builder, out, 4 * LANES * piece), further)
            store(builder, builder.fmul(factor, to_floats(builder, scales)), at, 4)
            least_of = builder.fneg(builder.fmul(minimum, to_floats(builder, codes_of_minima)))
            store(builder, least_of, builder.add(offset(builder, minima, 4 * LANES * piece), further), 4)


@llvm_intrinsic
def signed_factors(builder, record, codes, out, second):
    """d * s of 16 rows, float32 at `out`, and of a tile's other group at `second`."""
    for piece in range(PIECES):
        factor = half_scales(builder, record, piece)
        for half, address in enumerate((out, second)):
            scales = to_floats(builder, signed_bytes(builder, offset(builder, codes, ROWS * half), piece))
            store(builder, builder.fmul(factor, scales), offset(builder, address, 4 * LANES * piece), 4)


def _floats_of(with_minima: bool, wide_rows: bool = False):
    @llvm_intrinsic
    def run(builder, codes, zeros, factors, rows, out, stride):
        """A tile as float32: row * (factor * (code - zero)), its 16 rows `stride` bytes apart at `out`; with minima row * (factor * code
        - minimum).

        zeros: 16 bytes, or minima float32 [half][16], negative. factors: float32 [half][16]. rows: bfloat16 [16], `wide_rows`
        float32.
        """
        four, floats, bytes_ = ir.VectorType(I32, 4), ir.VectorType(F32, 4), ir.VectorType(I8, 4)
        loop = Loop(builder, I64(ROWS), [out], "rows")
        at = lambda base, item: builder.add(base, builder.mul(loop.index, I64(item)))  # noqa: E731
        if with_minima:
            zero = constant(four, 0)
            minima = [splat(builder, load(builder, offset(builder, at(zeros, 4), 64 * half), F32, 4), floats) for half in (0, 1)]
        else:
            zero = splat(builder, builder.zext(load(builder, at(zeros, 1), I8), I32), four)
        if wide_rows:
            row = load(builder, at(rows, 4), F32, 4)
        else:
            row = builder.bitcast(builder.shl(builder.zext(load(builder, at(rows, 2), I16), I32), I32(16)), F32)
        row = splat(builder, row, floats)
        for quad in range(QUADS):
            factor = splat(builder, load(builder, offset(builder, at(factors, 4), 64 * (quad // 4)), F32, 4), floats)
            raw = builder.zext(load(builder, offset(builder, at(codes, 4), 64 * quad), bytes_), four)
            value = builder.fmul(factor, builder.sitofp(builder.sub(raw, zero), floats))
            value = builder.fmul(row, builder.fadd(value, minima[quad // 4]) if with_minima else value)
            store(builder, value, offset(builder, loop.values[0], 16 * quad), 4)
        loop.end([builder.add(loop.values[0], stride)])

    return run


floats_of, floats_with_minima, floats_under_wide_rows = _floats_of(False), _floats_of(True), _floats_of(False, True)
