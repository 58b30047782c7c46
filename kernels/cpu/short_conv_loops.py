"""The kernel of a gated short convolution over a token and the few before it.

The product of a gate and its input is recomputed for every tap, always with the same rounding, so that tokens are independent: results
depend neither on threads nor on how a prompt is split. `reference_conv.py` defines the computation.
"""

from __future__ import annotations

from ..compile import kernel
from ..lazy_numba import inlined
from ..state_shape import AFTER, KEPT, TO
from .conv_loops import CHANNELS, CONTROL, CONV, MEMORY, OWN, RAW, SLOT, TAPS, TOKENS, X, add_tap, copy, input_of
from .intrinsics import f32_at, fetch_add, i64_at

# Slots after those of `conv_loops`, of which X is [TOKENS, 3, CHANNELS]: input gates, output gates, values to convolve. OUT and RAW
# [TOKENS, CHANNELS]; MIXED is unused.
OUT, SLOTS = range(OWN, OWN + 2)


@inlined()
def _gated(a, row, target):
    """The convolution's input for token `row`."""
    b, y = f32_at(a[X] + 12 * row * a[CHANNELS]), f32_at(target)
    x = f32_at(a[X] + (12 * row + 8) * a[CHANNELS])
    for i in range(a[CHANNELS]):
        y[i] = b[i] * x[i]


@inlined({"contract"})
def _add_gated_tap(y, weight, gate, x, count):
    """y += weight * (gate * x); all addresses."""
    sums, w, b, values = f32_at(y), f32_at(weight), f32_at(gate), f32_at(x)
    for i in range(count):
        sums[i] += w[i] * (b[i] * values[i])


@inlined()
def _keep(a, slot, tokens):
    """Store the last inputs of the first `tokens` in a slot."""
    before = a[TAPS] - 1
    for i in range(before):
        row, target = tokens - before + i, a[MEMORY] + slot * a[SLOT] + 4 * i * a[CHANNELS]
        if row >= 0:
            _gated(a, row, target)
        else:
            copy(input_of(a, row), target, a[CHANNELS])


@kernel()
def mix(args, worker, counter):
    """Blocks are tokens, and one that stores the last inputs."""
    a = i64_at(args)
    control, channels, taps = i64_at(a[CONTROL]), a[CHANNELS], a[TAPS]
    while True:
        t = fetch_add(counter, 1)
        if t > a[TOKENS]:
            return
        if t == a[TOKENS]:
            _keep(a, control[TO], t)
            if control[AFTER] > 0:
                _keep(a, control[KEPT], control[AFTER])
            continue
        out = a[OUT] + 4 * t * channels
        copy(0, out, channels)
        for tap in range(taps):
            row, weight = t - (taps - 1) + tap, a[CONV] + 4 * tap * channels
            if row >= 0:
                _add_gated_tap(out, weight, a[X] + 12 * row * channels, a[X] + (12 * row + 8) * channels, channels)
                continue
            source = input_of(a, row)
            if source != 0:
                add_tap(out, weight, source, channels)
        y, c = f32_at(out), f32_at(a[X] + (12 * t + 4) * channels)
        for i in range(channels):
            y[i] *= c[i]
        if a[RAW] != 0:
            _gated(a, t, a[RAW] + 4 * t * channels)
