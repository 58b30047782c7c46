"""The causal depthwise convolution of recurrent layers, and storing the last inputs of a pass.

Every token is convolved on its own, tap by tap in a fixed order, so results depend neither on threads nor on how a prompt is split.
"""

from __future__ import annotations

from ..layout import SILU
from ..lazy_numba import inlined
from ..state_shape import AFTER, FROM, KEPT, TO
from .arithmetic import ZERO, activate
from .intrinsics import f32_at, fetch_add, i64_at

# First slots of the argument blocks of recurrent layers' kernels; those of a kind begin at OWN. X, MIXED (results) and RAW (a copy of X, 0:
# none) [TOKENS, CHANNELS], CONV [TAPS, CHANNELS], BIAS [CHANNELS] (0: none). MEMORY: slots of SLOT bytes, with the state from STATE on;
# CONTROL: the slots of the pass.
X, TOKENS, MIXED, RAW, CONV, BIAS, MEMORY, SLOT, STATE, CONTROL, TAPS, CHANNELS, OWN = range(13)


@inlined()
def copy(source, target, count):
    """`count` float32; zeros if source is 0."""
    y = f32_at(target)
    if source == 0:
        for i in range(count):
            y[i] = ZERO
    else:
        x = f32_at(source)
        for i in range(count):
            y[i] = x[i]


@inlined()
def input_of(a, row):
    """Address of the inputs of token `row`; negative rows precede the pass; 0 before the text began."""
    if row >= 0:
        return a[X] + 4 * row * a[CHANNELS]
    source = i64_at(a[CONTROL])[FROM]
    return 0 if source < 0 else a[MEMORY] + source * a[SLOT] + 4 * (a[TAPS] - 1 + row) * a[CHANNELS]


@inlined()
def keep_inputs(a, slot, tokens):
    """Store the last inputs of the first `tokens` in a slot."""
    channels, before = a[CHANNELS], a[TAPS] - 1
    for i in range(before):
        copy(input_of(a, tokens - before + i), a[MEMORY] + slot * a[SLOT] + 4 * i * channels, channels)


@inlined()
def next_token(a, counter):
    """The next token to mix, -1 if none is left. The worker that takes the block after the last token first stores the last inputs."""
    t = fetch_add(counter, 1)
    if t == a[TOKENS]:
        control = i64_at(a[CONTROL])
        keep_inputs(a, control[TO], t)
        if control[AFTER] > 0:
            keep_inputs(a, control[KEPT], control[AFTER])
    return t if t < a[TOKENS] else -1


@inlined()
def keep_raw(a, t):
    """Log the inputs of token t, if requested."""
    if a[RAW] != 0:
        copy(a[X] + 4 * t * a[CHANNELS], a[RAW] + 4 * t * a[CHANNELS], a[CHANNELS])


@inlined({"contract"})
def add_tap(y, weight, x, count):
    """y += weight * x; all addresses."""
    sums, w, values = f32_at(y), f32_at(weight), f32_at(x)
    for i in range(count):
        sums[i] += w[i] * values[i]


@inlined()
def convolve(a, t):
    """MIXED of token t: SiLU of its convolution; returns its address."""
    channels, taps = a[CHANNELS], a[TAPS]
    out = a[MIXED] + 4 * t * channels
    copy(a[BIAS], out, channels)
    for tap in range(taps):
        source = input_of(a, t - (taps - 1) + tap)
        if source != 0:
            add_tap(out, a[CONV] + 4 * tap * channels, source, channels)
    y = f32_at(out)
    for i in range(channels):
        y[i] = activate(y[i], SILU)
    return out
