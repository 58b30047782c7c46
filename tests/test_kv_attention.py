"""Attention over packed pages against plain softmax over the decoded pages, and what it must not depend on."""

from __future__ import annotations

import kv_samples
import numpy as np
import pytest
from kv_samples import FINE, Stream, as_they_lie, excess, fine_error, moments_basis, packed_cache, relative, worst_error
from test_instruction_sets import X86, child, runs_here

from effllm import UsageError
from effllm.kernels.compile import cpu_features
from effllm.kernels.cpu.attention import LONG_CHUNK_TOKENS, LONG_TILE_ROWS
from effllm.kernels.cpu.int8_ir import INSTRUCTION_SET
from effllm.kernels.cpu.kv.prefill import prefill_scratch
from effllm.kernels.cpu.kv.scratch_layout import HAS_EIGHT_ROW_TILES, decode_scratch, query_places, tile_rows
from effllm.kernels.layout import PAGE
from effllm.kernels.threads import ThreadPool
from effllm.quant.kv import codec
from effllm.quant.kv_basis import KVBasis
from effllm.runtime.cache import CacheShape


@pytest.mark.parametrize("kv", ("10bit", "8bit", "6bit", "5bit", "4bit", "3bit", "2bit", "k8v2", "k2v8", "k10v4", "k2v10"))
@pytest.mark.parametrize("heads", (2, pytest.param(8, marks=pytest.mark.slow)))
def test_every_width_equals_softmax_over_the_decoded_pages(pool, kv, heads):
    """With one query head to a KV head prompts open pages everywhere."""
    assert worst_error(pool, kv, heads=heads) < 5e-3


@pytest.mark.parametrize("kv", ("10bit", "8bit", "6bit"))
def test_what_16_bits_round_lies_70_db_below_the_answer(pool, kv):
    assert fine_error(pool, kv) < FINE


@pytest.mark.parametrize("heads", (2, 6, 12))
def test_groups_of_10_bits_after_others(pool, heads):
    assert kv_samples.uneven_error(pool, heads) < FINE


@pytest.mark.parametrize("kv, heads, head_dim, most", (("8bit", 3, 576, 3.5e-4), ("4bit", 8, 512, 0.025), ("10bit", 8, 512, 1e-3)))
def test_heads_of_more_channels_than_a_tail_has_room_for(pool, kv, heads, head_dim, most):
    assert fine_error(pool, kv, heads, 1, head_dim) < most


@pytest.mark.parametrize("heads, sign", ((4, -1), (8, 1)))
def test_the_largest_sums_of_a_wide_head(pool, heads, sign):
    assert kv_samples.extreme_error(pool, "8bit", 512, heads, sign) < 1e-4


@pytest.mark.parametrize("kv", ("4bit", "8bit", "10bit"))
def test_bits_of_wide_heads_do_not_depend_on_threads_or_on_how_few_come_together(kv):
    outs = []
    for workers, cuts in ((1, [400] + [1] * 12), (2, [400] + [2] * 6), (3, [400, 3, 5, 4])):
        pool = ThreadPool(workers)
        stream = Stream(packed_cache(pool, kv, 8, 1, 512), 8, 412)
        for cut in cuts:
            stream.run(cut, compare=False)
        outs.append(stream.out)
        pool.close()
    assert all(np.array_equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("window,softcap,heads,kv_heads,head_dim", [
    pytest.param(*seen, *shape, marks=pytest.mark.slow if seen == (50, None) or seen[0] is None and shape[2] > 256 else ())
    for seen in ((None, None), (50, None), (200, 5.0))
    for shape in ((4, 4, 64), (4, 2, 80), (6, 2, 96), (8, 1, 128), (2, 1, 256), (3, 3, 16), (8, 1, 512), (16, 1, 576))])
def test_shapes_windows_and_caps(pool, heads, kv_heads, head_dim, window, softcap):
    assert worst_error(pool, "4bit", heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window, softcap=softcap) < 1e-2


def test_bytes_round_a_fraction_of_what_the_codec_loses(pool):
    """Keys and values that the basis was made for, codes of few bits on one side or on both: a thirtieth of the noise (of five bits of K, a
    twelfth)."""
    exact = Stream(packed_cache(pool, "32bit"), 8, 420)
    exact.run(420, compare=False)
    for kv, share in (("4bit", 0.18), ("3bit", 0.1), ("2bit", 0.05), ("k4v8", 0.14), ("k5v8", 0.3), ("k8v4", 0.3)):
        stream = Stream(packed_cache(pool, kv, basis=KVBasis.plain(2, 64)), 8, 420)
        for tokens in (400, *[1] * 20):
            stream.run(tokens)
        single = slice(400, 420)
        assert 1e-3 < relative(stream.out[single], stream.want[single]) < share * relative(stream.want[single], exact.out[single]), kv


def test_small_weights_beside_a_large_one_are_not_lost(pool):
    """One token of a page has most of the attention and no value to speak of, 127 have next to nothing each, and all the same value."""

    def ruin(k, v):
        k[64 : 64 + PAGE] *= 0.01
        v[64 : 64 + PAGE] = v[64]
        k[100] = 0.85 * np.sign(v[64])
        v[100] *= 0.01
        return k, v

    stream = Stream(packed_cache(pool, basis=KVBasis.plain(2, 64)), 8, 401, ruin=ruin)
    stream.q[400] = np.tile(np.sign(stream.v[64].reshape(2, 64)), (1, 4)).reshape(-1) * 1.5
    stream.run(400, compare=False)
    stream.run(1)
    assert relative(stream.out[400], stream.want[400]) < 0.03


@pytest.mark.parametrize("group", (1, 3, 4, 5, 8, 12))
@pytest.mark.parametrize("kv,most", (("4bit", 0.025), ("8bit", FINE), ("10bit", FINE)))
def test_any_number_of_heads_shares_a_record(pool, kv, most, group):
    """Tiles of four and eight rows, and what only fills them."""
    for window in (None, 150):
        assert fine_error(pool, kv, 2 * group, window=window) < most


def test_what_is_lost_is_what_the_codec_loses(pool):
    """Not only do kernels agree with the decoder: both are near the exact answer, nearer with more bits."""
    exact = Stream(packed_cache(pool, "32bit"), 8, 420)
    exact.run(420, compare=False)
    errors = []
    for kv in ("2bit", "3bit", "4bit", "5bit", "6bit", "8bit", "10bit"):
        stream = Stream(packed_cache(pool, kv, basis=KVBasis.plain(2, 64)), 8, 420)
        stream.run(420, compare=False)
        errors.append(relative(stream.out, exact.out))
    assert errors == sorted(errors, reverse=True) and errors[0] < 0.5 and errors[-1] < 0.01


@pytest.mark.parametrize("kv", ("4bit", "8bit", "10bit"))
@pytest.mark.parametrize("heads", (8, 24))
def test_bits_do_not_depend_on_threads_or_on_how_few_come_together(kv, heads):
    outs = []
    for workers, cuts in ((1, [400] + [1] * 16), (2, [400] + [2] * 8), (4, [400, 8, 8]), (3, [400, 3, 5, 8])):
        pool = ThreadPool(workers)
        stream = Stream(packed_cache(pool, kv, heads), heads, 416)
        for cut in cuts:
            stream.run(cut, compare=False)
        outs.append(stream.out)
        pool.close()
    assert all(np.array_equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("kv", ("4bit", "2bit", "8bit", "k8v4", "k10v8"))
@pytest.mark.parametrize("heads, kv_heads, window, softcap", ((8, 1, None, None), (8, 2, None, None), (14, 2, 200, None),
                                                              (12, 2, None, 5.0), (24, 2, 300, None), (2, 2, None, None)))
def test_a_prompt_reads_packed_pages_as_an_answer_does(pool, kv, heads, kv_heads, window, softcap):
    """The same to float32 where both multiply what lies there, whole tiles of rows or not; a prompt may open what an answer does not."""
    caches = [packed_cache(pool, kv, heads, kv_heads, window=window, softcap=softcap) for _ in range(2)]
    prompt, single = (Stream(cache, heads, 500) for cache in caches)
    for stream in (prompt, single):
        stream.run(420, compare=False)
    prompt.run(40, compare=False)
    for _ in range(40):
        single.run(1, compare=False)
    assert prompt.cache.sealed == single.cache.sealed == 2
    assert relative(prompt.out[420:460], single.out[420:460]) < (1e-5 if as_they_lie(kv, heads // kv_heads) else 0.03)


@pytest.mark.parametrize("kv", ("4bit", "8bit"))
def test_a_prompts_bits_do_not_depend_on_its_tiles(pool, kv):
    """Tokens of a chunk, and of one that begins elsewhere."""
    outs = []
    for cuts in ((400, 60), (400, 17, 43)):
        stream = Stream(packed_cache(pool, kv), 8, 460)
        for cut in cuts:
            stream.run(cut, compare=False)
        outs.append(stream.out)
    assert np.array_equal(outs[0], outs[1])


@pytest.mark.parametrize("heads, window", ((2, None), (4, 200)))
def test_taller_tiles_of_a_long_chunk_change_no_bits(pool, heads, window):
    """One and two query heads to a KV head, in passes of 452 tokens and 48, and in such as have no tall tiles."""
    outs = []
    for chunk in (512, 128):
        shape = CacheShape(1024, sink=64, window=16, chunk=chunk)
        stream = Stream(packed_cache(pool, "16bit", heads, 2, window=window, shape=shape), heads, 900)
        stream.run(400, compare=False)
        longest = max(stream.cache.pieces(500))
        assert (longest >= LONG_CHUNK_TOKENS and longest
                % LONG_TILE_ROWS) if chunk == 512 else longest < LONG_CHUNK_TOKENS, "the last of tall ones is not full"
        stream.run(500)
        outs.append(stream.out[400:])
        assert relative(outs[-1], stream.want[400:]) < 1e-5
    assert np.array_equal(outs[0], outs[1])


@pytest.mark.parametrize("kv, heads", (("4bit", 2), ("8bit", 2), ("8bit", 4)))
def test_taller_tiles_read_packed_pages(pool, kv, heads):
    shape = CacheShape(1024, sink=64, window=16, chunk=512)
    stream = Stream(packed_cache(pool, kv, heads, 2, shape=shape), heads, 900)
    stream.run(400, compare=False)
    assert max(stream.cache.pieces(500)) >= LONG_CHUNK_TOKENS and stream.cache.sealed
    stream.run(500)
    assert relative(stream.out[400:], stream.want[400:]) < (0.03 if as_they_lie(kv, heads // 2) else 1e-3)


@pytest.mark.parametrize("tokens", (1, 64, 64 + PAGE - 1, 64 + PAGE, 64 + PAGE + 1, 64 + PAGE + 16, 64 + PAGE + 17, 600))
@pytest.mark.parametrize("heads", (2, 8))
def test_page_edges(pool, tokens, heads):
    stream = Stream(packed_cache(pool, heads=heads, basis=moments_basis(2, 64)), heads, tokens)
    stream.run(tokens)
    whole = Stream(packed_cache(pool, "32bit", heads), heads, tokens)
    whole.run(tokens, compare=False)
    lie = as_they_lie("4bit", heads // 2)
    assert excess(stream, whole, "4bit", slice(0, tokens), lie) < 5e-3 and (lie or np.abs(stream.out - stream.want).max() < 2e-2)
    assert stream.cache.sealed == max(0, (tokens - 64 - 16) // PAGE)
    packed = stream.cache.codecs[0].layout(2, 64).layer_page_nbytes * stream.cache.sealed
    exact = tokens - PAGE * stream.cache.sealed - 64  # behind the sinks; these fill one part of a slot
    assert stream.cache.allocated_nbytes == packed + (1 + sum(-(-min(PAGE, max(0, exact - begin)) // 64) for begin in (0, PAGE)))\
        * stream.cache.layouts[0].part_nbytes


@pytest.mark.parametrize("kv", ("4bit", "10bit"))
def test_a_channel_that_drowns_the_others(pool, kv):
    """A page with a lone pair keeps its channels: the flag in its header chooses the queries that were not turned."""

    def ruin(k, v):
        k[:, 0, 5] *= 50
        return k, v

    stream = Stream(packed_cache(pool, kv, basis=moments_basis(2, 64)), 8, 420, ruin=ruin)
    for tokens in (400, *[1] * 20):
        stream.run(tokens)
    assert relative(stream.out, stream.want) < (3e-3 if kv == "10bit" else 1e-2)


def test_silent_pages_and_tiny_values(pool):
    def ruin(k, v):
        k[64 : 64 + PAGE], v[64 : 64 + PAGE] = 0, 0
        v[64 + PAGE : 64 + 2 * PAGE] *= 1e-6
        return k, v

    stream = Stream(packed_cache(pool), 8, 420, ruin=ruin)
    for tokens in (400, *[1] * 20):
        stream.run(tokens)
    assert np.isfinite(stream.out).all() and np.sqrt(np.square(stream.out - stream.want).mean()) < 2e-3 * np.abs(stream.want).max()


def test_learned_sinks_join_the_softmax(pool):
    stream = Stream(packed_cache(pool), 8, 420, sinks=np.linspace(-3, 6, 8, dtype=np.float32))
    for tokens in (400, *[1] * 20):
        stream.run(tokens)
    without = Stream(packed_cache(pool), 8, 420)
    without.run(400, compare=False)
    assert relative(stream.out, stream.want) < 5e-3 and relative(stream.out[:400], without.out[:400]) > 0.05


@pytest.mark.parametrize("softcap", (None, 5.0))
@pytest.mark.parametrize("kv", ("4bit", "8bit", "16bit", "32bit"))
def test_nan_in_a_query_shows(pool, kv, softcap):
    stream = Stream(packed_cache(pool, kv, softcap=softcap), 8, 401)
    stream.run(400, compare=False)
    stream.q[400, 70] = np.nan
    stream.run(1, compare=False)
    out = stream.out[400].reshape(8, 64)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2, 3, 4, 5, 6, 7]]).all()


@pytest.mark.parametrize("heads", (2, 8))
def test_truncating_into_a_sealed_page_goes_back_to_its_beginning(pool, heads):
    stream = Stream(packed_cache(pool, heads=heads), heads, 600)
    stream.run(600, compare=False)
    cache = stream.cache
    assert cache.sealed == 4 and cache.truncate(400) == 64 + 2 * PAGE and cache.sealed == 2
    again = np.array(stream.out)
    stream.run(600 - cache.n)
    most = 0.1 if as_they_lie("4bit", heads // 2) else 2e-2  # what is multiplied as it lies is rounded
    assert np.abs(stream.out[320:] - stream.want[320:]).max() < most and np.abs(stream.out[320:] - again[320:]).max() < 0.3


def test_a_window_larger_than_the_context_packs_nothing(pool):
    stream = Stream(packed_cache(pool, shape=CacheShape(512, sink=64, window=512, chunk=PAGE)), 8, 512)
    stream.run(512, compare=False)
    exact = Stream(packed_cache(pool, "16bit", shape=CacheShape(512, sink=64, window=512, chunk=PAGE)), 8, 512)
    exact.run(512, compare=False)
    assert stream.cache.sealed == 0 and np.array_equal(stream.out, exact.out)


def test_a_head_size_that_no_record_takes_is_refused():
    with pytest.raises(UsageError, match="multiple of 16, up to 1024, this model has 72") as caught:
        codec("4bit").layers([(2, 72)] * 2)
    assert caught.value.hint == "--kv 16bit"


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="the sets that can be forced are those of x86")
@pytest.mark.parametrize("name", [name for name in ("avx2", "portable") if name != INSTRUCTION_SET and runs_here(name)])
def test_with_fewer_instructions(name, tmp_path):
    child("import kv_samples; kv_samples.check_all()", tmp_path, forced=name)


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in cpu_features(), reason="the emulation is written in AVX2")
@pytest.mark.parametrize("name", [name for name in ("avx512", "avx2vnni", "neondot", "neon") if not runs_here(name)])
def test_with_emulated_instructions(name, tmp_path):
    child("import kv_samples; kv_samples.check_all()", tmp_path, emulated=name)


def test_the_largest_products_there_are():
    kv_samples.check_largest_products()
    kv_samples.check_largest_digits(4)


@pytest.mark.parametrize("rows", (4, 8) if HAS_EIGHT_ROW_TILES else (4,))
def test_scores_that_are_not_finite_show(rows):
    kv_samples.check_unknown_scores(rows)


@pytest.mark.slow
def test_all_widths_on_this_machine():
    kv_samples.check_all()


@pytest.mark.parametrize("head_dim", (16, 64, 80, 128, 256, 512, 576, 1024))
@pytest.mark.parametrize("group", (2, 3, 5, 8, 12, 33, 71, 128))
def test_a_prompts_page_has_room_where_its_keys_lie(group, head_dim):
    """`attend_page` over K, V and S of a tile; what it is given for one token alone holds its queries too."""
    keys, rows = prefill_scratch(group, 1, head_dim), -(-group // tile_rows(group)) * tile_rows(group)
    assert decode_scratch(group, head_dim) - query_places(rows, head_dim)[6] // 4 < PAGE * (2 * head_dim + 32 * group) < keys
