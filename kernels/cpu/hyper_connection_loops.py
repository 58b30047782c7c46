"""Kernels of hyper-connections: a branch's input from a token's streams, and the streams after it (`reference_hyper_connections.py`).

Blocks are tokens, and a token's sums are added in a fixed order, so results depend on neither threads nor other tokens.
"""

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..lazy_numba import inlined
from .arithmetic import ZERO, exp, sigmoid
from .intrinsics import f32_at, f64_at, fetch_add, i64_at

# Slots. X [TOKENS, COUNT * WIDTH]: the streams. BRANCH [TOKENS, WIDTH]: a branch's input or, for `mix_streams`, output. MIX_LOGITS [TOKENS,
# COUNT * (2 + COUNT)], which `gather_streams` turns into weights in place; [TOKENS, COUNT] with FINAL; [TOKENS, 2 * COUNT] without ROUNDS,
# when streams are not mixed. SCALE, BASE, EPSILON (float64) and ROUNDS as in `reference_hyper_connections.py`. SCRATCH of a worker, STRIDE
# bytes apart: BLOCK channels of all streams.
X, BRANCH, TOKENS, COUNT, WIDTH, MIX_LOGITS, SCALE, BASE, ROUNDS, FINAL, EPSILON, SCRATCH, STRIDE, SLOTS = range(14)
TWO = float32(2.0)
BLOCK = 64  # channels mixed at once; the old values of all streams are needed for each


@inlined()
def _balanced(m, count, rounds, epsilon):
    """Sinkhorn iterations on M [COUNT, COUNT], given as logarithms, towards row and column sums of 1."""
    for i in range(count):
        maximum, total = m[i * count], ZERO
        for j in range(1, count):
            maximum = max(maximum, m[i * count + j])
        for j in range(count):
            m[i * count + j] = exp(m[i * count + j] - maximum)
            total += m[i * count + j]
        for j in range(count):
            m[i * count + j] = m[i * count + j] / total + epsilon
    for iteration in range(2 * rounds - 1):  # columns, then alternately rows and columns
        of, along = (count, 1) if iteration % 2 else (1, count)
        for i in range(count):
            total = ZERO
            for j in range(count):
                total += m[i * of + j * along]
            total += epsilon
            for j in range(count):
                m[i * of + j * along] /= total


@kernel({"contract"})
def gather_streams(args, worker, counter):
    """BRANCH from X, and each token's mixing logits in MIX_LOGITS."""
    a = i64_at(args)
    count, width, epsilon = a[COUNT], a[WIDTH], float32(f64_at(args)[EPSILON])
    unmixed = a[ROUNDS] == 0
    numbers = count if a[FINAL] else 2 * count if unmixed else count * (2 + count)
    write_epsilon = epsilon if unmixed else ZERO  # added to write weights
    scale, base = f32_at(a[SCALE]), f32_at(a[BASE])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        logits, out = f32_at(a[MIX_LOGITS] + 4 * t * numbers), f32_at(a[BRANCH] + 4 * t * width)
        for i in range(numbers):
            logits[i] = logits[i] * scale[min(i // count, 2)] + base[i]
        for i in range(min(numbers, 2 * count)):
            logits[i] = sigmoid(logits[i]) + epsilon if i < count else TWO * sigmoid(logits[i]) + write_epsilon
        if a[FINAL] == 0 and not unmixed:
            _balanced(f32_at(a[MIX_LOGITS] + 4 * (t * numbers + 2 * count)), count, a[ROUNDS], epsilon)
        for i in range(width):
            out[i] = ZERO
        for s in range(count):
            x, share = f32_at(a[X] + 4 * (t * count + s) * width), logits[s]
            for i in range(width):
                out[i] += share * x[i]


@kernel({"contract"})
def mix_streams(args, worker, counter):
    """X after a branch that gave BRANCH, by the weights in MIX_LOGITS."""
    a = i64_at(args)
    count, width = a[COUNT], a[WIDTH]
    numbers = 2 * count if a[ROUNDS] == 0 else count * (2 + count)
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        logits = f32_at(a[MIX_LOGITS] + 4 * t * numbers)
        if a[ROUNDS] == 0:
            branch = f32_at(a[BRANCH] + 4 * t * width)
            for to in range(count):
                x, share = f32_at(a[X] + 4 * (t * count + to) * width), logits[count + to]
                for i in range(width):
                    x[i] += share * branch[i]
            continue
        scratch = a[SCRATCH] + worker * a[STRIDE]
        for begin in range(0, width, BLOCK):
            block_width, branch = min(BLOCK, width - begin), f32_at(a[BRANCH] + 4 * (t * width + begin))
            for s in range(count):
                x, mixed = f32_at(a[X] + 4 * ((t * count + s) * width + begin)), f32_at(scratch + 4 * s * BLOCK)
                for i in range(block_width):
                    mixed[i] = x[i]
            for to in range(count):
                x, share = f32_at(a[X] + 4 * ((t * count + to) * width + begin)), logits[count + to]
                for i in range(block_width):
                    x[i] = share * branch[i]
                for of in range(count):
                    mixed, share = f32_at(scratch + 4 * of * BLOCK), logits[2 * count + of * count + to]
                    for i in range(block_width):
                        x[i] += share * mixed[i]
