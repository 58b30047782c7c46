"""Sparse attention over KV pages on disk: the accuracy of page summaries, the selection, and that what is read is exact."""

import errno
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import relative
from test_kv_tiers import SHAPE, Feed, cache_of, same

from effllm.kernels.cpu.kv import selective
from effllm.kernels.cpu.kv.selective import abstract_nbytes, choose
from effllm.kernels.layout import PAGE
from effllm.kernels.threads import ThreadPool
from effllm.offload import page_stream
from effllm.offload.direct_io import Interrupted
from effllm.offload.page_pool import DiskTier
from effllm.offload.page_slots import PageSlots
from effllm.offload.page_stream import PagesLost

PREADV = os.preadv


def without_queue(*more: object) -> None:
    """A system that lets only threads read."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


CUTS = (1000, *[1] * 140)


def feeds(pool: ThreadPool, disk: DiskTier, **more: object) -> tuple[Feed, Feed]:
    return Feed(cache_of(pool, None, **more)), Feed(cache_of(pool, disk, **more))


@pytest.mark.parametrize("kv,queue", (("4bit", True), ("16bit", True), ("4bit", False)))
def test_where_all_pages_are_read_the_bits_are_those_of_memory(pool, tmp_path, monkeypatch, kv, queue):
    monkeypatch.setattr(selective, "LEFT", -1.0)
    if not queue:
        monkeypatch.setattr(page_stream, "AioQueue", without_queue)
    memory, disk = feeds(pool, DiskTier(tmp_path, 1, slots=12), kv=kv)
    for feed in (memory, disk):
        for cut in (*CUTS, 3, 200, *[1] * 5):
            feed.run(cut)
    slots = disk.cache.pool.stream.slots[0]
    assert same(memory, disk) and slots.num_requested > 140 and slots.num_hits > 0.9 * slots.num_requested
    disk.cache.close()


@pytest.mark.parametrize("kv", ("16bit", "8bit"))
@pytest.mark.parametrize("spread,bound", ((0.5, 0.06), (1.0, 0.13)))
def test_an_abstract_stands_for_a_page_that_is_not_read(pool, tmp_path, monkeypatch, kv, spread, bound):
    """Of values that have something in common, as the tokens of a text do: leaving the pages out would lose it."""
    monkeypatch.setattr(selective, "choose", lambda *more: ([], []))
    memory, disk = Feed(cache_of(pool, None, "16bit")), Feed(cache_of(pool, DiskTier(tmp_path, 0, slots=4), kv, plain=True))
    for feed in (memory, disk):
        feed.q *= spread
        feed.v[:, : 1000 - PAGE] += 2
        for cut in CUTS:
            feed.run(cut)
    assert not disk.cache.pool.stream.slots[0].num_requested
    span = slice(1000, 1140)
    assert relative(disk.out[:, span], memory.out[:, span]) < bound
    disk.cache.close()


def test_one_key_that_is_looked_up_brings_its_page(pool, tmp_path, monkeypatch):
    """Of 128 tokens one: the mean of its page, or of 16 tokens around it, would hardly show it."""
    picked, choosing = [], selective.choose

    def noted(*more: object) -> tuple[list[int], list[int]]:
        picked.append(choosing(*more)[0])
        return choosing(*more)

    monkeypatch.setattr(selective, "choose", noted)
    feed = Feed(cache_of(pool, DiskTier(tmp_path, 0, slots=4), kv="16bit", windows=(None,)))
    feed.q[:, 1000:] = feed.q[:, 1100:1101]
    feed.k[:, SHAPE.sinks + 3 * PAGE + 77] = feed.q.reshape(1, -1, 2, 4, 64)[:, 1100, :, 0].reshape(1, -1)
    for cut in CUTS:
        feed.run(cut)
    assert len(picked) == 140 and all(wanted[0] == 3 for wanted in picked)
    feed.cache.close()


def test_an_abstract_is_near_the_keys_and_values(pool, tmp_path):
    """Read back by its definition in float64: a bit a direction errs by sqrt(pi / 2 - 1), 0.76 of what keys scatter, and NEARER less."""
    basis = selective.key_basis(64).astype(np.float64)
    np.testing.assert_allclose(basis @ basis.T, np.eye(64), atol=1e-5)
    feed = Feed(cache_of(pool, DiskTier(tmp_path, 0, slots=4), kv="16bit", windows=(None,)))
    feed.k += 3 * np.random.default_rng(6).standard_normal(feed.k.shape[-1])
    feed.run(1000)
    own, span = feed.cache.layer(0).pages.selective, slice(SHAPE.sinks + 2 * PAGE, SHAPE.sinks + 3 * PAGE)
    for head in range(2):
        k, v = (side[0, span].reshape(PAGE, 2, 64)[:, head].astype(np.float64) for side in (feed.k, feed.v))
        sides = 2.0 * np.unpackbits(own._sides[head, 2].T, axis=-1, bitorder="little") - 1
        far_step, mean_step, *value_steps = own._steps[head, 2]
        found = (mean_step * own._means[head, 2] + far_step * own._far[head, 2][:, None] * sides) @ basis.T
        queries = np.random.default_rng(7).standard_normal((64, 400))
        assert np.std((found - k) @ queries) < 0.7 * np.std((k - k.mean(0)) @ queries)
        assert np.abs(found.mean(0) - k.mean(0)).max() < 0.3 * k.std()
        np.testing.assert_allclose(np.array(value_steps)[:, None] * own._values[head, 2], v.reshape(4, 32, 64).mean(1), atol=0.01)
    feed.cache.close()


def test_the_pages_that_matter_are_read(pool, tmp_path):
    memory, disk = feeds(pool, DiskTier(tmp_path, 0, slots=4), kv="16bit", windows=(None,))
    for feed in (memory, disk):
        sought = feed.q.reshape(1, -1, 2, 4, 64)[:, 1100:1101, :, 0].reshape(1, 1, -1)
        feed.k[:, SHAPE.sinks + 2 * PAGE : SHAPE.sinks + 3 * PAGE] = 0.5 * sought
        feed.q[:, 1000:] = feed.q[:, 1100:1101]
        for cut in CUTS:
            feed.run(cut)
    slots = disk.cache.pool.stream.slots[0]
    assert 2 in slots._pages and slots.num_hits >= slots.num_requested - 12
    found, wanted = (feed.out[:, 1000:1140].reshape(140, 2, 4, 64)[:, :, 0] for feed in (disk, memory))
    assert relative(found, wanted) < 0.05, "of the heads that look there"
    disk.cache.close()


def chosen(m: np.ndarray, l: np.ndarray, begin: int, end: int, most: int, left: float) -> tuple[list[int], list[int]]:
    """Among blocks [begin, end) with the maxima and sums [KVH, blocks, rows], by partials with an output of one number."""
    partials = np.stack((np.full(m.shape, np.nan), m, l), -1).astype(np.float32)
    return choose(partials, slice(begin, end), most, left, begin)


def test_choosing():
    m, l = np.zeros((2, 6, 3)), np.ones((2, 6, 3))
    m[:, 1:] = -20  # what is in memory has it all
    assert chosen(m, l, 1, 6, 4, 0.002)[0] == []
    m[0, 4, 1], m[1, 2, 0] = 5, 3  # nearly the whole of a row each
    assert chosen(m, l, 1, 6, 4, 0.002) == ([3, 1], [0])
    l[:, 1:], m[:, 1:] = 0, -np.inf  # pages that nobody sees
    assert chosen(m, l, 1, 6, 4, 0.002)[0] == []


def test_choosing_stops_where_enough_is_read():
    m, l = np.full((1, 10, 1), -30.0), np.ones((1, 10, 1))
    m[0, [3, 7, 5], 0] = 3, 2, 1
    assert chosen(m, l, 0, 10, 8, 0.002)[0] == [3, 7, 5]
    assert chosen(m, l, 0, 10, 2, 0.002)[0] == [3, 7]
    assert chosen(m, l, 0, 10, 8, 0.3)[0] == [3, 7]


def test_scores_that_are_not_finite_choose_as_many_as_there_may_be():
    m, l = np.zeros((1, 10, 2)), np.ones((1, 10, 2))
    m[0, 4, 0] = np.nan
    wanted, likely = chosen(m, l, 1, 10, 4, 0.002)
    assert len(set(wanted)) == 4 and not likely


@given(seed=st.integers(0, 2**32 - 1), kv_heads=st.integers(1, 4), rows=st.integers(1, 5), blocks=st.integers(3, 80),
       most=st.integers(1, 20), left=st.sampled_from((-1.0, 0.002, 0.1, 0.5)))
def test_what_is_chosen_is_enough_and_no_more(seed, kv_heads, rows, blocks, most, left):
    """Against the definition in float64, where no sum is near the bound."""
    rng = np.random.default_rng(seed)
    m, l = 3 * rng.standard_normal((kv_heads, blocks, rows)).astype(np.float32), 1 + rng.random((kv_heads, blocks, rows), np.float32)
    mass = np.exp(m.astype(np.float64)) * l
    share = (mass / mass.sum(1, keepdims=True)).swapaxes(0, 1).reshape(blocks, -1)[1:]
    order = np.argsort(-np.sqrt(share).sum(1), kind="stable")
    rest = np.array([share[order[count:]].sum(0).max() for count in range(blocks)])
    most = min(most, blocks - 1)
    wanted, likely = chosen(m, l, 1, blocks, most, left)
    if np.abs(rest - left).min() > 1e-5 and np.diff(np.sort(np.sqrt(share).sum(1))).min(initial=1) > 1e-5:
        enough = next((count for count in range(blocks) if rest[count] <= left), blocks - 1)
        assert wanted == order[: min(most, enough)].tolist()
        assert likely == order[len(wanted) :][: max(0, min(most - len(wanted), most // 4))].tolist()


@pytest.mark.parametrize("kv", ("4bit", pytest.param("16bit", marks=pytest.mark.slow)))
def test_what_is_read_ahead_changes_no_answer(pool, tmp_path, kv):
    rng, asked = np.random.default_rng(7), []
    ahead = PageSlots.prefetch

    def astray(slots: PageSlots, pages: list[int], keep: list[int]) -> None:
        known = [*pages, *keep]
        any_page = np.arange(min(known), max(known) + 1) if known else np.zeros(0, np.int64)
        asked.append(rng.permutation(any_page)[: rng.integers(0, 4)].tolist())
        ahead(slots, asked[-1], keep)

    made = []
    for way in (ahead, lambda *more: None, astray):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PageSlots, "prefetch", way)
            feed = Feed(cache_of(pool, DiskTier(tmp_path, 1, slots=3), kv=kv))
            for cut in CUTS:
                feed.run(cut)
            feed.cache.close()
            made.append(feed)
    assert any(asked) and all(same(made[0], other) for other in made[1:])


@settings(max_examples=5)
@given(steps=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 1200), st.integers(0, 30)), min_size=1, max_size=5),
       kv=st.sampled_from(("4bit", "16bit")))
def test_a_page_that_was_made_again_is_read_again(tmp_path_factory, steps, kv):
    pool, patch = ThreadPool(1), pytest.MonkeyPatch()
    patch.setattr(selective, "LEFT", -1.0)
    memory, disk = feeds(pool, DiskTier(tmp_path_factory.mktemp("spill"), 1, slots=12), kv=kv)
    for turn, (more, keep, single) in enumerate(((700, 0, 10), *steps)):
        for feed in (memory, disk):
            feed.cache.truncate(keep)
            feed.k[:, feed.cache.n :] *= 1 + turn / 8
            feed.run(min(more, 1300 - feed.cache.n))
            for _ in range(min(single, 1300 - feed.cache.n)):
                feed.run(1)
        assert same(memory, disk)
    patch.undo()
    disk.cache.close()
    pool.close()


def test_abstracts_are_small():
    assert abstract_nbytes(2, 64) == 2 * (21 * 64 + PAGE + 4 * 6) < 2 * PAGE * 64 * 2 * 2 / 20
    assert abstract_nbytes(1, 20) == 3 * PAGE + 5 * 20 + PAGE + 4 * 6  # bits of whole bytes


def test_a_disk_that_fails_or_hangs_under_a_token(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(selective, "LEFT", -1.0)
    monkeypatch.setattr(page_stream, "AioQueue", without_queue)
    ended: list[bool] = []
    memory, disk = feeds(pool, DiskTier(tmp_path, 1, slots=12, cancelled=lambda: bool(ended)))
    for feed in (memory, disk):
        feed.run(1000)

    def failing(*more: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(PagesLost, match="the KV cache's file cannot be read: Input/output error"):
        disk.run(1)
    opens = threading.Event()

    def hanging(*more: object) -> int:
        assert opens.wait(60)
        return PREADV(*more)

    monkeypatch.setattr(os, "preadv", hanging)
    ended.append(True)
    with pytest.raises(Interrupted):
        disk.run(1)
    ended.clear()
    opens.set()
    for feed in (memory, disk):
        for _ in range(30):
            feed.run(1)
    assert same(memory, disk)
    disk.cache.close()
