"""Vectors of bytes as LLVM instructions, for kernels over low-bit weights: unpacking, table lookup, the four-way dot product.

One instruction set is chosen when this is imported, from the features that Numba compiles for (`cpu_features`):

    avx512   64 bytes, vpdpbusd           (AVX-512 VNNI)
    avx2vnni 32 bytes, vpdpbusd           (AVX-VNNI, or the 256-bit form of AVX-512 VNNI)
    avx2     32 bytes, vpmaddubsw + vpmaddwd
    portable 16 bytes, plain LLVM

The unit is always a quad, 16 rows x 4 inputs = 64 bytes; narrower sets take it in pieces of fewer rows. Integer results are the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

from llvmlite import ir

from ..compile import cpu_features
from ..deferred import cgutils, inlined
from ..tiles import PLANES, ROWS
from .intrinsics import F32, I16, I32, I64

I1, I8 = ir.IntType(1), ir.IntType(8)


def _instruction_set() -> str:
    features = cpu_features()
    if {"avx512f", "avx512bw", "avx512vnni"} <= features:
        return "avx512"
    if "avx2" in features and ("avxvnni" in features or {"avx512vnni", "avx512vl"} <= features):
        return "avx2vnni"
    return "avx2" if "avx2" in features else "portable"


INSTRUCTION_SET = _instruction_set()
WIDTH = {"avx512": 64, "avx2vnni": 32, "avx2": 32, "portable": 16}[INSTRUCTION_SET]  # bytes of a vector
PIECES = 64 // WIDTH  # vectors of a quad
LANES = WIDTH // 4  # rows of a piece
BYTES, WORDS, FLOATS = ir.VectorType(I8, WIDTH), ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
HALVES = ir.VectorType(I16, WIDTH // 2)
SPLIT_SEEDS = OFFSET_WHEN_WIDE = INSTRUCTION_SET == "avx2"
SIX_BITS = INSTRUCTION_SET == "avx512" and "avx512vbmi" in cpu_features()  # is there a lookup that takes six bits of a byte as they are?
assert ROWS == LANES * PIECES
Emitting = Generator[None, None, ir.Value]  # gives a value; pauses where instructions of another such may come first


def function(builder: ir.IRBuilder, result: ir.Type, arguments: list[ir.Type], name: str) -> ir.Function:
    """A declared external function or LLVM intrinsic."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 1) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def offset(builder: ir.IRBuilder, address: ir.Value, nbytes: int) -> ir.Value:
    return builder.add(address, I64(nbytes)) if nbytes else address


def ask(builder: ir.IRBuilder, address: ir.Value, nbytes: int, nearness: int = 3) -> None:
    """Ask for the cache lines of bytes that will be read soon: into the first-level cache, or into the second with a `nearness` of 2."""
    fetch = function(builder, ir.VoidType(), [I8.as_pointer(), I32, I32, I32], "llvm.prefetch.p0")
    for line in range(0, nbytes, 64):
        where = builder.inttoptr(offset(builder, address, line), I8.as_pointer())
        builder.call(fetch, [where, I32(0), I32(nearness), I32(1)])


def in_register(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The address, of which the compiler is to know nothing but its register: it would write it as a sum of two, and an instruction with
    such an operand in memory is decoded as two."""
    return builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [address], side_effect=False)


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """A vector with one value in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def splat(builder: ir.IRBuilder, scalar: ir.Value, kind: ir.VectorType) -> ir.Value:
    """A scalar in every lane."""
    blank = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(blank, scalar, I32(0))
    return builder.shuffle_vector(single, blank, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return builder.call(function(builder, FLOATS, [FLOATS] * 3, f"llvm.fma.v{LANES}f32"), [a, b, c])


def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of two floats in every lane; `b` where one is no number."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def across(builder: ir.IRBuilder, vectors: list[ir.Value], merge: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """The lanes of each vector merged into one: a lane for each. Parts of two vectors lie side by side from the first step on, so that all
    together cost little more than one. Vectors: a power of two, no more than lanes."""
    size = vectors[0].type.count
    while size > 1:
        count = vectors[0].type.count
        parts = [[begin + size // 2 * part + i for begin in range(0, count, size) for i in range(size // 2)] for part in (0, 1)]
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        if len(vectors) > 1:
            parts = [part + [count + place for place in part] for part in parts]
        places = [ir.Constant(ir.VectorType(I32, len(part)), part) for part in parts]
        vectors = [merge(*(builder.shuffle_vector(a, b, each) for each in places)) for a, b in pairs]
        size //= 2
    return vectors[0]


def merged(vectors: list[ir.Value], merge: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Vectors, a power of two, merged lane by lane: neighbours first."""
    while len(vectors) > 1:
        vectors = [merge(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def shift_right(builder: ir.IRBuilder, value: ir.Value, bits: int, keep: int) -> ir.Value:
    """Bytes shifted right, `keep` bits kept; by 16-bit lanes, since no instruction set shifts bytes."""
    if bits:
        value = builder.bitcast(builder.lshr(builder.bitcast(value, HALVES), constant(HALVES, bits)), BYTES)
    return value if bits + keep == 8 and not bits else builder.and_(value, constant(BYTES, (1 << keep) - 1))


def shift_left(builder: ir.IRBuilder, value: ir.Value, bits: int) -> ir.Value:
    """Bytes shifted left that lose nothing."""
    return builder.bitcast(builder.shl(builder.bitcast(value, HALVES), constant(HALVES, bits)), BYTES) if bits else value


def unpack_tile(builder: ir.IRBuilder, address: ir.Value, bits: int, piece: int) -> list[ir.Value]:
    """The eight quads of a tile as codes, one byte each, for one piece of its rows."""

    def merge(raw: ir.Value, at: int, width: int, place: int, below: ir.Value | None) -> ir.Value:
        part = shift_left(builder, shift_right(builder, raw, at, width), place)
        return part if below is None else builder.or_(below, part)

    return _quads(builder, address, bits, piece, merge)


def _quads(builder: ir.IRBuilder, address: ir.Value, bits: int, piece: int, merge: Callable[..., ir.Value]) -> list[ir.Value]:
    """`unpack_tile`, plane by plane: merge(bytes, first bit there, how many, their place in the code, what is below it) -> bytes."""
    quads: list[ir.Value | None] = [None] * 8
    at = place = 0
    for width in PLANES[bits]:
        per = 8 // width
        for vector in range(8 // per):
            raw = load(builder, offset(builder, address, at + 64 * vector + WIDTH * piece), BYTES)
            for i in range(per):
                j = per * vector + i
                quads[j] = merge(raw, width * i, width, place, quads[j])
        at, place = at + 64 * (8 // per), place + width
    return quads


def _choose(builder: ir.IRBuilder, one: ir.Value, other: ir.Value, mask: ir.Value) -> ir.Value:
    """The bits of `one` where those of `mask` are set, of `other` elsewhere: one instruction, of which the compiler makes two."""
    choose = function(builder, WORDS, [WORDS] * 3 + [I32], "llvm.x86.avx512.pternlog.d.512")
    return builder.bitcast(builder.call(choose, [*(builder.bitcast(each, WORDS) for each in (one, other, mask)), I32(0xE4)]), BYTES)


def load_table(builder: ir.IRBuilder, address: ir.Value, bits: int) -> list[ir.Value]:
    """The levels of `bits` at an address, biased by 64 so that they are unsigned: as a lookup vector (portable: one vector per level)."""
    lane, period = ir.VectorType(I8, 16), 1 << bits if SIX_BITS else 16
    levels = builder.add(load(builder, address, lane), constant(lane, 64))
    if INSTRUCTION_SET == "portable":
        return [splat(builder, builder.extract_element(levels, I32(i)), BYTES) for i in range(16)]
    return [builder.shuffle_vector(levels, levels, ir.Constant(ir.VectorType(I32, WIDTH), [i % period for i in range(WIDTH)]))]


def levels_of_tile(builder: ir.IRBuilder, table: list[ir.Value], address: ir.Value, bits: int, piece: int) -> list[ir.Value]:
    """The eight quads of a tile as levels + 64, by what `load_table` made.

    Where a lookup takes six bits of a byte the table repeats itself, and what lies above a code there need not be taken away.
    """
    if not SIX_BITS:
        return [look_up(builder, table, each, bits) for each in unpack_tile(builder, address, bits, piece)]

    def merge(raw: ir.Value, at: int, width: int, place: int, below: ir.Value | None) -> ir.Value:
        halves = builder.bitcast(raw, HALVES)
        moved = builder.lshr(halves, constant(HALVES, at - place)) if at > place else builder.shl(halves, constant(HALVES, place - at))
        part = builder.bitcast(moved, BYTES) if at != place else raw
        if below is None:
            return part
        return _choose(builder, below, part, constant(BYTES, (1 << place) - 1))

    permute = function(builder, BYTES, [BYTES] * 2, "llvm.x86.avx512.permvar.qi.512")
    return [builder.call(permute, [table[0], each]) for each in _quads(builder, address, bits, piece, merge)]


def look_up(builder: ir.IRBuilder, table: list[ir.Value], codes: ir.Value, bits: int) -> ir.Value:
    """table[code] for every byte; codes below 16."""
    if INSTRUCTION_SET == "portable":
        found = table[0]
        for code in range(1, 1 << bits):
            found = builder.select(builder.icmp_unsigned("==", codes, constant(BYTES, code)), table[code], found)
        return found
    name = "llvm.x86.avx512.pshuf.b.512" if WIDTH == 64 else "llvm.x86.avx2.pshuf.b"
    return builder.call(function(builder, BYTES, [BYTES] * 2, name), [table[0], codes])


def dot(builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, x: ir.Value, wide: bool) -> ir.Value:
    """sums[i32 per row] + the four products of each row: unsigned bytes times signed bytes.

    `wide`: weights above 127 occur; where `OFFSET_WHEN_WIDE` the weights are then taken 128 lower.
    """
    if INSTRUCTION_SET in ("avx512", "avx2vnni"):
        dp = function(builder, WORDS, [WORDS] * 3, f"llvm.x86.avx512.vpdpbusd.{8 * WIDTH}")
        return builder.call(dp, [sums, builder.bitcast(weights, WORDS), builder.bitcast(x, WORDS)])
    if wide and INSTRUCTION_SET == "avx2":  # pairs of products would overflow 16 bits: signed weights, as magnitude and sign of x
        weights = builder.xor(weights, constant(BYTES, 128))
        x = builder.call(function(builder, BYTES, [BYTES] * 2, "llvm.x86.avx2.psign.b"), [x, weights])
        weights = builder.call(function(builder, BYTES, [BYTES, I1], f"llvm.abs.v{WIDTH}i8"), [weights, I1(0)])
    if INSTRUCTION_SET == "avx2":
        pairs = builder.call(function(builder, HALVES, [BYTES] * 2, "llvm.x86.avx2.pmadd.ub.sw"), [weights, x])
        fours = builder.call(function(builder, WORDS, [HALVES] * 2, "llvm.x86.avx2.pmadd.wd"), [pairs, constant(HALVES, 1)])
        return builder.add(sums, fours)
    halves, words = ir.VectorType(I16, WIDTH), ir.VectorType(I32, WIDTH)
    products = builder.sext(builder.mul(builder.zext(weights, halves), builder.sext(x, halves)), words)
    for i in range(4):
        lanes = ir.Constant(ir.VectorType(I32, LANES), list(range(i, WIDTH, 4)))
        sums = builder.add(sums, builder.shuffle_vector(products, products, lanes))
    return sums


def dots(builder: ir.IRBuilder, sums: ir.Value, weights: list[ir.Value], x: list[ir.Value], largest: int) -> ir.Value:
    """`dot` of some quads one after the other, none of whose single products is larger than `largest` (half of 2**15 at most)."""
    if INSTRUCTION_SET == "avx2":
        return builder.add(sums, pairs_of(builder, weights, x, largest, constant(HALVES, 1)))
    for quad, own in zip(weights, x, strict=True):
        sums = dot(builder, sums, quad, own, False)
    return sums


def pairs_of(builder: ir.IRBuilder, quads: list[ir.Value], x: list[ir.Value], largest: int, steps: ir.Value) -> ir.Value:
    """What two instructions make of every quad on AVX2, the second of which also multiplies by `steps`: one of those for as many quads as
    16 bits hold the pairs of products of, the largest product being `largest`."""
    pair_up = function(builder, HALVES, [BYTES] * 2, "llvm.x86.avx2.pmadd.ub.sw")
    scale_up = function(builder, WORDS, [HALVES] * 2, "llvm.x86.avx2.pmadd.wd")
    per, total = 32767 // (2 * largest), None
    for start in range(0, len(quads), per):
        pairs = None
        for quad, own in zip(quads[start : start + per], x[start : start + per]):
            products = builder.call(pair_up, [quad, own])
            pairs = products if pairs is None else builder.add(pairs, products)
        part = builder.call(scale_up, [pairs, steps])
        total = part if total is None else builder.add(total, part)
    return total


def side_by_side(emitting: Iterable[Emitting]) -> list[ir.Value]:
    """What each gives, their instructions by turns. A chain of dot products waits five cycles for each link, and a processor looks only
    some hundred instructions ahead: chains that follow one another run at four fifths of the rate of chains that lie side by side. Sixteen
    registers have no room for them; there one follows the other.
    """
    turns = [list(emitting)] if INSTRUCTION_SET == "avx512" else [[each] for each in emitting]
    given = []
    for together in turns:
        waiting, found = dict(enumerate(together)), {}
        while waiting:
            for index, each in list(waiting.items()):
                try:
                    next(each)
                except StopIteration as end:
                    found[index] = end.value
                    del waiting[index]
        given += [found[index] for index in range(len(together))]
    return given


def sum_quads(builder: ir.IRBuilder, quads: list[ir.Value], x: list[ir.Value], most: int, steps: ir.Value | None = None) -> Emitting:
    """The products of some quads, summed per row, as floats; codes are up to `most` (above 127: see `dot`). Times `steps`, in their form,
    if given: a whole number below 2**24 still.

    Without a four-way dot product, pairs of products are summed in 16 bits for as many quads as fit, and one instruction for all of them
    goes on to 32 bits, where it multiplies by the step at the same time.
    """
    if INSTRUCTION_SET == "avx2" and most <= 127:
        return to_floats(builder, pairs_of(builder, quads, x, 127 * most, constant(HALVES, 1) if steps is None else steps))
    # two chains: a dot product takes several cycles
    parts = [constant(WORDS, 0)] * 2
    for j, (quad, own) in enumerate(zip(quads, x)):
        which = 2 * j // len(quads) if len(quads) > 4 else 0
        parts[which] = dot(builder, parts[which], quad, own, most > 127)
        yield
    total = to_floats(builder, builder.add(*parts))
    return total if steps is None else builder.fmul(total, steps)


def step_form(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    """Whole numbers of 16 bits and a sign, a word per row, in the form that `sum_quads` and `codebook_sum` multiply by."""
    if INSTRUCTION_SET != "avx2":
        return to_floats(builder, words)
    return builder.bitcast(builder.or_(builder.and_(words, constant(WORDS, 0xFFFF)), builder.shl(words, constant(WORDS, 16))), HALVES)


def steps_table(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """The 16 steps at an address, as `look_up_steps` wants them."""
    lane = ir.VectorType(I8, 16)
    steps = load(builder, address, lane)
    if INSTRUCTION_SET == "avx512":
        return [builder.uitofp(steps, FLOATS)]
    if INSTRUCTION_SET == "portable":
        return [splat(builder, builder.extract_element(steps, I32(i)), ir.VectorType(I8, LANES)) for i in range(16)]
    return [builder.shuffle_vector(steps, steps, ir.Constant(ir.VectorType(I32, WIDTH), [i % 16 for i in range(WIDTH)]))]


def look_up_steps(builder: ir.IRBuilder, table: list[ir.Value], address: ir.Value, piece: int) -> tuple[ir.Value, ir.Value]:
    """What the two groups of a codebook tile are multiplied by, for a piece's rows, in the form of `codebook_sum`.

    At the address: a byte per row, the even group's code in the low nibble.
    """
    address = offset(builder, address, LANES * piece)
    lane = ir.VectorType(I8, LANES)
    if INSTRUCTION_SET == "avx512":
        codes = widen_bytes(builder, address)
        permute = function(builder, FLOATS, [FLOATS, WORDS], "llvm.x86.avx512.permvar.sf.512")
        return tuple(builder.call(permute, [table[0], each]) for each in (codes, builder.lshr(codes, constant(WORDS, 4))))
    raw = load(builder, address, lane)
    nibbles = builder.and_(raw, constant(lane, 15)), builder.lshr(raw, constant(lane, 4))
    if INSTRUCTION_SET == "portable":
        found = []
        for codes in nibbles:
            steps = table[0]
            for code in range(1, 16):
                steps = builder.select(builder.icmp_unsigned("==", codes, constant(lane, code)), table[code], steps)
            found.append(builder.uitofp(steps, FLOATS))
        return found[0], found[1]
    # Rows' bytes to bytes 0 and 2 of their words: the step of a row, twice, as 16-bit numbers; with a four-way dot product, once.
    spread = [i // 4 if i % 2 == 0 else LANES for i in range(WIDTH)]
    raw = builder.shuffle_vector(raw, constant(lane, 0), ir.Constant(ir.VectorType(I32, WIDTH), spread))
    look = function(builder, BYTES, [BYTES] * 2, "llvm.x86.avx2.pshuf.b")
    even = builder.and_(raw, constant(BYTES, 15))
    odd = builder.and_(builder.bitcast(builder.lshr(builder.bitcast(raw, HALVES), constant(HALVES, 4)), BYTES), constant(BYTES, 15))
    kind = HALVES if INSTRUCTION_SET == "avx2" else WORDS
    keep = constant(kind, 255)  # a zero index finds the first step
    found = tuple(builder.and_(builder.bitcast(builder.call(look, [table[0], each]), kind), keep) for each in (even, odd))
    return found if INSTRUCTION_SET == "avx2" else tuple(to_floats(builder, each) for each in found)


def codebook_sum(builder: ir.IRBuilder, quads: list[ir.Value], x: list[ir.Value], seeds: list[ir.Value],
                 steps: tuple[ir.Value, ir.Value], halved: bool = False) -> Emitting:
    """The sum over a tile's two groups of step * (levels . x), as floats, exact but for one rounding; `quads` hold levels + 64.

    A group's product with its step is below 2**24, so floats hold it, and a fused multiply-add rounds the sum of two once, as converting
    it from 32 bits would: three instructions in the place of two 32-bit multiplications (two micro-operations each) and three more. Where
    there is no four-way dot product, the multiplication that sums pairs takes the step along and so costs nothing. `seeds` take the 64
    back; `seed_of` makes them. `halved`: quads hold numbers up to 63 that are 32 above what they mean.
    """
    if INSTRUCTION_SET != "avx2":
        parts = [builder.ashr(seed, constant(WORDS, 1)) if halved else seed for seed in seeds]
        for j in range(4):
            yield
            parts = [dot(builder, part, quads[4 * group + j], x[4 * group + j], False) for group, part in enumerate(parts)]
        yield
        parts = [to_floats(builder, part) for part in parts]
        yield
        first = builder.fmul(parts[0], steps[0])
        yield
        return fma(builder, parts[1], steps[1], first)
    scale_up = function(builder, WORDS, [HALVES] * 2, "llvm.x86.avx2.pmadd.wd")
    sums = builder.add(*(builder.call(scale_up, [steps[group], builder.bitcast(seeds[group], HALVES)]) for group in (0, 1)))
    sums = sums if halved else builder.shl(sums, constant(WORDS, 1))
    for group in (0, 4):
        own = pairs_of(builder, quads[group : group + 4], x[group : group + 4], 127 * (63 if halved else 127), steps[group // 4])
        sums = builder.add(sums, own)
    return to_floats(builder, sums)


@inlined()
def seed_of(total):
    """The seed of a group whose int8 activations sum to `total` (at most 16 * 127): minus 64 times that, in the form of `codebook_sum`."""
    if SPLIT_SEEDS:  # half of it in each of two signed 16-bit numbers, halved again: doubled after the multiplication
        half = (total * -16) & 0xFFFF
        return half << 16 | half
    return total * -64


def to_floats(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return builder.sitofp(words, FLOATS)


def widen_bytes(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """LANES unsigned bytes at an address as 32-bit integers."""
    return builder.zext(load(builder, address, ir.VectorType(I8, LANES)), WORDS)
