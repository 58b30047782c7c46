"""Pages of different bit widths: what policies decide and observe, and attention over pages of both kinds."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from family_models import GPT_OSS, Case
from hypothesis import given
from hypothesis import strategies as st
from kv_samples import SHARE, Stream, moments_basis, packed_cache, relative
from saved_models import saved

import effllm
from effllm import UsageError
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.kernels import reference
from effllm.kernels.cpu.kv.mixed_codecs import MixedPages
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.layout import PAGE
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.kv import MIXED, PackedCodec, codec
from effllm.quant.kv_basis import KVBasis
from effllm.runtime.cache import KVCache
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.kv.attention_probes import BLOCK_TOKENS, PROBE_TOKENS, AttentionProbes
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_components import layer_codecs
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape, cache_nbytes
from effllm.runtime.policy import POLICIES, mikv, open_policy, zipcache
from effllm.runtime.policy.keep import Action, Keep, PageStats
from effllm.runtime.policy.salient import Salient
from effllm.runtime.prepare import EngineOptions

FABLE = Path(effllm.__path__[0]) / "models" / "fable"


def mixed_cache(pool: ThreadPool, kv: str = "4bit+mikv", heads: int = 8, kv_heads: int = 2, head_dim: int = 64, window: int | None = None,
                basis: KVBasis | None = None) -> KVCache:
    """One layer. Nobody tells its policy of queries, so all pages score alike and the budget alone decides: every other page at 4 bits."""
    form, shape = codec(kv), CacheShape(2048, sink=64, window=16, chunk=2 * PAGE)
    ops = CpuOps(pool, Dims(8, heads, kv_heads, head_dim, 8, 8, chunk=shape.chunk, ctx=shape.ctx, logit_rows=1, packed_kv=True,
                            spilled_kv=True))
    codecs = layer_codecs(form, [(kv_heads, head_dim)])
    if basis is not None:
        own = codecs[0]
        codecs = [PackedCodec(own.bits, basis, PackedCodec(own.better.bits, basis), own.share)]
    return build_cache([ops], [AttnSpec(heads, kv_heads, head_dim, head_dim**-0.5, window)], form, shape, codecs)


class Greedy:
    """A policy without a score: it looks at no attention, and wants more bits for `wanted` pages, without counting."""

    probes = False

    def __init__(self, wanted: Callable[[int], bool] = lambda page: True) -> None:
        self.wanted = wanted

    def act(self, stats: PageStats) -> Action:
        return Action.MORE if self.wanted(stats.page) else Action.FEWER


# ---- what is decided


@given(scores=st.lists(st.floats(0, 1), min_size=1, max_size=60), share=st.sampled_from((1 / 3, 0.5, 0.25, 1.0)))
def test_a_share_of_the_pages_at_most_gets_more_bits(scores, share):
    policy, given = Salient(lambda attention: attention[0, 0, 0].item(), share), 0
    for page, score in enumerate(scores):
        action = policy.act(PageStats(page, 64 + PAGE * page, PAGE, np.full((1, 1, 1), score)))
        most = ceil(share * (page + 1))
        free = most - given
        given += action is Action.MORE
        assert most - 1 <= given <= most
        if action is Action.MORE and free == 1:
            assert sum(other > score for other in scores[:page]) < most
    assert given >= 1  # the first page always does


def test_pages_that_matter_get_more_bits_and_what_was_taken_back_is_forgotten():
    policy = Salient(lambda attention: float(attention[0, 0, 0]), 0.5)

    def act(page: int, score: float) -> Action:
        return policy.act(PageStats(page, 0, PAGE, np.full((1, 1, 1), score)))

    assert [act(page, score) for page, score in enumerate((0.1, 0.2, 0.9, 0.05))] == [Action.MORE, Action.FEWER, Action.MORE, Action.FEWER]
    assert act(4, 0.5) is Action.MORE
    assert act(2, 0.01) is Action.FEWER  # the cache went back to page 2: what was said of pages 2 to 4 is void
    assert act(3, 0.3) is Action.MORE
    with pytest.raises(ValueError, match="page 6 comes before page 4"):
        act(6, 0.5)


def test_scores_of_the_papers():
    attention = np.zeros((2, 1, 8), np.float32)
    attention[0, 0, 3], attention[1] = 0.4, 0.01
    assert mikv.score(attention) == pytest.approx((0.4 + 0.08) / 2)
    assert zipcache.score(attention) == pytest.approx((0.4 + 0.01) / 2)
    assert isinstance(open_policy("", 0.0), Keep) and open_policy("zipcache", 0.5).share == 0.5


# ---- what is seen


@pytest.mark.parametrize("window, softcap, seen, sinks", [(128, None, None, None), (16, None, None, None), (128, 5.0, None, None),
                                                          (128, None, 150, None), (128, None, None, [9.0, -60.0, 2.0, 0.5])])
def test_probes_see_the_share_of_attention_that_a_page_gets(window, softcap, seen, sinks):
    """Against plain softmax weights, read from attention over values that say which block of 16 a token lies in. What learned sinks take,
    no page gets."""
    sinks = None if sinks is None else np.array(sinks, np.float32)
    spec, shape = AttnSpec(4, 2, 16, 0.25, seen, softcap), CacheShape(1024, sink=32, window=window)
    rng = np.random.default_rng(0)
    tokens = 32 + 3 * PAGE
    q, k = rng.standard_normal((tokens, 4 * 16)).astype(np.float32) * 2, rng.standard_normal((tokens, 2, 16)).astype(np.float32)
    probes = AttentionProbes([spec], shape)
    for begin, end in ((0, 200), (200, 201), (201, tokens)):
        if probes.begin(np.arange(begin, end)):
            probes.see("k", 0, q[begin:end] * 9)
            probes.see("q", 0, q[begin:end])
            if sinks is not None:
                probes.see("sinks", 0, sinks)
    for page in (0, 1):
        start = 32 + PAGE * page
        last = start + PAGE * (2 if window >= PAGE else 1)
        found = probes.attention(page, [[k[:32], k[start : start + PAGE], *([k[start + PAGE : last]] if window >= PAGE else [])]])
        rows, held = np.arange(last - PROBE_TOKENS, last), np.concatenate([np.arange(32), np.arange(start, last)])
        blocks = np.zeros((len(held), 2, 16), np.float32)
        for block in range(PAGE // BLOCK_TOKENS):
            blocks[32 + BLOCK_TOKENS * block : 32 + BLOCK_TOKENS * (block + 1), :, block] = 1
        made = np.stack([reference.attend(q[row].reshape(1, 4, 16), k[held], blocks, row, held, 0.25, seen, softcap, sinks)[0]
                         for row in rows])
        want = made.mean(0).reshape(2, 2, 16).max(1)[:, : PAGE // BLOCK_TOKENS]
        assert found.shape == (1, 2, 8) and np.allclose(found[0], want, atol=1e-6)


def test_a_page_of_which_nothing_was_seen_has_no_attention():
    probes = AttentionProbes([AttnSpec(2, 1, 16, 0.25)], CacheShape(1024, sink=0, window=128))
    k = np.ones((PAGE, 1, 16), np.float32)
    assert not probes.begin(np.arange(0, 100)) and not probes.attention(0, [[k, k]]).any()


# ---- attention over both kinds


@pytest.mark.parametrize("shape, kv", [pytest.param(shape, kv, marks=() if not shape or kv == "4bit+mikv" else pytest.mark.slow)
                                       for shape in ({}, {"heads": 4, "kv_heads": 4, "head_dim": 80}, {"window": 200})
                                       for kv in ("4bit+mikv", "3bit+mikv", "5bit+zipcache", "6bit+mikv")])
def test_attention_is_softmax_over_the_decoded_pages(pool, shape, kv):
    options = {"heads": 8, "kv_heads": 2, "head_dim": 64} | shape
    cache = mixed_cache(pool, kv, **options, basis=moments_basis(options["kv_heads"], options["head_dim"]))
    stream = Stream(cache, options["heads"], 900)
    for tokens in (700, 3, *[1] * 197):
        stream.run(tokens, compare=tokens > 1 or cache.n > 880)
    compared = ~np.isnan(stream.want).all(1)
    exact = Stream(packed_cache(pool, "32bit", **options), options["heads"], 900)
    exact.run(900, compare=False)
    lost = relative(stream.want[compared], exact.out[compared])
    assert relative(stream.out[compared], stream.want[compared]) < 5e-3 + SHARE * lost
    assert set(cache._kinds) == {1, 2} and len(cache._kinds) == cache.sealed == 6
    assert isinstance(cache.layer(0).pages, MixedPages)


def test_bits_do_not_depend_on_threads_or_on_how_few_come_together():
    outs = []
    for workers, cuts in ((1, [700] + [1] * 16), (2, [700] + [2] * 8), (3, [700, 8, 8])):
        pool = ThreadPool(workers)
        stream = Stream(mixed_cache(pool), 8, 716)
        for cut in cuts:
            stream.run(cut, compare=False)
        outs.append(stream.out)
        pool.close()
    assert all(np.array_equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("kv", ["4bit+mikv", "6bit+mikv", "4bit+greedy", "6bit+greedy"])
def test_bytes_are_those_of_the_plan_and_the_mean_is_what_was_asked_for(pool, kv, monkeypatch):
    """Of a policy that counts, and of one that always wants more: the cache itself holds to the share."""
    monkeypatch.setitem(POLICIES, "greedy", lambda share: Greedy())
    cache = mixed_cache(pool, kv, basis=KVBasis.plain(2, 64))
    more, fewer, share = MIXED[int(kv[0])]
    for piece in cache.pieces(2040):
        cache.begin(piece)
        cache.commit()
        assert cache._kinds.count(2) <= ceil(share * cache.sealed)
    fixed, per_page = cache_nbytes(cache.codecs, cache.layouts, cache.shape)
    assert cache.sealed == 15 and cache._kinds.count(2) == ceil(share * 15)
    assert share * more + (1 - share) * fewer == pytest.approx(int(kv[0]))
    packed = cache.allocated_nbytes - sum(cache.slots.used.values()) * cache.layouts[0].part_nbytes
    own, better = (each.layout(2, 64).layer_page_nbytes for each in (cache.codecs[0], cache.codecs[0].better))
    assert packed == (15 - ceil(share * 15)) * own + ceil(share * 15) * better <= cache.sealed * per_page + better - own
    assert cache.allocated_nbytes <= fixed + cache.sealed * per_page
    assert abs(cache.packed_bits - int(kv[0]) - 0.53125) < (more - fewer) / 15
    assert cache.truncate(1000) and cache.sealed == len(cache._kinds) == 7
    for piece in cache.pieces(2040 - cache.n):
        cache.begin(piece)
        cache.commit()
    assert cache.sealed == 15 and cache._kinds.count(2) == ceil(share * 15)


def test_two_codecs_of_a_layer_have_one_basis(pool):
    cache = mixed_cache(pool)
    pages, other = cache.layer(0).pages, PackedCodec(((5, 5),) * 2, moments_basis(2, 64))
    with pytest.raises(ValueError, match="share a basis"):
        MixedPages(pages.ops, pages.layout, pages.exact, pages.records, 0.125, None, None, pages.codec, pages.records, other)


# ---- a model


@pytest.fixture(scope="module")
def engine():
    *_, engine = open_engine(FABLE, EngineOptions(device="cpu", kv="4bit+zipcache", ctx=1024, chunk=256))
    yield engine
    engine.close()


def tokens(engine: Engine, count: int) -> list[int]:
    return np.random.default_rng(3).integers(3, engine.config.vocab_size, count).tolist()


def test_which_pages_get_more_bits_depends_on_positions_not_on_cuts(engine):
    ids, kinds = tokens(engine, 800), []
    for cuts in ([800], [300, 500], [600, *[1] * 200]):
        engine.reset()
        at = 0
        for cut in cuts:
            for piece in list(engine.cache.pieces(cut)):
                engine.model.forward(np.array(ids[at : at + piece]), engine.cache)
                at += piece
        kinds.append(list(engine.cache._kinds))
        assert engine.cache.sealed == 4 and engine.cache.upgraded_codecs
    assert kinds[0] == kinds[1] == kinds[2] and kinds[0].count(2) in (1, 2)
    attention = engine.cache.probes
    assert len(attention._rows) <= 4 * PROBE_TOKENS  # rows of pages long sealed are forgotten


def test_an_answer_is_nearer_than_that_of_fewer_bits(engine):
    """Six bits on average lie nearer to an exact cache than four, with pages of two kinds as without."""
    ids, found = tokens(engine, 700), []
    for kv in ("32bit", "6bit+mikv", "4bit+zipcache", "3bit+mikv"):
        *_, one = open_engine(FABLE, EngineOptions(device="cpu", kv=kv, ctx=1024))
        found.append(np.concatenate([logits.copy() for _, logits in one.score(ids, pages=1)])[400:])
        one.close()
    errors = [relative(each, found[0]) for each in found[1:]]
    assert errors == sorted(errors) and 0 < errors[0] and errors[-1] < 0.5


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_runs_within_its_share_and_the_same_way_again(name):
    *_, engine = open_engine(FABLE, EngineOptions(device="cpu", kv=f"4bit+{name}", ctx=1024, chunk=256))
    try:
        ids, kinds = tokens(engine, 800), []
        for _ in range(2):
            engine.reset()
            kinds.append([list(engine.cache._kinds) for _ in engine.score(ids)][-1])
    finally:
        engine.close()
    assert kinds[0] == kinds[1] and len(kinds[0]) == 4 and kinds[0].count(2) <= 2


def test_a_policy_of_any_kind_is_one_name_in_the_registry(monkeypatch):
    """One that nobody has heard of, by position instead of a score: its name is taken wherever one is, in options, plans and command
    lines, and a run asks it."""
    shares = []
    monkeypatch.setitem(POLICIES, "made_up", lambda share: (shares.append(share), Greedy(lambda page: page % 3 == 1))[1])
    options = EngineOptions(device="cpu", kv="4bit+made_up", ctx=1024, chunk=256)
    *_, engine = open_engine(FABLE, options)
    try:
        ids, last = tokens(engine, 800), []
        for few in (1, 2):  # in recorded passes, over pages that are sealed meanwhile
            engine.reset()
            for at in (0, 256, 512, *range(600, 800, few)):
                end = min(at + 256, 600) if at < 600 else at + few
                logits = engine.model.forward(np.array(ids[at:end]), engine.cache)
            last.append(logits[-1].copy())
            assert engine.cache._kinds == [1, 2, 1, 1] and engine.cache.probes is None
        assert np.array_equal(*last) and set(shares) == {MIXED[4][2]}
    finally:
        engine.close()
    for words in (("plan", "fable"), ("run", "fable", "Once", "-n", "2")):
        assert said(*words, "-c", "256", "--device", "cpu", "--kv", "4bit+made_up")[0] == 0
    for other in ("4bit+other", "4bit+"):
        code, error = said("plan", "fable", "--kv", other)
        assert code == 2 and "+made_up" in error


def said(*words: str) -> tuple[int, str]:
    """The exit code and the messages of a command line."""
    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), dict(os.environ))
    return main(words, environment), environment.stderr.getvalue()


def test_a_page_that_learned_sinks_leave_nothing_is_worth_nothing(tmp_path):
    """gpt-oss: shares were taken of what keys get alone, as though there were no sinks."""
    import safetensors.torch as files

    saved(Case("gpt_oss", GPT_OSS), tmp_path)
    path = tmp_path / "model.safetensors"
    weights = files.load_file(path)
    weights["model.layers.1.self_attn.sinks"][:] = 200.0
    files.save_file(weights, path, metadata={"format": "pt"})
    *_, engine = open_engine(tmp_path, EngineOptions(device="cpu", kv="4bit+mikv", ctx=512))
    try:
        seen, decide = [], engine.cache.policy.act
        engine.cache.policy.act = lambda stats: (seen.append(stats.attention), decide(stats))[1]
        for _ in engine.score([1 + i % 250 for i in range(400)]):
            continue
    finally:
        engine.close()
    assert len(seen) == 1 and seen[0][1].max() < 1e-6 < 1e-3 < seen[0][0].max()


@pytest.mark.parametrize("kv, more, said", [("4bit+h2o", {}, "no such policy"), ("8bit+mikv", {}, "average 3, 4, 5, 6"),
                                            ("k4v3+mikv", {}, "the same for keys and values"), ("2bit+mikv", {}, "average 3, 4, 5, 6"),
                                            ("16bit+mikv", {}, "not known"), ("4bit+mikv", {"kv_ram": "1M"}, "stay in memory"),
                                            ("4bit+", {}, "not known"), ("4bit+MIKV", {}, "not known"), ("auto+mikv", {}, "not known")])
def test_what_cannot_be_is_refused(kv, more, said):
    with pytest.raises(UsageError, match=said) as refused:
        list(open_engine(FABLE, EngineOptions(device="cpu", kv=kv, ctx=512, **more)))
    assert said != "not known" or all(f"+{name}" in refused.value.hint for name in POLICIES)
