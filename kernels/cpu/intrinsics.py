"""What Numba lacks and the kernels need, as LLVM instructions: typed pointers, atomics, 16-bit floats.

Nothing here is tied to one instruction set, but half precision: its conversion instruction needs F16C (or ARM), and without it LLVM
would call a library routine that is not there, so the portable variant (`arithmetic.py`) shifts integers instead.
"""

from __future__ import annotations

from llvmlite import ir

from ..compile import cpu_features
from ..deferred import cgutils, intrinsic, types

I16, I32, I64, F16, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
HAS_HALF = bool(cpu_features() & {"f16c", "fullfp16", "neon", "fp-armv8"})


def _pointer(element: str):
    """An address as a pointer to numbers of Numba's type `element`."""

    @intrinsic
    def at(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(getattr(types, element))(types.int64), codegen

    return at


f32_at, u16_at, i64_at, f64_at = _pointer("float32"), _pointer("uint16"), _pointer("int64"), _pointer("float64")
i8_at, u8_at, i32_at, u32_at = _pointer("int8"), _pointer("uint8"), _pointer("int32"), _pointer("uint32")
i16_at = _pointer("int16")


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
def call(typingctx, function, given):
    """Call a function of numbers that returns none (`compile.jit`) at an address; `given`: a tuple of them, whose types are the function's.
    What several kernels need, or few models, is compiled by itself and called so."""

    def codegen(context, builder, signature, values):
        numbers = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in numbers])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.int64, given), codegen
