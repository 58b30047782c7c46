"""Other tools' codes repacked by compiled functions: the bytes of NumPy's decoders and `put_rows`, whatever the buffer held."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_instruction_sets import X86, child

from effllm.kernels import tiles
from effllm.kernels.cpu import repack_gguf, repack_gguf_codebooks, repack_words
from effllm.quant.codebooks import MXFP
from effllm.quant.codes import Codes, dequantize
from effllm.quant.imports import awq, bitsandbytes, compressed_tensors, fp8, gguf_codebooks, gptq, mxfp4, nvfp4
from effllm.quant.imports.gguf import DECODERS, NATIVE, native_codes
from effllm.quant.imports.repack import (
    MXFP4,
    SIGNED,
    WORDS,
    put_bitsandbytes,
    put_fp8,
    put_fp8_as_halves,
    put_gguf_blocks,
    put_int32_words,
    put_mxfp4,
    put_nvfp4,
)
from effllm.quant.pack import pack, pack_tiles, put_rows, put_tables, unpack
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import from_f32

STALE = 0xA5
# inputs of a block
WIDE = {kind: 256 if spec.scheme in tiles.SUPER_BLOCK_SCHEMES else 64 if kind == "NVFP4" else 32 for kind, spec in NATIVE.items()}
HALVES = {"super": (0, 2), "minimum": (0, 2), "signed": (208,), "block": (0,), "table": (0,), "nibble": (80, 82), "Q3_K": (108,),
          "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": ()}
seeds = st.integers(0, 2**32 - 1)


def halves_of(kind: str) -> tuple[int, ...]:
    """Where halves lie in a block."""
    return HALVES.get(kind, HALVES.get(NATIVE[kind].scheme, ()))


def file_of(seed: int, kind: str, rows: int, blocks: int) -> np.ndarray:
    """Rows of any bytes but for scales that are no numbers, uint8 [rows, row bytes], at an odd address."""
    nbytes = DECODERS[kind][0]
    raw = np.random.default_rng(seed).integers(0, 256, rows * blocks * nbytes + 1, np.uint8)[1:]
    each = raw.reshape(-1, nbytes)
    if kind == "IQ1_M":  # four bits in each of four words
        each[:, 55] &= 0xBF
    for at in halves_of(kind):
        each[:, at + 1] &= 0xFB  # not all ones in the exponent
    if NATIVE[kind].scheme == "mxfp":
        each[each[:, 0] == mxfp4.NOT_A_NUMBER, 0] = 0
    return raw.reshape(rows, -1)


def stale(spec: QuantSpec, shape: tuple[int, int]) -> np.ndarray:
    return np.full(spec.nbytes(shape), STALE, np.uint8)


def put(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int], begin: int, codes: Codes) -> None:
    """As NumPy does."""
    put_rows(blob, spec, shape, begin, codes)
    if codes.levels is not None:
        put_tables(blob, spec, shape, codes.levels, codes.steps)


@pytest.mark.parametrize("kind", NATIVE)
@given(seed=seeds, rows=st.integers(1, 70), blocks=st.integers(1, 5), cut=st.integers(0, 4))
def test_blocks_are_the_bytes_of_their_codes(kind: str, seed: int, rows: int, blocks: int, cut: int) -> None:
    spec, shape, raw = NATIVE[kind], (rows, blocks * WIDE[kind]), file_of(seed, kind, rows, blocks)
    ours, theirs = stale(spec, shape), stale(spec, shape)
    cut = min(cut * tiles.ROWS, rows)
    for begin, end in ((cut, rows), (0, cut)):
        if begin < end:
            assert put_gguf_blocks(ours, kind, shape, begin, raw[begin:end])
            put(theirs, spec, shape, begin, native_codes(raw[begin:end], kind))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", [kind for kind in NATIVE if kind != "NVFP4"])  # which has none
@given(seed=seeds, rows=st.integers(1, 40), blocks=st.integers(1, 3), data=st.data())
def test_a_scale_that_is_not_finite_is_found_wherever_it_lies(kind: str, seed: int, rows: int, blocks: int, data: st.DataObject) -> None:
    shape, raw = (rows, blocks * WIDE[kind]), file_of(seed, kind, rows, blocks)
    block = raw.reshape(-1, DECODERS[kind][0])[data.draw(st.integers(0, rows * blocks - 1))]
    if NATIVE[kind].scheme == "mxfp":
        block[0] = mxfp4.NOT_A_NUMBER
    else:
        at = data.draw(st.sampled_from(halves_of(kind) or (-1,)))
        bits = np.frombuffer(data.draw(st.sampled_from((b"\x00\x7c", b"\x00\xfc", b"\x01\x7c", b"\xff\xff"))), np.uint8)
        if at >= 0:
            block[at : at + 2] = bits
        else:
            block[49:56:2] = block[49:56:2] & 15 | np.stack([bits[0] << 4, bits[0] & 0xF0, bits[1] << 4, bits[1] & 0xF0])
    assert not put_gguf_blocks(stale(NATIVE[kind], shape), kind, shape, 0, raw)


@given(seed=seeds, rows=st.integers(1, 40), groups=st.integers(1, 7), step=st.integers(1, 3), first=st.integers(0, 2), bad=st.booleans())
def test_pairs_are_the_bytes_of_their_codes(seed: int, rows: int, groups: int, step: int, first: int, bad: bool) -> None:
    """Every `step`-th row of a larger tensor."""
    rng, shape = np.random.default_rng(seed), (rows, 32 * groups)
    blocks = rng.integers(0, 256, (first + step * rows, 16 * groups), np.uint8)[first::step][:rows]
    scales = rng.integers(0, 255, (first + step * rows, groups), np.uint8)[first::step][:rows]
    if bad:
        scales[rng.integers(rows), rng.integers(groups)] = mxfp4.NOT_A_NUMBER
    ours, theirs = stale(MXFP4, shape), stale(MXFP4, shape)
    assert put_mxfp4(ours, shape, 0, blocks, scales) == (not bad)
    codes = mxfp4.unpack_pairs(np.ascontiguousarray(blocks).reshape(rows, groups, 16)).reshape(rows, -1)
    put(theirs, MXFP4, shape, 0, Codes(codes, scales, None, np.full(rows, 0.5, np.float32), MXFP))
    np.testing.assert_array_equal(ours, theirs)


def unpacked(layout: str, bits: int, words: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Codes uint8 [N, K], as NumPy finds them."""
    if layout == "gptq":
        return gptq.unpack_bits(words, bits).T
    if layout == "awq":
        return awq.unpack_words(words).T
    if layout in SIGNED:
        return (words.astype(np.int16) + 128).astype(np.uint8)
    return compressed_tensors.unpack_words(words, bits, shape[1]).view(np.uint8) + np.uint8(1 << (bits - 1)) & np.uint8((1 << bits) - 1)


def words_of(seed: int, layout: str, bits: int, shape: tuple[int, int]) -> np.ndarray:
    n, k = shape
    form = {"gptq": (k * bits // 32, n), "awq": (k, n // 8), "packed": (n, k * bits // 32)}.get(layout, (n, k // 4))
    words = np.random.default_rng(seed).integers(0, 1 << 32, form, np.uint32)
    return words.view(np.int8 if layout in SIGNED else np.int32)


@given(seed=seeds, rows=st.integers(1, 70), groups=st.integers(1, 40), cut=st.integers(0, 4), block=st.sampled_from((32, 64, 4096)))
def test_codes_beside_levels_are_the_bytes_of_their_codes(seed: int, rows: int, groups: int, cut: int, block: int) -> None:
    """In two parts, of which each begins with a block."""
    rng, shape = np.random.default_rng(seed), (rows, 16 * groups)
    packed, levels = rng.integers(0, 256, rows * 8 * groups, np.uint8), rng.standard_normal(16).astype(np.float32)
    scales = np.ldexp(rng.standard_normal(-(-2 * packed.size // block)), rng.integers(-20, 20)).astype(np.float32)
    spec, ours, cut = bitsandbytes.SPEC, stale(bitsandbytes.SPEC, shape), min(cut * tiles.ROWS, rows)
    cut = cut if cut * shape[1] % block == 0 else 0
    for begin, end in ((cut, rows), (0, cut)):
        if begin < end:
            own = slice(begin * shape[1] // block, -(-end * shape[1] // block))
            put_bitsandbytes(ours, shape, begin, packed[begin * 8 * groups : end * 8 * groups], levels, scales[own], block)
    theirs = stale(spec, shape)
    put(theirs, spec, shape, 0, bitsandbytes.packable(packed, levels, scales, block, shape))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("layout", "bits"), WORDS)
@given(seed=seeds, eights=st.integers(1, 9), odd=st.integers(0, 7), groups=st.integers(1, 5), group=st.sampled_from((32, 64, 128)))
def test_words_are_the_bytes_of_their_codes(layout: str, bits: int, seed: int, eights: int, odd: int, groups: int, group: int) -> None:
    """And nothing but the codes is touched."""
    rows = 8 * eights - (0 if layout == "awq" or (layout, bits) == ("gptq", 4) else odd)
    spec, shape = QuantSpec(bits, group, "offset"), (rows, group * groups)
    words, ours, theirs = words_of(seed, layout, bits, shape), stale(spec, shape), stale(spec, shape)
    put_int32_words(ours, spec, shape, layout, words)
    codes = np.zeros((spec.sections(shape).rows, shape[1]), np.uint8)
    codes[:rows] = unpacked(layout, bits, words, shape)
    theirs[: codes.size * bits // 8] = pack_tiles(codes, bits)
    np.testing.assert_array_equal(ours, theirs)


@given(seed=seeds, rows=st.integers(1, 40), depth=st.integers(1, 150), high=st.integers(1, 45), wide=st.integers(1, 160))
def test_floats_of_eight_bits_are_the_halves_that_numpy_rounds(seed: int, rows: int, depth: int, high: int, wide: int) -> None:
    """Any code, NaN too, under scales that lead to subnormal halves, and beyond the largest."""
    rng, form = np.random.default_rng(seed), (-(-rows // high), -(-depth // wide))
    codes = rng.integers(0, 256, (rows, depth), np.uint8)
    scales = np.ldexp(rng.random(form, np.float32) + np.float32(0.5), rng.integers(-36, 14, form)).astype(np.float32)
    out = np.full(2 * codes.size, STALE, np.uint8)
    put_fp8_as_halves(out, codes, scales, (high, wide))
    with np.errstate(all="ignore"):
        expected = from_f32(fp8.dequantize(codes, scales, (high, wide)), "f16")
    np.testing.assert_array_equal(out.view(np.uint16).reshape(rows, depth), expected)


@given(seed=seeds, rows=st.integers(1, 70), depth=st.integers(1, 300), high=st.sampled_from((16, 48, 128)),
       wide=st.sampled_from((32, 64, 96, 128, 256)), form=st.sampled_from(("blocks", "rows", "one")))
def test_floats_of_eight_bits_stay_what_they_are(seed: int, rows: int, depth: int, high: int, wide: int, form: str) -> None:
    """Any code but NaN, under one scale, a scale a row, or blocks; put in order as NumPy would, and meaning what NumPy says."""
    rng = np.random.default_rng(seed)
    shape = {"blocks": (-(-rows // high), -(-depth // wide)), "rows": (rows, 1), "one": (1, 1)}[form]
    codes = rng.integers(0, 127, (rows, depth), np.uint8) | rng.integers(0, 2, (rows, depth), np.uint8) << 7
    scales = np.ldexp(rng.random(shape, np.float32) + np.float32(0.5), rng.integers(-36, 14, shape)).astype(np.float32)
    spec = fp8.spec_of(codes.shape, scales.shape, (high, wide))
    out = np.full(spec.nbytes(codes.shape), STALE, np.uint8)
    put_fp8(out, spec, codes, scales, (high, wide))
    made = fp8.packable(codes, scales, spec, (high, wide))
    again = unpack(out, spec, codes.shape)
    np.testing.assert_array_equal(again.codes, codes)
    np.testing.assert_array_equal(dequantize(again, spec), fp8.dequantize(codes, scales, (high, wide)))
    theirs = pack(made, spec)
    at = spec.sections(codes.shape)
    scales_nbytes = at.rows // 16 * at.depth // spec.group * 4
    for begin, nbytes in ((0, at.rows * at.depth), (at.scales, scales_nbytes), (at.row_scales, 4 * at.rows)):
        np.testing.assert_array_equal(out[begin : begin + nbytes], theirs[begin : begin + nbytes])


@given(seed=seeds, rows=st.integers(1, 70), groups=st.integers(1, 20), scale=st.floats(2.0**-40, 2.0**40, width=32))
def test_floats_of_four_bits_stay_what_they_are(seed: int, rows: int, groups: int, scale: float) -> None:
    """NVFP4 of folders: put in order as NumPy would, and meaning what NumPy says. Rows that end within a tile, too."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, 8 * groups), np.uint8)
    scales = rng.integers(0, 127, (rows, groups), np.uint8) | rng.integers(0, 2, (rows, groups), np.uint8) << 7
    shape, out = (rows, 16 * groups), np.zeros(nvfp4.SPEC.nbytes((rows, 16 * groups)), np.uint8)
    put_nvfp4(out, packed, scales, np.float32(scale))
    np.testing.assert_array_equal(out, pack(nvfp4.packable(packed, scales, np.float32(scale)), nvfp4.SPEC))
    meant = nvfp4.dequantize(packed, scales, np.float32(scale))
    np.testing.assert_array_equal(dequantize(unpack(out, nvfp4.SPEC, shape), nvfp4.SPEC), meant)
    scales[rng.integers(rows), rng.integers(groups)] |= 0x7F
    with pytest.raises(ValueError, match="scale is NaN"):
        put_nvfp4(out, packed, scales, np.float32(scale))


def test_a_scale_of_a_matrix_is_one_number() -> None:
    one = np.float32([2.0])
    assert nvfp4.matrix_scale(one, None) == 0.5 and nvfp4.matrix_scale(None, one.reshape(())) == 2.0
    for divisor, factor in ((None, None), ([1, 2], None), ([0], None), (None, [np.inf]), ([np.nan], None)):
        with pytest.raises(ValueError, match="scale"):
            nvfp4.matrix_scale(*(None if each is None else np.float32(each) for each in (divisor, factor)))


def test_floats_of_eight_bits_that_are_not_finite_are_refused() -> None:
    spec, codes, scales = QuantSpec.parse("float8:32"), np.zeros((16, 32), np.uint8), np.ones((1, 1), np.float32)
    out = np.zeros(spec.nbytes((16, 32)), np.uint8)
    put_fp8(out, spec, codes, scales, (0, 0))
    for code in (0x7F, 0xFF):
        bad = codes.copy()
        bad[15, 31] = code
        with pytest.raises(ValueError, match="weight is NaN"):
            put_fp8(out, spec, bad, scales, (0, 0))
    for scale in (np.nan, np.inf):
        with pytest.raises(ValueError, match="scale is NaN or inf"):
            put_fp8(out, spec, codes, scales * np.float32(scale), (0, 0))
    for own, made in ((codes.view(np.int8), out), (codes.T, out), (codes, out[:-1])):
        with pytest.raises(ValueError, match="codes of|a blob of|scales of"):
            put_fp8(made, spec, own, scales, (0, 0))


def test_blocks_that_no_format_holds_stay_wide() -> None:
    """Blocks that end within sixteen rows, or within a tile; and scales that cover nothing."""
    for shape, scales, block in (((96, 64), (12, 1), (8, 64)), ((96, 96), (2, 6), (48, 16)), ((96, 96), (5, 2), (0, 0))):
        assert fp8.spec_of(shape, scales, block) is None
    assert str(fp8.spec_of((96, 192), (1, 2), (96, 96))) == "float8:32" and str(fp8.spec_of((7, 40), (), (0, 0))) == "float8:32"
    assert str(fp8.spec_of((4096, 7168), (32, 56), (128, 128))) == "float8:128"


def test_halves_that_do_not_fit_are_refused() -> None:
    codes, out, scales = np.zeros((16, 32), np.uint8), np.zeros(1024, np.uint8), np.ones((1, 1), np.float32)
    for own, made, factors in ((codes.view(np.int8), out, scales), (codes.T, out, scales), (codes, out[:-1], scales),
                               (codes, out[::-1], scales), (codes, out.view(np.int8), scales), (codes, out, np.ones((17, 1), np.float32)),
                               (codes, out, np.ones((3, 5), np.float32))):
        with pytest.raises(ValueError, match="codes of|scales of shape|scales for"):
            put_fp8_as_halves(made, own, factors, (0, 0))


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="the sets that can be forced are those of x86")
def test_a_processor_without_vectors_makes_the_same_bytes(tmp_path: Path) -> None:
    """Nor with instructions that round to halves."""
    child("""
from hypothesis import settings
settings.register_profile("compiles", deadline=None)  # in the first example
settings.load_profile("compiles")
import test_repack as t
t.test_floats_of_eight_bits_are_the_halves_that_numpy_rounds()
t.test_pairs_are_the_bytes_of_their_codes()
for kind in t.NATIVE:
    t.test_blocks_are_the_bytes_of_their_codes(kind=kind)
for layout, bits in t.WORDS:
    t.test_words_are_the_bytes_of_their_codes(layout=layout, bits=bits)
""", tmp_path, forced="portable")


def test_every_kind_has_its_function() -> None:
    assert {*repack_gguf.KINDS, *repack_gguf_codebooks.KINDS, "NVFP4"} == set(NATIVE)
    assert set(repack_gguf_codebooks.KINDS) == set(gguf_codebooks.KINDS)
    assert repack_words.AWQ_ORDER == awq.ORDER and repack_words.NOT_A_NUMBER == mxfp4.NOT_A_NUMBER


def test_what_does_not_fit_is_refused_before_anything_is_read() -> None:
    shape, spec = (40, 256), NATIVE["Q4_K"]
    raw, blob = file_of(0, "Q4_K", 40, 1), stale(spec, shape)
    before = blob.copy()
    for begin, own, out in ((8, raw[:32], blob), (32, raw, blob), (0, raw[:8], blob), (-16, raw[:16], blob), (0, raw[:, :-1], blob),
                            (0, np.asfortranarray(raw), blob), (0, raw.view(np.int8), blob), (0, raw, blob[:-1]), (0, raw, blob[::-1]),
                            (0, raw, blob.view(np.int8))):
        with pytest.raises(ValueError, match="shape|inputs"):
            put_gguf_blocks(out, "Q4_K", shape, begin, own)
    blob.flags.writeable = False
    with pytest.raises(ValueError, match="shape"):
        put_gguf_blocks(blob, "Q4_K", shape, 0, raw)
    with pytest.raises(ValueError, match="rows"):
        put_gguf_blocks(stale(NATIVE["Q4_K"], (40, 200)), "Q4_K", (40, 200), 0, raw)
    with pytest.raises(KeyError):
        put_gguf_blocks(blob, "Q9_1", shape, 0, raw)
    np.testing.assert_array_equal(blob, before)


def test_pairs_and_words_that_do_not_fit_are_refused() -> None:
    shape, blob = (24, 64), stale(MXFP4, (24, 64))
    blocks, scales = np.zeros((24, 32), np.uint8), np.zeros((24, 2), np.uint8)
    for codes, factors in ((blocks[:, :-1], scales), (blocks, scales[:, :1]), (blocks, scales[:-1]), (blocks.view(np.int8), scales),
                           (np.asfortranarray(blocks), scales), (blocks, np.asfortranarray(scales)), (blocks[:8], scales[:8])):
        with pytest.raises(ValueError, match="shape|inputs"):
            put_mxfp4(blob, shape, 0, codes, factors)
    for layout, bits in WORDS:
        spec = QuantSpec(bits, 32, "offset")
        words, own = words_of(0, layout, bits, shape), stale(spec, shape)
        for wrong in (words[:-1], words[:, :-1], words.T, words.view(np.uint8), words.reshape(-1), np.asfortranarray(words)):
            with pytest.raises(ValueError, match="words"):
                put_int32_words(own, spec, shape, layout, wrong)
        with pytest.raises(ValueError, match="blob"):
            put_int32_words(own[:-1], spec, shape, layout, words)
        assert (own == STALE).all()
    odd, spec = (20, 64), QuantSpec(4, 32, "offset")
    with pytest.raises(ValueError, match="words"):
        put_int32_words(stale(spec, odd), spec, odd, "gptq", words_of(0, "gptq", 4, odd))
