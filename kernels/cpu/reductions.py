"""Reductions of vectors and lanes, as LLVM instructions: maximum, sum."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from .intrinsics import I32


def maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of two floats in every lane; `b` if one is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def reduce_lanes(builder: ir.IRBuilder, vectors: list[ir.Value], merge: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Reduce the lanes of each vector to one: a result lane per vector. Two vectors are packed into one from the first step on, so that
    reducing all costs little more than one. Vectors: a power of two, at most the number of lanes."""
    size = vectors[0].type.count
    while size > 1:
        count = vectors[0].type.count
        parts = [[begin + size // 2 * part + i for begin in range(0, count, size) for i in range(size // 2)] for part in (0, 1)]
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        if len(vectors) > 1:
            parts = [part + [count + lane for lane in part] for part in parts]
        index_vectors = [ir.Constant(ir.VectorType(I32, len(part)), part) for part in parts]
        vectors = [merge(*(builder.shuffle_vector(a, b, indices) for indices in index_vectors)) for a, b in pairs]
        size //= 2
    return vectors[0]


def reduce_vectors(vectors: list[ir.Value], merge: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Reduce vectors (a power of two) lane by lane: neighbors first."""
    while len(vectors) > 1:
        vectors = [merge(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]
