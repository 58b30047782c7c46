"""Kernels for compressed keys (`compressed_shape.py`): accumulating tokens, completing keys, and rotary embedding of the last channels of a
head.

A key accumulates its tokens one after the other whatever the pass, starting from the state or from empty, so results depend neither on
threads nor on how a prompt is split. Keys are distributed over threads; overlapping ones reread the tokens of the previous key.
"""

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..layout import F32, NORM_RMS, PAGE
from ..lazy_numba import inlined
from ..state_shape import AFTER, FROM, KEPT, TO
from .arithmetic import MINUS_INF, ZERO, exp, narrow_half, normalise_here
from .intrinsics import f32_at, f64_at, fetch_add, i64_at, u16_at

# Slots. TOKENS from POSITION on, RATE per key, PARTS rows per token. Two series of arguments, for keys and, from SERIES slots on, for index
# keys (width 0: none), each with ROWS and WEIGHTS [TOKENS, PARTS * WIDTH], BIAS [RATE, PARTS * WIDTH], NORM [WIDTH] and KEYS, the storage
# of complete keys. MEMORY: states of SLOT bytes; CONTROL: the slots of the pass. COS and SIN [keys, NUM_ROTARY / 2]: angles of keys that
# may become complete. RECENT: the log of rows and weights of few tokens, after POSITION and TOKENS; 0: none. STATES: update only the
# states.
(ROWS, WEIGHTS, BIAS, WIDTH, NORM, KEYS, SERIES) = range(7)
(TOKENS, POSITION, RATE, PARTS, MEMORY, SLOT, CONTROL, COS, SIN, NUM_ROTARY, DTYPE, RECENT, STATES, SCRATCH, STRIDE, EPS,
 SLOTS) = range(2 * SERIES, 2 * SERIES + 17)
# Slots of `turn_tails`: Y [TOKENS, HEADS * DEPTH], in place; the last NUM_ROTARY channels of each head are rotated by COS and SIN [TOKENS,
# NUM_ROTARY / 2], backwards with BACK.
HEAD = 4  # floats of RECENT before rows and weights
T_Y, T_TOKENS, T_HEADS, T_DEPTH, T_TURNED, T_COS, T_SIN, T_BACK, T_SLOTS = range(9)


@inlined({"contract"})
def _rotate_tail(row, cos, sin, pairs, sign):
    """Rotate adjacent pairs in place."""
    y, c, s = f32_at(row), f32_at(cos), f32_at(sin)
    for i in range(pairs):
        low, high, signed_sin = y[2 * i], y[2 * i + 1], s[i] * sign
        y[2 * i] = low * c[i] - high * signed_sin
        y[2 * i + 1] = high * c[i] + low * signed_sin


@kernel()
def turn_tails(args, worker, counter):
    """Rotary embedding of the last channels of heads. Blocks are tokens."""
    a = i64_at(args)
    heads, depth, num_rotary = a[T_HEADS], a[T_DEPTH], a[T_TURNED]
    sign = float32(-1.0) if a[T_BACK] else float32(1.0)
    while True:
        t = fetch_add(counter, 1)
        if t >= a[T_TOKENS]:
            return
        at = 2 * t * num_rotary
        for head in range(heads):
            _rotate_tail(a[T_Y] + 4 * ((t * heads + head + 1) * depth - num_rotary), a[T_COS] + at, a[T_SIN] + at, num_rotary // 2, sign)


@inlined({"contract"})
def _take_in(accumulator, row, weight, bias, width):
    """Add one more token to an accumulator (maximum, sum, weighted sum); all addresses."""
    maxima, total, weighed = f32_at(accumulator), f32_at(accumulator + 4 * width), f32_at(accumulator + 8 * width)
    x, w, b = f32_at(row), f32_at(weight), f32_at(bias)
    for i in range(width):
        logit = w[i] + b[i]
        before = maxima[i] if total[i] > ZERO else MINUS_INF
        top = max(before, logit)
        old_factor, new_factor = exp(before - top), exp(logit - top)
        total[i] = total[i] * old_factor + new_factor
        weighed[i] = weighed[i] * old_factor + new_factor * x[i]
        maxima[i] = top


@inlined()
def _begin(a, width, at, accumulator):
    """Load the accumulator at `at` bytes into the state the pass began with; empty if that is below 0, or at the start of the text."""
    y, source = f32_at(accumulator), i64_at(a[CONTROL])[FROM]
    if at < 0 or source < 0:
        for i in range(3 * width):
            y[i] = ZERO
    else:
        x = f32_at(a[MEMORY] + source * a[SLOT] + at)
        for i in range(3 * width):
            y[i] = x[i]


@inlined()
def _token(a, series, position, part, accumulator):
    """Add the token at `position` to an accumulator, using its row `part`."""
    width, parts = a[series + WIDTH], a[PARTS]
    row, bias = ((position - a[POSITION]) * parts + part) * width, (position % a[RATE] * parts + part) * width
    _take_in(accumulator, a[series + ROWS] + 4 * row, a[series + WEIGHTS] + 4 * row, a[series + BIAS] + 4 * bias, width)


@inlined()
def _in_progress(a, series, base, key, end, accumulator):
    """Accumulate key number `key` over the tokens before `end`."""
    begin, rate, width = a[POSITION], a[RATE], a[series + WIDTH]
    first = begin // rate
    if key == first:
        _begin(a, width, base, accumulator)
    else:
        _begin(a, width, base + 12 * width if a[PARTS] == 2 and key - 1 == first else -1, accumulator)
        for position in range(max((key - 1) * rate, begin), key * rate if a[PARTS] == 2 else 0):
            _token(a, series, position, 0, accumulator)
    for position in range(max(key * rate, begin), min((key + 1) * rate, end)):
        _token(a, series, position, a[PARTS] - 1, accumulator)


@inlined()
def _keep_state(a, slot, end, base, series):
    """Store the state after the tokens before `end`."""
    width, rate = a[series + WIDTH], a[RATE]
    key, at = end // rate, a[MEMORY] + slot * a[SLOT] + base
    _in_progress(a, series, base, key, end, at)
    if a[PARTS] == 2:
        _begin(a, width, base + 12 * width if key == a[POSITION] // rate else -1, at + 12 * width)
        for position in range(max(key * rate, a[POSITION]), end):
            _token(a, series, position, 0, at + 12 * width)


@inlined()
def _close(a, series, base, key, accumulator, num_rotary, eps):
    """Key number `key` in its final form."""
    width = a[series + WIDTH]
    _in_progress(a, series, base, key, (key + 1) * a[RATE], accumulator)
    total, weighted = f32_at(accumulator + 4 * width), f32_at(accumulator + 8 * width)
    for i in range(width):
        weighted[i] = weighted[i] / total[i]
    normalise_here(accumulator + 8 * width, width, NORM_RMS, a[series + NORM], 0, eps)
    at = 2 * (key - a[POSITION] // a[RATE]) * num_rotary
    _rotate_tail(accumulator + 8 * width + 4 * (width - num_rotary), a[COS] + at, a[SIN] + at, num_rotary // 2, float32(1.0))
    item, step = 4 if a[DTYPE] == F32 else 2, 1
    where = a[series + KEYS] + key * width * item
    if series > 0:  # index keys are stored channel-major
        where, step = a[series + KEYS] + key // PAGE * PAGE * width * item + key % PAGE * item, PAGE
    if item == 4:
        wide = f32_at(where)
        for i in range(width):
            wide[i * step] = weighted[i]
    else:
        narrow = u16_at(where)
        for i in range(width):
            narrow[i * step] = narrow_half(weighted[i])


@inlined()
def _keep_recent(a):
    """Log rows and logits of a pass of few tokens, its start, and its number of tokens."""
    i64_at(a[RECENT])[0], i64_at(a[RECENT])[1] = a[POSITION], a[TOKENS]
    at = a[RECENT] + 4 * HEAD
    for series in range(0, 2 * SERIES, SERIES):
        numbers = a[TOKENS] * a[PARTS] * a[series + WIDTH]
        for part in range(2):
            x, y = f32_at(a[series + ROWS + part]), f32_at(at)
            for i in range(numbers):
                y[i] = x[i]
            at += 4 * numbers


@kernel()
def compress(args, worker, counter):
    """Accumulate tokens into keys, and store the states after them. Blocks of work: the states, then each key that completes."""
    a = i64_at(args)
    eps, num_rotary, rate, begin = float32(f64_at(args)[EPS]), a[NUM_ROTARY], a[RATE], a[POSITION]
    end, first = begin + a[TOKENS], begin // rate
    accumulator, control = a[SCRATCH] + worker * a[STRIDE], i64_at(a[CONTROL])
    second = 12 * a[PARTS] * a[WIDTH]  # offset of the index keys' accumulators in a state
    while True:
        job = fetch_add(counter, 1)
        if job == 0:
            if a[RECENT] != 0:
                _keep_recent(a)
            for series in range(0, 2 * SERIES if a[SERIES + WIDTH] > 0 else 1, SERIES):
                _keep_state(a, control[TO], end, second if series > 0 else 0, series)
                if control[AFTER] > 0:
                    _keep_state(a, control[KEPT], begin + control[AFTER], second if series > 0 else 0, series)
            continue
        key = first + job - 1
        if (key + 1) * rate > end or a[STATES]:
            return
        _close(a, 0, 0, key, accumulator, num_rotary, eps)
        if a[SERIES + WIDTH] > 0:
            _close(a, SERIES, second, key, accumulator, num_rotary, eps)


def scratch_floats(width: int) -> int:
    """Floats of scratch per worker."""
    return 3 * width
