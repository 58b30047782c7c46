"""Kernels of lightning attention: the activation, the recurrence head by head, and the output norm and gates.

State rows are distributed over threads as in `delta_loops.py`; results do not depend on threads or on how a prompt is split.
`reference_lightning.py` defines the computation, `lightning_shape.py` the slot layout.
"""

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..layout import NORM_RMS, SILU
from .arithmetic import ONE, activate, exp, normalise_here
from .conv_loops import CHANNELS, MIXED, OWN, TOKENS, X, keep_raw
from .delta_loops import write_and_read
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .recurrence_rows import begin_rows, keep_rows, next_rows

STATE_FLOATS_AT_ONCE = 4096  # floats of a state per block of work: 16 KiB, which stay in the L1 cache

# Slots after those of `conv_loops`. Z and OUT [TOKENS, heads * head dim], DECAY [heads], NORM [heads * head dim], EPS (float64). Decays do
# not depend on the token, so GATES is unused.
Z, GATES, OUT, DECAY, NORM, EPS, HEADS, HEAD_DIM, SLOTS = range(OWN, OWN + 9)


@kernel()
def mix_inputs(args, worker, counter):
    """MIXED = silu(X). Blocks are tokens."""
    a = i64_at(args)
    channels = a[CHANNELS]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        x, y = f32_at(a[X] + 4 * t * channels), f32_at(a[MIXED] + 4 * t * channels)
        for i in range(channels):
            y[i] = activate(x[i], SILU)
        keep_raw(a, t)


@kernel({"contract"})
def recur(args, worker, counter):
    """Blocks are some rows of a head's state."""
    a = i64_at(args)
    channels, heads, width, decays = a[CHANNELS], a[HEADS], a[HEAD_DIM], f32_at(a[DECAY])
    max_rows = max(1, STATE_FLOATS_AT_ONCE // width)
    while True:
        head, first, rows = next_rows(counter, heads, width, max_rows)
        if head < 0:
            return
        state = begin_rows(a, head * width + first, rows, width)
        for t in range(a[TOKENS]):
            row = a[MIXED] + 4 * (t * channels + head * width)
            v, k, q = f32_at(row + 4 * first), f32_at(row + 4 * heads * width), f32_at(row + 8 * heads * width)
            out = f32_at(a[OUT] + 4 * (t * heads * width + head * width + first))
            for j in range(rows):
                out[j] = write_and_read(f32_at(state + 4 * j * width), k, q, width, decays[head], v[j])
            keep_rows(a, t, state, head * width + first, rows, width)


@kernel({"contract"})
def normed_gates(args, worker, counter):
    """OUT = norm(OUT) * sigmoid(Z), over all heads together. Blocks are tokens."""
    a = i64_at(args)
    values, eps = a[HEADS] * a[HEAD_DIM], float32(f64_at(args)[EPS])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        at = 4 * t * values
        normalise_here(a[OUT] + at, values, NORM_RMS, a[NORM], 0, eps)
        y, z = f32_at(a[OUT] + at), f32_at(a[Z] + at)
        for i in range(values):
            y[i] *= ONE / (ONE + exp(-z[i]))
