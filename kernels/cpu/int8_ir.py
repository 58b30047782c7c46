"""Byte vectors as LLVM instructions, for kernels over low-bit weights: unpacking, table lookup, four-way dot products.

One instruction set is selected at import, from the features that Numba compiles for (`cpu_features`):

    avx512   64 bytes, vpdpbusd           (AVX-512 VNNI)
    avx2vnni 32 bytes, vpdpbusd           (AVX-VNNI, or the 256-bit form of AVX-512 VNNI)
    avx2     32 bytes, vpmaddubsw + vpmaddwd
    neondot  16 bytes, sdot               (ARM's dot products: ARMv8.2 and later)
    neon     16 bytes, smull + addp       (any other 64-bit ARM)
    portable 16 bytes, plain LLVM

The unit is always a quad, 16 rows x 4 inputs = 64 bytes; narrower sets process it in pieces of fewer rows. Integer results are the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from ..compile import cpu_features
from ..lazy_numba import cgutils, inlined
from ..target import target
from ..tiles import PLANES, ROWS
from .intrinsics import F32, I16, I32, I64

I1, I8 = ir.IntType(1), ir.IntType(8)


def _instruction_set() -> str:
    features = cpu_features()
    if {"avx512f", "avx512bw", "avx512vnni"} <= features:
        return "avx512"
    if "avx2" in features and ("avxvnni" in features or {"avx512vnni", "avx512vl"} <= features):
        return "avx2vnni"
    if "avx2" in features:
        return "avx2"
    return "neondot" if {"neon", "dotprod"} <= features else "neon" if "neon" in features else "portable"


INSTRUCTION_SET = _instruction_set()
NEON = INSTRUCTION_SET in ("neondot", "neon")
WIDTH = {"avx512": 64, "avx2vnni": 32, "avx2": 32}.get(INSTRUCTION_SET, 16)  # bytes of a vector
PIECES = 64 // WIDTH  # vectors of a quad
LANES = WIDTH // 4  # rows of a piece
BYTES, WORDS, FLOATS = ir.VectorType(I8, WIDTH), ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
HALVES = ir.VectorType(I16, WIDTH // 2)
# The cache level that the next page is prefetched into. The L1 cache of Zen 4 has 32 KiB, and waiting for it delays current loads.
NEXT_PAGE = 2 if target()[0] == "znver4" else 3
SPLIT_SEEDS = INSTRUCTION_SET == "avx2"
OFFSET_WHEN_WIDE = SPLIT_SEEDS or NEON  # bytes are multiplied as signed ones
SIX_BITS = INSTRUCTION_SET == "avx512" and "avx512vbmi" in cpu_features()  # there is a lookup by the low six bits of a byte
assert ROWS == LANES * PIECES


def function(builder: ir.IRBuilder, result: ir.Type, arguments: list[ir.Type], name: str) -> ir.Function:
    """A declared external function or LLVM intrinsic."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def arm(builder: ir.IRBuilder, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
    """One of ARM's vector instructions."""
    return builder.call(function(builder, result, [value.type for value in values], f"llvm.aarch64.neon.{name}"), values)


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 1) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def offset(builder: ir.IRBuilder, address: ir.Value, nbytes: int) -> ir.Value:
    return builder.add(address, I64(nbytes)) if nbytes else address


def prefetch_lines(builder: ir.IRBuilder, address: ir.Value, nbytes: int, nearness: int = 3) -> None:
    """Prefetch the cache lines of `nbytes` bytes, into L1, or into L2 with a `nearness` of 2."""
    fetch = function(builder, ir.VoidType(), [I8.as_pointer(), I32, I32, I32], "llvm.prefetch.p0")
    for line in range(0, nbytes, 64):
        where = builder.inttoptr(offset(builder, address, line), I8.as_pointer())
        builder.call(fetch, [where, I32(0), I32(nearness), I32(1)])


def opaque_address(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Hide how an address was computed from the compiler: it would express it as a sum of two registers, and an instruction with such a
    memory operand decodes into two."""
    return builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [address], side_effect=False)


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """A vector with one value in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def splat(builder: ir.IRBuilder, scalar: ir.Value, kind: ir.VectorType) -> ir.Value:
    """A scalar in every lane."""
    blank = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(blank, scalar, I32(0))
    return builder.shuffle_vector(single, blank, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))


def words_at(builder: ir.IRBuilder, address: ir.Value, count: int) -> list[ir.Value]:
    """`count` words at an address, each broadcast to all lanes. ARM multiplies by a lane of a vector, so several are one load there."""
    if not NEON:
        return [splat(builder, load(builder, offset(builder, address, 4 * i), I32, 4), WORDS) for i in range(count)]
    words = []
    while len(words) < count:
        num_words = min(LANES, 1 << (count - len(words)).bit_length() - 1)
        chunk = load(builder, offset(builder, address, 4 * len(words)), ir.VectorType(I32, num_words), 4)
        words += [builder.shuffle_vector(chunk, chunk, ir.Constant(ir.VectorType(I32, LANES), [i] * LANES)) for i in range(num_words)]
    return words


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c of float vectors, rounded once."""
    return builder.call(function(builder, a.type, [a.type] * 3, f"llvm.fma.v{a.type.count}f32"), [a, b, c])


def shift_right(builder: ir.IRBuilder, value: ir.Value, bits: int, keep: int) -> ir.Value:
    """Bytes shifted right, keeping `keep` bits; by 16-bit lanes, since only ARM has instructions that shift bytes."""
    if NEON and bits:
        value = builder.lshr(value, constant(BYTES, bits))
        return value if bits + keep == 8 else builder.and_(value, constant(BYTES, (1 << keep) - 1))
    if bits:
        value = builder.bitcast(builder.lshr(builder.bitcast(value, HALVES), constant(HALVES, bits)), BYTES)
    return value if bits + keep == 8 and not bits else builder.and_(value, constant(BYTES, (1 << keep) - 1))


def shift_left(builder: ir.IRBuilder, value: ir.Value, bits: int) -> ir.Value:
    """Bytes shifted left, assuming no bits are lost."""
    return builder.bitcast(builder.shl(builder.bitcast(value, HALVES), constant(HALVES, bits)), BYTES) if bits else value


def unpack_tile(builder: ir.IRBuilder, address: ir.Value, bits: int, piece: int) -> list[ir.Value]:
    """The eight quads of a tile as codes, one byte each, for one piece of its rows."""

    def merge(raw: ir.Value, at: int, width: int, position: int, below: ir.Value | None) -> ir.Value:
        part = shift_left(builder, shift_right(builder, raw, at, width), position)
        return part if below is None else builder.or_(below, part)

    return _quads(builder, address, bits, piece, merge)


def _quads(builder: ir.IRBuilder, address: ir.Value, bits: int, piece: int, merge: Callable[..., ir.Value]) -> list[ir.Value]:
    """`unpack_tile`, plane by plane: merge(bytes, first bit there, bit count, position in the code, what is below it) -> bytes."""
    quads: list[ir.Value | None] = [None] * 8
    at = position = 0
    for width in PLANES[bits]:
        per = 8 // width
        for vector in range(8 // per):
            raw = load(builder, offset(builder, address, at + 64 * vector + WIDTH * piece), BYTES)
            for i in range(per):
                j = per * vector + i
                quads[j] = merge(raw, width * i, width, position, quads[j])
        at, position = at + 64 * (8 // per), position + width
    return quads


def _choose(builder: ir.IRBuilder, one: ir.Value, other: ir.Value, mask: ir.Value) -> ir.Value:
    """Bits of `one` where `mask` is set, else of `other`. One instruction; the compiler would emit two for the plain expression."""
    choose = function(builder, WORDS, [WORDS] * 3 + [I32], "llvm.x86.avx512.pternlog.d.512")
    return builder.bitcast(builder.call(choose, [*(builder.bitcast(vector, WORDS) for vector in (one, other, mask)), I32(0xE4)]), BYTES)


def load_table(builder: ir.IRBuilder, address: ir.Value, bits: int, shift: int) -> list[ir.Value]:
    """The levels of `bits` at an address, offset by `shift` to be unsigned (0: they stay signed): as a lookup vector (portable: one vector
    per level)."""
    lane, period = ir.VectorType(I8, 16), 1 << bits if SIX_BITS else 16
    levels = builder.add(load(builder, address, lane), constant(lane, shift))
    if INSTRUCTION_SET == "portable":
        return [splat(builder, builder.extract_element(levels, I32(i)), BYTES) for i in range(16)]
    return [builder.shuffle_vector(levels, levels, ir.Constant(ir.VectorType(I32, WIDTH), [i % period for i in range(WIDTH)]))]


def levels_of_tile(builder: ir.IRBuilder, table: list[ir.Value], address: ir.Value, bits: int, piece: int) -> list[ir.Value]:
    """The eight quads of a tile as levels, using the output of `load_table`.

    Where a lookup uses six bits of a byte the table is repeated, so that bits above a code need not be masked.
    """
    if not SIX_BITS:
        return [look_up(builder, table, codes, bits) for codes in unpack_tile(builder, address, bits, piece)]
    permute = function(builder, BYTES, [BYTES] * 2, "llvm.x86.avx512.permvar.qi.512")
    return [builder.call(permute, [table[0], codes]) for codes in loose_quads(builder, address, bits, piece)]


def loose_quads(builder: ir.IRBuilder, address: ir.Value, bits: int, piece: int) -> list[ir.Value]:
    """The eight quads of a tile with AVX-512: codes in the low bits of their bytes, with arbitrary bits above."""

    def merge(raw: ir.Value, at: int, width: int, position: int, below: ir.Value | None) -> ir.Value:
        halves = builder.bitcast(raw, HALVES)
        shift = constant(HALVES, abs(at - position))
        moved = builder.lshr(halves, shift) if at > position else builder.shl(halves, shift)
        part = builder.bitcast(moved, BYTES) if at != position else raw
        if below is None:
            return part
        return _choose(builder, below, part, constant(BYTES, (1 << position) - 1))

    return _quads(builder, address, bits, piece, merge)


def look_up(builder: ir.IRBuilder, table: list[ir.Value], codes: ir.Value, bits: int) -> ir.Value:
    """table[code] for every byte; codes below 16."""
    if INSTRUCTION_SET == "portable":
        result = table[0]
        for code in range(1, 1 << bits):
            result = builder.select(builder.icmp_unsigned("==", codes, constant(BYTES, code)), table[code], result)
        return result
    if NEON:
        return arm(builder, "tbl1.v16i8", BYTES, table[0], codes)
    name = "llvm.x86.avx512.pshuf.b.512" if WIDTH == 64 else "llvm.x86.avx2.pshuf.b"
    return builder.call(function(builder, BYTES, [BYTES] * 2, name), [table[0], codes])


def step_form(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    """Signed integers of up to 16 bits and a sign, a word per row, in the form that `sum_quads` and `codebook_sum` multiply by."""
    if INSTRUCTION_SET != "avx2":
        return to_floats(builder, words)
    return builder.bitcast(builder.or_(builder.and_(words, constant(WORDS, 0xFFFF)), builder.shl(words, constant(WORDS, 16))), HALVES)


def steps_table(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """The 16 steps at an address, in the form that `look_up_steps` takes."""
    lane = ir.VectorType(I8, 16)
    steps = load(builder, address, lane)
    if INSTRUCTION_SET == "avx512":
        return [builder.uitofp(steps, FLOATS)]
    if INSTRUCTION_SET == "portable":
        return [splat(builder, builder.extract_element(steps, I32(i)), ir.VectorType(I8, LANES)) for i in range(16)]
    return [builder.shuffle_vector(steps, steps, ir.Constant(ir.VectorType(I32, WIDTH), [i % 16 for i in range(WIDTH)]))]


def look_up_steps(builder: ir.IRBuilder, table: list[ir.Value], address: ir.Value, piece: int) -> tuple[ir.Value, ir.Value]:
    """The step factors of a codebook tile's two groups, for a piece's rows, in the form that `codebook_sum` takes.

    At the address: a byte per row, the even group's code in the low nibble.
    """
    if NEON:  # steps of all rows at once; the compiler shares the load among pieces
        codes = load(builder, address, BYTES)
        lanes = ir.Constant(ir.VectorType(I32, LANES), [LANES * piece + i for i in range(LANES)])
        low_and_high = builder.and_(codes, constant(BYTES, 15)), builder.lshr(codes, constant(BYTES, 4))
        steps = (look_up(builder, table, half_codes, 4) for half_codes in low_and_high)
        return tuple(builder.uitofp(builder.shuffle_vector(half_codes, half_codes, lanes), FLOATS) for half_codes in steps)
    address = offset(builder, address, LANES * piece)
    lane = ir.VectorType(I8, LANES)
    if INSTRUCTION_SET == "avx512":
        codes = widen_bytes(builder, address)
        permute = function(builder, FLOATS, [FLOATS, WORDS], "llvm.x86.avx512.permvar.sf.512")
        return tuple(builder.call(permute, [table[0], half_codes]) for half_codes in (codes, builder.lshr(codes, constant(WORDS, 4))))
    raw = load(builder, address, lane)
    nibbles = builder.and_(raw, constant(lane, 15)), builder.lshr(raw, constant(lane, 4))
    if INSTRUCTION_SET == "portable":
        vectors = []
        for codes in nibbles:
            steps = table[0]
            for code in range(1, 16):
                steps = builder.select(builder.icmp_unsigned("==", codes, constant(lane, code)), table[code], steps)
            vectors.append(builder.uitofp(steps, FLOATS))
        return vectors[0], vectors[1]
    # Bytes of rows to bytes 0 and 2 of their words: the step of a row twice, as 16-bit numbers; with a four-way dot product once.
    spread = [i // 4 if i % 2 == 0 else LANES for i in range(WIDTH)]
    raw = builder.shuffle_vector(raw, constant(lane, 0), ir.Constant(ir.VectorType(I32, WIDTH), spread))
    shuffle = function(builder, BYTES, [BYTES] * 2, "llvm.x86.avx2.pshuf.b")
    even = builder.and_(raw, constant(BYTES, 15))
    odd = builder.and_(builder.bitcast(builder.lshr(builder.bitcast(raw, HALVES), constant(HALVES, 4)), BYTES), constant(BYTES, 15))
    kind = HALVES if INSTRUCTION_SET == "avx2" else WORDS
    keep = constant(kind, 255)  # index 0 selects the first step
    vectors = tuple(builder.and_(builder.bitcast(builder.call(shuffle, [table[0], half_codes]), kind), keep) for half_codes in (even, odd))
    return vectors if INSTRUCTION_SET == "avx2" else tuple(to_floats(builder, half_codes) for half_codes in vectors)


@inlined()
def seed_of(total):
    """The seed of a group whose int8 activations sum to `total` (at most 16 * 127): minus 64 times that, in the form that `codebook_sum`
    takes."""
    if SPLIT_SEEDS:  # half of it in each of two signed 16-bit numbers, halved again: doubled after the multiplication
        half = (total * -16) & 0xFFFF
        return half << 16 | half
    return total * -64


def to_floats(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return builder.sitofp(words, FLOATS)


def widen_bytes(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """LANES unsigned bytes at an address as 32-bit integers."""
    return builder.zext(load(builder, address, ir.VectorType(I8, LANES)), WORDS)
