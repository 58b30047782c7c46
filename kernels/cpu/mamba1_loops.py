"""Kernels of a Mamba layer: the convolution; then, after further projections of its output, steps, the recurrence channel by channel, and
gates.

Channels are independent and distributed over threads; results do not depend on threads or on how a prompt is split. Every state value
decays by its own factor, so the recurrence computes one exponential per state value and token. `reference_mamba1.py` defines the
computation, `mamba1_shape.py` the slot layout.
"""

from __future__ import annotations

from numpy import float32

from ..compile import REASSOCIATE, kernel
from ..layout import NORM_RMS, SILU
from ..lazy_numba import inlined
from .arithmetic import ZERO, activate, exp, normalise_here, softplus
from .conv_loops import CHANNELS, MIXED, OWN, TOKENS, convolve, copy, keep_raw, next_token
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .recurrence_rows import begin_rows, keep_rows, next_rows

STATE_FLOATS_AT_ONCE = 4096  # floats of a state per block of work: 16 KiB, which stay in the L1 cache
GATED = 1024  # channels of a token per block of work of the gates

# Slots after those of `conv_loops`. Z, STEPS and OUT [TOKENS, CHANNELS], KEYS [TOKENS, 2, DEPTH], GATES [TOKENS, CHANNELS + 2 * DEPTH],
# DECAY [CHANNELS, DEPTH], DT and SKIP [CHANNELS], B_NORM and C_NORM [DEPTH] (0: none). EPS is a float64.
Z, STEPS, KEYS, GATES, OUT, DECAY, DT, SKIP, B_NORM, C_NORM, EPS, DEPTH, SLOTS = range(OWN, OWN + 13)


@kernel()
def mix_inputs(args, worker, counter):
    """Blocks are tokens, and one that stores the last inputs."""
    a = i64_at(args)
    t = next_token(a, counter)
    while t >= 0:
        convolve(a, t)
        keep_raw(a, t)
        t = next_token(a, counter)


@kernel()
def make_gates(args, worker, counter):
    """Steps, B and C of every token. Blocks are tokens."""
    a, eps = i64_at(args), float32(f64_at(args)[EPS])
    channels, depth = a[CHANNELS], a[DEPTH]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        row = a[GATES] + 4 * t * (channels + 2 * depth)
        raw, dt, out = f32_at(a[STEPS] + 4 * t * channels), f32_at(a[DT]), f32_at(row)
        for channel in range(channels):
            out[channel] = softplus(raw[channel] + dt[channel])
        copy(a[KEYS] + 8 * t * depth, row + 4 * channels, 2 * depth)
        if a[B_NORM] != 0:
            normalise_here(row + 4 * channels, depth, NORM_RMS, a[B_NORM], 0, eps)
            normalise_here(row + 4 * (channels + depth), depth, NORM_RMS, a[C_NORM], 0, eps)


@inlined(REASSOCIATE)
def _written_and_read(s, decay, b, c, count, step, value):
    """s = exp(-decay * step) * s + step * value * b; returns s . c."""
    total, written = ZERO, step * value
    for i in range(count):
        updated = exp(-decay[i] * step) * s[i] + written * b[i]
        s[i] = updated
        total += updated * c[i]
    return total


@kernel({"contract"})
def recur(args, worker, counter):
    """Blocks are some channels' states."""
    a = i64_at(args)
    channels, depth, skips = a[CHANNELS], a[DEPTH], f32_at(a[SKIP])
    while True:
        head, first, count = next_rows(counter, 1, channels, max(1, STATE_FLOATS_AT_ONCE // depth))
        if head < 0:
            return
        state = begin_rows(a, first, count, depth)
        for t in range(a[TOKENS]):
            row = a[GATES] + 4 * t * (channels + 2 * depth)
            b, c = f32_at(row + 4 * channels), f32_at(row + 4 * (channels + depth))
            x, steps, out = f32_at(a[MIXED] + 4 * t * channels), f32_at(row), f32_at(a[OUT] + 4 * t * channels)
            for j in range(count):
                channel = first + j
                decay, s = f32_at(a[DECAY] + 4 * channel * depth), f32_at(state + 4 * j * depth)
                read = _written_and_read(s, decay, b, c, depth, steps[channel], x[channel])
                out[channel] = read + skips[channel] * x[channel]
            keep_rows(a, t, state, first, count, depth)


@kernel()
def gate(args, worker, counter):
    """OUT *= silu(Z). Blocks are some channels of a token."""
    a = i64_at(args)
    channels = a[CHANNELS]
    parts = (channels + GATED - 1) // GATED
    while True:
        block = fetch_add(counter, 1)
        if block >= a[TOKENS] * parts:
            return
        first = block % parts * GATED
        at = 4 * (block // parts * channels + first)
        y, z = f32_at(a[OUT] + at), f32_at(a[Z] + at)
        for i in range(min(GATED, channels - first)):
            y[i] *= activate(z[i], SILU)
