"""Integer loads and stores at any alignment: loads widen to int64, stores take the lowest bits of one."""

from __future__ import annotations

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic, types
from . import int8_ir
from .intrinsics import I64


def _load(bits: int):
    @llvm_intrinsic
    def load(builder, address) -> types.int64:
        value = int8_ir.load(builder, address, ir.IntType(bits))
        return value if bits == 64 else builder.zext(value, I64)

    return load


def _store(bits: int):
    @llvm_intrinsic
    def store(builder, address, value):
        int8_ir.store(builder, value if bits == 64 else builder.trunc(value, ir.IntType(bits)), address)

    return store


load8, load16, load32, load64 = (_load(bits) for bits in (8, 16, 32, 64))
store8, store16, store32, store64 = (_store(bits) for bits in (8, 16, 32, 64))
