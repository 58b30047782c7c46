"""The KV cache: the page grid, attention against plain softmax, sealing, truncation, and independence of how a prompt was chunked."""

import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm import UsageError
from effllm.kernels import reference
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.layout import F16, F32, HEADER_NBYTES, IO_ALIGN, PAGE, PageHeader, PageLayout
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.kv import codec, of_types
from effllm.runtime.cache import KVCache
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape, cache_nbytes
from effllm.runtime.policy.keep import Keep
from effllm.runtime.prepare import EngineOptions

CTX = 1024
SHAPE = CacheShape(CTX)


def make(pool, kv="32bit", heads=6, kv_heads=2, head_dim=24, window=None, softcap=None, shape=SHAPE, layers=1, only=None) -> KVCache:
    """A cache with CPU storage for every layer."""
    ops = CpuOps(pool, Dims(8, heads, kv_heads, head_dim, 8, 8, chunk=shape.chunk, ctx=shape.ctx, logit_rows=1,
                             packed_kv=codec(kv).is_packed), default_registry(only))
    spec = AttnSpec(heads, kv_heads, head_dim, head_dim**-0.5, window, softcap)
    return build_cache([ops] * layers, [spec] * layers, codec(kv), shape)


class Feed:
    """Random q, k, v for every position, and what a cache made of them."""

    def __init__(self, cache: KVCache, heads: int, tokens: int, seed: int = 0, sinks: np.ndarray | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.cache, self.sinks, layout = cache, sinks, cache.layouts[0]
        self.q = rng.standard_normal((tokens, heads * layout.head_dim), np.float32) * 2
        self.k, self.v = (rng.standard_normal((tokens, layout.kv_heads * layout.head_dim), np.float32) for _ in range(2))
        self.out = np.full_like(self.q, np.nan)

    def run(self, tokens: int) -> None:
        for piece in self.cache.pieces(tokens):
            span = slice(self.cache.n, self.cache.n + piece)
            self.cache.begin(piece)
            q, k, v = (np.ascontiguousarray(part[span]) for part in (self.q, self.k, self.v))
            self.out[span] = self.cache.layer(0).attend(q, k, v, self.sinks)
            self.cache.commit()

    def expected(self, window=None, softcap=None) -> np.ndarray:
        n, layout = self.cache.n, self.cache.layouts[0]
        q, k, v = (part[:n].reshape(n, -1, layout.head_dim) for part in (self.q, self.k, self.v))
        return reference.attend(q, k, v, 0, np.arange(n), layout.head_dim**-0.5, window, softcap, self.sinks).reshape(n, -1)


HEADS = ((6, 2, 24), (4, 4, 64), (8, 1, 80), (2, 1, 96), (2, 2, 128), (2, 1, 256), (12, 1, 64), (20, 1, 80))


@pytest.mark.parametrize("heads,kv_heads,head_dim,kv,bound,window,softcap", [
    # every head and both types with every window, and with the other type where there is time
    pytest.param(*heads, *kv, *window, marks=() if (at + i + j) % 2 == 0 else pytest.mark.slow)
    for i, window in enumerate(((None, None), (50, None), (200, 5.0))) for j, kv in enumerate((("32bit", 2e-5), ("16bit", 5e-3)))
    for at, heads in enumerate(HEADS)])
def test_attention_equals_softmax(pool, heads, kv_heads, head_dim, kv, bound, window, softcap):
    expected = None  # the same text however it is cut, and the reference takes longer than what is tested
    for cuts in ([700], [1] * 20 + [300, 5, 9, 1, 1, 364], [64, 128, 508]):
        feed = Feed(make(pool, kv, heads, kv_heads, head_dim, window, softcap), heads, 700)
        for cut in cuts:
            feed.run(cut)
        expected = feed.expected(window, softcap) if expected is None else expected
        assert np.abs(feed.out - expected).max() < bound


SINKS = np.array([0.0, 1.5, -300.0, 4.0, 9.0, 300.0], np.float32)  # without weight, of about that of the keys, of almost all weight


def test_a_sink_is_one_more_key_without_a_value():
    rng, heads = np.random.default_rng(3), 3
    q, k, v = (rng.standard_normal((1, heads, 16)) for _ in range(3))
    logits = rng.standard_normal(heads)
    got = reference.attend(q, k, v, 0, np.arange(1), 0.25, None, None, logits)
    weights = 1 / (1 + np.exp(logits - 0.25 * (q * k).sum(-1)[0]))
    assert np.abs(got[0] - weights[:, None] * v[0]).max() < 1e-12


@pytest.mark.parametrize("only", (None, "reference"))
@pytest.mark.parametrize("window", (None, 50))
def test_sinks_join_the_softmax(pool, only, window):
    feed = Feed(make(pool, window=window, only=only), 6, 400, sinks=SINKS)
    for cut in (370, 5, *[1] * 25):
        feed.run(cut)
    assert np.abs(feed.out - feed.expected(window)).max() < 2e-5
    heads = feed.out.reshape(400, 6, -1)
    plain = reference.attend(*(part.reshape(400, -1, 24) for part in (feed.q, feed.k, feed.v)), 0, np.arange(400), 24**-0.5, window, None)
    assert np.abs(heads[:, 2] - plain[:, 2]).max() < 2e-5 and np.abs(heads[:, 5]).max() < 1e-30
    assert (np.linalg.norm(heads[:, 1], axis=1) < np.linalg.norm(plain[:, 1], axis=1)).all()


@pytest.mark.parametrize("end", (1, 15, 63, 64, 65, 191, 192, 193, 319, 320, 321, CTX))
@pytest.mark.parametrize("shape", (SHAPE, CacheShape(CTX, sink=0, window=0, chunk=PAGE), CacheShape(CTX, sink=5, window=300, chunk=256)))
def test_page_edges(pool, end, shape):
    feed = Feed(make(pool, shape=shape), 6, end)
    feed.run(end)
    assert np.abs(feed.out - feed.expected()).max() < 2e-5
    exact = feed.cache.exact_tokens
    assert exact >= min(end, shape.sinks + shape.window) and exact < shape.sinks + shape.window + PAGE


def test_the_reference_candidate_reads_the_same_pages(pool):
    fast, slow = Feed(make(pool, "16bit"), 6, 400), Feed(make(pool, "16bit", only="reference"), 6, 400)
    for feed in (fast, slow):
        feed.run(380)
        for _ in range(20):
            feed.run(1)
    assert np.abs(fast.out - slow.out).max() < 2e-5


@pytest.mark.parametrize("sinks", (None, SINKS), ids=("plain", "sinks"))
def test_bits_do_not_depend_on_threads_or_on_how_few_come_together(sinks):
    outs = []
    for workers, cuts in ((1, [300] + [1] * 16), (2, [300] + [2] * 8), (4, [300, 8, 8]), (3, [300, 3, 5, 8])):
        other = ThreadPool(workers)
        feed = Feed(make(other, "16bit"), 6, 316, sinks=sinks)
        for cut in cuts:
            feed.run(cut)
        outs.append(feed.out)
        other.close()
    assert all(np.array_equal(outs[0], out) for out in outs[1:])


def test_a_prompt_cut_by_turns_gives_the_same_bits(pool):
    """Chunks end on a grid of positions, so only the rounding of few against many tokens could differ, and here neither chunk is short."""
    whole, cut = Feed(make(pool, shape=CacheShape(CTX, chunk=PAGE)), 6, 700), Feed(make(pool, shape=CacheShape(CTX, chunk=PAGE)), 6, 700)
    whole.run(700)
    for tokens in (100, 92, 208, 300):
        cut.run(tokens)
    assert np.array_equal(whole.out, cut.out)


@given(held=st.integers(1, 900), more=st.integers(0, 900), chunk=st.integers(1, 5), sink=st.integers(0, 130),
       pages=st.one_of(st.none(), st.integers(1, 3)))
def test_pieces_cover_the_prompt_and_end_on_pages(held, more, chunk, sink, pages):
    shape = CacheShape(4096, sink=sink, chunk=chunk * PAGE)
    cache = KVCache([], [], Keep(), shape, [codec("32bit").layout(1, 8)])
    cache.n = held
    pieces = list(cache.pieces(more, pages))
    assert sum(pieces) == more and all(0 < piece <= (pages or chunk) * PAGE for piece in pieces)
    ends = held + np.cumsum(pieces)
    assert all((end - shape.sinks) % PAGE == 0 for end in ends[:-1])


@given(tokens=st.integers(1, 600), keep=st.integers(0, 600), window=st.sampled_from((0, 1, 128, 300)), sink=st.sampled_from((0, 16, 64)))
def test_truncate_then_prefill_again_is_as_if_the_rest_never_came(tokens, keep, window, sink):
    pool = ThreadPool(1)
    shape = CacheShape(CTX, sink=sink, window=window, chunk=256)
    feed = Feed(make(pool, shape=shape), 6, 600)
    feed.run(tokens)
    held = feed.cache.truncate(keep)
    assert held == feed.cache.n <= min(tokens, keep)
    assert held == min(tokens, keep)
    fresh = Feed(make(pool, shape=shape), 6, 600)
    fresh.run(held)
    assert feed.cache.sealed == fresh.cache.sealed and feed.cache.exact_blocks() == fresh.cache.exact_blocks()
    feed.run(600 - held)
    fresh.run(600 - held)
    assert np.array_equal(feed.out[held:], fresh.out[held:])
    pool.close()


def test_raw_pages_are_cut_back_in_place(pool):
    cache = make(pool, shape=CacheShape(CTX, sink=64, window=128))
    feed = Feed(cache, 6, 800)
    feed.run(800)
    assert cache.sealed == 4
    for n, sealed in ((790, 4), (500, 2), (319, 0), (70, 0), (10, 0), (0, 0)):
        assert cache.truncate(n) == cache.n == n and cache.sealed == sealed
    assert len(cache.slots.of) + len(cache.slots.free) == cache.shape.slots


def test_truncating_into_a_packed_page_goes_back_to_its_boundary(pool):
    cache = make(pool, "4bit", 4, 2, 64, shape=CacheShape(CTX, sink=64, window=128))
    feed = Feed(cache, 4, 800)
    feed.run(800)
    assert cache.sealed == 4 and cache.exact_tokens == 800 - 4 * PAGE
    assert cache.truncate(790) == 790  # the same pages would be sealed: nothing is lost
    assert cache.truncate(500) == 64 + 2 * PAGE and cache.sealed == 2
    assert cache.truncate(70) == 64 and cache.sealed == 0
    assert cache.truncate(10) == 10
    assert cache.truncate(0) == 0


def test_the_context_is_a_limit(pool):
    cache = make(pool, shape=CacheShape(200))
    feed = Feed(cache, 6, 200)
    feed.run(200)
    with pytest.raises(ValueError, match=r"200 \+ 1 tokens in a cache for 200"):
        cache.begin(1)


def test_sealed_records_carry_header_and_checksum(pool):
    cache = make(pool, "16bit", shape=CacheShape(CTX, sink=16, window=0, chunk=PAGE))
    feed = Feed(cache, 6, 300)
    feed.run(300)
    layer, layout = cache.layer(0).pages, cache.layouts[0]
    assert cache.sealed == 2
    page = layer.sealed[layout.layer_page_nbytes : 2 * layout.layer_page_nbytes].copy()
    header = PageHeader.unpack(page[layout.record_nbytes : layout.record_nbytes + HEADER_NBYTES].tobytes())
    assert (header.layer, header.head, header.first_token, header.count, header.bits_k, header.bits_v) == (0, 1, 16 + PAGE, PAGE, 16, 16)
    body = page[layout.record_nbytes + HEADER_NBYTES :][: 2 * layout.side_nbytes]
    assert header.crc32 == zlib.crc32(body)
    keys = body[: layout.side_nbytes].view(np.float16).reshape(layout.head_dim, PAGE).T
    assert np.array_equal(keys, feed.k[16 + PAGE : 16 + 2 * PAGE, layout.head_dim :].astype(np.float16))
    cache.codecs[0].check(page, layout)
    page[layout.record_nbytes + HEADER_NBYTES + 5] ^= 1
    with pytest.raises(ValueError, match="layer 0, head 1, token 144: checksum differs"):
        cache.codecs[0].check(page, layout)


def test_golden_header_bytes():
    header = PageHeader(layer=3, head=1, first_token=64, count=128, bits_k=16, bits_v=16, base_position=-1, profile=7, crc32=0xDEADBEEF)
    golden = "45464b5601000300010000004000000000000000800000001010" + "0000" + "ffffffffffffffff" + "0700000000000000" + "efbeadde"
    assert header.pack().hex() == golden.ljust(128, "0")
    assert PageHeader.unpack(header.pack()) == header
    with pytest.raises(ValueError, match="not a KV page"):
        PageHeader.unpack(b"XXXX" + header.pack()[4:])
    with pytest.raises(ValueError, match="version 9"):
        PageHeader.unpack(header.pack()[:4] + struct.pack("<H", 9) + header.pack()[6:])


@given(st.builds(PageHeader, layer=st.integers(0, 65535), head=st.integers(0, 65535), first_token=st.integers(-(2**63), 2**63 - 1),
                 count=st.integers(0, 2**32 - 1), bits_k=st.integers(0, 255), bits_v=st.integers(0, 255),
                 base_position=st.integers(-(2**63), 2**63 - 1), profile=st.integers(0, 2**64 - 1), crc32=st.integers(0, 2**32 - 1)))
def test_headers_round_trip(header):
    assert PageHeader.unpack(header.pack()) == header and len(header.pack()) == HEADER_NBYTES


def test_golden_layout():
    layout = PageLayout(kv_heads=2, head_dim=64, stored=F16)
    assert (layout.side_nbytes, layout.record_nbytes, layout.layer_page_nbytes) == (16384, 32832, 69632)
    assert layout.layer_page_nbytes % IO_ALIGN == 0
    halves = PageLayout(kv_heads=2, head_dim=64, stored=F16, parts=2)
    assert (halves.rows, halves.side_nbytes, halves.record_nbytes, halves.part_nbytes) == (64, 8192, 16448, 32896)
    assert halves.layer_page_nbytes == 2 * halves.part_nbytes
    assert [halves.parts_of(tokens) for tokens in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]
    assert PageLayout(1, 80, F32).record_nbytes == 64 + 2 * 128 * 80 * 4


def test_the_byte_count_is_the_memory_in_use(pool):
    shape = CacheShape(CTX)
    cache = make(pool, "16bit", layers=3, shape=shape)
    for piece in cache.pieces(600):
        cache.begin(piece)
        for layer in range(3):
            rows = np.ones((piece, 48), np.float32)
            cache.layer(layer).attend(np.ones((piece, 144), np.float32), rows, rows)
        cache.commit()
    fixed, per_page = cache_nbytes(cache.codecs, cache.layouts, shape)
    assert cache.sealed == 3 and cache.exact_tokens == 600 - 3 * PAGE
    slots = 3  # sinks, and two pages of exact tokens
    assert cache.allocated_nbytes == slots * fixed // shape.slots + cache.sealed * per_page
    assert cache.bits_per_value == pytest.approx(8 * cache.allocated_nbytes / (2 * 48 * 3 * 600))
    assert cache.packed_bits == 8 * cache.layouts[0].layer_page_nbytes / (2 * PAGE * 48) >= 16


@pytest.mark.parametrize("kv, sink, parts", [("16bit", 64, 11), ("16bit", 0, 10), ("4bit", 64, 21), ("4bit", 0, 20), ("4bit", 100, 22)])
def test_the_plan_counts_the_parts_of_slots_that_can_hold_tokens(pool, kv, sink, parts):
    """Ten slots hold the window, a chunk, and a page at either end; the eleventh the sinks."""
    shape = CacheShape(4096, sink=sink, window=512)
    cache = make(pool, kv, head_dim=48, shape=shape)
    fixed, _ = cache_nbytes(cache.codecs, cache.layouts, shape)
    assert shape.slots == 11 and fixed == parts * cache.layouts[0].part_nbytes == len(cache.slots.memory[0])


@given(cuts=st.lists(st.integers(1, 300), min_size=1, max_size=8), sink=st.sampled_from((0, 16, 64, 80, 128)), back=st.integers(0, 200))
def test_parts_in_use_are_those_that_hold_tokens(cuts, sink, back):
    """After any cuts, and after tokens were taken back, no part is counted that the plan has no memory for."""
    shape = CacheShape(4096, sink=sink, window=128, chunk=256)
    cache = KVCache([], [], Keep(), shape, [PageLayout(2, 16, F16, parts=2)])
    for tokens in cuts:
        for piece in cache.pieces(tokens):
            cache.begin(piece)
            cache.commit()
    counts = [count for _, count in cache.exact_blocks()]
    assert sum(counts) == cache.exact_tokens
    assert sorted(cache.slots.used.values()) == sorted(-(-count // 64) for count in counts)
    cache.truncate(cache.n - min(back, cache.n))
    assert sum(cache.slots.used.values()) >= sum(-(-count // 64) for _, count in cache.exact_blocks())
    assert all(slot < shape.slots and used <= 2 for slot, used in cache.slots.used.items())


def test_raw_pages_in_parts_are_the_same_tokens(pool):
    """A slot in two parts gives what a slot in one gives, to the bit, however many tokens it holds."""
    outs = []
    for parts in (1, 2):
        shape = CacheShape(700, sink=48, window=512, chunk=PAGE)
        ops = CpuOps(pool, Dims(8, 6, 2, 24, 8, 8, chunk=shape.chunk, ctx=shape.ctx, logit_rows=1), default_registry())
        layout = PageLayout(2, 24, F16, parts)
        memory = np.zeros(((shape.slots - 1) * parts + 1) * layout.part_nbytes, np.uint8)
        layer = ops.kv_layer(layout, memory, np.zeros(0, np.uint8), 24**-0.5, None, None)
        feed = Feed(KVCache([layer], [codec("16bit")], Keep(), shape, [layout]), 6, 500)
        feed.run(400)
        for _ in range(100):
            feed.run(1)
        outs.append(feed.out)
        k, v = layer.sides(0, feed.cache.slots.of[-1])
        assert len(k) == layout.rows and np.array_equal(k[:48].reshape(48, -1), feed.k[:48].astype(np.float16))
        assert np.array_equal(v[:48].reshape(48, -1), feed.v[:48].astype(np.float16))
    assert np.array_equal(*outs)


@pytest.mark.parametrize("head_dim, kv_heads", [(64, 4), (128, 8)])
@pytest.mark.parametrize("kv, most", [("4bit", 5.0), ("3bit", 4.05), ("2bit", 3.1)])
@pytest.mark.parametrize("tokens", [8192, 8192 + 63])
def test_allocated_bits_at_8k_tokens(pool, kv, most, head_dim, kv_heads, tokens):
    """Sinks and window in 16 bits, headers and padding included, where the window is shortest and where it is longest."""
    cache = make(pool, kv, heads=kv_heads, kv_heads=kv_heads, head_dim=head_dim, shape=CacheShape(2 * 8192))
    for piece in cache.pieces(tokens):
        cache.begin(piece)
        cache.commit()
    assert cache.exact_tokens == 64 + 192 + tokens - 8192 and cache.packed_bits < float(kv[0]) + 0.54
    assert cache.packed_bits < cache.bits_per_value <= most


def test_unknown_kv_is_refused_with_what_exists():
    with pytest.raises(UsageError, match="--kv 7bit is not known") as caught:
        codec("7bit")
    assert "32bit, 16bit, 8bit" in caught.value.hint and "k8v4" in caught.value.hint
    for offered in re.findall(r"\b(?:\d+bit|k\dv\d)\b", caught.value.hint):
        codec(offered)


def test_types_as_llama_cpp_names_them():
    assert of_types("q4_0", "q4_0") == "4bit" and of_types("Q8_0", "q4_0") == "k8v4" and of_types("f16", "f16") == "16bit"
    assert of_types("8bit", "q5_1") == "k8v5"
    with pytest.raises(UsageError, match="q7 is not a cache type"):
        of_types("q7", "f16")
    for exact in ("f16", "f32"):
        with pytest.raises(UsageError, match=f"keys as q8_0 with values as {exact}: exact and packed ones do not mix"):
            of_types("q8_0", exact)
    with pytest.raises(UsageError, match="keys as f32 with values as f16: 32 and 16 bits do not mix") as caught:
        of_types("f32", "f16")
    assert caught.value.hint == "-ctk f32 -ctv f32, or f16 for both"
    assert EngineOptions(cache_k="q8_0", cache_v="q4_0").kv == "k8v4"
    with pytest.raises(UsageError, match="say the same thing"):
        EngineOptions(kv="4bit", cache_k="q8_0")


def test_a_step_of_one_token_keeps_the_arrays_of_the_last_within_a_page(pool):
    """A backend runs what it prepared for these arrays again, so they may change hands only where the blocks change."""
    cache = make(pool, shape=CacheShape(CTX, sink=16, window=16, chunk=PAGE))
    seen = []
    for _ in range(16 + 2 * PAGE + 20):
        step = cache.begin(1)
        seen.append((step.blocks, step.blocks.copy(), step.positions[0], step.slots[0], step.rows[0]))
        cache.commit()
    fresh = make(pool, shape=CacheShape(CTX, sink=16, window=16, chunk=PAGE))
    for at, (_, blocks, position, slot, row) in enumerate(seen):
        fresh.step = None  # nothing to go on from
        step = fresh.begin(1)
        assert np.array_equal(step.blocks, blocks) and (step.positions[0], step.slots[0], step.rows[0]) == (position, slot, row), at
        fresh.commit()
    changes = [at for at in range(1, len(seen)) if seen[at][0] is not seen[at - 1][0]]
    assert changes == [16, 16 + PAGE, 16 + PAGE + 16, 16 + 2 * PAGE, 16 + 2 * PAGE + 16]
