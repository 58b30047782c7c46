"""What Numba lacks and the kernels need, as LLVM instructions: typed pointers, atomics, 16-bit floats, a register-blocked tile product.

Nothing here is tied to one instruction set. Vectors are written at a width chosen from the target's features and LLVM
maps them to AVX-512, AVX2, NEON or plain code. Half precision is the exception: its conversion instruction needs F16C (or ARM),
and without it LLVM would call a library routine that is not there, so the portable variant shifts integers instead.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..compile import cpu_features

I8, I16, I32, I64, F16, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
HAS_HALF = bool(cpu_features() & {"f16c", "fullfp16", "neon", "fp-armv8"})
VECTOR = 16 if "avx512f" in cpu_features() else 8 if "avx2" in cpu_features() else 4
# Rows of the register tile: 12 x 2 accumulators of 32 registers on AVX-512, 6 x 2 of 16 elsewhere.
TILE_ROWS = 12 if VECTOR == 16 else 6
TILE_COLUMNS = 2 * VECTOR


def _pointer(element: types.Type):
    @intrinsic
    def at(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return at


f32_at, u16_at, i64_at, f64_at = _pointer(types.float32), _pointer(types.uint16), _pointer(types.int64), _pointer(types.float64)


@intrinsic
def bits_to_f32(typingctx, bits):
    """uint32 -> the float32 with these bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


@intrinsic
def f32_to_bits(typingctx, value):
    """float32 -> its bits as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], I32)

    return types.uint32(types.float32), codegen


@intrinsic
def half_to_f32(typingctx, bits):
    """uint16 bits of a half -> float32, by the conversion instruction. Only where `HAS_HALF`."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], F16), F32)

    return types.float32(types.uint16), codegen


@intrinsic
def f32_to_half(typingctx, value):
    """float32 -> bits of the nearest half (ties to even), by the conversion instruction. Only where `HAS_HALF`."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], F16), I16)

    return types.uint16(types.float32), codegen


def _address(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return builder.inttoptr(value, I64.as_pointer())


@intrinsic
def load(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load_atomic(_address(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx, address, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _address(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fetch_add(typingctx, address, value):
    """Atomically add; returns the value before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _address(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def compare_swap(typingctx, address, expected, wanted):
    """Atomically replace `expected` by `wanted`; 1 if that happened."""

    def codegen(context, builder, signature, args):
        pair = builder.cmpxchg(_address(builder, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(pair, 1), I64)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def relax(typingctx):
    """Tell the core that this is a spin loop."""

    def codegen(context, builder, signature, args):
        triple = context.codegen().magic_tuple()[0]
        if triple.startswith(("x86_64", "i686")):
            name, parameters, values = "llvm.x86.sse2.pause", [], []
        elif triple.startswith(("aarch64", "arm64")):
            name, parameters, values = "llvm.aarch64.hint", [I32], [I32(1)]
        else:
            return context.get_dummy_value()
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), parameters), name), values)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_kernel(typingctx, function, args, worker, counter):
    """Call `void(int64, int64, int64)` at an address."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at an address, to be read once."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I8.as_pointer())
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32]), "llvm.prefetch.p0")
        builder.call(function, [pointer, I32(0), I32(0), I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def tile_product(typingctx, a, a_stride, b, b_stride, c, c_stride, depth, accumulate):
    """C[TILE_ROWS, TILE_COLUMNS] (+)= A[TILE_ROWS, depth] @ B[depth, TILE_COLUMNS], all float32.

    Addresses and strides in bytes; `accumulate` 0 starts from zero, 1 from what C holds. Each element is one chain of fused
    multiply-adds in the order of `depth`, so cutting the depth or the columns differently gives the same bits.
    """
    vector = ir.VectorType(F32, VECTOR)
    width = VECTOR * 4

    def codegen(context, builder, signature, args):
        a, a_stride, b, b_stride, c, c_stride, depth, accumulate = args
        load = lambda address: builder.load(builder.inttoptr(address, vector.as_pointer()), align=4)  # noqa: E731
        at = lambda base, offset: builder.add(base, I64(offset)) if offset else base  # noqa: E731
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{VECTOR}f32")
        rows_a = [builder.add(a, builder.mul(I64(r), a_stride)) for r in range(TILE_ROWS)]
        rows_c = [builder.add(c, builder.mul(I64(r), c_stride)) for r in range(TILE_ROWS)]
        warm = builder.icmp_signed("!=", accumulate, I64(0))
        zero = ir.Constant(vector, [0.0] * VECTOR)
        start = builder.basic_block
        with builder.if_then(warm):
            loaded = [load(at(row, half * width)) for row in rows_c for half in (0, 1)]
            loading = builder.basic_block
        entry = builder.basic_block
        first = []
        for value in loaded:
            phi = builder.phi(vector)
            phi.add_incoming(zero, start)
            phi.add_incoming(value, loading)
            first.append(phi)
        loop, done = builder.append_basic_block("depth"), builder.append_basic_block("tile.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(I64)
        step.add_incoming(I64(0), entry)
        sums = []
        for value in first:
            phi = builder.phi(vector)
            phi.add_incoming(value, entry)
            sums.append(phi)
        row_b = builder.add(b, builder.mul(step, b_stride))
        halves = [load(row_b), load(at(row_b, width))]
        offset = builder.mul(step, I64(4))
        updated = []
        for r in range(TILE_ROWS):
            scalar = builder.load(builder.inttoptr(builder.add(rows_a[r], offset), F32.as_pointer()), align=4)
            broad = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
            broad = builder.shuffle_vector(broad, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, VECTOR), [0] * VECTOR))
            for half in (0, 1):
                updated.append(builder.call(fma, [broad, halves[half], sums[2 * r + half]]))
        following = builder.add(step, I64(1))
        step.add_incoming(following, loop)
        for phi, value in zip(sums, updated):
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
        builder.position_at_end(done)
        for index, value in enumerate(updated):
            row, half = divmod(index, 2)
            builder.store(value, builder.inttoptr(at(rows_c[row], half * width), vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen
