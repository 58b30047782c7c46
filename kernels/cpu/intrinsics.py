"""LLVM instructions that Numba lacks: typed pointers, atomics, 16-bit floats.

None of this is specific to an instruction set, except half precision: its conversion needs F16C (or ARM). Without that LLVM would call a
library routine that is not linked, so the portable variant (`arithmetic.py`) shifts integers instead.
"""

from __future__ import annotations

from llvmlite import ir

from ..compile import cpu_features
from ..lazy_numba import cgutils, intrinsic, llvm_intrinsic, types

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


@llvm_intrinsic
def bits_to_f32(builder, bits: types.uint32) -> types.float32:
    """uint32 -> the float32 with these bits."""
    return builder.bitcast(bits, F32)


@llvm_intrinsic
def f32_to_bits(builder, value: types.float32) -> types.uint32:
    """float32 -> its bits as uint32."""
    return builder.bitcast(value, I32)


@llvm_intrinsic
def half_to_f32(builder, bits: types.uint16) -> types.float32:
    """uint16 bits of a half -> float32, by the conversion instruction. Only where `HAS_HALF`."""
    return builder.fpext(builder.bitcast(bits, F16), F32)


@llvm_intrinsic
def f32_to_half(builder, value: types.float32) -> types.uint16:
    """float32 -> bits of the nearest half (ties to even), by the conversion instruction. Only where `HAS_HALF`."""
    return builder.bitcast(builder.fptrunc(value, F16), I16)


def _address(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return builder.inttoptr(value, I64.as_pointer())


@llvm_intrinsic
def load(builder, address) -> types.int64:
    return builder.load_atomic(_address(builder, address), "seq_cst", 8)


@llvm_intrinsic
def store(builder, address, value):
    builder.store_atomic(value, _address(builder, address), "seq_cst", 8)


@llvm_intrinsic
def fetch_add(builder, address, value) -> types.int64:
    """Atomically add; returns the value before."""
    return builder.atomic_rmw("add", _address(builder, address), value, "seq_cst")


@llvm_intrinsic
def compare_swap(builder, address, expected, desired) -> types.int64:
    """Atomically replace `expected` by `desired`; 1 if that happened."""
    pair = builder.cmpxchg(_address(builder, address), expected, desired, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(pair, 1), I64)


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


@llvm_intrinsic
def call_kernel(builder, function, args, worker, counter):
    """Call `void(int64, int64, int64)` at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [args, worker, counter])


@intrinsic
def call(typingctx, function, arguments):
    """Call a void function of numbers (`compile.jit`) at an address; `arguments`: a tuple of its arguments, whose types are the function's.
    Code shared by several kernels, or needed by few models, is compiled separately and called this way."""

    def codegen(context, builder, signature, values):
        numbers = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [number.type for number in numbers])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen
