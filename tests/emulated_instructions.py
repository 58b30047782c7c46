"""Runs kernels of an instruction set that the machine lacks, ARM's included, by replacing its intrinsics with AVX2 code.

`pretend` must run before anything imports the kernels, so it belongs at the start of a child process. Vectors keep their width; LLVM splits
them for the machine. This cannot show that LLVM selects the real instructions: other tests read the assembly for that.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

I8, I16, I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"}
FEATURES = {"avx512": AVX512, "avx512vbmi": AVX512 | {"avx512vbmi"}, "avx2vnni": {"avxvnni"}}
ARM = {"neondot": frozenset({"neon", "dotprod"}), "neon": frozenset({"neon"})}  # and nothing of what this machine has


def pretend(name: str) -> None:
    """Make kernels imported from now on use the instruction set `name`."""
    from effllm.kernels import compile as compiling

    features = ARM[name] if name in ARM else frozenset(compiling.cpu_features() | FEATURES[name])
    compiling.cpu_features = lambda: features  # the cache folder is named after it too
    from effllm.kernels.cpu import int8_ir

    real = int8_ir.function

    def function(builder: ir.IRBuilder, result: ir.Type, arguments: list[ir.Type], llvm_name: str) -> ir.Function:
        short = llvm_name.removeprefix("llvm.x86.avx512.").removeprefix("llvm.aarch64.neon.")
        if short == llvm_name:
            return real(builder, result, arguments, llvm_name)
        return _defined(builder.module, f"emulated.{short}", result, arguments, EMULATED[short])

    int8_ir.function = function
    assert name == int8_ir.INSTRUCTION_SET + "vbmi" * int8_ir.SIX_BITS


def _defined(module: ir.Module, name: str, result: ir.Type, arguments: list[ir.Type], body: Callable) -> ir.Function:
    if name in module.globals:
        return module.globals[name]
    emulated = ir.Function(module, ir.FunctionType(result, arguments), name)
    emulated.linkage = "internal"
    builder = ir.IRBuilder(emulated.append_basic_block("entry"))
    builder.ret(body(builder, *emulated.args))
    return emulated


def _native(builder: ir.IRBuilder, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx2.{name}"), values)


def _picked(builder: ir.IRBuilder, vector: ir.Value, indices: list[int]) -> ir.Value:
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, len(indices)), indices))


def _halved(name: str, element: ir.Type, count: int) -> Callable:
    """An instruction that works within 16 bytes, as its 256-bit form on both halves; `count` results per half."""

    def body(builder: ir.IRBuilder, *values: ir.Value) -> ir.Value:
        halves = []
        for half in (0, 1):
            half_vectors = [_picked(builder, value, [half * value.type.count // 2 + i for i in range(value.type.count // 2)])
                            for value in values]
            halves.append(_native(builder, name, ir.VectorType(element, count), *half_vectors))
        return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, 2 * count), list(range(2 * count))))

    return body


def _dot_product(builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
    """vpdpbusd: to each 32-bit sum, the products of four unsigned with four signed bytes."""
    count = 4 * sums.type.count
    wide, octets = ir.VectorType(I32, count), ir.VectorType(I8, count)
    products = builder.mul(builder.zext(builder.bitcast(weights, octets), wide), builder.sext(builder.bitcast(x, octets), wide))
    for i in range(4):
        sums = builder.add(sums, _picked(builder, products, list(range(i, count, 4))))
    return sums


def _permuted(builder: ir.IRBuilder, table: ir.Value, indices: ir.Value) -> ir.Value:
    """vpermd over 16 words, from the 8-word form: bit 3 of an index selects the half of the table."""
    words, results = ir.VectorType(I32, 8), []
    low, high = (_picked(builder, table, list(range(8 * half, 8 * half + 8))) for half in (0, 1))
    for half in (0, 1):
        half_indices = _picked(builder, indices, list(range(8 * half, 8 * half + 8)))
        upper = builder.icmp_unsigned("!=", builder.and_(half_indices, ir.Constant(words, [8] * 8)), ir.Constant(words, [0] * 8))
        results.append(builder.select(upper, _native(builder, "permd", words, high, half_indices),
                                      _native(builder, "permd", words, low, half_indices)))
    return builder.shuffle_vector(*results, ir.Constant(ir.VectorType(I32, 16), list(range(16))))


def _pairs(builder: ir.IRBuilder, sums: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """vpdpwssd: to each 32-bit sum, the products of two pairs of signed 16-bit numbers."""
    count = 2 * sums.type.count
    wide, words = ir.VectorType(I32, count), ir.VectorType(I16, count)
    products = builder.mul(*(builder.sext(builder.bitcast(vector, words), wide) for vector in (a, b)))
    for i in range(2):
        sums = builder.add(sums, _picked(builder, products, list(range(i, count, 2))))
    return sums


def _permuted_floats(builder: ir.IRBuilder, table: ir.Value, indices: ir.Value) -> ir.Value:
    """vpermps over 16 floats, via `_permuted`."""
    words = ir.VectorType(I32, 16)
    return builder.bitcast(_permuted(builder, builder.bitcast(table, words), indices), table.type)


def _permuted_bytes(builder: ir.IRBuilder, table: ir.Value, indices: ir.Value) -> ir.Value:
    """vpermb over 64 bytes: the low six bits of an index count."""
    result = ir.Constant(table.type, ir.Undefined)
    for i in range(64):
        index = builder.and_(builder.zext(builder.extract_element(indices, I32(i)), I32), I32(63))
        result = builder.insert_element(result, builder.extract_element(table, index), I32(i))
    return result


def _chosen(builder: ir.IRBuilder, one: ir.Value, other: ir.Value, mask: ir.Value, truth: ir.Value) -> ir.Value:
    """vpternlogd with the truth table 0xE4, the only one the kernels use: bits of `one` where the mask is set, else of `other`."""
    return builder.or_(builder.and_(one, mask), builder.and_(other, builder.not_(mask)))


def _table(builder: ir.IRBuilder, table: ir.Value, indices: ir.Value) -> ir.Value:
    """tbl: 16-byte tables, zero for indices beyond them."""
    kind = ir.FunctionType(table.type, [table.type] * 2)
    result = builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.ssse3.pshuf.b.128"), [table, indices])
    inside = builder.icmp_unsigned("<", indices, ir.Constant(indices.type, [16] * 16))
    return builder.select(inside, result, ir.Constant(table.type, [0] * 16))


def _signed_dots(builder: ir.IRBuilder, sums: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """sdot: to each 32-bit sum, the products of four signed bytes."""
    wide = ir.VectorType(I32, 16)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    for i in range(4):
        sums = builder.add(sums, _picked(builder, products, list(range(i, 16, 4))))
    return sums


def _neighbours(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """addp: sums of adjacent elements, those of `a` before those of `b`."""
    count = 2 * a.type.count
    return builder.add(*(builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, count // 2), list(range(i, count, 2))))
                         for i in (0, 1)))


def _long_neighbours(builder: ir.IRBuilder, a: ir.Value) -> ir.Value:
    """saddlp: sums of adjacent elements at twice the width."""
    wide = builder.sext(a, ir.VectorType(I32, 8))
    return builder.add(*(_picked(builder, wide, list(range(i, 8, 2))) for i in (0, 1)))


def _doubled_high(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """sqrdmulh, except for two times -2**15."""
    wide = ir.VectorType(I32, 8)
    product = builder.add(builder.mul(builder.sext(a, wide), builder.sext(b, wide)), ir.Constant(wide, [1 << 14] * 8))
    return builder.trunc(builder.ashr(product, ir.Constant(wide, [15] * 8)), a.type)


EMULATED = {"tbl1.v16i8": _table, "sdot.v4i32.v16i8": _signed_dots, "addp.v8i16": _neighbours, "addp.v4i32": _neighbours,
            "saddlp.v4i32.v8i16": _long_neighbours, "sqrdmulh.v8i16": _doubled_high,
            "permvar.qi.512": _permuted_bytes, "pternlog.d.512": _chosen,
            "vpdpbusd.512": _dot_product, "vpdpbusd.256": _dot_product, "vpdpwssd.512": _pairs, "vpdpwssd.256": _pairs,
            "permvar.si.512": _permuted, "permvar.sf.512": _permuted_floats, "pshuf.b.512": _halved("pshuf.b", I8, 32),
            "pmul.hr.sw.512": _halved("pmul.hr.sw", I16, 16),
            "pmulhu.w.512": _halved("pmulhu.w", I16, 16), "packuswb.512": _halved("packuswb", I8, 32),
            "pmaddubs.w.512": _halved("pmadd.ub.sw", I16, 16), "pmaddw.d.512": _halved("pmadd.wd", I32, 8)}
