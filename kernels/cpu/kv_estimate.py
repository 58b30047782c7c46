"""What pages give that are not read: attention over abstracts of their keys, in memory.

An abstract of a page is the mean of its keys, which side of it every key lies on in every direction of a basis that mixes all channels (a
bit each, as RaBitQ has it: Gao and Long 2024, arXiv:2405.12497), how far each key is from it, and the mean value of every 32 tokens. So
every token has a score of its own, and one that a head looks up stands out; of means over tokens, or bounds, it would be one of many. The
partial of a page is laid where that of the page itself would be (`attention.py`), in the basis in which its kind is merged; so whoever
reads the page afterwards puts the truth in its place.
"""

from __future__ import annotations

from llvmlite import ir
from numba import float32, types
from numba.extending import intrinsic

from ..compile import inlined, kernel
from ..layout import PAGE
from .arithmetic import ZERO
from .attention import _cap
from .inner_loops import LOW_ROWS, TILE_COLUMNS, low_tile_product
from .int8_ir import load, store
from .intrinsics import F32, f32_at, f64_at, fetch_add, i8_at, i64_at, u8_at
from .kv_attention import _broad, _turn
from .softmax import softmax_row

CHUNK = 32  # tokens with one mean value
CHUNKS = PAGE // CHUNK
SIDE_NBYTES = PAGE // 8  # of a direction
# Slots of the argument block. FIRST: the page with the first abstract; FROM, TO: pages to estimate; LEAD: rows of the table before page 0;
# SIDES uint8 [pages, KVH, D, SIDE_NBYTES]: a bit for each token, lowest first, FAR uint8 [pages, KVH, PAGE], MEANS int8 [pages, KVH, D],
# VALUES int8 [pages, KVH, CHUNKS, D], STEPS float32 [pages, KVH, STEP_SLOTS]: what FAR, a mean and the values of a chunk count in; TURN
# float32 [D, wide D]: into the basis of keys; SCALE and SOFTCAP are float64.
(E_Q, E_HEADS, E_BLOCKS, E_FROM, E_TO, E_KV_HEADS, E_DIM, E_FIRST, E_LEAD, E_PARTIALS, E_SIDES, E_FAR, E_MEANS, E_VALUES, E_STEPS, E_TURN,
 E_SCALE, E_SOFTCAP, E_SCRATCH, E_SCRATCH_STRIDE, ESTIMATE_SLOTS) = range(21)
FAR_STEP, MEAN_STEP, VALUE_STEPS, STEP_SLOTS = 0, 1, 2, 2 + CHUNKS


@intrinsic
def _widen_sides(typingctx, source, target):
    """TILE_COLUMNS bits at an address -> as many float32: 1 where a bit is set, else -1."""

    def codegen(context, builder, signature, args):
        bits = load(builder, args[0], ir.IntType(TILE_COLUMNS))
        mask, kind = builder.bitcast(bits, ir.VectorType(ir.IntType(1), TILE_COLUMNS)), ir.VectorType(F32, TILE_COLUMNS)
        one, other = (ir.Constant(kind, [value] * TILE_COLUMNS) for value in (1.0, -1.0))
        store(builder, builder.select(mask, one, other), args[1], 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@inlined({"contract", "reassoc", "nsz"})
def _of_mean(query, codes, depth):
    """The product of float32 x [D] and int8 c [D]."""
    q, c = f32_at(query), i8_at(codes)
    total = ZERO
    for i in range(depth):
        total += q[i] * float32(c[i])
    return total


@inlined({"contract"})
def _scored(row, far, step, more, scale):
    """Sums over sides [PAGE] -> scores, in place."""
    for t in range(PAGE):
        row[t] = scale * (step * float32(far[t]) * row[t] + more)


@inlined()
def _capped(row, softcap):
    for t in range(PAGE):
        row[t] = _cap(row[t], softcap)


@inlined({"contract", "reassoc", "nsz"})
def _by_chunk(row, chunks, steps):
    """Weights of PAGE tokens -> the sum of each chunk's times what its values count in, [CHUNKS]."""
    for chunk in range(CHUNKS):
        own = ZERO
        for t in range(CHUNK):
            own += row[chunk * CHUNK + t]
        chunks[chunk] = own * steps[VALUE_STEPS + chunk]


@inlined()
def _widen_values(source, target, depth, broad):
    """int8 [CHUNKS, D] -> float32 [CHUNKS, wide D], whose columns behind D nobody reads the sums of."""
    for chunk in range(CHUNKS):
        own, wide = i8_at(source + chunk * depth), f32_at(target + 4 * chunk * broad)
        for i in range(depth):
            wide[i] = float32(own[i])


@kernel({"contract"})
def estimate_pages(args, worker, counter):
    """Partials for one token from abstracts. Blocks of work: (KV head, page). Scratch per worker, float32, less than that of `attend_few`:
    Q[rows, D], turned Q[rows, wide D], K[D, TILE_COLUMNS], S[rows, PAGE], weights[rows, CHUNKS], V[CHUNKS, wide D],
    part[rows, wide D]."""
    a = i64_at(args)
    heads, kv_heads, depth, blocks = a[E_HEADS], a[E_KV_HEADS], a[E_DIM], a[E_BLOCKS]
    group, pages = heads // kv_heads, a[E_TO] - a[E_FROM]
    padded, broad = (group + LOW_ROWS - 1) // LOW_ROWS * LOW_ROWS, _broad(depth)
    scale, softcap = float32(f64_at(args)[E_SCALE]), float32(f64_at(args)[E_SOFTCAP])
    plain = a[E_SCRATCH] + worker * a[E_SCRATCH_STRIDE]
    query = plain + 4 * padded * depth
    scores = query + 4 * padded * broad
    keys = scores + 4 * padded * PAGE
    values = keys + 4 * depth * TILE_COLUMNS
    weights = values + 4 * CHUNKS * broad
    part = weights + 4 * padded * CHUNKS
    loaded = -1
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * pages:
            return
        kv, page = job // pages, a[E_FROM] + job % pages
        if loaded != kv:
            source, own = f32_at(a[E_Q] + 4 * kv * group * depth), f32_at(plain)
            for i in range(padded * depth):
                own[i] = source[i] if i < group * depth else ZERO
            _turn(padded, plain, a[E_TURN], query, depth, broad)
            loaded = kv
        place = (page - a[E_FIRST]) * kv_heads + kv
        sides, steps = a[E_SIDES] + place * depth * SIDE_NBYTES, f32_at(a[E_STEPS] + 4 * place * STEP_SLOTS)
        for begin in range(0, PAGE, TILE_COLUMNS):
            for i in range(depth):
                _widen_sides(sides + SIDE_NBYTES * i + begin // 8, keys + 4 * TILE_COLUMNS * i)
            for r in range(0, padded, LOW_ROWS):
                low_tile_product(query + 4 * r * broad, 4 * broad, keys, 4 * TILE_COLUMNS, scores + 4 * (r * PAGE + begin), 4 * PAGE,
                                 depth, 0)
        _widen_values(a[E_VALUES] + place * CHUNKS * depth, values, depth, broad)
        far = u8_at(a[E_FAR] + place * PAGE)
        partials = a[E_PARTIALS] + 4 * (kv * blocks + a[E_LEAD] + page) * group * (depth + 2)
        for r in range(group):
            row, chunks, o = f32_at(scores + 4 * r * PAGE), f32_at(weights + 4 * r * CHUNKS), f32_at(partials + 4 * r * (depth + 2))
            more = steps[MEAN_STEP] * _of_mean(query + 4 * r * broad, a[E_MEANS] + place * depth, depth)
            _scored(row, far, steps[FAR_STEP], more, scale)
            if softcap != ZERO:
                _capped(row, softcap)
            o[depth], o[depth + 1] = softmax_row(scores + 4 * r * PAGE, 0, PAGE)
            _by_chunk(row, chunks, steps)
        for r in range(0, padded, LOW_ROWS):
            for i in range(0, broad, TILE_COLUMNS):
                low_tile_product(weights + 4 * r * CHUNKS, 4 * CHUNKS, values + 4 * i, 4 * broad, part + 4 * (r * broad + i), 4 * broad,
                                 CHUNKS, 0)
        for r in range(group):
            source, o = f32_at(part + 4 * r * broad), f32_at(partials + 4 * r * (depth + 2))
            for i in range(depth):
                o[i] = source[i]
