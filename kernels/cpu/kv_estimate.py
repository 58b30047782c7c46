"""What pages give that are not read: attention over abstracts of 16 tokens each, in memory.

An abstract is the mean of a chunk's keys and of its values, beside the spread of the page's keys in every channel. A chunk of n tokens has
about the mass n * exp(q . mean + (q * spread)^2 / 2), the mean of exp over keys that scatter so, and its output is its values' mean. The
partial of a page is laid where that of the page itself would be (`attention.py`), in the basis in which its kind is merged; so whoever
reads the page afterwards puts the truth in its place.

Chunks of a few pages side by side are as wide as a register tile, so that the products are those of attention itself.
"""

from __future__ import annotations

from llvmlite import ir
from numba import float32, types
from numba.extending import intrinsic

from ..compile import inlined, kernel
from ..layout import PAGE
from .arithmetic import MINUS_INF, ZERO, exp
from .attention import _cap
from .inner_loops import LOW_ROWS, TILE_COLUMNS, low_tile_product
from .int8_ir import I8, function, load, splat, store
from .intrinsics import F32, f32_at, f64_at, fetch_add, i8_at, i64_at
from .kv_attention import _broad

CHUNK = 16  # tokens of an abstract
CHUNKS = PAGE // CHUNK
SPAN = TILE_COLUMNS // CHUNKS  # pages whose chunks fill a register tile
# Slots of the argument block. FIRST: the page with the first abstract; FROM, TO: pages to estimate; LEAD: rows of the table before page 0;
# KEYS int8 [pages, KVH, D, CHUNKS], VALUES int8 [pages, KVH, CHUNKS, D], STEPS float32 [pages, KVH, STEP_SLOTS]: what a key, a value and a
# spread count in, by chunk, SPREADS int8 [pages, KVH, D]; SCALE and SOFTCAP are float64.
(E_Q, E_HEADS, E_BLOCKS, E_FROM, E_TO, E_KV_HEADS, E_DIM, E_FIRST, E_LEAD, E_PARTIALS, E_KEYS, E_VALUES, E_SPREADS, E_STEPS, E_SCALE,
 E_SOFTCAP, E_SCRATCH, E_SCRATCH_STRIDE, ESTIMATE_SLOTS) = range(19)
STEP_SLOTS = 2 * CHUNKS + 1
HALF = float32(0.5)


@intrinsic
def _widen_chunks(typingctx, source, target):
    """CHUNKS signed bytes at an address -> as many float32."""

    def codegen(context, builder, signature, args):
        own = load(builder, args[0], ir.VectorType(I8, CHUNKS))
        store(builder, builder.sitofp(own, ir.VectorType(F32, CHUNKS)), args[1], 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _scored(typingctx, row, steps, scale, more):
    """CHUNKS sums of products -> scale * step * sum + more, less the largest of them, in place. Returns the largest; NaN if any is."""

    def codegen(context, builder, signature, args):
        kind = ir.VectorType(F32, CHUNKS)
        row, steps, scale, more = args
        factor = builder.fmul(load(builder, steps, kind, 4), splat(builder, scale, kind))
        score = builder.fadd(builder.fmul(factor, load(builder, row, kind, 4)), splat(builder, more, kind))
        top = builder.call(function(builder, F32, [kind], f"llvm.vector.reduce.fmaximum.v{CHUNKS}f32"), [score])
        store(builder, builder.fsub(score, splat(builder, top, kind)), row, 4)
        return top

    return types.float32(types.int64, types.int64, types.float32, types.float32), codegen


@inlined({"contract", "reassoc", "nsz"})
def _squares(query, codes, depth):
    """The sum of (x c)^2 of float32 x [D], int8 c [D]."""
    q, c = f32_at(query), i8_at(codes)
    total = ZERO
    for i in range(depth):
        each = q[i] * float32(c[i])
        total += each * each
    return total


@inlined()
def _capped(row, more, softcap):
    """`_scored` of scores that have a softcap: CHUNKS of them less their largest, in place; returns that."""
    top = MINUS_INF
    for chunk in range(CHUNKS):
        row[chunk] = _cap(row[chunk] + more, softcap)
        top = row[chunk] if row[chunk] > top else top
    for chunk in range(CHUNKS):
        row[chunk] -= top
    return top


@inlined()
def _weights(address, count):
    row = f32_at(address)
    for i in range(count):
        row[i] = float32(CHUNK) * exp(row[i])


@inlined({"contract", "reassoc", "nsz"})
def _total(row, steps):
    """The sum of CHUNKS weights, each of which is then multiplied by what its values count in."""
    total = ZERO
    for chunk in range(CHUNKS):
        total += row[chunk]
    for chunk in range(CHUNKS):
        row[chunk] *= steps[CHUNKS + chunk]
    return total


@inlined()
def _widen_values(source, target, depth, broad):
    """int8 [CHUNKS, D] -> float32 [CHUNKS, wide D], whose columns behind D nobody reads the sums of."""
    for chunk in range(CHUNKS):
        own, wide = i8_at(source + chunk * depth), f32_at(target + 4 * chunk * broad)
        for i in range(depth):
            wide[i] = float32(own[i])


@kernel({"contract"})
def estimate_pages(args, worker, counter):
    """Partials for one token from abstracts. Blocks of work: (KV head, SPAN pages). Scratch per worker, float32, less than that of
    `attend_few`: Q[rows, D], K[D, TILE_COLUMNS], S[rows, TILE_COLUMNS], V[CHUNKS, wide D], part[rows, wide D]."""
    a = i64_at(args)
    heads, kv_heads, depth, blocks = a[E_HEADS], a[E_KV_HEADS], a[E_DIM], a[E_BLOCKS]
    group, spans = heads // kv_heads, (a[E_TO] - a[E_FROM] + SPAN - 1) // SPAN
    padded, broad = (group + LOW_ROWS - 1) // LOW_ROWS * LOW_ROWS, _broad(depth)
    scale, softcap = float32(f64_at(args)[E_SCALE]), float32(f64_at(args)[E_SOFTCAP])
    query = a[E_SCRATCH] + worker * a[E_SCRATCH_STRIDE]
    keys = query + 4 * padded * depth
    scores = keys + 4 * depth * TILE_COLUMNS
    values = scores + 4 * padded * TILE_COLUMNS
    part = values + 4 * CHUNKS * broad
    loaded = -1
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * spans:
            return
        kv, begin = job // spans, a[E_FROM] + SPAN * (job % spans)
        count = min(SPAN, a[E_TO] - begin)
        if loaded != kv:
            source, own = f32_at(a[E_Q] + 4 * kv * group * depth), f32_at(query)
            for i in range(padded * depth):
                own[i] = source[i] if i < group * depth else ZERO
            loaded = kv
        place = (begin - a[E_FIRST]) * kv_heads + kv
        for page in range(count):
            source, target = a[E_KEYS] + (place + page * kv_heads) * CHUNKS * depth, keys + 4 * CHUNKS * page
            for i in range(depth):
                _widen_chunks(source + CHUNKS * i, target + 4 * TILE_COLUMNS * i)
        for r in range(0, padded, LOW_ROWS):
            low_tile_product(query + 4 * r * depth, 4 * depth, keys, 4 * TILE_COLUMNS, scores + 4 * r * TILE_COLUMNS, 4 * TILE_COLUMNS,
                             depth, 0)
        partials = a[E_PARTIALS] + 4 * (kv * blocks + a[E_LEAD] + begin) * group * (depth + 2)
        for page in range(count):
            at = place + page * kv_heads
            steps = a[E_STEPS] + 4 * at * STEP_SLOTS
            spread = scale * f32_at(steps)[2 * CHUNKS]
            for r in range(group):
                row = scores + 4 * (r * TILE_COLUMNS + page * CHUNKS)
                more = HALF * spread * spread * _squares(query + 4 * r * depth, a[E_SPREADS] + at * depth, depth)
                top = _scored(row, steps, scale, more)
                if softcap != ZERO:
                    top = _capped(f32_at(row), top, softcap)
                f32_at(partials + 4 * (page * group + r) * (depth + 2))[depth] = top
        _weights(scores, group * TILE_COLUMNS)
        for page in range(count):
            at = place + page * kv_heads
            _widen_values(a[E_VALUES] + at * CHUNKS * depth, values, depth, broad)
            for r in range(group):
                row, o = f32_at(scores + 4 * (r * TILE_COLUMNS + page * CHUNKS)), f32_at(partials + 4 * (page * group + r) * (depth + 2))
                o[depth + 1] = _total(row, f32_at(a[E_STEPS] + 4 * at * STEP_SLOTS))
            for r in range(0, padded, LOW_ROWS):
                for i in range(0, broad, TILE_COLUMNS):
                    low_tile_product(scores + 4 * (r * TILE_COLUMNS + page * CHUNKS), 4 * TILE_COLUMNS, values + 4 * i, 4 * broad,
                                     part + 4 * (r * broad + i), 4 * broad, CHUNKS, 0)
            for r in range(group):
                source, o = f32_at(part + 4 * r * broad), f32_at(partials + 4 * (page * group + r) * (depth + 2))
                for i in range(depth):
                    o[i] = source[i]
