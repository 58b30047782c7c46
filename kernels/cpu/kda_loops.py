"""Kernels of Kimi Delta Attention: those of `delta_loops.py`, sharing their argument block, with a decay for every key channel.

A row of S is read and written channel by channel, so per-channel decay costs loading the factors but no extra pass. Rows are distributed
over threads as there, and results do not depend on threads or on how a prompt is split.
"""

from __future__ import annotations

from numpy import float32

from ..compile import REASSOCIATE, kernel
from ..layout import NORM_RMS
from ..lazy_numba import inlined
from .arithmetic import ONE, ZERO, exp, normalise_here, softplus
from .conv_loops import CHANNELS, MIXED, TOKENS, keep_raw, next_token
from .delta_loops import BOUND, DECAY, DT, EPS, GATES, KEY_DIM, NORM, OUT, ROWS, SLOTS, VALUE_DIM, VALUE_HEADS, A, B, Z, mix
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .recurrence_rows import begin_rows, keep_rows, next_rows

__all__ = ["BOUND", "GATES", "OUT", "SLOTS", "gated_norm", "mix_inputs", "recur"]  # all but the last two are those of `delta_loops`


@inlined()
def _gates(args, t):
    """Token t's decay of every channel of S, and beta. A and DT [keys], GATES [TOKENS, keys + heads]."""
    a = i64_at(args)
    heads, depth = a[VALUE_HEADS], a[KEY_DIM]
    keys = heads * depth
    raw_a, raw_b, out = f32_at(a[A] + 4 * t * keys), f32_at(a[B] + 4 * t * heads), f32_at(a[GATES] + 4 * t * (keys + heads))
    rate, dt, bound = f32_at(a[DECAY]), f32_at(a[DT]), float32(f64_at(args)[BOUND])
    for head in range(heads):
        if bound == ZERO:
            for channel in range(head * depth, (head + 1) * depth):
                out[channel] = exp(-rate[head] * softplus(raw_a[channel] + dt[channel]))
        else:
            for channel in range(head * depth, (head + 1) * depth):
                out[channel] = exp(bound / (ONE + exp(-rate[head] * (raw_a[channel] + dt[channel]))))
        out[keys + head] = ONE / (ONE + exp(-raw_b[head]))


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
def _returned(s, decay, k, count):
    """(decay * s) . k"""
    total = ZERO
    for i in range(count):
        total += decay[i] * s[i] * k[i]
    return total


@inlined(REASSOCIATE)
def _write_and_read(s, decay, k, q, count, difference):
    """s = decay * s + difference * k; returns s . q."""
    total = ZERO
    for i in range(count):
        value = decay[i] * s[i] + difference * k[i]
        s[i] = value
        total += value * q[i]
    return total


@kernel({"contract"})
def recur(args, worker, counter):
    """Blocks are ROWS rows of a head's state."""
    a = i64_at(args)
    channels, depth = a[CHANNELS], a[KEY_DIM]
    heads, width = a[VALUE_HEADS], a[VALUE_DIM]
    keys = heads * depth
    while True:
        head, first, rows = next_rows(counter, heads, width, ROWS)
        if head < 0:
            return
        state = begin_rows(a, head * width + first, rows, depth)
        for t in range(a[TOKENS]):
            row, gates = a[MIXED] + 4 * t * channels, a[GATES] + 4 * t * (keys + heads)
            q, k, decay = f32_at(row + 4 * head * depth), f32_at(row + 4 * (keys + head * depth)), f32_at(gates + 4 * head * depth)
            v, beta = f32_at(row + 4 * (2 * keys + head * width + first)), f32_at(gates)[keys + head]
            out = f32_at(a[OUT] + 4 * (t * heads * width + head * width + first))
            for j in range(rows):
                s = f32_at(state + 4 * j * depth)
                out[j] = _write_and_read(s, decay, k, q, depth, (v[j] - _returned(s, decay, k, depth)) * beta)
            keep_rows(a, t, state, head * width + first, rows, depth)


@kernel({"contract"})
def gated_norm(args, worker, counter):
    """OUT = norm(OUT) * sigmoid(Z), head by head. Blocks are tokens."""
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
                y[i] *= ONE / (ONE + exp(-z[i]))
