"""Kernels of RWKV 7: token shift, inputs of the recurrence, the recurrence head by head, and the output norm and gates.

A row of S belongs to one value channel and is independent of other rows, so rows are distributed over threads as in `delta_loops.py`;
results do not depend on threads or on how a prompt is split. `reference_rwkv7.py` defines the computation, `rwkv7_shape.py` the slot
layout.
"""

from __future__ import annotations

import numpy as np
from numpy import float32

from ..compile import REASSOCIATE, kernel
from ..layout import NORM_LAYER
from ..lazy_numba import inlined
from ..reference_rwkv7 import EPS as LEAST_LENGTH
from ..reference_rwkv7 import SLOWEST as SLOWEST_RATE
from ..state_shape import AFTER, FROM, KEPT, TO
from .arithmetic import ONE, ZERO, dot_of, exp, normalise, normalise_here, sigmoid, squares_of
from .conv_loops import CHANNELS, CONTROL, MEMORY, OWN, RAW, SLOT, TOKENS, X, copy
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .recurrence_rows import begin_rows, keep_rows, next_rows

ROWS = 32  # rows of a state per block of work: 8 KiB with heads of 64 channels
SLOWEST, MIN_LENGTH, TWO = float32(SLOWEST_RATE), float32(LEAST_LENGTH), float32(2.0)

# Slots after those of `conv_loops`. `shift`: X [TOKENS, CHANNELS] is normed; each of COUNT rows of MIX [COUNT, CHANNELS] yields an
# interpolation, stored one after the other at OUTS, [TOKENS, CHANNELS] each. HALF: index of its row in a slot, and in RAW [TOKENS, 2,
# CHANNELS]. SCRATCH, STRIDE bytes per worker: two rows.
HALF, NORM, WEIGHT, BIAS, EPS, MIX, COUNT, SCRATCH, STRIDE = range(OWN, OWN + 9)
OUTS = STRIDE + 1
SHIFT_SLOTS = OUTS + 6
# The other kernels: raw keys, decays and rates, then the results computed from them, all [TOKENS, CHANNELS]; RECEPTANCE, VALUE and GATE
# likewise; OUT: the output. KEEP_R, KEEP_V: where receptances and values are copied, 0 for none. DIRECTION, RATE, BONUS, G_WEIGHT, G_BIAS
# [CHANNELS], the last may be 0; G_EPS is a float64.
(RAW_KEY, RAW_DECAY, RAW_RATE, RECEPTANCE, KEY, VALUE, DECAY, REMOVED, PUT, GATE, OUT, KEEP_R, KEEP_V, DIRECTION, RATE, BONUS, G_WEIGHT,
 G_BIAS, G_EPS, HEADS, HEAD_DIM, SLOTS) = range(OWN, OWN + 22)
# `squash`: Y [TOKENS, WIDTH], in place: its sigmoid or, if DOUBLED, its tanh. `blend`: VALUES [TOKENS, WIDTH], in place, FIRST and SHARES
# likewise.
Q_Y, Q_TOKENS, Q_WIDTH, Q_DOUBLED = range(4)
B_VALUES, B_FIRST, B_SHARES, B_TOKENS, B_WIDTH = range(5)


@inlined({"contract"})
def _mixed(now, before, mix, out, count):
    """out = now interpolated towards before; all addresses."""
    x, p, m, y = f32_at(now), f32_at(before), f32_at(mix), f32_at(out)
    for i in range(count):
        y[i] = x[i] + (p[i] - x[i]) * m[i]


@kernel()
def shift(args, worker, counter):
    """Blocks are tokens. The previous token's row is normed again for each token, so that tokens do not wait for each other."""
    a, eps = i64_at(args), float32(f64_at(args)[EPS])
    width, tokens, control = a[CHANNELS], a[TOKENS], i64_at(a[CONTROL])
    now = a[SCRATCH] + worker * a[STRIDE]
    before, half_offset = now + 4 * width, 4 * a[HALF] * width
    while True:
        t = fetch_add(counter, 1)
        if t >= tokens:
            return
        normalise(a[X] + 4 * t * width, now, width, a[NORM], a[WEIGHT], a[BIAS], eps)
        if t > 0:
            normalise(a[X] + 4 * (t - 1) * width, before, width, a[NORM], a[WEIGHT], a[BIAS], eps)
        else:
            source = control[FROM]
            copy(0 if source < 0 else a[MEMORY] + source * a[SLOT] + half_offset, before, width)
        for i in range(a[COUNT]):
            _mixed(now, before, a[MIX] + 4 * i * width, a[OUTS + i] + 4 * t * width, width)
        if a[RAW] != 0:
            copy(now, a[RAW] + 8 * t * width + half_offset, width)
        if t + 1 == tokens:
            copy(now, a[MEMORY] + control[TO] * a[SLOT] + half_offset, width)
        if t + 1 == control[AFTER]:
            copy(now, a[MEMORY] + control[KEPT] * a[SLOT] + half_offset, width)


@kernel()
def squash(args, worker, counter):
    """Blocks are tokens."""
    a = i64_at(args)
    width, doubled = a[Q_WIDTH], a[Q_DOUBLED]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[Q_TOKENS]:
            return
        y = f32_at(a[Q_Y] + 4 * t * width)
        if doubled != 0:
            for i in range(width):
                y[i] = TWO * sigmoid(TWO * y[i]) - ONE
        else:
            for i in range(width):
                y[i] = sigmoid(y[i])


@kernel({"contract"})
def blend(args, worker, counter):
    """VALUES interpolated towards FIRST. Blocks are tokens."""
    a = i64_at(args)
    width = a[B_WIDTH]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[B_TOKENS]:
            return
        at = 4 * t * width
        v, first, shares = f32_at(a[B_VALUES] + at), f32_at(a[B_FIRST] + at), f32_at(a[B_SHARES] + at)
        for i in range(width):
            v[i] += (first[i] - v[i]) * sigmoid(shares[i])


@inlined()
def _moved(source, target, count):
    """Copy `count` float32 to where they are changed in place: with two possibly aliasing arrays the compiler would process one value at a
    time."""
    if source != target:
        copy(source, target, count)


@inlined({"contract"})
def _keys(keys, put, direction, rate, removed, count):
    """From raw keys and rates of a head its keys, replacement keys, and normalized removal keys; all addresses."""
    y, replacement, removal, d, r = f32_at(keys), f32_at(put), f32_at(removed), f32_at(direction), f32_at(rate)
    for i in range(count):
        removal[i] = y[i] * d[i]
    scale = ONE / max(np.sqrt(squares_of(removal, count)), MIN_LENGTH)
    for i in range(count):
        replacement[i] = sigmoid(replacement[i])
    for i in range(count):
        y[i] *= ONE + (replacement[i] - ONE) * r[i]
    for i in range(count):
        removal[i] *= scale
        replacement[i] *= removal[i]


@kernel()
def make_gates(args, worker, counter):
    """Blocks are tokens."""
    a = i64_at(args)
    width, depth = a[CHANNELS], a[HEAD_DIM]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        row = 4 * t * width
        _moved(a[RAW_KEY] + row, a[KEY] + row, width)
        _moved(a[RAW_RATE] + row, a[PUT] + row, width)
        _moved(a[RAW_DECAY] + row, a[DECAY] + row, width)
        for head in range(a[HEADS]):
            at = 4 * head * depth
            _keys(a[KEY] + row + at, a[PUT] + row + at, a[DIRECTION] + at, a[RATE] + at, a[REMOVED] + row + at, depth)
        decay = f32_at(a[DECAY] + row)
        for i in range(width):
            decay[i] = exp(-SLOWEST * sigmoid(decay[i]))
        if a[KEEP_R] != 0:
            copy(a[RECEPTANCE] + row, a[KEEP_R] + row, width)
            copy(a[VALUE] + row, a[KEEP_V] + row, width)


@inlined(REASSOCIATE)
def _write_and_read(s, left, removed, k, r, count, put, value):
    """s = left * s - removed * put + value * k; returns s . r."""
    total = ZERO
    for i in range(count):
        updated = left[i] * s[i] - removed * put[i] + value * k[i]
        s[i] = updated
        total += updated * r[i]
    return total


@kernel({"contract"})
def recur(args, worker, counter):
    """Blocks are ROWS rows of a head's state."""
    a = i64_at(args)
    width, heads, depth = a[CHANNELS], a[HEADS], a[HEAD_DIM]
    while True:
        head, first, rows = next_rows(counter, heads, depth, ROWS)
        if head < 0:
            return
        row = head * depth + first
        state = begin_rows(a, row, rows, depth)
        for t in range(a[TOKENS]):
            at = 4 * (t * width + head * depth)
            r, k, left = f32_at(a[RECEPTANCE] + at), f32_at(a[KEY] + at), f32_at(a[DECAY] + at)
            removal, put = f32_at(a[REMOVED] + at), f32_at(a[PUT] + at)
            v, out = f32_at(a[VALUE] + at + 4 * first), f32_at(a[OUT] + at + 4 * first)
            for j in range(rows):
                s = f32_at(state + 4 * j * depth)
                out[j] = _write_and_read(s, left, dot_of(s, removal, depth), k, r, depth, put, v[j])
            keep_rows(a, t, state, row, rows, depth)


@inlined(REASSOCIATE)
def _share(r, k, bonus, count):
    total = ZERO
    for i in range(count):
        total += r[i] * k[i] * bonus[i]
    return total


@kernel({"contract"})
def finish(args, worker, counter):
    """OUT = (norm(OUT) + the token's own values times their bonus) * GATE, head by head. Blocks are tokens."""
    a, eps = i64_at(args), float32(f64_at(args)[G_EPS])
    width, depth = a[CHANNELS], a[HEAD_DIM]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        for head in range(a[HEADS]):
            head_offset, at = 4 * head * depth, 4 * (t * width + head * depth)
            normalise_here(a[OUT] + at, depth, NORM_LAYER, a[G_WEIGHT] + head_offset, 0 if a[G_BIAS] == 0 else a[G_BIAS] + head_offset, eps)
            share = _share(f32_at(a[RECEPTANCE] + at), f32_at(a[KEY] + at), f32_at(a[BONUS] + head_offset), depth)
            y, v, g = f32_at(a[OUT] + at), f32_at(a[VALUE] + at), f32_at(a[GATE] + at)
            for i in range(depth):
                y[i] = (y[i] + share * v[i]) * g[i]
