"""Bad input for packed caches: altered bytes, another version or profile, NaN, odd context lengths."""

from __future__ import annotations

import numpy as np
import pytest
from kv_samples import Stream, as_they_lie, moments_basis, packed_cache, relative

from effllm import EffllmError, UsageError
from effllm.kernels.layout import HEADER_NBYTES, PAGE
from effllm.quant.kv import PackedCodec, codec
from effllm.quant.kv_basis import KVBasis
from effllm.runtime.cache import CacheShape

HEADS = 8


@pytest.fixture
def filled(pool):
    """Two sealed pages of two KV heads."""
    stream = Stream(packed_cache(pool, basis=moments_basis(2, 64)), HEADS, 400)
    stream.run(400, compare=False)
    assert stream.cache.sealed == 2
    return stream.cache


@pytest.mark.parametrize("at, said", [(HEADER_NBYTES + 100, "checksum differs"), (60, "checksum differs"), (44, "checksum differs"),
                                      (0, "not a KV page"), (4, "KV page version 3, this program reads 1")])
@pytest.mark.parametrize("page, head", [(0, 0), (1, 1)])
def test_a_page_whose_bytes_changed_is_named(filled, at, said, page, head):
    pages = filled.layer(0).pages
    start = page * pages.packed.layer_page_nbytes + pages.packed.head_offsets[head]
    pages.records[start + at] ^= 2
    with pytest.raises(ValueError) as caught:
        pages.sides(1, page)
    assert said in str(caught.value)
    if said == "checksum differs":
        assert f"layer 0, head {head}, token {64 + PAGE * page}" in str(caught.value)
    pages.sides(1, 1 - page)  # the other page is whole


def test_a_page_of_another_profile_is_refused(filled):
    pages = filled.layer(0).pages
    own = pages.codec
    page = pages.records[: pages.packed.layer_page_nbytes]
    other = PackedCodec(own.bits, moments_basis(2, 64, profile=8))
    with pytest.raises(ValueError, match="KV page of layer 0, token 64: written with another profile"):
        other.open(page, 2, 64)
    with pytest.raises(ValueError, match="written with another profile"):
        PackedCodec(own.bits, KVBasis.plain(2, 64)).open(page, 2, 64)
    with pytest.raises(ValueError, match="a codec of 2 heads for a layer of 3"):
        own.open(page, 3, 64)


@pytest.mark.parametrize("head_dim", [8, 24, 72, 1040])
def test_head_sizes_that_no_record_takes_are_refused_beforehand(pool, head_dim):
    with pytest.raises(UsageError, match=f"multiple of 16, up to 1024, this model has {head_dim}") as caught:
        packed_cache(pool, head_dim=head_dim)
    assert caught.value.hint == "--kv 16bit"


@pytest.mark.parametrize("name", ["7bit", "1bit", "0bit", "k4", "k9v4", "4bits", ""])
def test_formats_that_do_not_exist(name):
    with pytest.raises(UsageError, match="is not known"):
        codec(name)


@pytest.mark.parametrize("side", "KV")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e9])
def test_what_is_not_finite_stops_the_run_and_says_where(pool, side, value):
    """NaN and infinity cannot be packed, and would silence their whole page if they were. What is only too large for a half saturates."""

    def ruin(k, v):
        (k if side == "K" else v)[200, 1, 7] = value
        return k, v

    stream = Stream(packed_cache(pool, basis=moments_basis(2, 64)), HEADS, 420, ruin=ruin)
    if np.isfinite(value):
        stream.run(420, compare=False)
        assert stream.cache.sealed == 2 and np.isfinite(stream.out).all()
        return
    with pytest.raises(EffllmError, match=f"{side} of layer 0, head 1, tokens 192 to 319: not finite") as caught:
        stream.run(420, compare=False)
    assert "16bit" in caught.value.hint
    cache = stream.cache
    assert cache.sealed == 1 and len(cache.slots.free) + len(cache.slots.of) == cache.shape.slots  # the page is still open
    assert cache.truncate(220) == 220 and cache.sealed == 1


@pytest.mark.parametrize("ctx", [1, 2, 63, 64, 65, PAGE - 1, PAGE, PAGE + 1, 64 + PAGE, 64 + PAGE + 16, 64 + PAGE + 17])
@pytest.mark.parametrize("sink", [0, 64])
def test_contexts_of_any_length(pool, ctx, sink):
    """Filled to the last token, by a prompt and one by one: what is attended is what is held."""
    for first in {1, ctx}:
        stream = Stream(packed_cache(pool, "8bit", shape=CacheShape(ctx, sink=sink, window=16, chunk=PAGE)), HEADS, ctx)
        for tokens in (first, *[1] * (ctx - first)):
            stream.run(tokens, compare=ctx < 70 or stream.cache.n + tokens == ctx)
        assert stream.cache.n == ctx and stream.cache.sealed == max(0, (ctx - sink - 16) // PAGE)
        assert np.isfinite(stream.out).all()
        compared = ~np.isnan(stream.want).all(1)
        assert compared.any() and relative(stream.out[compared], stream.want[compared]) < 5e-3
        with pytest.raises(ValueError, match=f"{ctx} \\+ 1 tokens in a cache for {ctx}"):
            stream.cache.begin(1)


@pytest.mark.parametrize("window", [400, 1024])
def test_a_window_longer_than_the_context_packs_nothing(pool, window):
    """And then answers are those of a 16-bit cache."""
    outs = []
    for kv in ("4bit", "16bit"):
        stream = Stream(packed_cache(pool, kv, shape=CacheShape(400, sink=64, window=window, chunk=PAGE)), HEADS, 400)
        for tokens in (380, *[1] * 20):
            stream.run(tokens, compare=False)
        outs.append(stream.out)
        assert stream.cache.sealed == 0 or kv == "16bit"
    assert relative(outs[0], outs[1]) < 1e-4


@pytest.mark.parametrize("to, kept, sealed", [(399, 399, 2), (336, 336, 2), (335, 192, 1), (300, 192, 1), (192, 64, 0), (100, 64, 0),
                                              (10, 10, 0), (0, 0, 0)])
def test_truncation_into_a_sealed_page_goes_back_to_its_beginning(filled, to, kept, sealed):
    assert filled.truncate(to) == kept
    assert filled.n == kept and filled.sealed == sealed
    free = len(filled.slots.free) + len(filled.slots.of)
    assert free == filled.shape.slots


@pytest.mark.parametrize("heads", (2, HEADS))
def test_tokens_run_again_after_truncation_see_what_is_held(pool, heads):
    stream = Stream(packed_cache(pool, "4bit", heads), heads, 500)
    stream.run(500, compare=False)
    before = stream.cache.layer(0).pages.records.copy()
    kept = stream.cache.truncate(250)
    stream.run(500 - kept)
    assert stream.cache.sealed == 3
    most = 0.03 if as_they_lie("4bit", heads // 2) else 5e-3  # what is multiplied as it lies is rounded
    assert relative(stream.out[kept:], stream.want[kept:]) < most
    assert np.array_equal(stream.cache.layer(0).pages.records, before)  # the same tokens make the same pages
