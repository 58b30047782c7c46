"""Kernels of hyper-connections: a branch's input from a token's streams, and the streams after it (`reference_hyper_connections.py`).

Blocks are tokens, and a token's sums are added in a fixed order, so results depend on neither threads nor other tokens.
"""

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..lazy_numba import inlined
from .arithmetic import ZERO, exp, sigmoid
from .intrinsics import f32_at, f64_at, fetch_add, i64_at

# Slots. X [TOKENS, COUNT * WIDTH]; OWN [TOKENS, WIDTH], what a branch reads, or of `mix_streams` what it gave; SAID [TOKENS, COUNT * (2 +
# COUNT)], of which `gather_streams` makes numbers in place; with LEAVE only COUNT of them. SCALE, BASE, LEAST (a float64) and ROUNDS as in
# `reference_hyper_connections.py`; without ROUNDS streams are not mixed, and SAID has 2 * COUNT. SCRATCH of a worker, STRIDE bytes apart:
# BLOCK channels of all streams.
X, OWN, TOKENS, COUNT, WIDTH, SAID, SCALE, BASE, ROUNDS, LEAVE, LEAST, SCRATCH, STRIDE, SLOTS = range(14)
TWO = float32(2.0)
BLOCK = 64  # channels whose streams are mixed at once: the old ones are still needed


@inlined()
def _balanced(m, count, rounds, least):
    """Sinkhorn iterations on M [COUNT, COUNT], given as logarithms, towards row and column sums of 1."""
    for i in range(count):
        most, total = m[i * count], ZERO
        for j in range(1, count):
            most = max(most, m[i * count + j])
        for j in range(count):
            m[i * count + j] = exp(m[i * count + j] - most)
            total += m[i * count + j]
        for j in range(count):
            m[i * count + j] = m[i * count + j] / total + least
    for turn in range(2 * rounds - 1):  # columns, then rows and columns again
        of, along = (count, 1) if turn % 2 else (1, count)
        for i in range(count):
            total = ZERO
            for j in range(count):
                total += m[i * of + j * along]
            total += least
            for j in range(count):
                m[i * of + j * along] /= total


@kernel({"contract"})
def gather_streams(args, worker, counter):
    """OWN from X, and each token's mixing logits in SAID."""
    a = i64_at(args)
    count, width, least = a[COUNT], a[WIDTH], float32(f64_at(args)[LEAST])
    kept = a[ROUNDS] == 0
    numbers = count if a[LEAVE] else 2 * count if kept else count * (2 + count)
    most = least if kept else ZERO  # what is added to what a stream has of a branch
    scale, base = f32_at(a[SCALE]), f32_at(a[BASE])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        said, out = f32_at(a[SAID] + 4 * t * numbers), f32_at(a[OWN] + 4 * t * width)
        for i in range(numbers):
            said[i] = said[i] * scale[min(i // count, 2)] + base[i]
        for i in range(min(numbers, 2 * count)):
            said[i] = sigmoid(said[i]) + least if i < count else TWO * sigmoid(said[i]) + most
        if a[LEAVE] == 0 and not kept:
            _balanced(f32_at(a[SAID] + 4 * (t * numbers + 2 * count)), count, a[ROUNDS], least)
        for i in range(width):
            out[i] = ZERO
        for s in range(count):
            x, share = f32_at(a[X] + 4 * (t * count + s) * width), said[s]
            for i in range(width):
                out[i] += share * x[i]


@kernel({"contract"})
def mix_streams(args, worker, counter):
    """X after a branch that gave OWN, by the weights in SAID."""
    a = i64_at(args)
    count, width = a[COUNT], a[WIDTH]
    numbers = 2 * count if a[ROUNDS] == 0 else count * (2 + count)
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        said = f32_at(a[SAID] + 4 * t * numbers)
        if a[ROUNDS] == 0:
            gave = f32_at(a[OWN] + 4 * t * width)
            for to in range(count):
                x, share = f32_at(a[X] + 4 * (t * count + to) * width), said[count + to]
                for i in range(width):
                    x[i] += share * gave[i]
            continue
        scratch = a[SCRATCH] + worker * a[STRIDE]
        for begin in range(0, width, BLOCK):
            here, gave = min(BLOCK, width - begin), f32_at(a[OWN] + 4 * (t * width + begin))
            for s in range(count):
                x, kept = f32_at(a[X] + 4 * ((t * count + s) * width + begin)), f32_at(scratch + 4 * s * BLOCK)
                for i in range(here):
                    kept[i] = x[i]
            for to in range(count):
                x, share = f32_at(a[X] + 4 * ((t * count + to) * width + begin)), said[count + to]
                for i in range(here):
                    x[i] = share * gave[i]
                for of in range(count):
                    kept, share = f32_at(scratch + 4 * of * BLOCK), said[2 * count + of * count + to]
                    for i in range(here):
                        x[i] += share * kept[i]
