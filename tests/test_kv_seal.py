"""Sealing pages by the compiled kernel against the codec's NumPy definition: the same bytes where the rotated values are equal."""

import os
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kv_codec import GOLDEN, GOLDEN_WIDE, moments, rotary, turned, wide_page

from effllm.kernels import raw_pages
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.kv_layout import ROTATED_K, SUPPORTED_BITS, TAIL, TAIL_OFFSET, WIDTHS, RecordLayout
from effllm.kernels.layout import F16, F32, PAGE, PageLayout
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.kv import exact_sides
from effllm.quant.kv_basis import KVBasis
from effllm.quant.kv_codec import decode, encode
from effllm.quant.kv_seal import Sealer

SIZES = (64, 80, 96, 128, 256, 272, 512, 576)


def make(pool: ThreadPool, heads: int, size: int, bases: list[KVBasis], bits: list[tuple[int, int]], stored: int = F32) -> Sealer:
    ops = CpuOps(pool, Dims(8, heads, heads, size, 8, 8, 1, 256, 1))
    return Sealer(ops, [PageLayout(heads, size, stored)] * len(bases), bases, [(each,) * heads for each in bits])


def normal(heads: int, size: int, seed: int = 0, stored: int = F32) -> np.ndarray:
    """K and V that the stored type holds, [2, H, PAGE, D]."""
    x = np.random.default_rng(seed).standard_normal((2, heads, PAGE, size)).astype(np.float32)
    return x if stored == F32 else x.astype(np.float16).astype(np.float32)


def exact_page(k: np.ndarray, v: np.ndarray, stored: int = F32, parts: int = 1) -> np.ndarray:
    """K and V [H, PAGE, D] as a raw layer-page."""
    layout = PageLayout(k.shape[0], k.shape[2], stored, parts)
    page = np.zeros(layout.layer_page_nbytes, np.uint8)
    keys, values = raw_pages.views(page, layout)
    keys[:] = k.reshape(len(k), parts, layout.rows, -1).transpose(1, 0, 3, 2)
    values[:] = v.reshape(len(v), parts, layout.rows, -1).swapaxes(0, 1)
    return page


def sealed(pool: ThreadPool, k: np.ndarray, v: np.ndarray, bits_k: int, bits_v: int, basis: KVBasis, layer: int = 0, first_token: int = 0,
           turn=None, stored: int = F32) -> np.ndarray:
    """What the kernel makes, in memory that held something else: uint8 [H, record_nbytes]."""
    sealer = make(pool, len(k), k.shape[2], [basis] * (layer + 1), [(bits_k, bits_v)] * (layer + 1), stored)
    out = np.full(sealer.layouts[layer].layer_page_nbytes, 0xA5, np.uint8)
    sealer.seal(layer, exact_page(k, v, stored), out, first_token, turn)
    sealer.flush()
    return out.reshape(len(k), -1)


def unturned(heads: int, size: int, **more) -> KVBasis:
    """A basis that leaves every value as it is, so that both sides search the same numbers."""
    eye = np.broadcast_to(np.eye(size, dtype=np.float32), (heads, size, size))
    return KVBasis(np.ones((heads, size), np.float32), eye, eye, **more)


def power(x: np.ndarray) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def close(got: np.ndarray, want: np.ndarray, k: np.ndarray, v: np.ndarray, basis: KVBasis, turn=None) -> None:
    """Both decode, with the same total squared error; sums of a rotation may differ in their last bit, and with them a code."""
    size = k.shape[-1]
    for mine, theirs, x in zip(decode(got, size, basis, rotary=turn), decode(want, size, basis, rotary=turn), (k, v), strict=True):
        assert power(mine - x) == pytest.approx(power(theirs - x), rel=1e-4)


@pytest.mark.parametrize("bits_k", SUPPORTED_BITS)
@pytest.mark.parametrize("bits_v", SUPPORTED_BITS)
def test_the_same_values_give_the_same_record(pool, bits_k, bits_v):
    k, v = normal(3, 64, 10 * bits_k + bits_v)
    basis = unturned(3, 64, profile=77)
    want = encode(k, v, bits_k, bits_v, basis, layer=2, first_token=192)
    assert np.array_equal(sealed(pool, k, v, bits_k, bits_v, basis, layer=2, first_token=192), want)


@given(st.sampled_from(SIZES), st.sampled_from(SUPPORTED_BITS), st.sampled_from((F16, F32)), st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=15)
def test_head_sizes_types_and_odd_heads(size, bits, stored, heads, seed):
    k, v = normal(heads, size, seed, stored) * np.geomspace(1e-3, 300, heads, dtype=np.float32)[:, None, None]
    if stored == F16:
        k, v = k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32)
    with_threads = ThreadPool(2)
    try:
        for basis in (unturned(heads, size), KVBasis.plain(heads, size)):
            got = sealed(with_threads, k, v, bits, bits, basis, stored=stored)
            want = encode(k, v, bits, bits, basis)
            close(got, want, k, v, basis)
        assert np.array_equal(sealed(with_threads, k, v, bits, bits, unturned(heads, size), stored=stored),
                              encode(k, v, bits, bits, unturned(heads, size)))
    finally:
        with_threads.close()


@pytest.mark.parametrize("bits", SUPPORTED_BITS[1:-1])
def test_groups_of_many_widths(pool, bits):
    """Strong and weak channels, every width in one record: the groups follow one another."""
    k, v = normal(2, 256, bits)
    strength = np.geomspace(512, 1 / 512, 16)[None].repeat(2, 0)
    strength[1] = strength[1, ::-1]
    basis = unturned(2, 256, strength_k=strength, strength_v=strength[:, ::-1] ** 0.5)
    widths = np.unique(basis.widths(bits, bits)[0])
    assert len(widths) > 2 and set(widths) <= set(WIDTHS)
    assert np.array_equal(sealed(pool, k, v, bits, bits, basis), encode(k, v, bits, bits, basis))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_profile_with_matrices_widths_and_a_mean(pool, bits):
    k, v = normal(2, 64, 3)
    mix = np.linalg.qr(np.random.default_rng(3).standard_normal((64, 64)))[0]
    k, v = ((x * np.geomspace(8, 1 / 8, 64) @ mix).astype(np.float32) for x in (k, v))
    mean, turn = normal(1, 64, 5)[0, 0, :2] * 4, rotary(64, 320)
    basis = KVBasis.from_moments(moments(k), moments(k), moments(v), moments(v), k_mean=mean, profile=5)
    k = k + turned(mean, *turn)
    got, want = sealed(pool, k, v, bits, bits, basis, turn=turn), encode(k, v, bits, bits, basis, rotary=turn)
    close(got, want, k, v, basis, turn)
    assert (got != want).mean() < 0.02


def test_a_lone_pair_keeps_its_channels(pool):
    """One head of three has it: its record says so, is not turned, and has the same bits in every group."""
    k, v = normal(3, 64, 4)
    k[1][:, [3, 35]] *= 64
    rng = np.random.default_rng(4)
    strength = np.geomspace(9, 1, 4)[None].repeat(3, 0)
    matrix = np.linalg.qr(rng.standard_normal((3, 64, 64)))[0].astype(np.float32)
    scale = np.exp2(rng.integers(-3, 3, (3, 32))).astype(np.float32)
    basis = KVBasis(np.tile(scale, 2), matrix, matrix, strength_k=strength)
    got, want = sealed(pool, k, v, 4, 4, basis), encode(k, v, 4, 4, basis)
    assert [TAIL.unpack_from(record, TAIL_OFFSET)[1] & ROTATED_K for record in got] == [ROTATED_K, 0, ROTATED_K]
    half = RecordLayout(64, 4, 4).offsets[3]
    assert np.array_equal(got[1, 64:half], want[1, 64:half])
    close(got, want, k, v, basis)


def test_golden_bytes(pool):
    """The records of the format's own test: every sum of a rotation is exact there."""
    assert golden(pool) == GOLDEN


@pytest.mark.parametrize("size", GOLDEN_WIDE)
def test_golden_bytes_of_wide_heads(pool, size):
    k, v, basis = wide_page(size)
    assert zlib.crc32(sealed(pool, k, v, 4, 4, basis, layer=1, first_token=192)) == GOLDEN_WIDE[size]


def golden(pool: ThreadPool) -> dict[int, int]:
    steps = np.arange(2 * PAGE * 64).reshape(2, PAGE, 64)
    k, v = (steps * 37 % 101 - 50).astype(np.float32) / 16, (steps * 53 % 89 - 44).astype(np.float32) / 8
    basis = KVBasis.plain(2, 64)
    return {bits: zlib.crc32(sealed(pool, k, v, bits, bits, basis, layer=1, first_token=192)) for bits in SUPPORTED_BITS}


def digests(pool: ThreadPool) -> list[int]:
    """Of records with turned values: matrices, a mean, odd head sizes, halves."""
    found = []
    for size, stored, bits in ((64, F16, 4), (80, F32, 3), (128, F16, 8), (96, F32, 2)):
        k, v = normal(2, size, size, stored)
        rng = np.random.default_rng(size)
        matrices = rng.standard_normal((2, 2, size, size)).astype(np.float32) / np.float32(8)
        basis = KVBasis(np.ones((2, size), np.float32), *matrices, rng.standard_normal((2, size)).astype(np.float32))
        found.append(zlib.crc32(sealed(pool, k, v, bits, bits, basis, turn=rotary(size, 64), stored=stored)))
    return found


def test_the_bytes_do_not_depend_on_threads():
    found = []
    for workers in (1, 2, 3):
        pool = ThreadPool(workers)
        found.append(digests(pool))
        pool.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_instruction_set(pool, tmp_path):
    """The portable path, features forced off in a child."""
    if os.uname().machine != "x86_64":
        pytest.skip("the features that can be forced off are those of x86")
    code = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_kv_seal as t
from effllm.kernels.cpu import inner_loops, intrinsics
assert not intrinsics.HAS_HALF and inner_loops.VECTOR == 4
pool = t.ThreadPool(2)
assert t.golden(pool) == t.GOLDEN
print(t.digests(pool))
"""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+sse,+sse2,+64bit,+cx8,+fxsr,+mmx",
                   "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(digests(pool))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_constants_zeros_and_extremes(pool, bits):
    """Pages without spread, a lone spike, values beyond and below the grid's scales: as the definition has them."""
    ones = np.ones((1, PAGE, 64), np.float32)
    spike = np.zeros((1, PAGE, 64), np.float32)
    spike[0, 7, 5] = 1e3
    wide = normal(1, 64, 6)[0]
    for k, v in ((0 * ones, 0 * ones), (ones * 3, -ones * 1e4), (spike, -spike), (wide * 1e12, wide * 1e12), (wide * 1e-12, wide * 1e-12),
                 (wide * 1e-38, wide * 1e-42), (spike * 1e14, wide)):
        basis = unturned(1, 64)
        got, want = sealed(pool, k, v, bits, bits, basis), encode(k, v, bits, bits, basis)
        assert np.array_equal(got, want)
        assert all(np.isfinite(side).all() for side in decode(got, 64, basis))


@pytest.mark.filterwarnings("error")  # which a user would read above the one line that says it
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**70])
@pytest.mark.parametrize("side", "KV")
def test_what_is_not_finite_is_refused_by_name(pool, side, value):
    heads, size = 2, 64
    pages = normal(heads, size, 1)
    sealer = make(pool, heads, size, [KVBasis.plain(heads, size)] * 3, [(4, 4)] * 3)
    good, out = exact_page(*pages), [np.zeros(layout.layer_page_nbytes, np.uint8) for layout in sealer.layouts]
    pages["KV".index(side), 1, 127, 63] = value
    for layer in range(3):
        sealer.seal(layer, exact_page(*pages) if layer == 1 else good, out[layer], 64)
    with pytest.raises(ValueError, match=f"{side} of layer 1, head 1, tokens 64 to 191: not finite"):
        sealer.flush()
    with pytest.raises(ValueError, match=f"{side} of layer 1, head 1, tokens 64 to 191: not finite"):
        encode(*pages, 4, 4, KVBasis.plain(heads, size), layer=1, first_token=64)
    sealer.seal(1, good, out[1], 64)  # nothing of the failed job is left
    sealer.flush()
    decode(out[1].reshape(heads, -1), size, KVBasis.plain(heads, size))


def test_layers_of_a_cache_in_one_job(pool):
    """Each layer with its own bits and basis; the order of notes does not matter; nothing noted, nothing done."""
    heads, size, bits = 2, 64, [(8, 4), (4, 8), (3, 2)]
    bases = [unturned(heads, size, profile=layer) for layer in range(3)]
    sealer = make(pool, heads, size, bases, bits)
    sealer.flush()
    pages, out = [normal(heads, size, layer) for layer in range(3)], [np.zeros(each.layer_page_nbytes, np.uint8) for each in sealer.layouts]
    for layer in (2, 0, 1):
        sealer.seal(layer, exact_page(*pages[layer]), out[layer], 64 + PAGE * layer)
    sealer.flush()
    for layer, (made, basis) in enumerate(zip(out, bases, strict=True)):
        want = encode(*pages[layer], *bits[layer], basis, layer=layer, first_token=64 + PAGE * layer)
        assert np.array_equal(made.reshape(heads, -1), want)


@pytest.mark.parametrize("size", [16, 64, 80])
def test_slots_in_two_parts_seal_to_the_same_bytes(pool, size):
    heads, basis, made = 2, KVBasis.plain(2, size), []
    pages = normal(heads, size, 4, F16)
    for parts in (1, 2):
        ops = CpuOps(pool, Dims(8, heads, heads, size, 8, 8, 1, 256, 1))
        sealer = Sealer(ops, [PageLayout(heads, size, F16, parts)], [basis], [[(4, 3)] * heads])
        made.append(np.zeros(sealer.layouts[0].layer_page_nbytes, np.uint8))
        sealer.seal(0, exact_page(*pages, F16, parts), made[-1], 64)
        sealer.flush()
        k, v = exact_sides(exact_page(*pages, F16, parts), sealer.exact[0])
        assert np.array_equal(k, pages[0]) and np.array_equal(v, pages[1])
    assert np.array_equal(*made) and made[0].any()


def test_heads_of_a_layer_may_have_different_bits(pool):
    heads, size, bits = 4, 96, ((8, 2), (1, 3), (4, 4), (6, 1))
    k, v = normal(heads, size, 9)
    basis = unturned(heads, size, strength_k=np.geomspace(1, 30, 24).reshape(4, 6), profile=3)
    sealer = Sealer(CpuOps(pool, Dims(8, heads, heads, size, 8, 8, 1, 256, 1)), [PageLayout(heads, size, F32)], [basis], [bits])
    layout, out = sealer.layouts[0], np.full(sealer.layouts[0].layer_page_nbytes, 0xA5, np.uint8)
    sealer.seal(0, exact_page(k, v), out, 64)
    sealer.flush()
    for head, each in enumerate(bits):
        one = slice(head, head + 1)
        want = encode(k[one], v[one], *each, basis.head(head), first_head=head, first_token=64)[0]
        assert np.array_equal(out[layout.head_offsets[head] : layout.head_offsets[head + 1]], want)


def test_a_mean_needs_positions_and_bits_that_exist(pool):
    with_mean = unturned(1, 64, k_mean=np.ones((1, 64), np.float32))
    sealer = make(pool, 1, 64, [with_mean], [(4, 4)])
    with pytest.raises(ValueError, match="cos and sin"):
        sealer.seal(0, exact_page(*normal(1, 64)), np.zeros(sealer.layouts[0].layer_page_nbytes, np.uint8), 0)
    with pytest.raises(ValueError, match="7 bits"):
        make(pool, 1, 64, [KVBasis.plain(1, 64)], [(7, 4)])
    with pytest.raises(ValueError, match="head_dim 24"):
        make(pool, 1, 24, [KVBasis.plain(1, 24)], [(4, 4)])
