"""Index keys pooled from several tokens with per-channel softmax weights (`indexer_shape.py`)."""

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..layout import F32, NORM_LAYER, PAGE
from ..lazy_numba import inlined
from .arithmetic import MINUS_INF, ZERO, exp, expand, normalise_here
from .indexer_loops import put_kept
from .intrinsics import f32_at, f64_at, fetch_add, i64_at

# Slots of `note_pools`: K [TOKENS, 2 * WIDTH] holds a row, normed by WEIGHT, BIAS and EPS, and logits, to which PLACES [RATE, WIDTH] of the
# token's place in its key is added. Both are written to ROWS from POSITION on. For every complete run of RATE rows their mean, weighted by
# a softmax of the logits, is written to KEYS. Scratch of a worker: a row, and three times WIDTH.
(P_K, P_TOKENS, P_POSITION, P_WIDTH, P_DTYPE, P_KEYS, P_ROWS, P_RATE, P_WEIGHT, P_BIAS, P_PLACES, P_SCRATCH, P_STRIDE, P_EPS,
 POOL_SLOTS) = range(15)
SCRATCH_ROWS = 5  # of WIDTH floats


@inlined()
def _pooled(args, group, row, maxima_at):
    """The key of a complete group of rows, by a two-pass softmax (maximum, then sum of weights); rows in order, in their stored precision.
    """
    a = i64_at(args)
    width, rate, item = a[P_WIDTH], a[P_RATE], 4 if a[P_DTYPE] == F32 else 2
    key, logits = f32_at(row), f32_at(row + 4 * width)
    top, weights, weighted = f32_at(maxima_at), f32_at(maxima_at + 4 * width), f32_at(maxima_at + 8 * width)
    for i in range(width):
        top[i], weights[i], weighted[i] = MINUS_INF, ZERO, ZERO
    for t in range(group * rate, (group + 1) * rate):
        expand(a[P_ROWS] + t * 2 * width * item, a[P_DTYPE], row, 2 * width)
        for i in range(width):
            top[i] = max(top[i], logits[i])
    for t in range(group * rate, (group + 1) * rate):
        expand(a[P_ROWS] + t * 2 * width * item, a[P_DTYPE], row, 2 * width)
        for i in range(width):
            weight = exp(logits[i] - top[i])
            weights[i] += weight
            weighted[i] += weight * key[i]
    for i in range(width):
        weighted[i] = weighted[i] / weights[i]


@kernel()
def note_pools(args, worker, counter):
    """Store the tokens' contributions to pools, and the keys that become complete. Blocks are the tokens of one key."""
    a = i64_at(args)
    width, rate, item = a[P_WIDTH], a[P_RATE], 4 if a[P_DTYPE] == F32 else 2
    begin, end, eps = a[P_POSITION], a[P_POSITION] + a[P_TOKENS], float32(f64_at(args)[P_EPS])
    first, row = begin // rate, a[P_SCRATCH] + worker * a[P_STRIDE]
    while True:
        group = first + fetch_add(counter, 1)
        if group * rate >= end:
            return
        for t in range(max(begin, group * rate), min(end, (group + 1) * rate)):
            source, row_copy, bias = f32_at(a[P_K] + 8 * (t - begin) * width), f32_at(row), f32_at(a[P_PLACES] + 4 * (t % rate) * width)
            for i in range(width):
                row_copy[i] = source[i]
                row_copy[width + i] = source[width + i] + bias[i]
            normalise_here(row, width, NORM_LAYER, a[P_WEIGHT], a[P_BIAS], eps)
            put_kept(row_copy, a[P_ROWS] + t * 2 * width * item, 2 * width, 1, item)
        if (group + 1) * rate > end:
            continue
        _pooled(args, group, row, row + 8 * width)
        pooled, block = f32_at(row + 16 * width), a[P_KEYS] + group // PAGE * PAGE * width * item
        put_kept(pooled, block + group % PAGE * item, width, PAGE, item)
