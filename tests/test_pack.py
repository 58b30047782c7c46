"""The bytes of a low-bit weight: packing and unpacking are inverses, and version 1 of the layout never changes."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from low_bit_samples import FORMATS, WITH_OUTLIERS, random_codes

from effllm.kernels.tiles import PLANES
from effllm.quant.codebooks import MXFP
from effllm.quant.codes import Codes, Sparse, bf16, dequantize, scale_values
from effllm.quant.pack import pack, pack_tiles, unpack, unpack_tiles
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Weight

# sha256 of the blob of `counted(spec)`, its first 16 digits. A change here is a new version of the layout: old files become unreadable.
GOLDEN = {
    "mxfp4:32": "8a1a0c3e4ffc9f20", "block8:32": "a619cf2716b31158", "block5:32": "baef7c374407aaac", "block4:32": "01617376a925e7e6",
    "offset8:32": "7d5916b05f9fa306", "offset8:64": "c0c45a18932cc7e4", "offset8:128": "e96336a6728d11c0",
    "offset4:32": "b90edc4ba52bcc96", "offset4:64": "9ad2ddcc7769216e", "offset4:128": "2ad6d151792ff7df",
    "super5:32": "36d70d87969abce4", "super4:32": "5ddbc440372d5d01", "signed6:16": "fcff9bfbcb45a0fe",
    "nibble2:16": "d1f8ac1be53b1170", "table4:16": "2f34a0b47637a0c9", "table3:16": "0290abbb23b88d97",
    "float8:128": "6bf666d058d2c626", "float8:64": "cafa50c052ed6c4b", "float8:32": "b10d85ea47604885",
    "minimum8:32": "55f09fc55c5811ec", "minimum8:64": "f561704dda376d02", "minimum6:32": "6771b2b0d385486d",
    "minimum6:64": "f63fabb94644df18", "minimum5:32": "41e0c95b2d3913d8", "minimum5:64": "5c2bb274066be1df",
    "minimum4:32": "8bff636769d7a160", "minimum4:64": "0bbe51f814c17006", "minimum3:32": "8c4cd3c1b38f4ea7",
    "minimum3:64": "a051eb12b4f20d84", "minimum2:32": "be479008dae771e1", "minimum2:64": "903a018220466c49",
    "nvfp4:16": "b48b9dceb467c18c",
    "codebook4:16": "2bd72257fa25d194", "codebook3:16": "9123088f474d2e4e", "codebook2:16": "179b7f35beb1ece2",
    "affine8:32": "a883979c5ff1c426", "affine8:64": "5627c002af4deda8", "affine8:128": "88ae428e7ed9e276",
    "affine6:32": "70b1727ce065ad1e", "affine6:64": "680fd2ac4125f180", "affine6:128": "12093cba2a1aa9b7",
    "affine5:32": "9ff8cc502fbf4556", "affine5:64": "e79f6d528ab0b3e5", "affine5:128": "2c06ea68f67f4802",
    "affine4:32": "1eba46fd2e6d1778", "affine4:64": "516c5bd1163cd592", "affine4:128": "3a7d4490b054718a",
    "affine3:32": "b7669edb683aaa85", "affine3:64": "27c317755233ac36", "affine3:128": "2566ef5a3cd70e4f",
    "affine2:32": "a21b6c943241fd10", "affine2:64": "0dc1f3fb3ef8c0fb", "affine2:128": "7ff0ed6f4532bae7",
    "symmetric8:16": "a2c194bd7392d752", "symmetric8:32": "e10aedcf37c91e7d", "symmetric8:64": "ac7ad82013c13646",
    "symmetric8:128": "e10704b6b395bf99", "symmetric6:16": "fb3ec6c3233abbb0", "symmetric6:32": "8aa124ab0ffc92e9",
    "symmetric6:64": "83b507a79c5df4e1", "symmetric6:128": "c1962e03097176cb", "symmetric5:16": "f9237734b51e3a97",
    "symmetric5:32": "581c6897669eafca", "symmetric5:64": "e39e36cd45adfa0a", "symmetric5:128": "bf1e6c6a4ecdd76b",
    "symmetric4:16": "f608b21f83046a06", "symmetric4:32": "d44abe848011784c", "symmetric4:64": "675253bfbd3e4d94",
    "symmetric4:128": "594264602840622e", "symmetric3:16": "1641d57c9b4d08d6", "symmetric3:32": "602db666036c4b0e",
    "symmetric3:64": "d1b214b8cbdc5c18", "symmetric3:128": "593a2d82c66bbf28", "symmetric2:16": "a52a67949c727a11",
    "symmetric2:32": "45172243578e3bdb", "symmetric2:64": "d66eace3feb78d01", "symmetric2:128": "3241c54d30a3e87f",
    "ternary:32": "54dd43afe104e492", "ternary:64": "88817975c479695c", "ternary:128": "b1d9c3658291d4ed",
    "codebook4:16+0.01": "0bae759cf111fb53", "codebook2:16+0.05": "cb8938f349f53503", "symmetric8:32+0.005": "a64762a4ace3561d",
    "affine3:64+0.02": "9731db49d8b99c8d", "ternary:128+0.05": "e1335431ab3b207a"}


def equal(one: Codes, other: Codes) -> bool:
    """The same arrays, types and shapes included."""
    for field in fields(Codes):
        a, b = getattr(one, field.name), getattr(other, field.name)
        parts = [(a, b)] if field.name != "sparse" or a is None else [(getattr(a, f.name), getattr(b, f.name)) for f in fields(Sparse)]
        for x, y in parts:
            if (x is None) != (y is None) or x is not None and not (x.dtype == y.dtype and np.array_equal(x, y)):
                return False
    return True


def counted(spec: QuantSpec, rows: int = 17, depth: int = 70) -> Codes:
    """Codes that arithmetic alone decides, so that they are the same everywhere; every code, and many scales and zeros, occur."""
    n, k, g = np.arange(rows)[:, None], np.arange(depth), np.arange(-(-depth // spec.group))
    book = spec.scheme == "codebook"
    count = round(rows * depth * spec.outliers)
    places = np.arange(count) * (rows * depth // max(1, count))
    bits, entry = spec.bits, np.arange(16)
    supers = ((5 * n + 11 * np.arange(-(-depth // 256))) % 700 + 0x2A00).astype(np.uint16)
    six, eight = ((((a * n + b * g) % 256).astype(np.uint8)) for a, b in ((5, 11), (9, 4)))
    foreign = {"super": (six & 63, eight & 63, np.stack([supers, supers ^ 0x8001], 2)),
               "signed": (six.view(np.int8), None, supers[:, :, None]),
               "nibble": (six & 15, eight & 15, np.stack([supers, supers ^ 0x8001], 2)),
               "table": ((six % 65).astype(np.int8) - np.int8(32), None, supers[:, :, None])}
    if spec.scheme == "minimum":
        return Codes(codes=((7 * n + 3 * k + n * k // 5) % (1 << bits)).astype(np.uint8), zeros=None, rows=np.ones(rows, np.float32),
                     scales=((5 * n + 11 * g) % 700 + 0x3A00).astype(np.uint16), minima=((9 * n + 4 * g) % 500 + 0xBA00).astype(np.uint16))
    if spec.scheme == "nvfp":
        return Codes(codes=((7 * n + 3 * k + n * k // 5) % 16).astype(np.uint8), zeros=None, rows=((n[:, 0] - 8) / 15).astype(np.float32),
                     scales=((5 * n + 11 * g) % 127).astype(np.int8), levels=(entry * 7 - 60).astype(np.int8))
    own, minima, supers = foreign.get(spec.scheme, (None, None, None))
    if spec.scheme == "float":  # but for NaN
        whole = ((7 * n + 3 * k + n * k // 5) % 127 | (n + k) % 2 << 7).astype(np.uint8)
        scales = ((5 * n[: -(-rows // 16)] + 11 * g) % 700 - 350).astype(np.float32) / 512
        return Codes(codes=whole, scales=scales, zeros=None, rows=((n[:, 0] - 8) / 15).astype(np.float32))
    return Codes(codes=((7 * n + 3 * k + n * k // 5) % (3 if spec.scheme == "ternary" else 1 << bits)).astype(np.uint8),
                 scales=own if own is not None else (
                         ((5 * n + 11 * g) % 700 + 0x3A00 | (n + g) % 2 << 15).astype(np.uint16) if spec.scheme in ("block", "offset")
                         else ((5 * n + 11 * g) % (16 if book else 256)).astype(np.uint8)),
                 zeros=((13 * n + 7 * g) % 256).astype(np.uint8) if spec.scheme in ("affine", "offset") else None,
                 rows=bf16(((n[:, 0] - 8) / 16).astype(np.float32)),
                 levels=(entry[: 1 << bits] * (120 >> bits) - 60).astype(np.int8) * np.int8(2 if spec.scheme == "table" else 1)
                 if book or spec.scheme in ("mxfp", "table") else None,
                 steps=(7 * entry + 9).astype(np.uint8) if book else None,
                 sparse=Sparse((places // depth).astype(np.uint32), (places % depth).astype(np.uint32),
                               bf16((places % 9 - 4).astype(np.float32) / 8)) if spec.outliers else None, supers=supers, minima=minima)


@given(text=st.sampled_from(FORMATS + WITH_OUTLIERS), rows=st.integers(1, 70), depth=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_unpacking_undoes_packing(text, rows, depth, seed):
    spec = QuantSpec.parse(text)
    codes = random_codes(np.random.default_rng(seed), spec, (rows, depth), every_scale=True)
    blob = pack(codes, spec)
    assert blob.dtype == np.uint8 and len(blob) == spec.nbytes((rows, depth))
    back = unpack(blob, spec, (rows, depth))
    assert equal(back, codes)
    assert np.array_equal(pack(back, spec), blob)  # padding has one value


@pytest.mark.parametrize("text", FORMATS + WITH_OUTLIERS)
def test_every_format_survives_shapes_at_the_edges_of_tiles(text):
    spec, rng = QuantSpec.parse(text), np.random.default_rng(1)
    for shape in ((1, 1), (15, 31), (16, 32), (17, 33), (32, 128), (33, 129)):
        codes = random_codes(rng, spec, shape, every_scale=True)
        assert equal(unpack(pack(codes, spec), spec, shape), codes)


@pytest.mark.parametrize("bits", PLANES)
def test_tiles_alone_survive_too(bits):
    codes = np.random.default_rng(2).integers(0, 1 << bits, (48, 96)).astype(np.uint8)
    packed = pack_tiles(codes, bits)
    assert packed.size == 48 * 96 * bits // 8 and np.array_equal(unpack_tiles(packed, bits, 48, 96), codes)


def small_float(code: int) -> np.float32:
    """An E4M3 number by its parts."""
    power, rest = code >> 3 & 15, code & 7
    return np.float32((-1) ** (code >> 7) * (8 * (power > 0) + rest) * 2.0 ** (max(power, 1) - 10))


@pytest.mark.parametrize("text", FORMATS + WITH_OUTLIERS)
def test_dequantize_is_the_formula_weight_by_weight(text):
    """w = row * (f(scale) * v(code)) + correction, one number at a time."""
    spec = QuantSpec.parse(text)
    codes = random_codes(np.random.default_rng(3), spec, (5, 290), every_scale=True)
    corrections = {} if codes.sparse is None else dict(zip(zip(codes.sparse.row.tolist(), codes.sparse.col.tolist()), codes.sparse.value))
    got = dequantize(codes, spec)
    assert got.shape == (5, 290) and got.dtype == np.float32
    for n in range(5):
        for k in range(290):
            code, scale = int(codes.codes[n, k]), codes.scales[n // 16 if spec.scheme == "float" else n, k // spec.group]
            scale = scale if spec.scheme == "float" else int(scale)
            if spec.scheme == "float":
                product = scale * small_float(code)
            elif spec.scheme == "nvfp":
                product = small_float(scale & 255) * int(codes.levels[code])
            elif spec.scheme == "minimum":
                d, m = (np.uint16(bits).view(np.float16).astype(np.float32) for bits in (scale, codes.minima[n, k // spec.group]))
                product = d * np.float32(code) + m
            elif spec.scheme == "codebook":
                product = int(codes.steps[scale]) * int(codes.levels[code])
            elif spec.scheme == "mxfp":
                product = np.float32(2.0 ** (scale - 127) if scale else 0) * int(codes.levels[code])
            else:
                zero = {"ternary": 1, "super": 0, "nibble": 0}.get(spec.scheme, 2 ** (spec.bits - 1))
                if spec.scheme in ("affine", "offset"):
                    zero = int(codes.zeros[n, k // spec.group])
                if spec.scheme in ("block", "offset"):
                    scale = np.uint16(scale).view(np.float16).astype(np.float32)
                product = scale * (int(codes.levels[code]) if spec.scheme == "table" else code - zero)
                if codes.supers is not None:
                    d, *e = (np.uint16(bits).view(np.float16).astype(np.float32) for bits in codes.supers[n, k // 256].tolist())
                    product = d * np.float32(product) - (e[0] * np.float32(codes.minima[n, k // spec.group]) if e else np.float32(0))
            want = codes.rows[n] * np.float32(product) + corrections.get((n, k), np.float32(0))
            assert got[n, k] == want
    blob = pack(codes, spec)
    assert np.array_equal(Weight.low_bit(spec, (5, 290), blob).to_f32(), got)


def test_a_scale_code_is_the_scale_itself_or_chooses_a_step():
    assert scale_values().tolist() == list(range(256)) and scale_values().dtype == np.float32
    assert scale_values(np.array([3, 9], np.uint8)).tolist() == [3, 9]


# -- the layout, version 1 -----------------------------------------------------------------------------------------------------------


def test_a_codebook_weight_written_out_by_hand():
    """Two rows of five inputs, 4 bits: one tile of 256 bytes, of which only the first vector (quads 0 and 1) holds anything."""
    codes = Codes(codes=np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], np.uint8), scales=np.array([[3], [12]], np.uint8), zeros=None,
                  rows=np.array([1.0, -0.5], np.float32), levels=np.arange(-8, 8, dtype=np.int8), steps=np.arange(1, 17, dtype=np.uint8))
    by_hand = {0: bytes([0x51, 0x02, 0x03, 0x04,    # row 0: inputs 0 to 3 in the low nibbles, input 4 in the high one of the first byte
                         0xA6, 0x07, 0x08, 0x09]),  # row 1
               256: bytes([0x03, 0x0C]),            # scales, a byte per row: the even group's low, the odd one's (padding) high
               320: bytes([0x80, 0x3F, 0x00, 0xBF]),  # 1.0 and -0.5 as bfloat16, little endian
               384: bytes(range(0xF8, 0x100)) + bytes(range(8)),  # levels -8 to 7
               400: bytes(range(1, 17))}  # steps
    assert pack(codes, QuantSpec.parse("codebook4:16")).tobytes() == laid_out(by_hand, 448)


def test_an_affine_weight_with_outliers_written_out_by_hand():
    """Two rows of 20 inputs, 3 bits as planes of 2 + 1: row 0 counts 0 to 7 over and over, row 1 is all sevens."""
    codes = Codes(codes=np.array([[k % 8 for k in range(20)], [7] * 20], np.uint8), scales=np.array([[0x10], [0x21]], np.uint8),
                  zeros=np.array([[3], [200]], np.uint8), rows=np.array([2.0, 3.0], np.float32),
                  sparse=Sparse(np.array([0, 1], np.uint32), np.array([19, 2], np.uint32), np.array([1.0, -2.0], np.float32)))
    by_hand = {0: bytes([0b00000000, 0b01010101, 0b10101010, 0b11111111,    # row 0, inputs b, 4+b, 8+b, 12+b from the low bits up
                         0xFF, 0xFF, 0xFF, 0xFF]),                          # row 1
               64: bytes([0, 1, 2, 3, 3, 3, 3, 3]),                         # the second vector of two bits: inputs 16 to 19 of both rows
               128: bytes([0b01010] * 4 + [0b11111] * 4),                   # the high bits: quad j in bit j
               192: bytes([0x10, 0x21]),                                    # scales: 16 and 33
               256: bytes([3, 200]),                                        # zeros
               320: bytes([0x00, 0x40, 0x40, 0x40]),                        # row scales 2.0 and 3.0
               384: bytes([0, 0, 0, 0, 2, 0, 0, 0])                         # the only block's outliers are entries 0 and 1
               + bytes([19, 0, 0, 0, 2, 0, 0, 0x10])                        # row 0 column 19; row 1 column 2
               + bytes([0x80, 0x3F, 0x00, 0xC0])}                           # 1.0 and -2.0
    spec = QuantSpec.parse("affine3:32+0.05")
    assert pack(codes, spec).tobytes() == laid_out(by_hand, 448)
    w = dequantize(codes, spec)
    assert w[0, 18] == 2.0 * (16 * (2 - 3)) and w[0, 19] == 2.0 * (16 * (3 - 3)) + 1.0 and w[1, 2] == 3.0 * (33 * (7 - 200)) - 2.0


def test_an_mxfp4_weight_written_out_by_hand():
    """As `codebook`, but a scale is an exponent in a byte of its own, rows are a half, and there are no steps."""
    codes = Codes(codes=np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], np.uint8), scales=np.array([[126], [130]], np.uint8), zeros=None,
                  rows=np.array([0.5, 0.5], np.float32), levels=MXFP)
    by_hand = {0: bytes([0x51, 0x02, 0x03, 0x04, 0xA6, 0x07, 0x08, 0x09]),
               256: bytes([126, 130]),
               320: bytes([0x00, 0x3F, 0x00, 0x3F]),
               384: bytes([0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244])}
    assert pack(codes, QuantSpec.parse("mxfp4:32")).tobytes() == laid_out(by_hand, 448)
    assert dequantize(codes, QuantSpec.parse("mxfp4:32")).tolist() == [[0.25, 0.5, 0.75, 1.0, 1.5], [32.0, 48.0, 0.0, -4.0, -8.0]]


def test_super_blocks_written_out_by_hand():
    """Two rows of 34 inputs: a record of their scales, of which the first two tiles hold anything; then one with signed scales."""
    supers = np.array([[[0x3C00, 0xC000]], [[0x4000, 0x3800]]], np.uint16)  # 1 and -2; 2 and 0.5
    codes = Codes(codes=np.array([[15] * 34, [1] * 34], np.uint8), scales=np.array([[63, 2], [5, 6]], np.uint8), zeros=None,
                  rows=np.array([1.0, 1.0], np.float32), supers=supers, minima=np.array([[61, 4], [7, 8]], np.uint8))
    row_scales = bytes([0x80, 0x3F, 0x80, 0x3F])
    by_hand = {64 * i: bytes([0xFF] * 4 + [0x11] * 4) for i in range(4)}  # the first tile: quads 2i and 2i + 1 of both rows
    by_hand |= {256: bytes([15, 15, 0, 0, 1, 1]),  # the second: two inputs
                2048: bytes([0x00, 0x3C, 0x00, 0x40]), 2080: bytes([0x00, 0xC0, 0x00, 0x38]),  # 16 halves d, 16 halves e
                2112: bytes([63 | 61 % 4 << 6, 5 | 7 % 4 << 6]), 2128: bytes([61 // 4, 7 // 4]),  # of the first tile
                2136: bytes([2 | 4 % 4 << 6, 6 | 8 % 4 << 6]), 2152: bytes([4 // 4, 8 // 4]),
                2304: row_scales}
    spec = QuantSpec.parse("super4:32")
    assert pack(codes, spec).tobytes() == laid_out(by_hand, 2368)
    w = dequantize(codes, spec)
    assert w[0, 31] == 63 * 15 + 2 * 61 and w[0, 32] == 2 * 15 + 2 * 4 and w[1, 33] == 2 * 6 * 1 - 0.5 * 8
    codes = replace(codes, codes=codes.codes + 32, scales=np.array([[-128, 1, 7], [3, -2, -1]], np.int8), supers=supers[:, :, :1],
                    minima=None)
    blob, spec = pack(codes, QuantSpec.parse("signed6:16")), QuantSpec.parse("signed6:16")
    assert blob[3072:3076].tobytes() == bytes([0x00, 0x3C, 0x00, 0x40]) and blob.size == 3072 + 288 + 32 + 64
    assert [blob[3104 + 16 * i : 3106 + 16 * i].tolist() for i in range(4)] == [[128, 3], [1, 254], [7, 255], [0, 0]]
    w = dequantize(codes, spec)
    assert w[0, 15] == -128 * 15 and w[0, 16] == 15 and w[1, 33] == -2


def laid_out(parts: dict[int, bytes], size: int) -> bytes:
    blob = bytearray(size)
    for start, part in parts.items():
        blob[start : start + len(part)] = part
    return bytes(blob)


@pytest.mark.parametrize("text", FORMATS + WITH_OUTLIERS)
def test_layout_version_1(text):
    spec = QuantSpec.parse(text)
    assert hashlib.sha256(pack(counted(spec), spec)).hexdigest()[:16] == GOLDEN[text]


def test_every_format_is_pinned():
    assert set(GOLDEN) == set(FORMATS + WITH_OUTLIERS) and len(set(GOLDEN.values())) == len(GOLDEN)


# -- what cannot be packed -----------------------------------------------------------------------------------------------------------


def refusal(codes: Codes, text: str) -> str:
    with pytest.raises(ValueError) as caught:
        pack(codes, QuantSpec.parse(text))
    return str(caught.value)


def test_arrays_that_do_not_fit_the_format_are_refused():
    rng = np.random.default_rng(4)
    texts = ("codebook4:16", "affine3:32", "ternary:64+0.01")
    book, affine, sparse = (random_codes(rng, QuantSpec.parse(text), (20, 70)) for text in texts)
    assert "rows (19,)" in refusal(replace(book, rows=book.rows[:19]), "codebook4:16")
    assert "scales (20, 4)" in refusal(replace(book, scales=book.scales[:, :4]), "codebook4:16")
    assert "code" in refusal(replace(book, codes=book.codes + 1), "codebook4:16")
    assert "scale code" in refusal(replace(book, scales=book.scales + 16), "codebook4:16")
    assert "15 levels" in refusal(replace(book, levels=book.levels[:15]), "codebook4:16")
    assert "belong to" in refusal(replace(book, steps=None), "codebook4:16")
    assert "levels of -64 to 64" in refusal(replace(book, levels=np.linspace(-64, 64, 16).astype(np.int8)), "codebook4:16")
    assert "levels of -65 to 0" in refusal(replace(book, levels=np.linspace(-65, 0, 16).astype(np.int8)), "codebook4:16")
    assert "a step of 128" in refusal(replace(book, steps=np.arange(113, 129, dtype=np.uint8)), "codebook4:16")
    assert "belong to" in refusal(replace(affine, zeros=None), "affine3:32")
    assert "zeros (20, 2)" in refusal(replace(affine, zeros=affine.zeros[:, :2]), "affine3:32")
    assert "belong to" in refusal(affine, "symmetric3:32")
    assert "code 3" in refusal(replace(sparse, codes=np.full((20, 70), 3, np.uint8)), "ternary:64+0.01")
    assert "14 outliers" in refusal(replace(sparse, sparse=None), "ternary:64+0.01")
    assert "0 outliers" in refusal(sparse, "ternary:64")
    large, signed = (random_codes(rng, QuantSpec.parse(text), (20, 270)) for text in ("super5:32", "signed6:16"))
    assert "missing" in refusal(replace(large, minima=None), "super5:32") and (
        "scales of int8" in refusal(replace(signed, scales=signed.scales[:, ::2]), "super5:32"))
    assert "up to 63" in refusal(replace(large, minima=large.minima + 64), "super5:32")
    assert "super-blocks (20, 1, 1)" in refusal(replace(signed, supers=signed.supers[:, :1]), "signed6:16")
    small = random_codes(rng, QuantSpec.parse("nibble2:16"), (20, 270))
    assert "up to 15" in refusal(replace(small, scales=small.scales + 16), "nibble2:16")
    table = random_codes(rng, QuantSpec.parse("table4:16"), (20, 270))
    wide = replace(table, levels=np.full(16, -128, np.int8))
    assert "exactly" in refusal(replace(wide, scales=np.full_like(table.scales, 33)), "table4:16")
    assert pack(replace(wide, scales=np.full_like(table.scales, -32)), QuantSpec.parse("table4:16")).size
    assert "belong to" in refusal(replace(table, levels=None), "table4:16")
    assert "do not belong" in refusal(replace(affine, supers=large.supers), "affine3:32")


@pytest.mark.parametrize(("rows", "columns"), (((0, 1), (5, 5)), ((1, 0), (5, 5)), ((0, 0), (7, 7)), ((0, 0), (7, 6)), ((0, 2), (5, 0)),
                                               ((0, 1), (5, 20))))
def test_outliers_must_be_sorted_and_inside(rows, columns):
    spec = QuantSpec.parse("symmetric8:32+0.05")
    codes = random_codes(np.random.default_rng(5), spec, (2, 20))
    codes = replace(codes, sparse=Sparse(np.array(rows, np.uint32), np.array(columns, np.uint32), codes.sparse.value))
    if (rows, columns) == ((0, 1), (5, 5)):
        assert equal(unpack(pack(codes, spec), spec, (2, 20)), codes)
    else:
        assert "in order" in refusal(codes, str(spec))


def test_a_share_that_comes_to_no_outlier_needs_none():
    spec = QuantSpec.parse("4bit+1%")
    codes = random_codes(np.random.default_rng(6), spec, (3, 16))
    assert len(codes.sparse.row) == 0
    blob = pack(replace(codes, sparse=None), spec)
    assert np.array_equal(blob, pack(codes, spec)) and equal(unpack(blob, spec, (3, 16)), codes)


def test_a_blob_of_another_size_is_refused():
    spec = QuantSpec.parse("4bit")
    blob = pack(random_codes(np.random.default_rng(7), spec, (16, 32)), spec)
    for wrong in (blob[:-1], np.append(blob, np.uint8(0))):
        with pytest.raises(ValueError, match="expected"):
            unpack(wrong, spec, (16, 32))
        with pytest.raises(ValueError, match="expected"):
            Weight.low_bit(spec, (16, 32), wrong)
