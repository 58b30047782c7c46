"""Kernels over a token's AltUp streams, of which one passes through a layer: predict before it and correct after it, creating streams from
an embedding and merging them again; and Gaussian top-k gates.

Streams are adjacent, [T, S * D], the active one first. Each kernel iterates over tokens, and a token's sums are added in a fixed order, so
results depend on neither threads nor other tokens.
"""

from __future__ import annotations

import numpy as np
from numpy import float32

from ..compile import kernel
from ..lazy_numba import inlined
from .arithmetic import ONE, ZERO, dot_of, exp, gated, mean_of, normalise, normalise_here, squares_of, variance_of
from .intrinsics import f32_at, f64_at, fetch_add, i64_at

MIN_MEAN_SQUARE = float32(1e-5)  # lower bound of a stream's mean square before its root divides the stream
TWO = float32(2.0)

# Slots of `predict` and `correct`: X [TOKENS, COUNT * WIDTH], in place; ACTIVE_STREAM [TOKENS, WIDTH], which the layer processes; a norm,
# ROUTER [COUNT, WIDTH] and COEFFICIENTS [COUNT * COUNT, COUNT] or [COUNT, COUNT]; SCALE [WIDTH] of the ACTIVE_STREAM that `correct`
# returns. Scratch of a worker: `scratch_floats`.
X, ACTIVE_STREAM, TOKENS, COUNT, WIDTH, NORM, NORM_WEIGHT, ROUTER, COEFFICIENTS, SCALE, SCRATCH, STRIDE, EPS = range(13)
# Slots of `spread`: the normed BRANCH [TOKENS, WIDTH] is added to all streams of X [TOKENS, COUNT * WIDTH] but the first.
P_X, P_BRANCH, P_TOKENS, P_COUNT, P_WIDTH, P_NORM, P_WEIGHT, P_EPS = range(8)
# Slots of `enter` and `leave`: STREAMS [TOKENS, COUNT * WIDTH], BRANCHES [COUNT - 1, TOKENS, WIDTH], ONE_STREAM [TOKENS, WIDTH]. Slots of
# `take` and `put`: STREAMS, ONE_STREAM, WHICH (the stream's index) and, for `put`, KEPT: add to the stream instead of replacing it.
M_STREAMS, M_BRANCHES, M_ONE, M_TOKENS, M_COUNT, M_WIDTH, M_WHICH, M_KEPT = range(8)
# Slots of `cut`: GATE [TOKENS, WIDTH], in place: minus its mean and DEVIATIONS (float64) standard deviations, clamped at 0, activated and
# multiplied by UP.
C_GATE, C_UP, C_TOKENS, C_WIDTH, C_ACT, C_DEVIATIONS = range(6)


def scratch_floats(count: int, width: int) -> int:
    """Per worker: a token's streams, a normed row, the router's output and coefficients."""
    return (count + 1) * width + count + count * count


@inlined()
def _power(x, depth):
    return squares_of(x, depth) / float32(depth)


@inlined()
def _coefficients(args, row, normed, count, rows):
    """Address of a token's `rows` coefficients: coefficients times the router's output for its normed `row`, clamped to -1 and 1. They are
    stored after the row that is `normed`."""
    a = i64_at(args)
    width = a[WIDTH]
    normalise(row, normed, width, a[NORM], a[NORM_WEIGHT], 0, float32(f64_at(args)[EPS]))
    at = normed + 4 * width
    logits, results = f32_at(at), f32_at(at + 4 * count)
    for s in range(count):
        value = dot_of(f32_at(normed), f32_at(a[ROUTER] + 4 * s * width), width) / float32(width)
        logits[s] = ONE - TWO / (ONE + exp(min(value + value, float32(80.0))))
    weights = f32_at(a[COEFFICIENTS])
    for i in range(rows):
        total = ZERO
        for s in range(count):
            total += weights[i * count + s] * logits[s]
        results[i] = total
    return at + 4 * count


@kernel({"contract"})
def predict(args, worker, counter):
    """Every stream plus a linear combination of all of them, and the first of the results in ACTIVE_STREAM. Blocks are tokens."""
    a = i64_at(args)
    count, width = a[COUNT], a[WIDTH]
    before = a[SCRATCH] + worker * a[STRIDE]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        row = a[X] + 4 * t * count * width
        shares = f32_at(_coefficients(args, row, before + 4 * count * width, count, count * count))
        x, previous = f32_at(row), f32_at(before)
        for i in range(count * width):
            previous[i] = x[i]
        for to in range(count):
            y = f32_at(row + 4 * to * width)
            for of in range(count):
                share, source = shares[to * count + of], f32_at(before + 4 * of * width)
                for i in range(width):
                    y[i] += share * source[i]
        active = f32_at(a[ACTIVE_STREAM] + 4 * t * width)
        for i in range(width):
            active[i] = x[i]


@kernel({"contract"})
def correct(args, worker, counter):
    """Every stream plus a multiple of the difference between ACTIVE_STREAM and the first; then the first, scaled, in ACTIVE_STREAM. Blocks
    are tokens."""
    a = i64_at(args)
    count, width = a[COUNT], a[WIDTH]
    beyond = a[SCRATCH] + worker * a[STRIDE]
    scale = f32_at(a[SCALE])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        row, at = a[X] + 4 * t * count * width, a[ACTIVE_STREAM] + 4 * t * width
        shares = f32_at(_coefficients(args, at, beyond + 4 * width, count, count))
        x, active, difference = f32_at(row), f32_at(at), f32_at(beyond)
        for i in range(width):
            difference[i] = active[i] - x[i]
        for to in range(count):
            y, share = f32_at(row + 4 * to * width), ONE + shares[to]
            for i in range(width):
                y[i] += share * difference[i]
        for i in range(width):
            active[i] = x[i] * scale[i]


@kernel()
def spread(args, worker, counter):
    """Add a token's normed per-layer input to all streams but the first. Blocks are tokens."""
    a = i64_at(args)
    count, width = a[P_COUNT], a[P_WIDTH]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[P_TOKENS]:
            return
        branch = a[P_BRANCH] + 4 * t * width
        normalise_here(branch, width, a[P_NORM], a[P_WEIGHT], 0, float32(f64_at(args)[P_EPS]))
        y = f32_at(branch)
        for to in range(1, count):
            x = f32_at(a[P_X] + 4 * (t * count + to) * width)
            for i in range(width):
                x[i] += y[i]


@inlined()
def _matching(target, branch, width):
    """The factor that gives a branch the magnitude `target`."""
    return target / np.sqrt(max(_power(f32_at(branch), width), MIN_MEAN_SQUARE))


@kernel()
def enter(args, worker, counter):
    """Streams from one and from branches, rescaled to its magnitude. Blocks are tokens."""
    a = i64_at(args)
    count, width = a[M_COUNT], a[M_WIDTH]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[M_TOKENS]:
            return
        x, first = f32_at(a[M_ONE] + 4 * t * width), f32_at(a[M_STREAMS] + 4 * t * count * width)
        for i in range(width):
            first[i] = x[i]
        target = np.sqrt(_power(x, width))
        for to in range(1, count):
            at = a[M_BRANCHES] + 4 * ((to - 1) * a[M_TOKENS] + t) * width
            factor, branch, y = _matching(target, at, width), f32_at(at), f32_at(a[M_STREAMS] + 4 * (t * count + to) * width)
            for i in range(width):
                y[i] = branch[i] * factor


@kernel({"contract"})
def leave(args, worker, counter):
    """The mean of the first stream and of branches, rescaled to its magnitude. Blocks are tokens."""
    a = i64_at(args)
    count, width = a[M_COUNT], a[M_WIDTH]
    share = ONE / float32(count)
    while True:
        t = fetch_add(counter, 1)
        if t >= a[M_TOKENS]:
            return
        first, out = f32_at(a[M_STREAMS] + 4 * t * count * width), f32_at(a[M_ONE] + 4 * t * width)
        target = np.sqrt(_power(first, width))
        for i in range(width):
            out[i] = first[i]
        for of in range(1, count):
            at = a[M_BRANCHES] + 4 * ((of - 1) * a[M_TOKENS] + t) * width
            factor, branch = _matching(target, at, width), f32_at(at)
            for i in range(width):
                out[i] += branch[i] * factor
        for i in range(width):
            out[i] *= share


@kernel()
def take(args, worker, counter):
    """Copy one stream of every token. Blocks are tokens."""
    a = i64_at(args)
    width = a[M_WIDTH]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[M_TOKENS]:
            return
        x, out = f32_at(a[M_STREAMS] + 4 * (t * a[M_COUNT] + a[M_WHICH]) * width), f32_at(a[M_ONE] + 4 * t * width)
        for i in range(width):
            out[i] = x[i]


@kernel()
def put(args, worker, counter):
    """Write or add one stream of every token. Blocks are tokens."""
    a = i64_at(args)
    width = a[M_WIDTH]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[M_TOKENS]:
            return
        x, one = f32_at(a[M_STREAMS] + 4 * (t * a[M_COUNT] + a[M_WHICH]) * width), f32_at(a[M_ONE] + 4 * t * width)
        if a[M_KEPT] != 0:
            for i in range(width):
                x[i] += one[i]
        else:
            for i in range(width):
                x[i] = one[i]


@kernel()
def cut(args, worker, counter):
    """Gates minus their threshold, activated, times `up`. Few are positive, and the activation of zero, which is zero, is not computed.
    Blocks are tokens."""
    a = i64_at(args)
    width, act, deviations = a[C_WIDTH], a[C_ACT], float32(f64_at(args)[C_DEVIATIONS])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[C_TOKENS]:
            return
        gate, up = f32_at(a[C_GATE] + 4 * t * width), f32_at(a[C_UP] + 4 * t * width)
        mean = mean_of(gate, width)
        threshold = mean + np.sqrt(variance_of(gate, mean, width)) * deviations
        for i in range(width):
            beyond = gate[i] - threshold
            gate[i] = ZERO if beyond < ZERO else beyond  # NaN stays NaN
        for i in range(width):
            gate[i] = gate[i] * up[i] if gate[i] == ZERO else gated(gate[i], up[i], act)
