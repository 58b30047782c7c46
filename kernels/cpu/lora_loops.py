"""LoRA kernels for thin column-major matrices: into the rank-sized intermediate, y_r = A x, and out of it, y += B y_r.

One of the two matrices has rows as short as the rank, and a dot product of sixteen numbers is mostly reduction. Column-major there is no
reduction: a vector holds adjacent outputs, and each input is multiplied into it. For A, the inputs are cut into parts of PART, each summed
in CHAINS chains and the parts then added in order; for B, an output is one chain over an adapter's rank, added to the existing value,
adapter by adapter. So results depend neither on the number of tokens, nor on other tokens' adapters, threads, or vector width. For few
tokens each part is a block of work, and the B step adds the parts up, which saves a job; for many tokens a worker goes through all parts of
a group of tokens. Adapters that no token uses are not read.

A block of work reads one contiguous stretch of a matrix (`quant/thin.py`). With whole columns a block would touch as many pages as the
rank, a line or two in each, which defeats the prefetcher.

Compiled steps, AVX-512 and bf16: A takes 4 `vpmovzxwd`, 4 `vpslld` and 12 `vfmadd231ps` with x broadcast from memory, for four inputs of 16
ranks and three tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir
from numpy import float32, int64

from ..compile import kernel
from ..layout import BF16, F16, F32, LORA_BLOCK_INPUTS, LORA_BLOCK_OUTPUTS, LORA_BLOCK_RANKS
from ..lazy_numba import inlined, llvm_intrinsic
from .arithmetic import ONE, ZERO, gate_values, normalise, widen
from .inner_loops import TILE_COLUMNS, VECTOR, plain_f32, widen_bf16, widen_f16
from .int8_ir import constant, fma, load, offset, splat, store
from .intrinsics import F32 as FLOAT
from .intrinsics import I64, call_kernel, f32_at, f64_at, i64_at
from .ir_loop import Loop
from .linear import ACT, DEPTH, EPS, FIRST, GATED, MATRICES, MODE, NORM, NORM_BIAS, NORM_WEIGHT, SCRATCH, SCRATCH_STRIDE, TOKENS, X
from .work_distribution import COUNTERS_NBYTES, first_region, take_block

# Number of partial sums of an intermediate value (`parts_of`); scales of adapters (0: none), and floats between tokens.
ALL_PARTS, SCALES, STEP, OWN_FIRST = range(FIRST, FIRST + 4)
# Then the fields of A per adapter matrix. Of B, OUT_FIELDS per matrix of the model: its number of adapters and the position of the FIELDS
# of the first one. THIN: the intermediates between A and B.
WEIGHT, DTYPE, RANK, THIN, ADAPTER, FIELDS = range(6)
# GAINS float32 [ADAPTERS, ROWS] of a matrix whose rows are rescaled (DoRA), 0 for others; BIAS [ROWS] or 0.
ROWS, OUT, OUT_STRIDE, PAIRS, FIRST_PAIR, RANKS, GAINS, ADAPTERS, BIAS, OUT_FIELDS = range(10)

MIN_OUTPUTS = 4  # of the shortest vector: ranks are a multiple of it
PART, CHAINS = LORA_BLOCK_INPUTS, 4  # inputs
TOKENS_AT_ONCE = 3 if VECTOR == 16 else 2  # tokens multiplied while a weight is in a register
GROUP = min(12, TILE_COLUMNS)  # tokens of a block of work
RUN = 256  # outputs of a block of work


def parts_of(depth: int) -> int:
    """Partial sums per intermediate, for few tokens: leftover inputs beyond CHAINS form a part of their own."""
    return -(-(depth // CHAINS * CHAINS) // PART) + (depth % CHAINS > 0)


def _add_to(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, warm: ir.Value) -> None:
    before = builder.fadd(load(builder, address, value.type, 4), value)
    store(builder, builder.select(builder.icmp_signed("!=", warm, I64(0)), before, value), address, 4)


def _in(widened: Callable, item: int, abreast: int, lanes: int):
    @llvm_intrinsic
    def run(builder, x, stride, weights, pitch, steps, out, out_apart, warm):
        """out[c, :lanes] (+)= the products of CHAINS * steps inputs with as many rows of weights, `pitch` bytes apart, for `abreast` x."""
        floats = ir.VectorType(FLOAT, lanes)
        columns = [builder.add(x, builder.mul(stride, I64(c))) for c in range(abreast)]
        loop = Loop(builder, steps, [weights, *[constant(floats, 0.0)] * (CHAINS * abreast)], "inputs")
        row, *sums = loop.values
        for chain in range(CHAINS):
            weight = widened(builder, row, lanes)
            row = builder.add(row, pitch)
            for c, column in enumerate(columns):
                at = offset(builder, builder.add(column, builder.mul(loop.index, I64(4 * CHAINS))), 4 * chain)
                accumulator = CHAINS * c + chain
                sums[accumulator] = fma(builder, splat(builder, load(builder, at, FLOAT, 4), floats), weight, sums[accumulator])
        _, *sums = loop.end([row, *sums])
        for c in range(abreast):
            one, two, three, four = sums[CHAINS * c : CHAINS * (c + 1)]
            total = builder.fadd(builder.fadd(one, two), builder.fadd(three, four))
            _add_to(builder, total, builder.add(out, builder.mul(out_apart, I64(c))), warm)

    return run


def _out(widened: Callable, item: int, abreast: int, lanes: int, vectors: int):
    @llvm_intrinsic
    def run(builder, thin, stride, weights, pitch, rank, out, out_apart, warm):
        """out[c, :vectors * lanes] (+)= thin[c, :rank] @ weights, rows of which are `pitch` bytes apart, for `abreast` of thin."""
        floats = ir.VectorType(FLOAT, lanes)
        columns = [builder.add(thin, builder.mul(stride, I64(c))) for c in range(abreast)]
        loop = Loop(builder, rank, [weights, *[constant(floats, 0.0)] * (vectors * abreast)], "ranks")
        row, *sums = loop.values
        weights_of_row = [widened(builder, offset(builder, row, item * lanes * v), lanes) for v in range(vectors)]
        for c, column in enumerate(columns):
            number = load(builder, builder.add(column, builder.mul(loop.index, I64(4))), FLOAT, 4)
            for v in range(vectors):
                sums[vectors * c + v] = fma(builder, splat(builder, number, floats), weights_of_row[v], sums[vectors * c + v])
        _, *sums = loop.end([builder.add(row, pitch), *sums])
        for c in range(abreast):
            to = builder.add(out, builder.mul(out_apart, I64(c)))
            for v in range(vectors):
                _add_to(builder, sums[vectors * c + v], offset(builder, to, 4 * lanes * v), warm)

    return run


def _step(make: Callable[[Callable, int, int], object]):
    """A strip of outputs for all tokens of a group, for any stored type; `make` builds the loop for one type and number of tokens."""
    (half_all, half_one), (brain_all, brain_one), (full_all, full_one) = (
        [make(widened, item, abreast) for abreast in (TOKENS_AT_ONCE, 1)]
        for widened, item in ((widen_f16, 2), (widen_bf16, 2), (plain_f32, 4)))

    @inlined()
    def run(dtype, tokens, x, stride, weights, pitch, steps, out, out_apart, warm):
        t = int64(0)
        while t < tokens:
            at, to, all_ = x + t * stride, out + t * out_apart, tokens - t >= TOKENS_AT_ONCE
            if dtype == BF16:
                if all_:
                    brain_all(at, stride, weights, pitch, steps, to, out_apart, warm)
                else:
                    brain_one(at, stride, weights, pitch, steps, to, out_apart, warm)
            elif dtype == F16:
                if all_:
                    half_all(at, stride, weights, pitch, steps, to, out_apart, warm)
                else:
                    half_one(at, stride, weights, pitch, steps, to, out_apart, warm)
            elif all_:
                full_all(at, stride, weights, pitch, steps, to, out_apart, warm)
            else:
                full_one(at, stride, weights, pitch, steps, to, out_apart, warm)
            t += TOKENS_AT_ONCE if all_ else 1

    return run


_wide_in, _short_in = _step(partial(_in, lanes=VECTOR)), _step(partial(_in, lanes=MIN_OUTPUTS))
_wide_out, _short_out = _step(partial(_out, lanes=VECTOR, vectors=4)), _step(partial(_out, lanes=MIN_OUTPUTS, vectors=1))


@inlined()
def _has(a, pair, token):
    """Does a token use a pair's adapter?"""
    return a[SCALES] == 0 or f32_at(a[SCALES] + 4 * a[STEP] * token)[a[pair + ADAPTER]] != ZERO


@inlined()
def _next_run(a, pair, first, begin, end_token):
    """The next run of consecutive tokens of a group, from `first` on, that use a pair's adapter: [begin, end); begin is `end_token` if
    there is none."""
    while begin < end_token and not _has(a, pair, first + begin):
        begin += 1
    end = begin
    while end < end_token and _has(a, pair, first + end):
        end += 1
    return begin, end


@inlined()
def _part_in(a, m, tokens, x, stride, part, out, warm):
    """The products of a part of the inputs of some tokens with matrix m: float32 [tokens][rank] at `out`."""
    dtype, rank, depth = a[m + DTYPE], a[m + RANK], a[DEPTH]
    full_chains, begin, item = depth // CHAINS * CHAINS, part * PART, int64(4 if a[m + DTYPE] == F32 else 2)
    if begin >= full_chains:
        start = full_chains // PART * PART
        for t in range(tokens):
            for r in range(rank):
                strip = r // LORA_BLOCK_RANKS * LORA_BLOCK_RANKS
                width, total = min(int64(LORA_BLOCK_RANKS), rank - strip), ZERO
                for k in range(full_chains, depth):
                    at = start * rank + (depth - start) * strip + (k - start) * width + r - strip
                    total += widen(a[m + WEIGHT], dtype, at) * f32_at(x + t * stride)[k]
                f32_at(out)[t * rank + r] = f32_at(out)[t * rank + r] + total if warm else total
        return
    span, weights, x = min(int64(PART), depth - begin), a[m + WEIGHT] + item * begin * rank, x + 4 * begin
    steps = min(int64(PART), full_chains - begin) // CHAINS
    strip = int64(0)
    while strip < rank:
        width, strip_weights, first = min(int64(LORA_BLOCK_RANKS), rank - strip), weights + item * span * strip, int64(0)
        while width - first >= VECTOR:
            _wide_in(dtype, tokens, x, stride, strip_weights + item * first, item * width, steps, out + 4 * (strip + first), 4 * rank, warm)
            first += VECTOR
        while first < width:
            _short_in(dtype, tokens, x, stride, strip_weights + item * first, item * width, steps, out + 4 * (strip + first), 4 * rank,
                      warm)
            first += MIN_OUTPUTS
        strip += LORA_BLOCK_RANKS


@kernel()
def columns_in(args, worker, counter):
    """The intermediates of each adapter of a stage: [tokens][rank] at its THIN, for up to GROUP tokens separately per part; nothing is
    written for tokens that do not use it. Blocks of work are parts, for more tokens groups of them."""
    a = i64_at(args)
    tokens, depth, matrices = a[TOKENS], a[DEPTH], a[MATRICES]
    parts, groups = a[ALL_PARTS], (tokens + GROUP - 1) // GROUP
    normed = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    region, ended, at_hand = first_region(worker), int64(0), int64(-1)
    while True:
        block, region, ended = take_block(counter, region, ended, parts if groups == 1 else groups)
        if block < 0:
            return
        group = int64(0) if groups == 1 else block
        first = group * GROUP
        group_tokens = min(int64(GROUP), tokens - first)
        for i in range(matrices):
            m = OWN_FIRST + i * FIELDS
            begin, end = _next_run(a, m, first, int64(0), group_tokens)
            while begin < group_tokens:
                x = a[X] + 4 * depth * first
                if a[NORM] != 0:
                    if group != at_hand:  # every worker computes the norm: cheaper than a second job
                        eps = float32(f64_at(args)[EPS])
                        for t in range(group_tokens):
                            normalise(x + 4 * t * depth, normed + 4 * t * depth, depth, a[NORM], a[NORM_WEIGHT], a[NORM_BIAS], eps)
                        at_hand = group
                    x = normed
                for part in range(block if groups == 1 else 0, block + 1 if groups == 1 else parts):
                    product_index, warm = (part * group_tokens if groups == 1 else first) + begin, int64(0) if groups == 1 else part
                    _part_in(a, m, end - begin, x + 4 * depth * begin, 4 * depth, part, a[m + THIN] + 4 * product_index * a[m + RANK], warm)
                begin, end = _next_run(a, m, first, end, group_tokens)


@kernel()
def side_by_side(args, worker, counter):
    """Two independent kernels as one job: a worker that finds nothing left to do for the first continues with the second."""
    a = i64_at(args)
    call_kernel(a[0], a[1], worker, counter)
    call_kernel(a[2], a[3], worker, counter + COUNTERS_NBYTES)


@inlined()
def _gather(a, m, group, num_tokens, out):
    """The intermediates of each pair for a group's tokens, parts added up, times each token's scale: consecutive [tokens][rank] at `out`.
    """
    for i in range(a[m + PAIRS]):
        pair = a[m + FIRST_PAIR] + i * FIELDS
        rank = a[pair + RANK]
        total, source = f32_at(out), f32_at(a[pair + THIN] + 4 * group * GROUP * rank)
        for t in range(num_tokens):
            if not _has(a, pair, group * GROUP + t):
                continue
            for j in range(t * rank, (t + 1) * rank):
                total[j] = source[j]
            for part in range(1, a[ALL_PARTS]):
                for j in range(t * rank, (t + 1) * rank):
                    total[j] += source[part * num_tokens * rank + j]
            if a[SCALES] != 0:
                share = f32_at(a[SCALES] + 4 * a[STEP] * (group * GROUP + t))[a[pair + ADAPTER]]
                for j in range(t * rank, (t + 1) * rank):
                    total[j] *= share
        out += 4 * num_tokens * rank


@inlined()
def _run_out(a, m, group, num_tokens, thin, begin, rows, out):
    """out[t, :rows] += each pair's intermediates in `thin` times B, for outputs of matrix m from `begin` on, a multiple of THIN_OUTPUTS."""
    out_stride = 4 * a[m + OUT_STRIDE]
    for i in range(a[m + PAIRS]):
        pair = a[m + FIRST_PAIR] + i * FIELDS
        dtype, rank, item = a[pair + DTYPE], a[pair + RANK], int64(4 if a[pair + DTYPE] == F32 else 2)
        first, last = _next_run(a, pair, group * GROUP, int64(0), num_tokens)
        while first < num_tokens:
            run_products, to, strip = thin + 4 * first * rank, out + first * out_stride, int64(0)
            while strip < rows:
                width, weights = min(int64(LORA_BLOCK_OUTPUTS), rows - strip), a[pair + WEIGHT] + item * rank * (begin + strip)
                row = int64(0)
                pitch, y = item * width, to + 4 * strip
                while width - row >= 4 * VECTOR:
                    _wide_out(dtype, last - first, run_products, 4 * rank, weights + item * row, pitch, rank, y + 4 * row, out_stride, 1)
                    row += 4 * VECTOR
                while width - row >= MIN_OUTPUTS:
                    _short_out(dtype, last - first, run_products, 4 * rank, weights + item * row, pitch, rank, y + 4 * row, out_stride, 1)
                    row += MIN_OUTPUTS
                for left in range(row, width):
                    for t in range(last - first):
                        total = ZERO
                        for r in range(rank):
                            total += f32_at(run_products)[t * rank + r] * widen(weights, dtype, r * width + left)
                        f32_at(y + t * out_stride)[left] += total
                strip += LORA_BLOCK_OUTPUTS
            first, last = _next_run(a, pair, group * GROUP, last, num_tokens)
        thin += 4 * num_tokens * rank


@inlined()
def _total(a, m, token, begin, rows, total):
    """Relative growth of each output of a run for a token (DoRA): float32 [rows] at `total`. Returns whether any is nonzero."""
    gains, of_run, some = f32_at(a[m + GAINS] + 4 * begin), f32_at(total), False
    for n in range(rows):
        of_run[n] = ZERO
    for i in range(a[m + ADAPTERS]):
        share = f32_at(a[SCALES] + 4 * a[STEP] * token)[i] if a[SCALES] != 0 else ONE
        if share != ZERO:
            some = True
            for n in range(rows):
                of_run[n] += share * gains[i * a[m + ROWS] + n]
    return some


@inlined()
def _lengthen(a, m, first, num_tokens, begin, rows, total):
    """y[t, n] of a run becomes y + (y - bias[n]) * (the gains of n, each times the token's adapter scale, summed)."""
    bias, of_run, some = f32_at(a[m + BIAS] + 4 * begin), f32_at(total), False
    for t in range(first, first + num_tokens):
        if t == first or a[SCALES] != 0 and a[STEP] != 0:
            some = _total(a, m, t, begin, rows, total)
        if not some:
            continue
        y = f32_at(a[m + OUT] + 4 * (t * a[m + OUT_STRIDE] + begin))
        if a[m + BIAS] != 0:
            for n in range(rows):
                y[n] += of_run[n] * (y[n] - bias[n])
        else:
            for n in range(rows):
                y[n] += of_run[n] * y[n]


@inlined()
def _runs(a, m):
    return (a[m + ROWS] + RUN - 1) // RUN


@kernel()
def columns_out(args, worker, counter):
    """Rescale y[t, n] where adapters change row lengths, then add each adapter's contribution. With GATED there are two matrices, and then
    y = act(y0) * y1 in place of y0. A block of work is a run of a group's outputs."""
    a = i64_at(args)
    tokens, mode = a[TOKENS], a[MODE]
    groups = (tokens + GROUP - 1) // GROUP
    total = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    thin, blocks = total + 4 * RUN, int64(0)
    for i in range(1 if mode == GATED else a[MATRICES]):
        blocks += groups * _runs(a, OWN_FIRST + i * OUT_FIELDS)
    region, ended, at_hand, of = first_region(worker), int64(0), int64(-1), int64(-1)
    while True:
        block, region, ended = take_block(counter, region, ended, blocks)
        if block < 0:
            return
        m = int64(OWN_FIRST)
        while block >= groups * _runs(a, m):
            block -= groups * _runs(a, m)
            m += OUT_FIELDS
        group, begin, both = block // _runs(a, m), block % _runs(a, m) * RUN, 2 if mode == GATED else 1
        group_tokens, rows = min(int64(GROUP), tokens - group * GROUP), min(int64(RUN), a[m + ROWS] - begin)
        if group != at_hand or m != of:
            products = thin
            for i in range(both):
                _gather(a, m + i * OUT_FIELDS, group, group_tokens, products)
                products += 4 * group_tokens * a[m + i * OUT_FIELDS + RANKS]
            at_hand, of = group, m
        products = thin
        for i in range(both):
            n = m + i * OUT_FIELDS
            if a[n + GAINS] != 0:
                _lengthen(a, n, group * GROUP, group_tokens, begin, rows, total)
            _run_out(a, n, group, group_tokens, products, begin, rows, a[n + OUT] + 4 * (group * GROUP * a[n + OUT_STRIDE] + begin))
            products += 4 * group_tokens * a[n + RANKS]
        if mode == GATED:
            out, n = a[m + OUT] + 4 * (group * GROUP * a[m + OUT_STRIDE] + begin), m + OUT_FIELDS
            up = a[n + OUT] + 4 * (group * GROUP * a[n + OUT_STRIDE] + begin)
            for t in range(group_tokens):
                gate_values(out + 4 * t * a[m + OUT_STRIDE], up + 4 * t * a[n + OUT_STRIDE], rows, a[ACT])
