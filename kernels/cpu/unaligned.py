"""Integers at any address, as files hold them: loads widen to int64, stores take the lowest bits of one."""

from __future__ import annotations

from llvmlite import ir

from ..deferred import intrinsic, types
from . import int8_ir
from .intrinsics import I64


def _load(bits: int):
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            value = int8_ir.load(builder, args[0], ir.IntType(bits))
            return value if bits == 64 else builder.zext(value, I64)

        return types.int64(types.int64), codegen

    return load


def _store(bits: int):
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            int8_ir.store(builder, args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits)), args[0])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store


load8, load16, load32, load64 = (_load(bits) for bits in (8, 16, 32, 64))
store8, store16, store32, store64 = (_store(bits) for bits in (8, 16, 32, 64))
