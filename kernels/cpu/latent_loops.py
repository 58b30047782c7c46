"""Kernels of latent attention: per-head products before and after attention (absorbed projections, `latent_shape.py`).

Queries: rows of a strip of a head's matrix are widened once and multiplied by all tokens of a pass; every element is one chain of fused
multiply-adds in input order, whatever the tile size; for one token rows are used in their stored type. Values: for a few tokens rows are
multiplied in their stored type, for more a strip is widened and transposed first. Apart from that choice, results depend on neither threads
nor other tokens.
"""

from __future__ import annotations

from numpy import float32, uint32

from ..compile import kernel
from ..layout import BF16, F32
from ..lazy_numba import inlined
from .arithmetic import ZERO, dot, expand, normalise_here, widen, widen_half
from .inner_loops import DECODE_TILE_ROWS, FEW_ROWS, TILE_COLUMNS, TILE_ROWS, VECTOR, low_tile_product, product
from .intrinsics import bits_to_f32, f32_at, f64_at, fetch_add, i64_at, u16_at

# Slots of `latent_keys`: Y [TOKENS, RANK + ROPE] -> OUT [TOKENS, ROPE + RANK], the latents normed.
K_Y, K_OUT, K_TOKENS, K_RANK, K_ROPE, K_NORM, K_WEIGHT, K_EPS = range(8)
# Slots of the products: X and OUT [TOKENS, HEADS, ...], WEIGHT [HEADS * (NOPE + VALUE), RANK] of stored type DTYPE.
X, OUT, TOKENS, HEADS, NOPE, ROPE, VALUE, RANK, WEIGHT, DTYPE, SCRATCH, STRIDE, SLOTS = range(13)
STRIP = 128  # columns of a block of work, for queries
VALUE_ROWS = 64  # the same for values
TRANSPOSE_ROWS = 16  # rows transposed at once
# The processor has fused multiply-adds, which the compiler uses for contractions; otherwise only register tiles use them.
FUSED = VECTOR > 4


@kernel()
def latent_keys(args, worker, counter):
    """A token's cached key. Blocks are tokens."""
    a = i64_at(args)
    rank, rope, eps = a[K_RANK], a[K_ROPE], float32(f64_at(args)[K_EPS])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[K_TOKENS]:
            return
        y, out = f32_at(a[K_Y] + 4 * t * (rank + rope)), f32_at(a[K_OUT] + 4 * t * (rank + rope))
        for i in range(rope):
            out[i] = y[rank + i]
        for i in range(rank):
            out[rope + i] = y[i]
        normalise_here(a[K_OUT] + 4 * (t * (rank + rope) + rope), rank, a[K_NORM], a[K_WEIGHT], 0, eps)


@inlined()
def _tiles(x, x_stride, b, b_stride, out, out_stride, rows, columns, depth, left, output):
    """OUT[rows, columns] = X[rows, depth] @ B[depth, columns], float32, strides in bytes; B is zero-padded to whole tiles. `left`
    [TILE_ROWS, depth] and `output` [TILE_ROWS, whole tiles of columns] are scratch for rows that fill no tile."""
    wide = (columns + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    full_rows = rows // TILE_ROWS * TILE_ROWS if wide == columns else 0
    product(x, x_stride, b, b_stride, out, out_stride, full_rows, columns, depth)
    for r in range(full_rows, rows, TILE_ROWS):
        tile_rows = min(TILE_ROWS, rows - r)
        padded = DECODE_TILE_ROWS if tile_rows <= DECODE_TILE_ROWS else TILE_ROWS
        for row in range(padded):
            source, target = f32_at(x + (r + row) * x_stride), f32_at(left + 4 * row * depth)
            for i in range(depth):
                target[i] = source[i] if row < tile_rows else ZERO
        if padded == DECODE_TILE_ROWS:
            for j in range(0, wide, TILE_COLUMNS):
                low_tile_product(left, 4 * depth, b + 4 * j, b_stride, output + 4 * j, 4 * wide, depth, 0)
        else:
            product(left, 4 * depth, b, b_stride, output, 4 * wide, TILE_ROWS, wide, depth)
        for row in range(tile_rows):
            source, target = f32_at(output + 4 * row * wide), f32_at(out + (r + row) * out_stride)
            for i in range(columns):
                target[i] = source[i]


@kernel()
def latent_queries(args, worker, counter):
    """Each head's query [NOPE | ROPE] -> [ROPE | RANK]: the rotary part is copied, the other multiplied by the rows of WEIGHT that make
    keys. Blocks are strips of RANK of a head.

    Scratch per worker, float32: B[NOPE, STRIP], left[TILE_ROWS, NOPE], made[TILE_ROWS, STRIP].
    """
    a = i64_at(args)
    tokens, heads, nope, rope, rank = a[TOKENS], a[HEADS], a[NOPE], a[ROPE], a[RANK]
    item, query, key = 4 if a[DTYPE] == F32 else 2, nope + rope, rope + rank
    strips = (rank + STRIP - 1) // STRIP
    b = a[SCRATCH] + worker * a[STRIDE]
    left = b + 4 * nope * STRIP
    output = left + 4 * TILE_ROWS * nope
    while True:
        job = fetch_add(counter, 1)
        if job >= heads * strips:
            return
        head, begin = job // strips, job % strips * STRIP
        columns = min(STRIP, rank - begin)
        rows = a[WEIGHT] + (head * (nope + a[VALUE]) * rank + begin) * item
        for n in range(nope):
            expand(rows + n * rank * item, a[DTYPE], b + 4 * n * STRIP, columns)
            padding = f32_at(b + 4 * n * STRIP)
            for i in range(columns, STRIP):
                padding[i] = ZERO
        x, out = a[X] + 4 * head * query, a[OUT] + 4 * head * key
        _tiles(x, 4 * heads * query, b, 4 * STRIP, out + 4 * (rope + begin), 4 * heads * key, tokens, columns, nope, left, output)
        if begin == 0:
            for t in range(tokens):
                source, target = f32_at(x + 4 * (t * heads * query + nope)), f32_at(out + 4 * t * heads * key)
                for i in range(rope):
                    target[i] = source[i]


@inlined({"contract"})
def _add_rows(w, pitch, dtype, q, count, sums_at, columns):
    """SUMS[columns] += q[count] @ W[count, columns], rows `pitch` bytes apart, in their order; `count` is 1 or 4."""
    s, factors = f32_at(sums_at), f32_at(q)
    if count == 1:
        for i in range(columns):
            s[i] += factors[0] * widen(w, dtype, i)
        return
    a, b, c, d = factors[0], factors[1], factors[2], factors[3]
    if dtype == F32:
        first, second, third, fourth = f32_at(w), f32_at(w + pitch), f32_at(w + 2 * pitch), f32_at(w + 3 * pitch)
        for i in range(columns):
            s[i] = s[i] + a * first[i] + b * second[i] + c * third[i] + d * fourth[i]
        return
    one, two, three, four = u16_at(w), u16_at(w + pitch), u16_at(w + 2 * pitch), u16_at(w + 3 * pitch)
    if dtype == BF16:
        for i in range(columns):
            s[i] = (s[i] + a * bits_to_f32(uint32(one[i]) << uint32(16)) + b * bits_to_f32(uint32(two[i]) << uint32(16))
                    + c * bits_to_f32(uint32(three[i]) << uint32(16)) + d * bits_to_f32(uint32(four[i]) << uint32(16)))
    else:
        for i in range(columns):
            s[i] = s[i] + a * widen_half(one[i]) + b * widen_half(two[i]) + c * widen_half(three[i]) + d * widen_half(four[i])


@kernel({"contract"})
def latent_queries_one(args, worker, counter):
    """`latent_queries` of one token: rows in their stored type, four at a time. Blocks are strips of RANK of a head."""
    a = i64_at(args)
    nope, rope, rank = a[NOPE], a[ROPE], a[RANK]
    item, query, key = 4 if a[DTYPE] == F32 else 2, nope + rope, rope + rank
    strips = (rank + STRIP - 1) // STRIP
    sums_at = a[SCRATCH] + worker * a[STRIDE]
    sums = f32_at(sums_at)
    while True:
        job = fetch_add(counter, 1)
        if job >= a[HEADS] * strips:
            return
        head, begin = job // strips, job % strips * STRIP
        columns, x = min(STRIP, rank - begin), a[X] + 4 * head * query
        rows = a[WEIGHT] + (head * (nope + a[VALUE]) * rank + begin) * item
        for i in range(columns):
            sums[i] = ZERO
        full_quads = nope // 4 * 4
        for n in range(0, full_quads, 4):
            _add_rows(rows + n * rank * item, rank * item, a[DTYPE], x + 4 * n, 4, sums_at, columns)
        for n in range(full_quads, nope):
            _add_rows(rows + n * rank * item, rank * item, a[DTYPE], x + 4 * n, 1, sums_at, columns)
        out = f32_at(a[OUT] + 4 * (head * key + rope + begin))
        for i in range(columns):
            out[i] = sums[i]
        if begin == 0:
            source, target = f32_at(x + 4 * nope), f32_at(a[OUT] + 4 * head * key)
            for i in range(rope):
                target[i] = source[i]


@kernel()
def latent_values_few(args, worker, counter):
    """Each head's attention output [ROPE | RANK] -> its values [VALUE]: the latent part times the rows of WEIGHT that make values. Blocks
    are heads."""
    a = i64_at(args)
    heads, rank, value, item = a[HEADS], a[RANK], a[VALUE], 4 if a[DTYPE] == F32 else 2
    sums_at = a[SCRATCH] + worker * a[STRIDE]
    sums, table = f32_at(sums_at), i64_at(sums_at + 64)
    while True:
        head = fetch_add(counter, 1)
        if head >= heads:
            return
        rows = a[WEIGHT] + (head * (a[NOPE] + value) + a[NOPE]) * rank * item
        for begin in range(0, value, FEW_ROWS):
            for i in range(FEW_ROWS):
                table[i] = rows + min(begin + i, value - 1) * rank * item
            for t in range(a[TOKENS]):
                dot(sums_at + 64, FEW_ROWS, a[DTYPE], a[X] + 4 * ((t * heads + head) * (a[ROPE] + rank) + a[ROPE]), rank, sums_at)
                out = f32_at(a[OUT] + 4 * ((t * heads + head) * value + begin))
                for i in range(min(FEW_ROWS, value - begin)):
                    out[i] = sums[i]


@kernel()
def latent_values_many(args, worker, counter):
    """`latent_values_few` for more tokens. Blocks are strips of VALUE of a head.

    Scratch per worker, float32: B[RANK, VALUE_ROWS], left[TILE_ROWS, RANK], made[TILE_ROWS, VALUE_ROWS], wide[TRANSPOSE_ROWS, RANK].
    """
    a = i64_at(args)
    heads, rank, rope, value, item = a[HEADS], a[RANK], a[ROPE], a[VALUE], 4 if a[DTYPE] == F32 else 2
    strips = (value + VALUE_ROWS - 1) // VALUE_ROWS
    b = a[SCRATCH] + worker * a[STRIDE]
    left = b + 4 * rank * VALUE_ROWS
    output = left + 4 * TILE_ROWS * rank
    wide_at = output + 4 * TILE_ROWS * VALUE_ROWS
    transposed, wide = f32_at(b), f32_at(wide_at)
    while True:
        job = fetch_add(counter, 1)
        if job >= heads * strips:
            return
        head, begin = job // strips, job % strips * VALUE_ROWS
        columns = min(VALUE_ROWS, value - begin)
        rows = a[WEIGHT] + (head * (a[NOPE] + value) + a[NOPE] + begin) * rank * item
        for first in range(0, VALUE_ROWS, TRANSPOSE_ROWS):
            num_columns = max(0, min(TRANSPOSE_ROWS, columns - first))
            expand(rows + first * rank * item, a[DTYPE], wide_at, num_columns * rank)
            for i in range(num_columns * rank, TRANSPOSE_ROWS * rank):
                wide[i] = ZERO
            for r in range(rank):
                for i in range(TRANSPOSE_ROWS):
                    transposed[r * VALUE_ROWS + first + i] = wide[i * rank + r]
        x, out = a[X] + 4 * (head * (rope + rank) + rope), a[OUT] + 4 * (head * value + begin)
        _tiles(x, 4 * heads * (rope + rank), b, 4 * VALUE_ROWS, out, 4 * heads * value, a[TOKENS], columns, rank, left, output)


def scratch_floats(nope: int, rank: int) -> int:
    """Floats of scratch per worker for the products."""
    queries = nope * STRIP + TILE_ROWS * (nope + STRIP)
    return max(queries, rank * VALUE_ROWS + TILE_ROWS * (rank + VALUE_ROWS) + TRANSPOSE_ROWS * rank)
