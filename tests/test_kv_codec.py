"""The lossy KV page codec: records byte for byte, and reconstruction quality at every head size and bit width."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.kernels.kv_layout import (
    GROUP_CHANNELS,
    PLANES,
    SUPPORTED_BITS,
    TAIL_OFFSET,
    WIDTHS,
    RecordLayout,
    pack_tail,
    pack_widths,
    unpack_tail,
    unpack_widths,
)
from effllm.kernels.layout import HEADER_NBYTES, PAGE, PageHeader
from effllm.quant.kv_basis import KVBasis, hadamard, noise_basis
from effllm.quant.kv_bits import allocate
from effllm.quant.kv_codec import decode, encode
from effllm.quant.kv_record import pack_k, pack_scales, pack_v, unpack_k, unpack_scales, unpack_v

SIZES = (64, 80, 96, 128, 256, 272, 512, 576)
GOLDEN_WIDE = {512: 2472906502, 576: 580057250}
GOLDEN = {10: 3843529252, 8: 3568589614, 6: 921266520, 5: 2918295413, 4: 1179872051, 3: 3980613162, 2: 693264014, 1: 2366947719}


def page(heads: int, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((2, heads, PAGE, size)).astype(np.float32))


def decibels(there: np.ndarray, x: np.ndarray) -> float:
    return float(10 * np.log10(np.square(there - x).mean() / np.square(x).mean()))


def rotary(size: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    angle = np.arange(first, first + PAGE)[:, None] * 1e4 ** (-np.arange(size // 2) / (size // 2))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def turned(mean: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(mean[:, None], 2, -1)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], -1)


def moments(x: np.ndarray) -> np.ndarray:
    """[H, T, D] -> [H, D, D]."""
    return x.swapaxes(1, 2).astype(np.float64) @ x / x.shape[1]


@given(st.sampled_from(WIDTHS), st.integers(1, 5), st.integers(0, 99))
def test_codes_survive_packing(bits: int, groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (groups, GROUP_CHANNELS, PAGE), np.uint16)
    packed = pack_k(codes, bits)
    assert packed.shape == (groups, 256 * bits)
    assert (unpack_k(packed, bits) == codes).all()
    codes = np.ascontiguousarray(codes.swapaxes(1, 2))
    assert (unpack_v(pack_v(codes, bits), bits) == codes).all()
    steps, zeros = rng.integers(0, 16, (groups, PAGE), np.uint8), rng.integers(-8, 8, (groups, PAGE), np.int8)
    assert all((back == there).all() for back, there in zip(unpack_scales(pack_scales(steps, zeros)), (steps, zeros), strict=True))
    widths = [WIDTHS[place] for place in rng.integers(0, len(WIDTHS), groups)]
    assert unpack_widths(pack_widths(widths, widths[::-1]), groups) == (tuple(widths), tuple(widths[::-1]))


@given(st.integers(1, 64), st.integers(0, 99))
def test_bits_of_any_number_of_groups_lie_in_front_of_the_codes(groups: int, seed: int) -> None:
    places = np.random.default_rng(seed).integers(0, len(WIDTHS), (2, groups))
    k, v = (tuple(WIDTHS[place] for place in side) for side in places)
    tail, layout = pack_tail(-300, 3, k, v), RecordLayout(16 * groups, 8, 8)
    assert len(tail) == layout.offsets[0] - TAIL_OFFSET == (16 if groups <= 16 else 80)
    assert unpack_tail(bytes(TAIL_OFFSET) + tail, groups) == (-300, 3, (k, v))
    if groups <= 16:
        assert tail[3:15] == pack_widths(k, v)


def test_codes_lie_where_kernels_look_for_them() -> None:
    """K: bytes of four channels of a token side by side; V: four tokens of a channel. High bits in the first plane."""
    k = np.zeros((1, GROUP_CHANNELS, PAGE), np.uint8)
    k[0, 6, 70] = 0b10110  # channel quad 1, third of it; token 70 = 64 + 6
    packed = pack_k(k, 5)[0]
    nibbles, ones = packed[:1024].reshape(4, 64, 4), packed[1024:].reshape(4, 16, 4)
    assert nibbles[1, 6, 2] == 0b1011 << 4
    assert np.count_nonzero(nibbles) == 1
    assert not ones.any()
    k[0, 6, 70] = 1
    ones = pack_k(k, 5)[0, 1024:].reshape(4, 16, 4)
    assert ones[1, 6, 2] == 1 << 4  # token 70 = 4 · 16 + 6
    assert np.count_nonzero(ones) == 1
    v = np.zeros((1, PAGE, GROUP_CHANNELS), np.uint8)
    v[0, 13, 9] = 3  # token 13 of a unit of 16: field 3, second of the quad
    twos = pack_v(v, 2)[0].reshape(8, GROUP_CHANNELS, 4)
    assert twos[0, 9, 1] == 3 << 6
    assert np.count_nonzero(twos) == 1


@given(st.sampled_from(SIZES), st.sampled_from(SUPPORTED_BITS), st.sampled_from(SUPPORTED_BITS), st.integers(1, 2), st.integers(0, 99))
def test_a_record_gives_back_what_its_bits_allow(size: int, bits_k: int, bits_v: int, heads: int, seed: int) -> None:
    k, v = page(heads, size, seed)
    basis = KVBasis.plain(heads, size)
    records = encode(k, v, bits_k, bits_v, basis, layer=3, first_token=64)
    layout = RecordLayout(size, bits_k, bits_v)
    assert records.shape == (heads, layout.record_nbytes)
    assert layout.record_nbytes % 64 == 0
    assert records.nbytes * 8 / (k.size + v.size) == layout.packed_bits
    header = PageHeader.unpack(records[-1, :HEADER_NBYTES].tobytes())
    assert (header.layer, header.head, header.first_token, header.count) == (3, heads - 1, 64, PAGE)
    assert (header.bits_k, header.bits_v) == (bits_k, bits_v)
    back_k, back_v = decode(records, size, basis)
    worst = {10: -56.5, 8: -44.5, 6: -33, 5: -27.5, 4: -22, 3: -16, 2: -9.8, 1: -3.5}
    assert decibels(back_k, k) < worst[bits_k]
    assert decibels(back_v, v) < worst[bits_v]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=16), st.sampled_from(SUPPORTED_BITS))
def test_bits_of_groups_come_out_even(strength: list[float], bits: int) -> None:
    given_bits = allocate(np.array(strength), bits)
    assert sum(given_bits) == bits * len(strength)
    assert set(given_bits) <= set(PLANES)
    order = np.argsort(strength, kind="stable")
    assert all(given_bits[low] <= given_bits[high] for low, high in zip(order, order[1:], strict=False) if strength[low] < strength[high])


@pytest.mark.parametrize(("size", "bits", "most"), [(64, 8, 8.6), (64, 5, 5.55), (64, 4, 4.55), (64, 3, 3.6), (64, 2, 2.6), (128, 4, 4.55)])
def test_records_are_as_small_as_promised(size: int, bits: int, most: float) -> None:
    assert RecordLayout(size, bits, bits).packed_bits <= most


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("bits", "most"), [(4, 5.0), (3, 4.05), (2, 3.1)])
def test_a_cache_of_8k_is_as_small_as_promised(size: int, bits: int, most: float) -> None:
    assert RecordLayout(size, bits, bits).bits_per_value(8192, exact=64 + 128) <= most


def test_golden_bytes() -> None:
    """A record is a file format: the same numbers give the same bytes. Every sum of the input is exact in float32."""
    steps = np.arange(2 * PAGE * 64).reshape(2, PAGE, 64)
    k, v = (steps * 37 % 101 - 50).astype(np.float32) / 16, (steps * 53 % 89 - 44).astype(np.float32) / 8
    found = {bits: zlib.crc32(encode(k, v, bits, bits, KVBasis.plain(2, 64), layer=1, first_token=192)) for bits in SUPPORTED_BITS}
    assert found == GOLDEN


def wide_page(size: int) -> tuple[np.ndarray, np.ndarray, KVBasis]:
    """K and V whose every number is exact, and a basis that leaves them as they are and gives groups unequal bits."""
    steps = np.arange(PAGE * size).reshape(1, PAGE, size)
    strength, eye = np.exp2(np.arange(size // GROUP_CHANNELS) % 7 * 1.5)[None], np.eye(size, dtype=np.float32)[None]
    basis = KVBasis(np.ones((1, size), np.float32), eye, eye, strength_k=strength, strength_v=strength[:, ::-1])
    return (steps * 37 % 101 - 50).astype(np.float32) / 16, (steps * 53 % 89 - 44).astype(np.float32) / 8, basis


@pytest.mark.parametrize("size", GOLDEN_WIDE)
def test_golden_bytes_of_wide_heads(size: int) -> None:
    k, v, basis = wide_page(size)
    assert len(np.unique(basis.widths(4, 4)[0])) > 2
    assert zlib.crc32(encode(k, v, 4, 4, basis, layer=1, first_token=192)) == GOLDEN_WIDE[size]


def test_a_profile_spends_bits_where_noise_costs_most() -> None:
    """K and V with few strong directions: matrices and bits by groups leave a third of the noise, in the metric that counts."""
    rng = np.random.default_rng(3)
    k, v = page(2, 64, 3)
    spread = np.geomspace(8, 1 / 8, 64)
    mix = np.linalg.qr(rng.standard_normal((64, 64)))[0]
    k, v = ((x * spread @ mix).astype(np.float32) for x in (k, v))
    basis = KVBasis.from_moments(moments(k), moments(k), moments(v), moments(v), profile=5)
    plain = KVBasis.plain(2, 64)
    assert len(np.unique(basis.widths(4, 4)[0])) > 1
    for side in range(2):
        x = (k, v)[side]
        noise = [decode(encode(k, v, 4, 4, one), 64, one)[side] - x for one in (basis, plain)]
        cost = [float((away @ moments(x) * away).sum()) for away in noise]
        assert cost[0] < cost[1] / 3


def test_powers_of_two_in_a_pair_of_channels_change_nothing() -> None:
    """K of a pair times α, q divided by it: the basis undoes it, code for code."""
    (k, v), (q, o) = page(2, 64), page(2, 64, 1)
    plain = KVBasis.from_moments(moments(k), moments(q), moments(v), moments(o))
    factor = np.ones(64, np.float32)
    factor[[5, 37]] = 64
    twin = KVBasis.from_moments(moments(k * factor), moments(q / factor), moments(v), moments(o))
    assert (encode(k * factor, v, 4, 4, twin) == encode(k, v, 4, 4, plain)).all()


def alone(v: np.ndarray, price: np.ndarray) -> KVBasis:
    """All groups the same bits, and no ridge."""
    rotation = hadamard(64)
    return KVBasis(np.ones((1, 64), np.float32), rotation[None], (rotation @ noise_basis(v, price)[0]).astype(np.float32))


def by_groups(v: np.ndarray, price: np.ndarray) -> KVBasis:
    eye = np.eye(64)[None]
    return KVBasis.from_moments(eye, eye, v, price)


# The ridge that a recorded moment gets (an empty channel has to be inverted) shows from a condition of 64 on: 8%.
@pytest.mark.parametrize(("basis_of", "condition"), [(alone, 64), (by_groups, 16)])
def test_the_matrix_of_v_undoes_any_change_of_basis(basis_of, condition: int) -> None:
    """V ← M V, W_o ← W_o M⁻¹ with an M of such a condition: the noise of attention's output stays what it was."""
    rng = np.random.default_rng(2)
    wv, wo = rng.standard_normal((64, 96)), rng.standard_normal((96, 64))
    left, right = (np.linalg.qr(rng.standard_normal((64, 64)))[0] for _ in range(2))
    m = left * np.geomspace(condition**-0.5, condition**0.5, 64) @ right
    x = rng.standard_normal((1, PAGE, 96))

    def noise(wv: np.ndarray, wo: np.ndarray) -> float:
        basis = basis_of((wv @ wv.T)[None], (wo.T @ wo)[None])
        v = (x @ wv.T).astype(np.float32)
        back = decode(encode(v, v, 4, 4, basis), 64, basis)[1]
        return float(np.square((back - v) @ wo.T).mean())

    assert noise(m @ wv, wo @ np.linalg.inv(m)) == pytest.approx(noise(wv, wo), rel=0.05)


def test_a_mean_of_many_deviations_costs_nothing() -> None:
    """K with a large bias before RoPE, as Qwen2 has it: with the mean in the basis the noise is that of the unbiased K."""
    k, v = page(2, 64)
    mean = np.zeros((2, 64), np.float32)
    mean[:, [3, 35]] = 10
    turn = rotary(64, 64)
    eye = KVBasis.plain(2, 64)
    biased = KVBasis(eye.k_scale, eye.k_matrix, eye.v_matrix, mean, profile=7)
    shifted = k + turned(mean, *turn)
    back, _ = decode(encode(shifted, v, 4, 4, biased, rotary=turn), 64, biased, rotary=turn)
    alone, _ = decode(encode(k, v, 4, 4, eye), 64, eye)
    assert np.square(back - shifted).mean() == pytest.approx(np.square(alone - k).mean(), rel=0.01)
    without, _ = decode(encode(shifted, v, 4, 4, eye), 64, eye)
    assert np.square(without - shifted).mean() > 1.5 * np.square(back - shifted).mean()


def test_a_pair_that_outshines_the_others_does_not_drown_them() -> None:
    k, v = page(2, 64)
    loud = k.copy()
    loud[1][:, [3, 35]] *= 64
    basis = KVBasis.plain(2, 64)
    back, _ = decode(encode(loud, v, 4, 4, basis), 64, basis)
    others = np.delete(np.arange(64), [3, 35])
    assert decibels(back[1][:, others], loud[1][:, others]) < -22


@pytest.mark.parametrize("at", [44, TAIL_OFFSET, TAIL_OFFSET + 3, HEADER_NBYTES, 5000])
def test_changed_bytes_are_noticed(at: int) -> None:
    k, v = page(2, 64)
    records = encode(k, v, 4, 4, KVBasis.plain(2, 64))
    records[1, at] ^= 1
    with pytest.raises(ValueError, match="KV page of layer 0, head 1, token 0: checksum differs"):
        decode(records, 64, KVBasis.plain(2, 64))


def test_a_record_is_read_with_the_basis_it_was_written_with() -> None:
    k, v = page(1, 64)
    plain = KVBasis.plain(1, 64)
    records = encode(k, v, 4, 4, plain)
    with pytest.raises(ValueError, match="another profile"):
        decode(records, 64, KVBasis(plain.k_scale, plain.k_matrix, plain.v_matrix, profile=9))
    mean = KVBasis(plain.k_scale, plain.k_matrix, plain.v_matrix, np.zeros((1, 64), np.float32))
    with pytest.raises(ValueError, match="another mean of K"):
        decode(records, 64, mean, rotary=rotary(64))
    with pytest.raises(ValueError, match="cos and sin"):
        encode(k, v, 4, 4, mean)


def test_what_no_record_holds_is_refused() -> None:
    k, v = page(1, 64)
    with pytest.raises(ValueError, match="7 bits"):
        encode(k, v, 7, 4, KVBasis.plain(1, 64))
    with pytest.raises(ValueError, match="head_dim 72"):
        RecordLayout(72, 4, 4)
    with pytest.raises(ValueError, match=r"\[heads, 128, head_dim\]"):
        encode(k[:, :64], v[:, :64], 4, 4, KVBasis.plain(1, 64))


def test_zeros_and_extremes_stay_finite() -> None:
    k, v = np.zeros((2, 1, PAGE, 64), np.float32)
    v[0, 5], k[0, 7] = 1e4, 1e3
    basis = KVBasis.plain(1, 64)
    for bits in SUPPORTED_BITS:
        back_k, back_v = decode(encode(k, v, bits, bits, basis), 64, basis)
        assert np.isfinite(back_k).all()
        assert np.isfinite(back_v).all()
    silent, _ = decode(encode(k * 0, v * 0, 4, 4, basis), 64, basis)
    assert np.abs(silent).max() < 1e-4


@pytest.mark.parametrize("size", SIZES)
def test_the_rotation_is_its_own_inverse(size: int) -> None:
    assert np.abs(hadamard(size) @ hadamard(size) - np.eye(size)).max() < 1e-6


def test_a_head_brings_its_inverses_along() -> None:
    """A reader of pages asks for each head's basis for every page: what is known of the layer is not made again, and is the same."""
    k, v = page(2, 64)
    basis = KVBasis.from_moments(moments(k), moments(k), moments(v), moments(v))
    alone = basis.head(1)
    assert "k_inverse" not in vars(alone) and np.array_equal(alone.k_inverse, basis.k_inverse[1:])
    one = basis.head(1)
    assert np.shares_memory(vars(one)["k_inverse"], basis.k_inverse) and np.array_equal(one.k_inverse, alone.k_inverse)
    assert "v_inverse" not in vars(one) and np.array_equal(one.v_inverse, basis.v_inverse[1:])
