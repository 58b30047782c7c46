"""The two float inner loops where most time goes, as LLVM vectors: rows times a vector, and a GEMM register tile.

Vectors have the width of the target's registers (16 floats with AVX-512, 8 with AVX2, else 4), which LLVM maps to instructions. On AVX-512
`dot_rows` compiles to one `vpmovzxwd` from memory, one `vpslld` and one `vfmadd231ps` per 16 bf16 weights (f16: one `vcvtph2ps`), with x
loaded once for all rows; `tile_product` to 24 `vfmadd231ps` on registers for 12 broadcasts and two loads.
"""

from __future__ import annotations

from llvmlite import ir

from ..compile import cpu_features
from ..lazy_numba import inlined, llvm_intrinsic
from .int8_ir import fma, function, load, offset, splat, store
from .intrinsics import F16, F32, HAS_HALF, I16, I32, I64
from .ir_loop import Loop

VECTOR = 16 if "avx512f" in cpu_features() else 8 if "avx2" in cpu_features() else 4
# Rows of the register tile: 12 x 2 accumulators of 32 registers on AVX-512, 6 x 2 of 16 elsewhere.
TILE_ROWS = 12 if VECTOR == 16 else 6
TILE_COLUMNS = 2 * VECTOR
# The attention tile, with pages WIDE_COLUMNS wide: as many sums for 10 loads per step instead of 14.
WIDE_ROWS, WIDE_COLUMNS = (6, 4 * VECTOR) if VECTOR == 16 else (TILE_ROWS, TILE_COLUMNS)
DECODE_TILE_ROWS = 4  # rows of the tile for the few query rows of a decode step
# Rows of a dot product loop: few if x stays in the L1 cache, many if it comes from L2.
FEW_ROWS, MANY_ROWS = 4, 12 if VECTOR == 16 else 4
# Weights of a row taken at once, limited by the registers that accumulators leave.
FEW_STEP, MANY_STEP = 4 * VECTOR, 2 * VECTOR

FLOATS = ir.VectorType(F32, VECTOR)


def widen_bf16(builder: ir.IRBuilder, address: ir.Value, lanes: int = VECTOR) -> ir.Value:
    words = ir.VectorType(I32, lanes)
    bits = builder.zext(load(builder, address, ir.VectorType(I16, lanes), 2), words)
    return builder.bitcast(builder.shl(bits, ir.Constant(words, [16] * lanes)), ir.VectorType(F32, lanes))


def widen_f16(builder: ir.IRBuilder, address: ir.Value, lanes: int = VECTOR) -> ir.Value:
    """Halves as floats; without a conversion instruction as in `arithmetic.widen_half`."""
    words, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
    if HAS_HALF:
        return builder.fpext(load(builder, address, ir.VectorType(F16, lanes), 2), floats)
    splat_constant = lambda value: ir.Constant(words, [value] * lanes)  # noqa: E731
    raw = builder.zext(load(builder, address, ir.VectorType(I16, lanes), 2), words)
    bits = builder.shl(builder.and_(raw, splat_constant(0x7FFF)), splat_constant(13))
    finite = builder.fmul(builder.bitcast(bits, floats), ir.Constant(floats, [2.0**112] * lanes))
    special = builder.icmp_unsigned(">=", bits, splat_constant(0x7C00 << 13))
    magnitude = builder.select(special, builder.or_(bits, splat_constant(0x7F800000)), builder.bitcast(finite, words))
    sign = builder.shl(builder.and_(raw, splat_constant(0x8000)), splat_constant(16))
    return builder.bitcast(builder.or_(magnitude, sign), floats)


def plain_f32(builder: ir.IRBuilder, address: ir.Value, lanes: int = VECTOR) -> ir.Value:
    return load(builder, address, ir.VectorType(F32, lanes), 4)


def _dot_rows(widen, item: int, count: int, width: int):
    """A dot loop for `count` rows of a stored type of `item` bytes, `width` weights of each at a time."""
    parts = width // VECTOR

    @llvm_intrinsic
    def dot_rows(builder, table, x, steps, out):
        """The rows whose addresses are at `table` times float32 x, over `steps` >= 1 steps of `width` weights; the sums to `out`.

        A row's sum has the same bits whichever rows are processed with it.
        """
        rows = [load(builder, builder.add(table, I64(8 * row)), I64, 8) for row in range(count)]
        loop = Loop(builder, steps, [ir.Constant(FLOATS, [0.0] * VECTOR)] * (parts * count), "dot")
        at_x, at_w = builder.mul(loop.index, I64(4 * width)), builder.mul(loop.index, I64(item * width))
        pieces = [load(builder, builder.add(x, builder.add(at_x, I64(4 * VECTOR * part))), FLOATS, 4) for part in range(parts)]
        updated = []
        for index in range(parts * count):
            row, part = divmod(index, parts)
            address = builder.add(rows[row], builder.add(at_w, I64(item * VECTOR * part)))
            updated.append(fma(builder, widen(builder, address), pieces[part], loop.values[index]))
        loop.end(updated)
        reduce = function(builder, F32, [F32, FLOATS], f"llvm.vector.reduce.fadd.v{VECTOR}f32")
        for row in range(count):
            total = updated[parts * row]
            for part in range(1, parts):
                total = builder.fadd(total, updated[parts * row + part])
            total = builder.call(reduce, [F32(0.0), total], fastmath=("reassoc",))
            builder.store(total, builder.inttoptr(builder.add(out, I64(4 * row)), F32.as_pointer()))

    return dot_rows


_STORED = ((widen_bf16, 2), (widen_f16, 2), (plain_f32, 4))
few_rows_bf16, few_rows_f16, few_rows_f32 = (_dot_rows(*kind, FEW_ROWS, FEW_STEP) for kind in _STORED)
many_rows_bf16, many_rows_f16, many_rows_f32 = (_dot_rows(*kind, MANY_ROWS, MANY_STEP) for kind in _STORED)


def _tile_product(rows: int, vectors: int = 2):
    """A register tile of `rows` x (`vectors` * VECTOR)."""

    @llvm_intrinsic
    def tile_product(builder, a, a_stride, b, b_stride, c, c_stride, depth, accumulate):
        """C[R, N] (+)= A[R, depth] @ B[depth, N], all float32; R and N are the tile's rows and columns (TILE_COLUMNS, WIDE_COLUMNS).

        Addresses and strides in bytes; `accumulate` 0 starts from zero, 1 from what C holds. Each element is one chain of fused
        multiply-adds in the order of `depth`, so cutting the depth or the columns differently gives the same bits.
        """
        width = VECTOR * 4
        rows_a = [builder.add(a, builder.mul(I64(r), a_stride)) for r in range(rows)]
        rows_c = [builder.add(c, builder.mul(I64(r), c_stride)) for r in range(rows)]
        warm = builder.icmp_signed("!=", accumulate, I64(0))
        zero = ir.Constant(FLOATS, [0.0] * VECTOR)
        start = builder.basic_block
        with builder.if_then(warm):
            loaded = [load(builder, offset(builder, row, part * width), FLOATS, 4) for row in rows_c for part in range(vectors)]
            loading = builder.basic_block
        first = []
        for value in loaded:
            phi = builder.phi(FLOATS)
            phi.add_incoming(zero, start)
            phi.add_incoming(value, loading)
            first.append(phi)
        loop = Loop(builder, depth, first, "depth")
        row_b = builder.add(b, builder.mul(loop.index, b_stride))
        parts = [load(builder, offset(builder, row_b, part * width), FLOATS, 4) for part in range(vectors)]
        offset_bytes = builder.mul(loop.index, I64(4))
        updated = []
        for r in range(rows):
            multiplier = splat(builder, load(builder, builder.add(rows_a[r], offset_bytes), F32, 4), FLOATS)
            for part in range(vectors):
                updated.append(fma(builder, multiplier, parts[part], loop.values[vectors * r + part]))
        for index, value in enumerate(loop.end(updated)):
            row, part = divmod(index, vectors)
            store(builder, value, offset(builder, rows_c[row], part * width), 4)

    return tile_product


tile_product, low_tile_product = _tile_product(TILE_ROWS), _tile_product(DECODE_TILE_ROWS)
wide_tile_product = _tile_product(WIDE_ROWS, WIDE_COLUMNS // VECTOR)


@inlined()
def product(a, a_stride, b, b_stride, c, c_stride, rows, columns, depth):
    """C[rows, columns] = A[rows, depth] @ B[depth, columns] by tiles; strides in bytes, `rows` a multiple of TILE_ROWS, `columns` of
    TILE_COLUMNS."""
    wide = columns // WIDE_COLUMNS * WIDE_COLUMNS
    for j in range(0, wide, WIDE_COLUMNS):
        for r in range(0, rows, WIDE_ROWS):
            wide_tile_product(a + r * a_stride, a_stride, b + 4 * j, b_stride, c + r * c_stride + 4 * j, c_stride, depth, 0)
    for j in range(wide, columns, TILE_COLUMNS):
        for r in range(0, rows, TILE_ROWS):
            tile_product(a + r * a_stride, a_stride, b + 4 * j, b_stride, c + r * c_stride + 4 * j, c_stride, depth, 0)
