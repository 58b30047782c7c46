"""Kernels of a Mamba 2 layer: convolution and steps of every token, the recurrence head by head, and the output norm.

A row of S belongs to one channel and is independent of other rows, so rows are distributed over threads as in `delta_loops.py`; results do
not depend on threads or on how a prompt is split. `reference_mamba2.py` defines the computation, `mamba2_shape.py` the slot layout.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import float32

from ..compile import kernel
from ..layout import NORM_RMS, SILU
from ..lazy_numba import inlined
from .arithmetic import ZERO, activate, exp, normalise_here
from .conv_loops import CHANNELS, MIXED, OWN, TOKENS, convolve, keep_raw, next_token
from .delta_loops import write_and_read
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .recurrence_rows import begin_rows, keep_rows, next_rows

STATE_FLOATS_AT_ONCE = 4096  # floats of a state per block of work: 16 KiB, which stay in the L1 cache

# Slots after those of `conv_loops`. Z and OUT [TOKENS, heads * head dim], STEPS [TOKENS, heads], GATES [TOKENS, 2, heads], DECAY, DT and
# SKIP [heads], NORM [heads * head dim] (0: none). GATE_FACTOR and STEP_FACTOR, float64 like EPS, multiply Z and STEPS.
(Z, STEPS, GATES, OUT, DECAY, DT, SKIP, NORM, EPS, GATE_FACTOR, STEP_FACTOR, HEADS, HEAD_DIM, GROUPS, DEPTH,
 SLOTS) = range(OWN, OWN + 16)


@inlined()
def _steps(a, t, factor):
    """Token t's decay of S, and its step."""
    heads = a[HEADS]
    raw, out, rate, dt = f32_at(a[STEPS] + 4 * t * heads), f32_at(a[GATES] + 8 * t * heads), f32_at(a[DECAY]), f32_at(a[DT])
    for head in range(heads):
        x = raw[head] * factor + dt[head]
        step = max(x, ZERO) + float32(math.log1p(math.exp(-abs(np.float64(x)))))
        step = step if x == x else x
        out[head] = exp(-rate[head] * step)
        out[heads + head] = step


@kernel()
def mix_inputs(args, worker, counter):
    """Blocks are tokens, and one that stores the last inputs."""
    a, factor = i64_at(args), float32(f64_at(args)[STEP_FACTOR])
    t = next_token(a, counter)
    while t >= 0:
        convolve(a, t)
        _steps(a, t, factor)
        keep_raw(a, t)
        t = next_token(a, counter)


@kernel({"contract"})
def recur(args, worker, counter):
    """Blocks are some rows of a head's state."""
    a = i64_at(args)
    channels, depth = a[CHANNELS], a[DEPTH]
    heads, width, skips = a[HEADS], a[HEAD_DIM], f32_at(a[SKIP])
    max_rows = max(1, STATE_FLOATS_AT_ONCE // depth)
    while True:
        head, first, rows = next_rows(counter, heads, width, max_rows)
        if head < 0:
            return
        state = begin_rows(a, head * width + first, rows, depth)
        group_offset = (heads * width + head * a[GROUPS] // heads * depth) * 4
        for t in range(a[TOKENS]):
            row, gates = a[MIXED] + 4 * t * channels, f32_at(a[GATES] + 8 * t * heads)
            x, b = f32_at(row + 4 * (head * width + first)), f32_at(row + group_offset)
            c = f32_at(row + group_offset + 4 * a[GROUPS] * depth)
            out, decay, step = f32_at(a[OUT] + 4 * (t * heads * width + head * width + first)), gates[head], gates[heads + head]
            for j in range(rows):
                out[j] = write_and_read(f32_at(state + 4 * j * depth), b, c, depth, decay, step * x[j]) + skips[head] * x[j]
            keep_rows(a, t, state, head * width + first, rows, depth)


@kernel({"contract"})
def gated_norm(args, worker, counter):
    """OUT = norm(OUT * silu(Z)), group by group, where there is a norm. Blocks are tokens."""
    a = i64_at(args)
    values, groups, eps, factor = a[HEADS] * a[HEAD_DIM], a[GROUPS], float32(f64_at(args)[EPS]), float32(f64_at(args)[GATE_FACTOR])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        y, z = f32_at(a[OUT] + 4 * t * values), f32_at(a[Z] + 4 * t * values)
        for i in range(values):
            y[i] *= activate(z[i] * factor, SILU)
        for group in range(groups if a[NORM] != 0 else 0):
            at = 4 * group * (values // groups)
            normalise_here(a[OUT] + 4 * t * values + at, values // groups, NORM_RMS, a[NORM] + at, 0, eps)
