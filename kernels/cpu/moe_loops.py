"""Kernels for a mixture of experts: routing, gathering rows, many products as one job, and the weighted sum.

One argument block serves all but `each_product`. A visit is a (token, expert) pair, numbered as in `reference_moe.py`. The products
themselves are those of `linear.py`, `packed.py` and `lut.py`: for a few tokens `group_visits` writes an argument block for every visited
expert, and the other experts are not read.
"""

from __future__ import annotations

import numpy as np
from numpy import float32, float64, int64

from ..compile import kernel
from ..lazy_numba import inlined
from ..reference_moe import MIN_SUM
from .arithmetic import activate, exp, softplus
from .intrinsics import call_kernel, f32_at, f64_at, fetch_add, i64_at
from .linear import ACT, FIRST, OUT, TOKENS
from .linear import DEPTH as INPUT_DEPTH
from .linear import X as INPUT
from .packed_matrix import FIELDS
from .work_distribution import COUNTERS_NBYTES, clear_regions

# Slots. X: the residual stream [T, DEPTH]. int64 CHOSEN and VISIT_OF [T, TOP], OWNERS [T TOP] (the token of a visit), OFFSETS [EXPERTS +
# 1]. float32 LOGITS [T, EXPERTS], SHARES [T, TOP], ROWS [T TOP, DEPTH] (inputs of the visits, then their results), HIDDEN [T TOP, WIDTH].
# If the products are prepared here: GATED and DOWN, records of every expert (below); HEADS, the start of their argument blocks; LISTS for
# `each_product`, BLOCKS and COUNTERS.
# Routing: SIGMOID 0, 1, LOGIT_CORRECTION or ROOTS; CORRECTION float32 [EXPERTS] or 0, and INPUT_WEIGHTS, the bytes between those of two
# tokens; FACTOR (float64); KEPT_GROUPS of GROUPS; SCALES_OF float32 [EXPERTS], factors of shares, or 0; NEAR (float64) as in `Routing`,
# negative for none.
# SUM_OUT [T, DEPTH]: where results go instead of being added to X, or 0. WEIGHT of an RMS norm with EPS (float64): inputs of visits are
# normed and multiplied by shares, results are not; 0 if the products apply the norm. The first NUM_ROUTED of the EXPERTS have matrices; the
# others return their input after an RMS norm, HANDED with HANDED_EPS.
(X, COUNT, DEPTH, EXPERTS, TOP, RENORMALISE, LOGITS, CHOSEN, SHARES, OFFSETS, VISIT_OF, OWNERS, ROWS, HIDDEN, WIDTH, GATED, DOWN, HEADS,
 LISTS, BLOCKS, COUNTERS, SIGMOID, CORRECTION, FACTOR, GROUPS, KEPT_GROUPS, SCALES_OF, SUM_OUT, WEIGHT, EPS, NEAR, INPUT_WEIGHTS,
 NUM_ROUTED, HANDED,
 HANDED_EPS) = range(35)
SCALED, SCALED_ROWS, SCALED_WIDTH, SCALES = range(4)  # slots of `scale_rows`
# Records: the kernel's address, then the fields of its matrices; OUT is filled in by `group_visits`.
GATED_RECORD, DOWN_RECORD = 1 + 2 * FIELDS, 1 + FIELDS
BLOCK = FIRST + 2 * FIELDS  # int64 slots of an argument block
COUNTS = COUNTERS_NBYTES // 8  # int64 of a product's work counters
MIN_SUM_F32, MINUS_INF = float32(MIN_SUM), float32(-np.inf)
LOGIT_CORRECTION = 2  # value of SIGMOID: sigmoid scores, with a correction added to the logits
ROOTS = 3  # value of SIGMOID: square roots of softplus


@inlined()
def _choose(logit, experts, correction, chosen, top):
    """The `top` experts with the highest logits plus `correction`, in ascending order; ties go to the lower expert."""
    for j in range(top):
        best, highest = int64(-1), float32(0.0)
        for e in range(experts):
            logit_e = logit[e]
            if correction != 0:
                logit_e += f32_at(correction)[e]
            if best < 0 or logit_e > highest:
                free = True
                for i in range(j):
                    if chosen[i] == e:
                        free = False
                if free:
                    best, highest = e, logit_e
        at = j
        while at > 0 and chosen[at - 1] > best:
            chosen[at] = chosen[at - 1]
            at -= 1
        chosen[at] = best


@inlined()
def _share_scores(logit, scored, kind, renormalise, factor, chosen, share, top):
    """Expert weights from scores, or from a `kind` of logits that are not `scored` yet."""
    total = float32(0.0)
    for j in range(top):
        share[j] = logit[chosen[j]] if scored else _score(logit[chosen[j]], kind)
        total += share[j]
    total = max(total, MIN_SUM_F32)
    for j in range(top):
        share[j] = share[j] / total * factor if renormalise else share[j] * factor


@inlined()
def _share_softmax(logit, experts, renormalise, factor, chosen, share, top):
    """Expert weights from a softmax over those selected or, without `renormalise`, over all."""
    maximum = logit[chosen[0]]
    for j in range(1, top):
        maximum = max(maximum, logit[chosen[j]])
    total = float32(0.0)
    for j in range(top):
        share[j] = exp(logit[chosen[j]] - maximum)
        total += share[j]
    if not renormalise:
        total = float32(0.0)
        for e in range(experts):
            total += exp(logit[e] - maximum)
    for j in range(top):
        share[j] = share[j] / total * factor


@kernel()
def route_tokens(args, worker, counter):
    """CHOSEN (ascending) and SHARES from LOGITS; ties go to the lower expert. Blocks are tokens. With a CORRECTION of scores, or if only
    some GROUPS are kept, LOGITS become scores, -inf in the others."""
    a = i64_at(args)
    experts, top, factor = a[EXPERTS], a[TOP], float32(f64_at(args)[FACTOR])
    renormalise = a[RENORMALISE] != 0
    scored, near = a[CORRECTION] != 0 and a[SIGMOID] != LOGIT_CORRECTION or a[KEPT_GROUPS] < a[GROUPS], float32(f64_at(args)[NEAR])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[COUNT]:
            return
        correction = a[CORRECTION] + t * a[INPUT_WEIGHTS]
        logit, chosen, share = f32_at(a[LOGITS] + 4 * t * experts), i64_at(a[CHOSEN] + 8 * t * top), f32_at(a[SHARES] + 4 * t * top)
        if scored:  # otherwise logits decide, which differ where scores are saturated
            if a[SIGMOID] != 0:
                for e in range(experts):
                    logit[e] = _score(logit[e], a[SIGMOID])
            else:
                _softmax(logit, experts)
            _keep_groups(logit, experts // a[GROUPS], a[GROUPS], a[KEPT_GROUPS], correction)
        _choose(logit, experts, correction, chosen, top)
        if near >= float32(0.0):
            for j in range(top):
                share[j] = _near_share(logit, experts, chosen[j], near) * factor
        elif a[SIGMOID] != 0 or scored:
            _share_scores(logit, scored, a[SIGMOID], renormalise, factor, chosen, share, top)
        else:
            _share_softmax(logit, experts, renormalise, factor, chosen, share, top)
        _scale(a[SCALES_OF], share, chosen, top)


@inlined()
def _near_share(logit, experts, chosen, near):
    chosen_logit, total = logit[chosen], float32(0.0)
    for e in range(experts):
        other_logit = logit[e]
        if (other_logit < chosen_logit or other_logit == chosen_logit
            and e >= chosen) and chosen_logit - other_logit <= near * max(abs(other_logit), chosen_logit):
            total += exp(other_logit - chosen_logit)
    return float32(1.0) / total


@inlined()
def _scale(scales, share, chosen, top):
    if scales != 0:
        for j in range(top):
            share[j] *= f32_at(scales)[chosen[j]]


@inlined()
def _score(x, kind):
    return np.sqrt(softplus(x)) if kind == ROOTS else float32(1.0) / (float32(1.0) + exp(-x))


@inlined()
def _keep_groups(score, size, groups, num_kept, correction):
    """Scores of a token -> -inf in all but the `num_kept` best groups of `size` experts, ties going to the lower; `Routing` defines a
    group's score."""
    for _ in range(groups - num_kept):
        worst, lowest = int64(-1), float32(0.0)
        for group in range(groups):
            first, second = MINUS_INF, MINUS_INF
            for e in range(group * size, (group + 1) * size):
                expert_score = score[e]
                if correction != 0:
                    expert_score += f32_at(correction)[e]
                if expert_score > first:
                    first, second = expert_score, first
                elif expert_score > second:
                    second = expert_score
            if correction != 0:
                first += second
            if score[group * size] != MINUS_INF and (worst < 0 or first <= lowest):
                worst, lowest = group, first
        for e in range(max(worst, 0) * size, (worst + 1) * size):
            score[e] = MINUS_INF


@inlined()
def _softmax(logit, experts):
    """Softmax of a token's logits, in place."""
    maximum, total = logit[0], float32(0.0)
    for e in range(1, experts):
        maximum = max(maximum, logit[e])
    for e in range(experts):
        logit[e] = exp(logit[e] - maximum)
        total += logit[e]
    for e in range(experts):
        logit[e] /= total


@inlined()
def _prepare(a, which, expert, records, record, count, number, source, target):
    """Entry `number` of list `which` (0 gate and up, 1 down): the argument block of an expert's product over its visits."""
    max_experts = min(a[EXPERTS], a[COUNT] * a[TOP])
    block = a[BLOCKS] + 8 * BLOCK * (which * max_experts + number)
    to, head, fields = i64_at(block), i64_at(a[HEADS] + 8 * FIRST * which), i64_at(records + 8 * record * expert)
    for i in range(FIRST):
        to[i] = head[i]
    for i in range(record - 1):
        to[FIRST + i] = fields[1 + i]
    to[INPUT], to[TOKENS], to[FIRST + OUT] = source, count, target
    entry = i64_at(a[LISTS] + 8 * which * (1 + 3 * max_experts) + 8 * (1 + 3 * number))
    done = a[COUNTERS] + 8 * COUNTS * (which * max_experts + number)
    entry[0], entry[1], entry[2] = fields[0], block, done
    clear_regions(done)


@kernel()
def group_visits(args, worker, counter):
    """OFFSETS, VISIT_OF and OWNERS from CHOSEN, and with GATED the products of a few tokens. One block."""
    if fetch_add(counter, 1) > 0:
        return
    a = i64_at(args)
    experts, top, depth, width = a[EXPERTS], a[TOP], a[DEPTH], a[WIDTH]
    offsets, chosen, visit_of, owners = i64_at(a[OFFSETS]), i64_at(a[CHOSEN]), i64_at(a[VISIT_OF]), i64_at(a[OWNERS])
    for e in range(experts + 1):
        offsets[e] = 0
    for i in range(a[COUNT] * top):
        offsets[chosen[i] + 1] += 1
    for e in range(experts):
        offsets[e + 1] += offsets[e]
    for i in range(a[COUNT] * top):  # each offset has moved from the begin of its expert to that of the next
        visit = offsets[chosen[i]]
        offsets[chosen[i]] = visit + 1
        visit_of[i], owners[visit] = visit, i // top
    for e in range(experts, 0, -1):
        offsets[e] = offsets[e - 1]
    offsets[0] = 0
    if a[GATED] == 0:
        return
    number = 0
    for e in range(a[NUM_ROUTED]):
        begin, count = offsets[e], offsets[e + 1] - offsets[e]
        if count == 0:
            continue
        rows, hidden = a[ROWS] + 4 * begin * depth, a[HIDDEN] + 4 * begin * width
        source = a[X] if a[COUNT] == 1 and a[WEIGHT] == 0 else rows  # a single token is read in place
        _prepare(a, 0, e, a[GATED], GATED_RECORD, count, number, source, hidden)
        _prepare(a, 1, e, a[DOWN], DOWN_RECORD, count, number, hidden, rows)
        number += 1
    max_experts = min(experts, a[COUNT] * top)
    i64_at(a[LISTS])[0] = number
    i64_at(a[LISTS] + 8 * (1 + 3 * max_experts))[0] = number


@kernel()
def each_product(args, worker, counter):
    """A list of kernels run one after the other without a barrier in between: its length, then (kernel, argument block, own counter)."""
    a = i64_at(args)
    for i in range(a[0]):
        call_kernel(a[1 + 3 * i], a[2 + 3 * i], worker, a[3 + 3 * i])


@kernel()
def activate_inputs(args, worker, counter):
    """Activates in place the inputs of a product list (as for `each_product`), as their argument blocks say. Blocks are its entries."""
    a = i64_at(args)
    while True:
        i = fetch_add(counter, 1)
        if i >= a[0]:
            return
        block = i64_at(a[2 + 3 * i])
        values, act = f32_at(block[INPUT]), block[ACT]
        for j in range(block[TOKENS] * block[INPUT_DEPTH]):
            values[j] = activate(values[j], act)


@kernel()
def gather_rows(args, worker, counter):
    """ROWS of every visit from its token's row of X, or the output of an expert without matrices. Blocks are visits."""
    a = i64_at(args)
    depth, owners, top, num_routed = a[DEPTH], i64_at(a[OWNERS]), a[TOP], i64_at(a[OFFSETS])[a[NUM_ROUTED]]
    while True:
        visit = fetch_add(counter, 1)
        if visit >= a[COUNT] * a[TOP]:
            return
        source, out = f32_at(a[X] + 4 * owners[visit] * depth), f32_at(a[ROWS] + 4 * visit * depth)
        handed = visit >= num_routed
        if a[WEIGHT] == 0 and not handed:
            for i in range(depth):
                out[i] = source[i]
            continue
        total, share, weight = 0.0, float32(1.0) if handed else float32(0.0), f32_at(a[HANDED] if handed else a[WEIGHT])
        eps = f64_at(args)[HANDED_EPS] if handed else f64_at(args)[EPS]
        for i in range(depth):
            total += float64(source[i]) * float64(source[i])
        for j in range(owners[visit] * top, owners[visit] * top if handed else (owners[visit] + 1) * top):
            if i64_at(a[VISIT_OF])[j] == visit:
                share = f32_at(a[SHARES])[j]
        factor = float32(1.0 / np.sqrt(total / depth + eps)) * share
        for i in range(depth):
            out[i] = source[i] * factor * weight[i]


@kernel({"contract"})
def combine_visits(args, worker, counter):
    """X += weights times ROWS, or SUM_OUT = that, over a token's experts in ascending order. Blocks are tokens."""
    a = i64_at(args)
    depth, top, target = a[DEPTH], a[TOP], a[SUM_OUT] if a[SUM_OUT] != 0 else a[X]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[COUNT]:
            return
        out, visit_of, shares = f32_at(target + 4 * t * depth), i64_at(a[VISIT_OF] + 8 * t * top), f32_at(a[SHARES] + 4 * t * top)
        if a[SUM_OUT] != 0:
            for i in range(depth):
                out[i] = float32(0.0)
        for j in range(top):
            share, row = shares[j] if a[WEIGHT] == 0 else float32(1.0), f32_at(a[ROWS] + 4 * visit_of[j] * depth)
            for i in range(depth):
                out[i] += share * row[i]


@kernel()
def scale_rows(args, worker, counter):
    """SCALED [SCALED_ROWS, SCALED_WIDTH], row by row, times the sigmoid of SCALES [SCALED_ROWS]. Blocks are rows."""
    a = i64_at(args)
    width = a[SCALED_WIDTH]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[SCALED_ROWS]:
            return
        row, scale = f32_at(a[SCALED] + 4 * t * width), _score(f32_at(a[SCALES])[t], 1)
        for i in range(width):
            row[i] *= scale
