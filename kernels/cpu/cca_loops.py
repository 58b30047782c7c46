"""The kernel of compressed convolutional attention: queries, keys and values from a token and the few before it (`cca_shape.py`).

Every output is one chain of sums over its inputs, so results depend neither on threads nor on how a prompt is split. `reference_cca.py`
defines the computation.
"""

from __future__ import annotations

import numpy as np
from numpy import float32

from ..compile import kernel
from ..lazy_numba import inlined
from ..reference_cca import EPS
from ..state_shape import AFTER, KEPT, TO
from .arithmetic import dot_of, squares_of
from .conv_loops import BIAS, CHANNELS, CONTROL, CONV, MEMORY, OWN, RAW, SLOT, TAPS, TOKENS, X, add_tap, copy, input_of
from .intrinsics import f32_at, fetch_add, i64_at

# Slots after those of `conv_loops`, of which X is [TOKENS, WIDE] and MIXED is unused: BY_HEAD [CONVOLVED, SECOND, DEPTH] and its biases,
# TEMPS [KV_HEADS], Q, K and V. Scratch of a worker: a group's channels, SECOND times.
HEADS, KV_HEADS, DEPTH, FIRST, SECOND, WIDE, BY_HEAD, HEAD_BIAS, TEMPS, Q, K, V, SCRATCH, STRIDE, SLOTS = range(OWN, OWN + 15)
HALF, SHORTEST = float32(0.5), float32(EPS)


@inlined()
def _input(a, row):
    """Address of the inputs of token `row`; negative rows precede the pass; 0 before the text began."""
    return a[X] + 4 * row * a[WIDE] if row >= 0 else input_of(a, row)


@inlined()
def _keep(a, slot, tokens):
    """Store the last inputs of the first `tokens` in a slot."""
    before = a[TAPS] - 1
    for i in range(before):
        copy(_input(a, tokens - before + i), a[MEMORY] + slot * a[SLOT] + 4 * i * a[CHANNELS], a[CHANNELS])


@inlined()
def _head(a, t, head, scratch, out):
    """One query or key head after both convolutions, into `out`."""
    depth, first, second, base = a[DEPTH], a[FIRST], a[SECOND], head * a[DEPTH]
    convolved = (a[HEADS] + a[KV_HEADS]) * depth
    for tap in range(second):
        output = scratch + 4 * tap * depth
        copy(a[BIAS] + 4 * base, output, depth)
        for i in range(first):
            source = _input(a, t - (second - 1) + tap - (first - 1) + i)
            if source != 0:
                add_tap(output, a[CONV] + 4 * (i * convolved + base), source + 4 * base, depth)
    y, bias, x = f32_at(out), f32_at(a[HEAD_BIAS] + 4 * base), f32_at(scratch)
    for o in range(depth):
        y[o] = bias[o] + dot_of(f32_at(a[BY_HEAD] + 4 * (base + o) * second * depth), x, second * depth)


@inlined()
def _stretch(out, depth, temp):
    """Scale a head to length sqrt(width), times a factor."""
    y = f32_at(out)
    factor = temp * float32(np.sqrt(depth)) / max(np.sqrt(squares_of(y, depth)), SHORTEST)
    for i in range(depth):
        y[i] *= factor


@inlined()
def _values(a, t):
    """A token's values, and logging of its inputs."""
    half = a[KV_HEADS] * a[DEPTH] // 2
    out = a[V] + 8 * t * half
    copy(a[X] + 4 * (t * a[WIDE] + a[CHANNELS]), out, half)
    before = _input(a, t - 1)
    copy(before + 4 * (a[CHANNELS] - half) if before != 0 else before, out + 4 * half, half)
    if a[RAW] != 0:
        copy(a[X] + 4 * t * a[WIDE], a[RAW] + 4 * t * a[CHANNELS], a[CHANNELS])


@kernel()
def convolve_heads(args, worker, counter):
    """Blocks are a token's key heads with their queries, and one that stores the last inputs."""
    a = i64_at(args)
    control, depth, heads, kv_heads = i64_at(a[CONTROL]), a[DEPTH], a[HEADS], a[KV_HEADS]
    group, scratch = heads // kv_heads, a[SCRATCH] + worker * a[STRIDE]
    while True:
        block = fetch_add(counter, 1)
        if block > a[TOKENS] * kv_heads:
            return
        if block == a[TOKENS] * kv_heads:
            _keep(a, control[TO], a[TOKENS])
            if control[AFTER] > 0:
                _keep(a, control[KEPT], control[AFTER])
            continue
        t, kv_head = block // kv_heads, block % kv_heads
        if kv_head == 0:
            _values(a, t)
        key = a[K] + 4 * (t * kv_heads + kv_head) * depth
        _head(a, t, heads + kv_head, scratch, key)
        row, share = a[X] + 4 * t * a[WIDE], HALF / float32(group)
        y, x = f32_at(key), f32_at(row + 4 * (heads + kv_head) * depth)
        for head in range(kv_head * group, (kv_head + 1) * group):
            query = a[Q] + 4 * (t * heads + head) * depth
            _head(a, t, head, scratch, query)
            z, q = f32_at(query), f32_at(row + 4 * head * depth)
            for i in range(depth):
                residual = q[i] + x[i]
                z[i] += HALF * residual
                y[i] += share * residual
            _stretch(query, depth, float32(1.0))
        _stretch(key, depth, f32_at(a[TEMPS])[kv_head])
