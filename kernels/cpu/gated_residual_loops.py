"""Kernels of gated residuals: normed streams of a token, a branch's input, and the streams after it (`reference_gated_residuals.py`).

Blocks are tokens, and a token's sums are added in a fixed order, so results depend on neither threads nor other tokens.
"""

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..lazy_numba import inlined
from .arithmetic import ONE, ZERO, normalise, sigmoid
from .intrinsics import f32_at, f64_at, fetch_add, i64_at

# Slots. X [TOKENS, COUNT * WIDTH]: the streams. NORMED: the same after a norm of KIND with WEIGHT [COUNT * WIDTH] and EPS (float64). GATES:
# gate logits of the same size. BRANCH [TOKENS, WIDTH]: a branch's input or output. WRITE_LOGITS [TOKENS, COUNT]: logits of the weight with
# which each stream receives it.
X, NORMED, GATES, BRANCH, WRITE_LOGITS, TOKENS, COUNT, WIDTH, KIND, WEIGHT, EPS, SLOTS = range(12)
TWO = float32(2.0)


@kernel()
def norm_streams(args, worker, counter):
    """NORMED of X."""
    a = i64_at(args)
    count, width, eps = a[COUNT], a[WIDTH], float32(f64_at(args)[EPS])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        for s in range(count):
            at = 4 * (t * count + s) * width
            normalise(a[X] + at, a[NORMED] + at, width, a[KIND], a[WEIGHT] + 4 * s * width, 0, eps)


@inlined({"contract"})
def _add_opened(output, normed, opened, width, share):
    out, x, gate = f32_at(output), f32_at(normed), f32_at(opened)
    for i in range(width):
        out[i] += share * (sigmoid(gate[i]) * x[i])


@kernel()
def read_streams(args, worker, counter):
    """BRANCH of NORMED by GATES."""
    a = i64_at(args)
    count, width = a[COUNT], a[WIDTH]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        output = f32_at(a[BRANCH] + 4 * t * width)
        for i in range(width):
            output[i] = ZERO
        for s in range(count):
            at = 4 * (t * count + s) * width
            _add_opened(a[BRANCH] + 4 * t * width, a[NORMED] + at, a[GATES] + at, width, ONE / float32(count))


@inlined({"contract"})
def _add_branch(stream, branch, width, share):
    x, branch_row = f32_at(stream), f32_at(branch)
    for i in range(width):
        x[i] += share * branch_row[i]


@kernel()
def write_streams(args, worker, counter):
    """X after a branch that gave BRANCH, by weights WRITE_LOGITS."""
    a = i64_at(args)
    count, width = a[COUNT], a[WIDTH]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        weights = f32_at(a[WRITE_LOGITS] + 4 * t * count)
        for s in range(count):
            share = TWO * sigmoid(weights[s] / float32(count))
            _add_branch(a[X] + 4 * (t * count + s) * width, a[BRANCH] + 4 * t * width, width, share)
