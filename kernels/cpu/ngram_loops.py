"""Kernels of n-gram embeddings: values gated into a token's streams, and a dilated convolution over tokens (`reference_ngrams.py`).

Blocks are tokens, each processed on its own and tap by tap in a fixed order, so results depend neither on threads nor on how a prompt is
split.
"""

from __future__ import annotations

import numpy as np
from numpy import float32

from ..compile import REASSOCIATE, kernel
from ..layout import NORM_RMS_PLUS_ONE, SILU
from ..lazy_numba import inlined
from ..reference_ngrams import MIN_MATCH
from .arithmetic import ONE, ZERO, activate, normalise_here, sigmoid, squares_of
from .conv_loops import CHANNELS, CONV, MIXED, OWN, TAPS, TOKENS, X, add_tap, copy, input_of, keep_raw, next_token
from .intrinsics import f32_at, f64_at, fetch_add, i64_at

# Slots after those of `conv_loops`, of which X and MIXED are [TOKENS, COUNT * WIDTH]: the input of the convolution and its result. STREAMS
# and KEYS of the same size, VALUES [TOKENS, WIDTH], GATES [TOKENS, COUNT]; norm weights [COUNT * WIDTH] OF_STREAMS, OF_KEYS and OUTPUT_NORM
# with EPS (float64). STEP: dilation of the convolution.
STREAMS, KEYS, VALUES, GATES, OF_STREAMS, OF_KEYS, OUTPUT_NORM, COUNT, WIDTH, STEP, EPS, SLOTS = range(OWN, OWN + 12)
MIN_MATCH_F32 = float32(MIN_MATCH)


@inlined(REASSOCIATE)
def _match(x, y, weight_x, weight_y, count):
    total = ZERO
    for i in range(count):
        total += (x[i] * (ONE + weight_x[i])) * (y[i] * (ONE + weight_y[i]))
    return total


@inlined()
def _scale(x, count, eps):
    return ONE / np.sqrt(squares_of(x, count) / float32(count) + eps)


@inlined()
def _open(a, t, s, eps):
    """The gate of a token's stream."""
    width, at = a[WIDTH], 4 * (t * a[COUNT] + s) * a[WIDTH]
    x, y = f32_at(a[STREAMS] + at), f32_at(a[KEYS] + at)
    match = _match(x, y, f32_at(a[OF_STREAMS] + 4 * s * width), f32_at(a[OF_KEYS] + 4 * s * width), width)
    match = match * _scale(x, width, eps) * _scale(y, width, eps) / np.sqrt(float32(width))
    root = np.sqrt(max(abs(match), MIN_MATCH_F32))
    return sigmoid(root if match > ZERO else -root if match < ZERO else match)


@kernel()
def gate_values(args, worker, counter):
    """GATES and X."""
    a = i64_at(args)
    count, width, eps = a[COUNT], a[WIDTH], float32(f64_at(args)[EPS])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        values, gates = f32_at(a[VALUES] + 4 * t * width), f32_at(a[GATES] + 4 * t * count)
        for s in range(count):
            gate, out = _open(a, t, s, eps), a[X] + 4 * (t * count + s) * width
            gates[s] = gate
            y = f32_at(out)
            for i in range(width):
                y[i] = gate * values[i]
            normalise_here(out, width, NORM_RMS_PLUS_ONE, a[OUTPUT_NORM] + 4 * s * width, 0, eps)


@kernel()
def add_values(args, worker, counter):
    """Add the gated values and their convolution to STREAMS; then store the last inputs."""
    a = i64_at(args)
    channels, count, width, step = a[CHANNELS], a[COUNT], a[WIDTH], a[STEP]
    taps = (a[TAPS] - 1) // step + 1
    t = next_token(a, counter)
    while t >= 0:
        out = a[MIXED] + 4 * t * channels
        copy(0, out, channels)
        for tap in range(taps):
            source = input_of(a, t - (taps - 1 - tap) * step)
            if source != 0:
                add_tap(out, a[CONV] + 4 * tap * channels, source, channels)
        values, gates = f32_at(a[VALUES] + 4 * t * width), f32_at(a[GATES] + 4 * t * count)
        for s in range(count):
            stream, gated_values = f32_at(a[STREAMS] + 4 * (t * count + s) * width), f32_at(out + 4 * s * width)
            gate = gates[s]
            for i in range(width):
                stream[i] += gate * values[i] + activate(gated_values[i], SILU)
        keep_raw(a, t)
        t = next_token(a, counter)
