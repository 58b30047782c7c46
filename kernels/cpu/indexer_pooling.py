"""Index keys pooled from several tokens with per-channel softmax weights (`indexer_shape.py`)."""

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..layout import F32, NORM_LAYER, PAGE
from ..lazy_numba import inlined
from .arithmetic import MINUS_INF, ZERO, exp, expand, normalise_here
from .indexer_loops import put_kept
from .intrinsics import f32_at, f64_at, fetch_add, i64_at

# Slots of `note_pools`: of K [TOKENS, 2 * WIDTH] the first half is normed by WEIGHT, BIAS and EPS, the second is what a token says, to
# which that of its place in its pool is added, PLACES [RATE, WIDTH]. Both go to rows POSITION and on of ROWS, and of every RATE rows that
# are whole then the mean into KEYS, weighed by a softmax over what they say. Scratch of a worker: a row, and three times WIDTH.
(P_K, P_TOKENS, P_POSITION, P_WIDTH, P_DTYPE, P_KEYS, P_ROWS, P_RATE, P_WEIGHT, P_BIAS, P_PLACES, P_SCRATCH, P_STRIDE, P_EPS,
 POOL_SLOTS) = range(15)
SCRATCH_ROWS = 5  # of WIDTH floats


@inlined()
def _pooled(args, group, row, most):
    """The key of a complete group of rows, by a two-pass softmax (maximum, then sum of weights); rows in order, in their stored precision.
    """
    a = i64_at(args)
    width, rate, item = a[P_WIDTH], a[P_RATE], 4 if a[P_DTYPE] == F32 else 2
    key, says = f32_at(row), f32_at(row + 4 * width)
    top, weights, made = f32_at(most), f32_at(most + 4 * width), f32_at(most + 8 * width)
    for i in range(width):
        top[i], weights[i], made[i] = MINUS_INF, ZERO, ZERO
    for t in range(group * rate, (group + 1) * rate):
        expand(a[P_ROWS] + t * 2 * width * item, a[P_DTYPE], row, 2 * width)
        for i in range(width):
            top[i] = max(top[i], says[i])
    for t in range(group * rate, (group + 1) * rate):
        expand(a[P_ROWS] + t * 2 * width * item, a[P_DTYPE], row, 2 * width)
        for i in range(width):
            weight = exp(says[i] - top[i])
            weights[i] += weight
            made[i] += weight * key[i]
    for i in range(width):
        made[i] = made[i] / weights[i]


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
            source, own, place = f32_at(a[P_K] + 8 * (t - begin) * width), f32_at(row), f32_at(a[P_PLACES] + 4 * (t % rate) * width)
            for i in range(width):
                own[i] = source[i]
                own[width + i] = source[width + i] + place[i]
            normalise_here(row, width, NORM_LAYER, a[P_WEIGHT], a[P_BIAS], eps)
            put_kept(own, a[P_ROWS] + t * 2 * width * item, 2 * width, 1, item)
        if (group + 1) * rate > end:
            continue
        _pooled(args, group, row, row + 8 * width)
        made, block = f32_at(row + 16 * width), a[P_KEYS] + group // PAGE * PAGE * width * item
        put_kept(made, block + group % PAGE * item, width, PAGE, item)
