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

LEAST_POWER = float32(1e-5)  # of a stream's mean square, where it is divided by its root
TWO = float32(2.0)

# Slots of `predict` and `correct`: X [TOKENS, COUNT * WIDTH], in place; OWN [TOKENS, WIDTH], what a layer works on; a norm, ROUTER
# [COUNT, WIDTH] and COEFFICIENTS, [COUNT * COUNT, COUNT] or [COUNT, COUNT]; SCALE [WIDTH] of what `correct` leaves in OWN. Scratch of a
# worker: `scratch_floats`.
X, OWN, TOKENS, COUNT, WIDTH, NORM, NORM_WEIGHT, ROUTER, COEFFICIENTS, SCALE, SCRATCH, STRIDE, EPS = range(13)
# Slots of `spread`: X [TOKENS, COUNT * WIDTH], to all streams but the first of which the normed BRANCH [TOKENS, WIDTH] is added.
P_X, P_BRANCH, P_TOKENS, P_COUNT, P_WIDTH, P_NORM, P_WEIGHT, P_EPS = range(8)
# Slots of `enter` and `leave`: STREAMS [TOKENS, COUNT * WIDTH], BRANCHES [COUNT - 1, TOKENS, WIDTH], ONE_STREAM [TOKENS, WIDTH]; of `take`
# and `put` STREAMS, ONE_STREAM and WHICH, of the latter KEPT too: whether what is there stays, and the one is added to it.
M_STREAMS, M_BRANCHES, M_ONE, M_TOKENS, M_COUNT, M_WIDTH, M_WHICH, M_KEPT = range(8)
# Slots of `cut`: GATE [TOKENS, WIDTH], in place, less its mean and DEVIATIONS, a float64, times its deviation, above zero, is activated and
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
    said, found = f32_at(at), f32_at(at + 4 * count)
    for s in range(count):
        value = dot_of(f32_at(normed), f32_at(a[ROUTER] + 4 * s * width), width) / float32(width)
        said[s] = ONE - TWO / (ONE + exp(min(value + value, float32(80.0))))
    weights = f32_at(a[COEFFICIENTS])
    for i in range(rows):
        total = ZERO
        for s in range(count):
            total += weights[i * count + s] * said[s]
        found[i] = total
    return at + 4 * count


@kernel({"contract"})
def predict(args, worker, counter):
    """Every stream plus a linear combination of all of them, and the first of the results in OWN. Blocks are tokens."""
    a = i64_at(args)
    count, width = a[COUNT], a[WIDTH]
    before = a[SCRATCH] + worker * a[STRIDE]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        row = a[X] + 4 * t * count * width
        shares = f32_at(_coefficients(args, row, before + 4 * count * width, count, count * count))
        x, kept = f32_at(row), f32_at(before)
        for i in range(count * width):
            kept[i] = x[i]
        for to in range(count):
            y = f32_at(row + 4 * to * width)
            for of in range(count):
                share, source = shares[to * count + of], f32_at(before + 4 * of * width)
                for i in range(width):
                    y[i] += share * source[i]
        own = f32_at(a[OWN] + 4 * t * width)
        for i in range(width):
            own[i] = x[i]


@kernel({"contract"})
def correct(args, worker, counter):
    """Every stream plus a multiple of the difference between OWN and the first; then the first, scaled, in OWN. Blocks are tokens."""
    a = i64_at(args)
    count, width = a[COUNT], a[WIDTH]
    beyond = a[SCRATCH] + worker * a[STRIDE]
    scale = f32_at(a[SCALE])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        row, at = a[X] + 4 * t * count * width, a[OWN] + 4 * t * width
        shares = f32_at(_coefficients(args, at, beyond + 4 * width, count, count))
        x, own, more = f32_at(row), f32_at(at), f32_at(beyond)
        for i in range(width):
            more[i] = own[i] - x[i]
        for to in range(count):
            y, share = f32_at(row + 4 * to * width), ONE + shares[to]
            for i in range(width):
                y[i] += share * more[i]
        for i in range(width):
            own[i] = x[i] * scale[i]


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
def _matching(wanted, branch, width):
    """The factor that gives a branch the magnitude `wanted`."""
    return wanted / np.sqrt(max(_power(f32_at(branch), width), LEAST_POWER))


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
        wanted = np.sqrt(_power(x, width))
        for to in range(1, count):
            at = a[M_BRANCHES] + 4 * ((to - 1) * a[M_TOKENS] + t) * width
            factor, branch, y = _matching(wanted, at, width), f32_at(at), f32_at(a[M_STREAMS] + 4 * (t * count + to) * width)
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
        wanted = np.sqrt(_power(first, width))
        for i in range(width):
            out[i] = first[i]
        for of in range(1, count):
            at = a[M_BRANCHES] + 4 * ((of - 1) * a[M_TOKENS] + t) * width
            factor, branch = _matching(wanted, at, width), f32_at(at)
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
        least = mean + np.sqrt(variance_of(gate, mean, width)) * deviations
        for i in range(width):
            beyond = gate[i] - least
            gate[i] = ZERO if beyond < ZERO else beyond  # NaN stays
        for i in range(width):
            gate[i] = gate[i] * up[i] if gate[i] == ZERO else gated(gate[i], up[i], act)
