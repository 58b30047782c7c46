"""A KV cache restored from files: the same bits in all later logits, few bytes, pages shared by common prefixes."""

import json
import shutil
import zlib
from dataclasses import replace

import numpy as np
import pytest
from config_samples import SMALL
from session_engines import FABLE, opened, read, restore, save, tokens

from effllm import ContextOverflow, EffllmError, UsageError
from effllm.kernels import raw_pages
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.layout import F16, F32, PAGE, PageLayout
from effllm.kernels.mamba1_shape import Mamba1Shape
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.offload.page_file import PageFile
from effllm.offload.page_pool import DiskTier
from effllm.quant.kv import codec
from effllm.quant.kv_lossless import most_exact, pack_exact, unpack_exact
from effllm.quant.kv_page_check import check_stored
from effllm.runtime.engine import Engine
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape
from effllm.runtime.moe_config import MoEConfig
from effllm.runtime.sessions.config_identity import first_repr
from effllm.runtime.sessions.saved_cache import (
    SPARSE_ATTENTION,
    folder_identity,
    identity,
    page_keys,
    refuse_other,
    restore_cache,
    tail_key,
)
from effllm.runtime.sessions.session_format import SavedCache, SavedSession, TokenizedText
from effllm.runtime.sessions.session_store import SessionStore

LENGTHS = {"a page sealed": 400, "sinks alone": 40, "nothing sealed": 200, "on a page's end": 64 + 2 * PAGE}


@pytest.fixture(scope="module", params=["4bit", "16bit", pytest.param("32bit", marks=pytest.mark.slow)])
def pair(request):
    """An engine, and the one of a process that comes later."""
    engines = [opened(kv=request.param) for _ in range(2)]
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def one():
    engine = opened(kv="4bit")
    yield engine
    engine.close()


@pytest.fixture
def store(tmp_path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


def rest(engine: Engine, ids: list[int]) -> list[np.ndarray]:
    """Logits of a few tokens one by one, of some at once, and of a prompt that takes part of it back."""
    found = [engine.forward_logits([token]).copy() for token in ids[:3]]
    found.append(engine.forward_logits(ids[3:30]).copy())
    read(engine, [*engine.tokens[:-20], *ids[40:60]])
    return [*found, engine._logits.copy()]


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_every_logit_afterwards_has_the_same_bits(pair, store, length):
    first, second = pair
    first.reset()
    read(first, tokens(length))
    for token in tokens(5, 1):
        first.forward_logits([token])
    save(first, store, "tale")
    second.reset()
    restore(second, store)
    assert second.tokens == first.tokens and second.cache.n == first.cache.n and second.cache.sealed == first.cache.sealed
    more = tokens(60, 2)
    for got, want in zip(rest(second, more), rest(first, more), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_cache_that_was_cut_back_comes_back_as_it_was(pair, store):
    """Its last page is packed though its tokens are newer than the window: what is held is not a function of the length."""
    first, second = pair
    first.reset()
    read(first, tokens(500))
    read(first, [*tokens(500)[:330], 11, 12])
    save(first, store, "tale")
    restore(second, store)
    assert (second.cache.n, second.cache.sealed) == (first.cache.n, first.cache.sealed)
    more = tokens(60, 3)
    for got, want in zip(rest(second, more), rest(first, more), strict=True):
        np.testing.assert_array_equal(got, want)


def test_two_thousand_tokens_take_a_third_of_what_they_take_in_sixteen_bits(store):
    """Sealed pages at 4.5 bits, 192 to 319 tokens exact; the session's own file counts."""
    engine = opened(kv="4bit", ctx=2048)
    try:
        read(engine, tokens(2000))
        session = save(engine, store, "tale")
        nbytes = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
        values = 2000 * 2 * engine.config.num_hidden_layers * engine.config.num_key_value_heads * engine.config.head_dim
        assert nbytes <= 0.35 * 2 * values
        assert session.cache.sealed == 14 and sum(file.nbytes for file in session.cache.pages) == 14 * engine.cache.sealed_nbytes
    finally:
        engine.close()


def test_sessions_that_begin_alike_share_their_pages(one, store):
    one.reset()
    read(one, tokens(600))
    first = save(one, store, "first")
    read(one, [*tokens(600)[:470], *tokens(130, 5)])
    second = save(one, store, "second")
    same = [a == b for a, b in zip(first.cache.pages, second.cache.pages)]
    assert len(same) == 3 and same[:2] == [True, True] and first.cache.sinks == second.cache.sinks and first.cache.tail != second.cache.tail


def test_a_key_tells_every_token_before_it_and_all_that_bytes_depend_on(one):
    own, ids = identity(one), tokens(600)
    keys = page_keys(own, ids, 64, 4)
    assert len(set(keys)) == 5 and page_keys(own, [*ids[:320], 1, *ids[321:]], 64, 4)[:3] == keys[:3]
    for place in (0, 63, 64, 191, 319):
        other = page_keys(own, [*ids[:place], ids[place] + 1, *ids[place + 1 :]], 64, 4)
        first = 0 if place < 64 else 1 + (place - 64) // PAGE
        assert other[:first] == keys[:first] and not set(other[first:]) & set(keys[first:]), place
    for part in own:
        assert not set(page_keys({**own, part: "other"}, ids, 64, 4)) & set(keys), part


# ---- what is refused


@pytest.mark.parametrize(("part", "value", "said"), [
    ("model", "x", "was saved with another model"), ("weights", "x", "was saved with other weights"),
    ("kv", "8bit", "was saved with --kv 8bit, this run has 4bit"), ("basis", "x", "another KV profile, or by another effllm"),
    ("sink", 16, "--kv-sink 16, this run has 64"), ("sink", 0, "--kv-sink 0, this run has 64"),
    ("window", 256, "--kv-window 256, this run has 128"),
    (SPARSE_ATTENTION, "chosen ones", "tokens see chosen ones, this run has one in which they see all"),
    ("positions", "x", "a context of another length"), ("exact", True, "--exact on, this run has off"),
    ("pages", 9, "pages of version 9, this effllm has 1")])
def test_a_session_of_something_else_is_refused_by_name(one, part, value, said):
    own = identity(one)
    assert set(own) == {"model", "weights", "kv", "basis", "sink", "window", "positions", "exact", "pages"}
    session = SavedSession("tale", "fable", 0.0, {}, SavedCache({**own, part: value}, (), (), None, None, None))
    with pytest.raises(UsageError) as caught:
        refuse_other(session, own)
    assert caught.value.message.startswith("session tale was saved with ") and said in caught.value.message
    assert "effllm session rm tale --cache" in caught.value.hint


def test_identities_differ_where_bytes_would(one):
    own = identity(one)
    for options, parts in (({"kv": "3bit"}, {"kv", "basis"}), ({"kv_sink": 16}, {"sink"}), ({"kv_window": 256}, {"window"}),
                           ({"kv": "4bit", "ctx": 512}, set()), ({"threads": 1}, set()), ({"exact": True}, {"exact"})):
        engine = opened(**{"kv": "4bit", **options})
        other = identity(engine)
        engine.close()
        assert {part for part in own if own[part] != other[part]} == parts, options


@pytest.mark.parametrize("end", ["first", "last"])
def test_a_folder_tells_another_model_and_other_weights(one, tmp_path, end):
    """A byte of a tensor's first row, or of its last: words that a vocabulary had kept free are learned there."""
    own = identity(one)
    copy = tmp_path / "copy"
    shutil.copytree(FABLE, copy)
    assert folder_identity(copy) == {part: own[part] for part in ("model", "weights")}
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    begins, ends = json.loads(data[8:begin])["model.embed_tokens.weight"]["data_offsets"]
    data[begin + (begins + 11 if end == "first" else ends - 11)] ^= 1
    weights.write_bytes(data)
    other = folder_identity(copy)
    assert other["model"] == own["model"] and other["weights"] != own["weights"]
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert folder_identity(copy)["model"] != own["model"]


@pytest.mark.parametrize("more, model", [
    ({"model_type": "llama"}, "90bf880e5bd4ba609274a58950644285"),
    ({"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2}, "9bf4152275b399c02f6ad4f7e4d85baf"),
    ({"model_type": "qwen3_5_text"}, "46c761938fa5bdbbca1182a368abd787")])
def test_a_model_is_the_same_for_sessions_that_were_saved_before_configs_said_more(more, model, tmp_path):
    shutil.copy(FABLE / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **more}))
    assert folder_identity(tmp_path)["model"] == model


def test_a_context_too_short_for_what_was_held(one, store):
    one.reset()
    read(one, tokens(500))
    save(one, store, "tale")
    small = opened(kv="4bit", ctx=400)
    with pytest.raises(ContextOverflow, match="session tale holds 500 tokens and the context 400") as caught:
        restore(small, store)
    small.close()
    assert caught.value.hint == "-c 501 or more"


# ---- damage


@pytest.mark.parametrize(("which", "where"), [("page", "the page of tokens 64 to 191"), ("sinks", "the file of 64 exact tokens"),
                                              ("tail", "the file of 208 exact tokens")])
@pytest.mark.parametrize("how", ["altered", "cut short", "gone"])
def test_damaged_files_are_named_and_the_engine_continues(one, store, which, where, how):
    one.reset()
    read(one, tokens(400))
    cache = save(one, store, "tale").cache
    path = store.pages / {"page": cache.pages[0], "sinks": cache.sinks, "tail": cache.tail}[which].name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data if how == "altered" else data[:-10])
    with pytest.raises(EffllmError) as caught:
        restore(one, store)
    said = {"altered": "is corrupt: its checksum does not match", "cut short": "bytes instead of", "gone": "is gone"}[how]
    assert caught.value.message.startswith(f"session tale is damaged: {where} ") and said in caught.value.message
    assert caught.value.hint.startswith("effllm session rm tale --cache") and caught.value.exit_code == 1
    assert one.tokens == [] and one.cache.n == 0
    read(one, tokens(400))
    assert np.isfinite(one._logits).all()


def test_forged_sessions_reach_no_kernel(one, store):
    """Whole checksums around content that no engine wrote."""
    one.reset()
    read(one, tokens(400))
    session, own = save(one, store, "tale"), identity(one)
    cache, ids = session.cache, list(session.cache.tokens)
    page = bytearray(store.read_page(cache.pages[0]))
    widths = bytearray(page)
    widths[48 + 3 : 64] = b"\x77" * 13

    def forged(data: bytes, key: str) -> PageFile:
        with store.writing("tale"):
            return store.store_page(key, [data])

    def tried(said: str, **changes: object) -> None:
        changed = replace(session, cache=replace(cache, **changes))
        with pytest.raises(EffllmError, match=said):
            for _ in restore_cache(one, store, changed):
                continue
        assert one.tokens == [] and one.cache.n == 0 and one.cache.sealed == 0

    key = cache.pages[0].key
    tried("groups of", pages=(forged(bytes(widths), key),))
    tried("not a KV page", pages=(forged(bytes(len(page)), key),))
    tried("bytes for a page of", pages=(forged(bytes(page[:-1]), key),))
    tried("bytes for a page of", pages=(forged(bytes(page) + b"x", key),))
    tried("pages of other tokens", pages=cache.pages * 2)
    tried("tokens that the model does not have", tokens=(*ids[:-1], 1 << 20))
    tried("exact tokens", tail=forged(b"\x01" * 100, cache.tail.key))
    tried("exact tokens", tail=forged(zlib.compress(bytes(10)), cache.tail.key))
    tried("exact tokens", tail=None)
    tried("tokens that the model does not have", tokenized_text=TokenizedText("a", (5, 1 << 20), None))
    tried("pages of other tokens", tokens=tuple(ids[:-1]))
    tail = tail_key(key, ids[192:-1])
    tried("another number of exact tokens", tokens=tuple(ids[:-1]), tail=forged(bytes(store.read_page(cache.tail)), tail))
    later = page_keys(own, ids[:300], 64, 3)
    tried("300 tokens with 3 packed pages in a cache for 1024", tokens=tuple(ids[:300]), tail=None,
          pages=tuple(replace(cache.pages[0], key=each) for each in later[1:]))


@pytest.mark.parametrize("which", ["page", "sinks", "tail"])
def test_no_more_is_read_than_pages_can_have(one, store, which):
    """A file with a hole is as large as it likes, and costs who made it nothing: asked for, half a terabyte was a lack of memory."""
    one.reset()
    read(one, tokens(400))
    session = save(one, store, "tale")
    cache = session.cache
    file = {"page": cache.pages[0], "sinks": cache.sinks, "tail": cache.tail}[which]
    large = replace(file, nbytes=1 << 39)
    with (store.pages / file.name).open("r+b") as out:
        out.truncate(large.stored_nbytes)
    changed = replace(cache, **{"pages": (large, *cache.pages[1:])} if which == "page" else {which: large})
    with pytest.raises(EffllmError, match=f"session tale is damaged: .*{large.nbytes} bytes "):
        list(restore_cache(one, store, replace(session, cache=changed)))
    assert one.tokens == []


@pytest.mark.parametrize("stored", [F16, F32])
@pytest.mark.parametrize("layers", [1, 30])
def test_exact_tokens_take_no_more_than_is_allowed_for_them(stored, layers):
    """Noise, which nothing packs."""
    layout = PageLayout(2, 64, stored)
    pages = [[np.random.default_rng(layer).integers(0, 256, layout.layer_page_nbytes, np.uint8) for layer in range(layers)]]
    for count in (1, PAGE):
        assert len(pack_exact(pages, [count], [layout] * layers)) <= most_exact([count], [layout] * layers)


def test_pages_say_what_they_are_of(one):
    one.reset()
    read(one, tokens(400))
    cache = one.cache
    page = cache.read(0)[2]
    check_stored(cache.codecs[2], page, cache.layouts[0], 2, 64)
    for layer, first in ((1, 64), (2, 192)):
        with pytest.raises(ValueError, match="a page of something else"):
            check_stored(cache.codecs[2], page, cache.layouts[0], layer, first)


# ---- exact tokens


@pytest.mark.parametrize("stored", [F16, F32])
@pytest.mark.parametrize("counts", [[], [1], [64, 128], [128, 7], [65, 64]])
@pytest.mark.parametrize("parts", [1, 2])
def test_exact_tokens_come_back_bit_for_bit(stored, counts, parts):
    layout = PageLayout(2, 16, stored, parts)
    rng = np.random.default_rng(len(counts))
    pages = [[rng.integers(0, 256, layout.layer_page_nbytes, np.uint8) for _ in range(3)] for _ in counts]
    data = pack_exact(pages, counts, [layout] * 3)
    back = unpack_exact(data, counts, [layout] * 3)
    assert pack_exact(back, counts, [layout] * 3) == data and len(back) == len(counts)
    kind = np.uint32 if stored == F32 else np.uint16
    for wanted, found, count in zip(pages, back, counts):
        for one_layer, other in zip(wanted, found):
            for here, there in zip(raw_pages.keys_and_values(one_layer, layout), raw_pages.keys_and_values(other, layout)):
                np.testing.assert_array_equal(here[:count].view(kind), there[:count].view(kind))
                assert here.shape == (PAGE, 2, 16) and not there[count:].any()
    for bad in (data[:-1], data + b"x", data[: len(data) // 2]) if counts else (b"", data + b"x"):
        with pytest.raises(ValueError):
            unpack_exact(bad, counts, [layout] * 3)


def test_keys_and_values_are_packed_to_less_than_their_bits(one):
    one.reset()
    read(one, tokens(250))
    blocks = one.cache.exact_blocks()
    counts = [count for _, count in blocks]
    data = pack_exact([one.cache.read(page) for page, _ in blocks], counts, one.cache.layouts)
    assert len(data) < 0.9 * 2 * 2 * sum(counts) * one.config.num_hidden_layers * one.config.num_key_value_heads * one.config.head_dim


# ---- pages that lie on the disk


@pytest.mark.parametrize(("before", "after"), [(None, 1), (1, None), (0, 2)], ids=["to the disk", "from the disk", "from there to there"])
def test_pages_are_the_same_wherever_they_lie(tmp_path, before, after):
    pool, shape, rng = ThreadPool(2), CacheShape(1024, sink=64, window=16, chunk=PAGE), np.random.default_rng(0)

    def opened_cache(first):
        ops = CpuOps(pool, Dims(8, 8, 2, 64, 8, 8, chunk=PAGE, ctx=1024, logit_rows=1, packed_kv=True, spilled_kv=first is not None))
        disk = None if first is None else DiskTier(tmp_path, first)
        return build_cache([ops, ops], [AttnSpec(8, 2, 64, 0.125)] * 2, codec("4bit"), shape, disk=disk)

    def step(cache, data):
        cache.begin(len(data[0]))
        out = [cache.layer(index).attend(*data).copy() for index in range(2)]
        cache.commit()
        return out

    def some(count):
        return [rng.standard_normal((count, width)).astype(np.float32) for width in (512, 128, 128)]

    first, second = opened_cache(before), opened_cache(after)
    for piece in list(first.pieces(600)):
        step(first, some(piece))
    second.adopt(first.n, first.sealed)
    for page in (*range(first.sealed), *(page for page, _ in first.exact_blocks())):
        second.write(page, first.read(page))
        if 0 <= page < first.sealed:
            np.testing.assert_array_equal(second.read(page)[1], first.read(page)[1])
    assert first.sealed == 4
    for count in (1, 20, 100):
        data = some(count)
        np.testing.assert_array_equal(step(first, data), step(second, data))
    for each in (first, second):
        each.close()
    pool.close()


def test_a_digest_is_of_the_first_names_of_fields() -> None:
    """As when sessions were first saved: names that have changed since, and values that were left out."""
    assert first_repr((Mamba1Shape(512, 16, 8, 4, normed=True), Mamba1Shape(512, 16, 8, 4))) == (
        "(Mamba1Shape(width=512, depth=16, rank=8, taps=4, biased=True), "
        "Mamba1Shape(width=512, depth=16, rank=8, taps=4, biased=True, normed=False))")
    assert first_repr(MoEConfig(8, 2, 64, True, frozenset({0}))) == (
        "Mixture(experts=8, per_token=2, width=64, renormalise=True, layers=frozenset({0}))")
    assert first_repr(MoEConfig(8, 2, 64, True, frozenset({0}), num_groups=2)).endswith("groups=2, kept_groups=1)")
