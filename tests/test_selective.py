"""Attention that reads few pages of the disk: what an abstract promises, what is picked, and that what is read is the truth."""

import errno
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effllm.kernels.cpu import selective
from effllm.kernels.cpu.selective import abstract_nbytes, choose, shares
from effllm.kernels.layout import PAGE
from effllm.kernels.threads import ThreadPool
from effllm.offload.checkpoint import CheckpointError
from effllm.offload.direct import Interrupted
from effllm.offload.page_slots import PageSlots
from effllm.offload.pages import DiskTier

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kv_samples import relative
from test_kv_tiers import SHAPE, Feed, cache_of, same

PREADV = os.preadv
CUTS = (1000, *[1] * 140)


@pytest.fixture(scope="module")
def pool():
    pool = ThreadPool(2)
    yield pool
    pool.close()


def feeds(pool: ThreadPool, disk: DiskTier, **more: object) -> tuple[Feed, Feed]:
    return Feed(cache_of(pool, None, **more)), Feed(cache_of(pool, disk, **more))


@pytest.mark.parametrize("kv", ("4bit", "16bit"))
def test_where_all_pages_are_read_the_bits_are_those_of_memory(pool, tmp_path, monkeypatch, kv):
    monkeypatch.setattr(selective, "LEFT", -1.0)
    memory, disk = feeds(pool, DiskTier(tmp_path, 1, slots=12), kv=kv)
    for feed in (memory, disk):
        for cut in (*CUTS, 3, 200, *[1] * 5):
            feed.run(cut)
    slots = disk.cache.pool.stream.slots[0]
    assert same(memory, disk) and slots.asked > 140 and slots.found > 0.9 * slots.asked
    disk.cache.close()


def chunked(feed: Feed, scatter: float) -> None:
    """Keys and values that hardly change within a chunk of 16 tokens."""
    rng = np.random.default_rng(5)
    for side in (feed.k, feed.v):
        layers, tokens, width = side.shape
        means = np.repeat(rng.standard_normal((layers, -(-tokens // 16) + 1, width)), 16, axis=1)[:, :tokens]
        side[:] = means + scatter * rng.standard_normal(side.shape)


@pytest.mark.parametrize("kv,scatter,bound", (("16bit", 0.0, 0.02), ("16bit", 0.3, 0.06), ("8bit", 0.0, 0.08), ("8bit", 0.3, 0.08)))
def test_an_abstract_stands_for_tokens_that_are_alike(pool, tmp_path, monkeypatch, kv, scatter, bound):
    """Chunks of a page begin at multiples of 16: with 64 sinks the text's do too."""
    monkeypatch.setattr(selective, "choose", lambda *more: ([], []))
    memory, disk = Feed(cache_of(pool, None, "16bit")), Feed(cache_of(pool, DiskTier(tmp_path, 0, slots=4), kv, plain=True))
    for feed in (memory, disk):
        chunked(feed, scatter)
        feed.q *= 0.5
        for cut in CUTS:
            feed.run(cut)
    assert not disk.cache.pool.stream.slots[0].asked
    span = slice(1000, 1140)
    assert relative(disk.out[:, span], memory.out[:, span]) < bound
    disk.cache.close()


def test_what_scatters_weighs_more(pool, tmp_path, monkeypatch):
    """Without the spread of keys the mass of pages would be underestimated."""
    monkeypatch.setattr(selective, "choose", lambda *more: ([], []))
    memory, disk = feeds(pool, DiskTier(tmp_path, 0, slots=4), kv="16bit", windows=(None,))
    errors = []
    for flat in (False, True):
        for feed in (memory, disk):
            feed.cache.truncate(0)
            feed.run(1000)
            if flat and feed is disk:
                feed.cache.layer(0).pages.selective._steps[..., -1] = 0
            for _ in range(20):
                feed.run(1)
        errors.append(relative(disk.out[:, 1000:1020], memory.out[:, 1000:1020]))
    assert errors[0] < 0.8 * errors[1]
    disk.cache.close()


def test_the_pages_that_matter_are_read(pool, tmp_path):
    memory, disk = feeds(pool, DiskTier(tmp_path, 0, slots=4), kv="16bit", windows=(None,))
    for feed in (memory, disk):
        sought = feed.q.reshape(1, -1, 2, 4, 64)[:, 1100:1101, :, 0].reshape(1, 1, -1)
        feed.k[:, SHAPE.sinks + 2 * PAGE : SHAPE.sinks + 3 * PAGE] = 0.5 * sought
        feed.q[:, 1000:] = feed.q[:, 1100:1101]
        for cut in CUTS:
            feed.run(cut)
    slots = disk.cache.pool.stream.slots[0]
    assert 2 in slots._held and slots.found >= slots.asked - 12
    found, wanted = (feed.out[:, 1000:1140].reshape(140, 2, 4, 64)[:, :, 0] for feed in (disk, memory))
    assert relative(found, wanted) < 0.05, "of the heads that look there"
    disk.cache.close()


def share_of(m: np.ndarray, l: np.ndarray, begin: int, end: int) -> np.ndarray:
    """The shares of blocks [begin, end) with maxima and sums [KVH, blocks, rows]."""
    return shares(np.stack((m, l), -1))[begin:end]


def test_choosing():
    m, l = np.zeros((2, 6, 3)), np.ones((2, 6, 3))
    m[:, 1:] = -20  # what is in memory has it all
    assert choose(share_of(m, l, 1, 6), 4, 0.002)[0] == []
    m[0, 4, 1], m[1, 2, 0] = 5, 3  # nearly the whole of a row each
    assert choose(share_of(m, l, 1, 6), 4, 0.002) == ([3, 1], [0])
    l[:, 1:] = 0  # pages that nobody sees
    assert choose(share_of(m, l, 1, 6), 4, 0.002)[0] == []


def test_choosing_stops_where_enough_is_read():
    m, l = np.full((1, 10, 1), -30.0), np.ones((1, 10, 1))
    m[0, [3, 7, 5], 0] = 3, 2, 1
    share = share_of(m, l, 0, 10)
    assert choose(share, 8, 0.002)[0] == [3, 7, 5]
    assert choose(share, 2, 0.002)[0] == [3, 7]
    assert choose(share, 8, 0.3)[0] == [3, 7]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kv_heads=st.integers(1, 4), rows=st.integers(1, 5), blocks=st.integers(3, 80),
       most=st.integers(1, 20), left=st.sampled_from((-1.0, 0.002, 0.1, 0.5)))
def test_what_is_chosen_is_enough_and_no_more(seed, kv_heads, rows, blocks, most, left):
    """Against the definition in float64, where no sum is near the bound."""
    rng = np.random.default_rng(seed)
    m, l = 3 * rng.standard_normal((kv_heads, blocks, rows)).astype(np.float32), 1 + rng.random((kv_heads, blocks, rows), np.float32)
    mass = np.exp(m.astype(np.float64)) * l
    share = (mass / mass.sum(1, keepdims=True)).swapaxes(0, 1).reshape(blocks, -1)[1:]
    order = np.argsort(-share.max(1), kind="stable")
    rest = np.array([share[order[count:]].sum(0).max() for count in range(blocks)])
    wanted, likely = choose(share_of(m, l, 1, blocks), most, left)
    if np.abs(rest - left).min() > 1e-5 and np.diff(np.sort(share.max(1))).min(initial=1) > 1e-6:
        enough = next((count for count in range(blocks) if rest[count] <= left), blocks - 1)
        assert wanted == order[: min(most, enough)].tolist()
        assert likely == order[len(wanted) :][: max(0, min(most - len(wanted), most // 4))].tolist()


@pytest.mark.parametrize("kv", ("4bit", "16bit"))
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


@settings(max_examples=5, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 1200), st.integers(0, 30)), min_size=1, max_size=5),
       kv=st.sampled_from(("4bit", "16bit")))
def test_a_page_that_was_made_anew_is_read_anew(tmp_path_factory, steps, kv):
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
    assert abstract_nbytes(2, 64) == 2 * (17 * 64 + 4 * 17) < 2 * PAGE * 64 * 2 * 2 / 25


def test_a_disk_that_fails_or_hangs_under_a_token(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(selective, "LEFT", -1.0)
    ended: list[bool] = []
    memory, disk = feeds(pool, DiskTier(tmp_path, 1, slots=12, cancelled=lambda: bool(ended)))
    for feed in (memory, disk):
        feed.run(1000)

    def failing(*more: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError, match="the KV cache's file cannot be read: Input/output error"):
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
