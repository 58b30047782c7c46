"""Sampling: penalties, filters, and the draw. Defined by `kernels/reference_sampling.py`.

Nothing is sorted. Top-k, top-p and typical all need the smallest key whose predecessors, itself included, reach a given mass. A radix walk
over the 32 bits of the key (11 + 11 + 10) finds it in three passes over a histogram. For top-k the walk first runs
over the maxima of blocks of 64 logits: the k-th largest of those is a lower bound of the k-th logit, so only a few blocks are examined. A
filter never separates equal keys: ties at the border stay, whatever their order.

Survivors are compacted, by ascending token id, in `ids` int32[V] and `weights` float32[V]; the weight of the largest logit is exactly 1 and
the sum is not normalized. `keys` uint32[V] and `mass` float64[2048] are scratch. Sums are float64, the exponential float32.
"""

from __future__ import annotations

import numpy as np
from numpy import float32, float64, int64, uint32, uint64

from ..compile import REASSOCIATE, jit
from ..lazy_numba import inlined
from .arithmetic import exp
from .intrinsics import bits_to_f32, f32_at, f32_to_bits, f64_at, i32_at, i64_at, u32_at

BINS = 2048
BLOCK = np.uint64(64)  # logits that share a precomputed maximum
STRIDE = 1024  # weights per partial sum of the draw
MAX_PENALTY = 1e30  # limit of a DRY penalty, so that the logit stays finite
MASKED_LOGIT = np.float32(-1e20)  # logits below belong to masked tokens
HAS_NAN, HAS_INFINITY, NONE_FINITE = -1, -2, -3
SIGN, MAGNITUDE, ALL, INFINITY_BITS = (np.uint32(bits) for bits in (0x80000000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000))
ONE, ZERO = np.uint64(1), np.float32(0.0)


@inlined()
def _descending(value):
    """float32 -> uint32 that is smaller for a larger value. Adding zero makes -0 equal to 0."""
    bits = f32_to_bits(value + ZERO)
    return bits if bits & SIGN else uint32(bits ^ MAGNITUDE)


@inlined()
def _value(key):
    """The float32 of a `_descending` key."""
    return bits_to_f32(key if key & SIGN else uint32(key ^ MAGNITUDE))


@inlined(REASSOCIATE)
def _sum(weights, start, stop):
    total = 0.0
    for i in range(start, stop):
        total += weights[i]
    return total


@inlined(REASSOCIATE)
def _moment(weights, bits, count):
    """Sum of weight x value, the values given as bits; a weight of 0 silences a value of -inf."""
    total = 0.0
    for i in range(count):
        total += weights[i] * bits_to_f32(bits[i]) if weights[i] > ZERO else 0.0
    return total


@inlined()
def _cut(keys, weights, count, target, unit, mass):
    """Smallest key c such that everything with key <= c weighs at least `target` (`unit`: weighs 1 each); else the largest key.

    Rounding may leave a finer histogram short of what the coarser one indicated: the last key with any weight is then used.
    """
    prefix, below = uint32(0), 0.0
    for level in range(3):
        shift = uint32(21) if level == 0 else uint32(10) if level == 1 else uint32(0)
        bins = 1024 if level == 2 else 2048
        mask = uint32(bins - 1)
        upper = uint32(10) if level == 2 else uint32(11)
        for b in range(bins):
            mass[b] = 0.0
        for i in range(count):
            bucket = uint32(keys[i] >> shift)
            if level == 0 or uint32(bucket >> upper) == prefix:
                mass[bucket & mask] += 1.0 if unit else weights[i]
        chosen = 0
        for b in range(bins):
            if mass[b] > 0.0:
                chosen = b
                if below + mass[b] >= target:
                    break
                below += mass[b]
        else:
            below -= mass[chosen]
        prefix = uint32(chosen) if level == 0 else uint32(uint32(prefix << upper) | uint32(chosen))
    return prefix


@inlined()
def _keep(ids, weights, keys, count, cut):
    """Drop everything beyond `cut`, in place and branch-free; returns how many stay."""
    kept = uint64(0)
    for i in range(count):
        token, weight, stays = ids[i], weights[i], keys[i] <= cut
        ids[kept], weights[kept] = token, weight
        kept += uint64(stays)
    return kept


@inlined()
def _block_maxima(logits, tokens, maxima):
    """The largest of each block of 64 logits -> `maxima`; returns the key of the largest of all, and whether one is NaN."""
    size, largest, worst = uint64(tokens), ALL, uint32(0)
    for block in range((size + BLOCK - ONE) // BLOCK):
        best, start = ALL, uint64(block * BLOCK)
        for i in range(start, min(size, start + BLOCK)):
            best = min(best, _descending(logits[i]))
            worst = max(worst, uint32(f32_to_bits(logits[i]) & MAGNITUDE))
        maxima[block] = _value(best)
        largest = min(largest, best)
    return largest, worst > INFINITY_BITS


@inlined()
def _top_k(logits, tokens, top_k, maxima, ids, keys, mass):
    """The `top_k` largest logits, including ties with the last -> `ids`. Returns how many."""
    size = uint64(tokens)
    blocks = uint64((size + BLOCK - ONE) // BLOCK)
    bound = ALL
    if uint64(top_k) <= blocks:
        for block in range(blocks):
            keys[block] = _descending(maxima[block])
        bound = _cut(keys, maxima, blocks, float(top_k), True, mass)
    count = uint64(0)
    for block in range(blocks):
        if _descending(maxima[block]) <= bound:
            start = uint64(block * BLOCK)
            for i in range(start, min(size, start + BLOCK)):
                key = _descending(logits[i])
                ids[count], keys[count] = i, key
                count += uint64(key <= bound)
    cut = _cut(keys, maxima, count, float(top_k), True, mass)
    kept = uint64(0)
    for i in range(count):
        token, stays = ids[i], keys[i] <= cut
        ids[kept] = token
        kept += uint64(stays)
    return kept


@inlined()
def _typical(logits, largest, temperature, typical_p, ids, weights, keys, count, mass):
    """Locally typical: the tokens whose surprise is nearest the entropy. |-log p - H| = |y - mean(y)| for scaled logits y."""
    for i in range(count):
        keys[i] = f32_to_bits((logits[uint32(ids[i])] - largest) / temperature)
    total = _sum(weights, 0, count)
    mean = _moment(weights, keys, count) / total
    for i in range(count):
        keys[i] = f32_to_bits(float32(abs(float64(bits_to_f32(keys[i])) - mean)))
    return _keep(ids, weights, keys, count, _cut(keys, weights, count, typical_p * total, False, mass))


@inlined(REASSOCIATE)
def _above_sigmas(logits, size, largest, sigmas):
    """Top-n-sigma: -inf for logits further below the largest than `sigmas` standard deviations of the logits not removed earlier. If all
    were removed, all stay."""
    if largest <= MASKED_LOGIT:
        return
    total, num_finite = 0.0, 0.0
    for i in range(size):
        total += logits[i] if logits[i] > MASKED_LOGIT else ZERO
        num_finite += 1.0 if logits[i] > MASKED_LOGIT else 0.0
    mean, squares = total / num_finite, 0.0
    for i in range(size):
        deviation = logits[i] - mean if logits[i] > MASKED_LOGIT else 0.0
        squares += deviation * deviation
    bound = float32(largest - sigmas * np.sqrt(squares / num_finite))
    for i in range(size):
        logits[i] = logits[i] if logits[i] >= bound else float32(-np.inf)


@inlined()
def _without_top(logits, largest, temperature, threshold, ids, weights, keys, count):
    """XTC: of the survivors with probability at least `threshold` at temperature 1, only the least likely stays, with those below it.
    Weights are recomputed relative to the largest one left: relative to the removed ones a low temperature could leave them at 0."""
    total = 0.0
    for i in range(count):
        weights[i] = exp(logits[uint32(ids[i])] - largest)
        total += weights[i]
    smallest = ALL
    for i in range(count):
        keys[i] = uint32(ALL - _descending(logits[uint32(ids[i])]))
        if weights[i] >= threshold * total:
            smallest = min(smallest, keys[i])
    kept = _keep(ids, weights, keys, count, smallest)
    left = _value(uint32(ALL - smallest)) if smallest < ALL else largest
    for i in range(kept):
        weights[i] = exp((logits[uint32(ids[i])] - left) / temperature)
    return kept


@jit("int64(int64, int64, float32, int64, float32, float64, float32, float64, float64, int64, int64, int64, int64)")
def survivors(at_logits, size, sigmas, top_k, temperature, top_p, min_p, typical_p, threshold, at_ids, at_weights, at_keys, at_mass):
    """How many of `size` tokens survive top-n-sigma, top-k, top-p, min-p, typical and XTC, in this order, or a negative code. `temperature`
    > 0. `sigmas` <= 0 and `threshold` > 0.5 disable top-n-sigma and XTC. Arrays are given by address; top-n-sigma modifies the logits."""
    logits, weights, mass, ids, keys = f32_at(at_logits), f32_at(at_weights), f64_at(at_mass), i32_at(at_ids), u32_at(at_keys)
    best, bad = _block_maxima(logits, size, weights)
    if bad:
        return HAS_NAN
    largest = _value(best)
    if largest == np.inf:
        return HAS_INFINITY
    if largest == -np.inf:
        return NONE_FINITE
    if sigmas > ZERO:
        _above_sigmas(logits, size, largest, sigmas)
    count = uint64(size)
    if 0 < top_k < size:
        count = _top_k(logits, size, top_k, weights, ids, keys, mass)
        for i in range(count):
            weights[i] = exp((logits[uint32(ids[i])] - largest) / temperature)
    else:
        for i in range(count):
            ids[i], weights[i] = i, exp((logits[i] - largest) / temperature)
    # Tokens lighter than (1 - top_p) / V cannot add up to 1 - top_p: they are outside the nucleus.
    total = _sum(weights, 0, count)
    floor = max(min_p, float32(max(0.0, 1.0 - top_p) * total / count * 0.999))
    kept = uint64(0)
    for i in range(count):
        token, weight = ids[i], weights[i]
        ids[kept], weights[kept] = token, weight
        # XTC may remove every token that has a weight; tokens that a low temperature leaves without any are kept until then.
        kept += uint64(weight >= floor and (weight > ZERO or threshold <= 0.5 and logits[uint32(token)] > MASKED_LOGIT))
    count = kept
    # Already below the target: min-p alone decided, and the nucleus contains all remaining tokens.
    if top_p < 1.0 and _sum(weights, 0, count) > top_p * total:
        for i in range(count):
            keys[i] = _descending(weights[i])
        count = _keep(ids, weights, keys, count, _cut(keys, weights, count, top_p * total, False, mass))
    if typical_p < 1.0:
        count = _typical(logits, largest, temperature, typical_p, ids, weights, keys, count, mass)
    if threshold <= 0.5:
        count = _without_top(logits, largest, temperature, threshold, ids, weights, keys, count)
    return count


@jit("int64(int64, int64, int64, float64)")
def draw(at_ids, at_weights, count, uniform):
    """The token at `uniform` in [0, 1) of the cumulative weight of `count` survivors, tokens in the order of `ids`."""
    ids, weights = i32_at(at_ids), f32_at(at_weights)
    target, reached, start = uniform * _sum(weights, 0, count), 0.0, 0
    while start + STRIDE < count:
        part = _sum(weights, start, start + STRIDE)
        if reached + part > target:
            break
        reached += part
        start += STRIDE
    for i in range(start, count):
        reached += weights[i]
        if reached > target:
            return ids[i]
    return ids[count - 1]


@jit("int64(int64, int64, int64, int64, int64, int64)")
def count_tokens(at_new, many, at_counts, size, at_distinct, known):
    """Add `many` new tokens, int64, to `counts` int64 [size]; `distinct` int32 [:known] lists those seen at least once. Arrays by their
    addresses. Returns the new `known`."""
    new, counts, distinct = i64_at(at_new), i64_at(at_counts), i32_at(at_distinct)
    for i in range(many):
        token = new[i]
        if 0 <= token < size:
            if counts[token] == 0:
                distinct[known] = token
                known += 1
            counts[token] += 1
    return known


@jit("void(int64, int64, int64, int64, float32, float32, float32)")
def penalise(at_logits, at_counts, at_distinct, known, repetition, presence, frequency):
    """In place, for each distinct token of the history: repetition shrinks its logit towards less likely, presence and frequency are
    subtracted. Arrays are given by address."""
    logits, counts, distinct = f32_at(at_logits), i64_at(at_counts), i32_at(at_distinct)
    for i in range(known):
        token = uint32(distinct[i])
        value = logits[token]
        value = value * repetition if value < ZERO else value / repetition
        logits[token] = value - presence - frequency * float32(counts[token])


@inlined()
def _since_break(tokens, many, rows, first, starts, tails):
    """How many of `many` tokens follow the newest sequence breaker. Breakers that begin with a token are numbered from `first` of it to
    that of the next; the rest of sequence s is `tails` from `starts`[s] to [s + 1]."""
    for back in range(many):
        token = tokens[many - 1 - back]
        longest = -1
        if 0 <= token < rows:
            for sequence in range(first[token], first[token + 1]):
                begin = starts[sequence]
                length = starts[sequence + 1] - begin
                if longest < length <= back:
                    same = True
                    for i in range(length):
                        same = same and tails[begin + i] == tokens[many - back + i]
                    longest = length if same else longest
        if longest >= 0:
            return back - longest
    return many


@inlined()
def _repeats(tokens, many, matches):
    """For each k >= 1: how many of the newest tokens match those k places earlier -> `matches`[k]. The Z-algorithm from the end: each token
    is compared a few times at most, whatever repeats."""
    left = right = 0
    for k in range(1, many):
        length = min(matches[k - left], right - k + 1) if k <= right else 0
        while length + k < many and tokens[many - 1 - length] == tokens[many - 1 - length - k]:
            length += 1
        matches[k] = length
        if k + length - 1 > right:
            left, right = k, k + length - 1


@jit("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, float64, float64, int64)")
def penalise_repeats(at_logits, size, at_tokens, many, rows, at_first, at_starts, at_tails, at_matches, at_longest, multiplier, base,
                     allowed):
    """DRY, in place: a token that would extend a repetition of at least `allowed` tokens loses `multiplier` x `base` ** (tokens beyond
    these). `tokens` int32 [many] are the newest; sequence breakers as in `_since_break`, over `rows` tokens, if there are any. `matches`
    int32 [many] and `longest` uint32 [size] are scratch. Arrays are given by address."""
    logits, tokens, matches, longest = f32_at(at_logits), i32_at(at_tokens), i32_at(at_matches), u32_at(at_longest)
    first, starts, tails = i32_at(at_first), i32_at(at_starts), i32_at(at_tails)
    max_length = _since_break(tokens, many, rows, first, starts, tails)
    if max_length < allowed or many <= allowed:
        return
    _repeats(tokens, many, matches)
    for k in range(1, many):
        if 0 <= tokens[many - k] < size:
            longest[tokens[many - k]] = 0
    for k in range(1, many):
        token, length = tokens[many - k], min(int64(matches[k]), max_length)
        if length >= allowed and 0 <= token < size:
            longest[token] = max(longest[token], uint32(length + 1))
    for k in range(1, many):
        token = tokens[many - k]
        if 0 <= token < size and longest[token] > 0:
            beyond = int64(longest[token]) - 1 - allowed
            longest[token] = 0
            breaks = False
            if token < rows:
                for sequence in range(first[token], first[token + 1]):
                    breaks = breaks or starts[sequence] == starts[sequence + 1]
            if not breaks:
                logits[token] -= float32(min(multiplier * base ** float64(beyond), MAX_PENALTY))
