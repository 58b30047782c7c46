"""Kernels of a gated delta rule: convolution and gates of every token, the recurrence head by head, and the output norm.

A row of S belongs to one value channel and is independent of other rows, so rows are distributed over threads, as many of a head at a time
as stay in the L1 cache from token to token. Tokens are processed in order and sums over keys in a fixed order, so results depend neither on
threads nor on how a prompt is split. `reference_delta.py` defines the computation, `delta_shape.py` the slot layout.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import float32

from ..compile import REASSOCIATE, kernel
from ..layout import NORM_RMS, SILU
from ..lazy_numba import inlined
from ..reference_delta import KEY_EPS
from .arithmetic import ONE, ZERO, activate, dot_of, exp, normalise_here, squares_of
from .conv_loops import CHANNELS, MIXED, OWN, TOKENS, convolve, keep_raw, next_token
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .recurrence_rows import begin_rows, keep_rows, next_rows

ROWS = 32  # rows of a state per block of work: 16 KiB with keys of 128 channels
EPS_OF_KEYS = np.float32(KEY_EPS)

# Slots of all three kernels, after those of `conv_loops`. Z and OUT [TOKENS, values], B and A [TOKENS, value heads], GATES [TOKENS, 2,
# value heads], DECAY and DT [value heads], NORM [value dim]. TILED: 0 or 1, see `DeltaShape`. WRITES: a float64 factor of beta. BOUND, for
# `kda_loops`: a float64, lower bound of the logarithm of decays, 0 for none.
Z, B, A, GATES, OUT, DECAY, DT, NORM, EPS, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TILED, WRITES, BOUND, SLOTS = range(OWN, OWN + 17)


@inlined()
def _unit(row, count, factor):
    """Scale a head to length `factor`, in place."""
    x = f32_at(row)
    scale = factor / np.sqrt(squares_of(x, count) + EPS_OF_KEYS)
    for i in range(count):
        x[i] *= scale


@inlined()
def mix(a, t):
    """Token t's queries, keys and values."""
    out, depth = convolve(a, t), a[KEY_DIM]
    for head in range(a[KEY_HEADS]):
        _unit(out + 4 * head * depth, depth, ONE / np.sqrt(float32(depth)))
        _unit(out + 4 * (a[KEY_HEADS] + head) * depth, depth, ONE)


@inlined()
def _gates(args, t):
    """Token t's decay of S, and beta."""
    a = i64_at(args)
    heads = a[VALUE_HEADS]
    raw_a, raw_b, out = f32_at(a[A] + 4 * t * heads), f32_at(a[B] + 4 * t * heads), f32_at(a[GATES] + 8 * t * heads)
    rate, dt, writes = f32_at(a[DECAY]), f32_at(a[DT]), float32(f64_at(args)[WRITES])
    for head in range(heads):
        x = raw_a[head] + dt[head]
        softplus = max(x, ZERO) + float32(math.log1p(math.exp(-abs(np.float64(x)))))
        softplus = softplus if x == x else x
        out[head] = exp(-rate[head] * softplus)
        out[heads + head] = writes / (ONE + exp(-raw_b[head]))


@kernel()
def mix_inputs(args, worker, counter):
    """Blocks are tokens, and one that stores the last inputs."""
    a = i64_at(args)
    t = next_token(a, counter)
    while t >= 0:
        mix(a, t)
        _gates(args, t)
        keep_raw(a, t)
        t = next_token(a, counter)


@inlined(REASSOCIATE)
def write_and_read(s, k, q, count, decay, difference):
    """s = decay * s + difference * k; returns s . q."""
    total = ZERO
    for i in range(count):
        value = decay * s[i] + difference * k[i]
        s[i] = value
        total += value * q[i]
    return total


@kernel({"contract"})
def recur(args, worker, counter):
    """Blocks are ROWS rows of a head's state."""
    a = i64_at(args)
    channels, depth = a[CHANNELS], a[KEY_DIM]
    heads, width, keys = a[VALUE_HEADS], a[VALUE_DIM], a[KEY_HEADS] * a[KEY_DIM]
    while True:
        head, first, rows = next_rows(counter, heads, width, ROWS)
        if head < 0:
            return
        state = begin_rows(a, head * width + first, rows, depth)
        key_offset = (head % a[KEY_HEADS] if a[TILED] != 0 else head * a[KEY_HEADS] // heads) * depth
        for t in range(a[TOKENS]):
            row, gates = a[MIXED] + 4 * t * channels, f32_at(a[GATES] + 8 * t * heads)
            q, k = f32_at(row + 4 * key_offset), f32_at(row + 4 * (keys + key_offset))
            v = f32_at(row + 4 * (2 * keys + head * width + first))
            out, decay, beta = f32_at(a[OUT] + 4 * (t * heads * width + head * width + first)), gates[head], gates[heads + head]
            for j in range(rows):
                s = f32_at(state + 4 * j * depth)
                out[j] = write_and_read(s, k, q, depth, decay, (v[j] - decay * dot_of(s, k, depth)) * beta)
            keep_rows(a, t, state, head * width + first, rows, depth)


@kernel({"contract"})
def gated_norm(args, worker, counter):
    """OUT = norm(OUT) * silu(Z), head by head. Blocks are tokens."""
    a = i64_at(args)
    heads, width, eps = a[VALUE_HEADS], a[VALUE_DIM], float32(f64_at(args)[EPS])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        for head in range(heads):
            at = 4 * (t * heads + head) * width
            normalise_here(a[OUT] + at, width, NORM_RMS, a[NORM], 0, eps)
            y, z = f32_at(a[OUT] + at), f32_at(a[Z] + at)
            for i in range(width):
                y[i] *= activate(z[i], SILU)
