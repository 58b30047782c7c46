"""Lanes and vectors of numbers merged into fewer, as LLVM instructions: the largest, the sum."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from .intrinsics import I32


def maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of two floats in every lane; `b` where one is no number."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def reduce_lanes(builder: ir.IRBuilder, vectors: list[ir.Value], merge: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """The lanes of each vector merged into one: a lane for each. Parts of two vectors lie side by side from the first step on, so that all
    together cost little more than one. Vectors: a power of two, no more than lanes."""
    size = vectors[0].type.count
    while size > 1:
        count = vectors[0].type.count
        parts = [[begin + size // 2 * part + i for begin in range(0, count, size) for i in range(size // 2)] for part in (0, 1)]
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        if len(vectors) > 1:
            parts = [part + [count + place for place in part] for part in parts]
        places = [ir.Constant(ir.VectorType(I32, len(part)), part) for part in parts]
        vectors = [merge(*(builder.shuffle_vector(a, b, each) for each in places)) for a, b in pairs]
        size //= 2
    return vectors[0]


def reduce_vectors(vectors: list[ir.Value], merge: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Vectors, a power of two, merged lane by lane: neighbours first."""
    while len(vectors) > 1:
        vectors = [merge(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]
