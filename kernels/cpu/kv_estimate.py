"""What pages give that are not read: attention over abstracts of 16 tokens each, in memory.

An abstract is the mean of a chunk's keys and of its values, beside the spread of the page's keys in every channel. A chunk of n tokens has
about the mass n * exp(q . mean + (q * spread)^2 / 2), the mean of exp over keys that scatter so, and its output is its values' mean. The
partial of a page is laid where that of the page itself would be (`attention.py`), in the basis in which its kind is merged; so whoever
reads the page afterwards puts the truth in its place.
"""

from __future__ import annotations

from numba import float32

from ..compile import inlined, kernel
from ..layout import PAGE
from .arithmetic import MINUS_INF, ZERO, exp
from .attention import _cap
from .intrinsics import f32_at, f64_at, fetch_add, i8_at, i64_at

CHUNK = 16  # tokens of an abstract
CHUNKS = PAGE // CHUNK
# Slots of the argument block. FIRST: the page with the first abstract; FROM, TO: pages to estimate; LEAD: rows of the table before page 0;
# KEYS, VALUES int8 [pages, KVH, CHUNKS, D], STEPS float32 [pages, KVH, STEP_SLOTS]: what a key, a value and a spread count in, by chunk,
# SPREADS int8 [pages, KVH, D]; SCALE and SOFTCAP are float64.
(E_Q, E_HEADS, E_BLOCKS, E_FROM, E_TO, E_KV_HEADS, E_DIM, E_FIRST, E_LEAD, E_PARTIALS, E_KEYS, E_VALUES, E_SPREADS, E_STEPS, E_SCALE,
 E_SOFTCAP, ESTIMATE_SLOTS) = range(17)
STEP_SLOTS = 2 * CHUNKS + 1
HALF = float32(0.5)


@inlined({"contract", "reassoc", "nsz"})
def _dot(query, codes, depth):
    """float32 x [D] . int8 c [D]."""
    q, c = f32_at(query), i8_at(codes)
    total = ZERO
    for i in range(depth):
        total += q[i] * float32(c[i])
    return total


@inlined({"contract", "reassoc", "nsz"})
def _squares(query, codes, depth):
    """The sum of (x c)^2."""
    q, c = f32_at(query), i8_at(codes)
    total = ZERO
    for i in range(depth):
        each = q[i] * float32(c[i])
        total += each * each
    return total


@kernel({"contract"})
def estimate_pages(args, worker, counter):
    """Partials for one token from abstracts. Blocks of work: (page, KV head)."""
    a = i64_at(args)
    heads, kv_heads, depth, blocks = a[E_HEADS], a[E_KV_HEADS], a[E_DIM], a[E_BLOCKS]
    group, span = heads // kv_heads, a[E_TO] - a[E_FROM]
    scale, softcap = float32(f64_at(args)[E_SCALE]), float32(f64_at(args)[E_SOFTCAP])
    while True:
        job = fetch_add(counter, 1)
        if job >= span * kv_heads:
            return
        page, kv = a[E_FROM] + job // kv_heads, job % kv_heads
        place = (page - a[E_FIRST]) * kv_heads + kv
        steps = f32_at(a[E_STEPS] + 4 * place * STEP_SLOTS)
        keys, values = a[E_KEYS] + place * CHUNKS * depth, a[E_VALUES] + place * CHUNKS * depth
        for g in range(group):
            query = a[E_Q] + 4 * (kv * group + g) * depth
            o = f32_at(a[E_PARTIALS] + 4 * ((kv * blocks + a[E_LEAD] + page) * group + g) * (depth + 2))
            spread = scale * steps[2 * CHUNKS]
            more = HALF * spread * spread * _squares(query, a[E_SPREADS] + place * depth, depth)
            for i in range(depth):
                o[i] = ZERO
            m, l = MINUS_INF, ZERO
            for chunk in range(CHUNKS):
                score = _cap(scale * steps[chunk] * _dot(query, keys + chunk * depth, depth) + more, softcap)
                if score > m:
                    shrink = exp(m - score)
                    l *= shrink
                    for i in range(depth):
                        o[i] *= shrink
                    m = score
                weight = float32(CHUNK) * exp(score - m)
                l += weight
                mean, part = i8_at(values + chunk * depth), weight * steps[CHUNKS + chunk]
                for i in range(depth):
                    o[i] += part * float32(mean[i])
            o[depth], o[depth + 1] = m, l
