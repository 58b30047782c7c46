"""KV pages on disk: the bits of attention with everything in memory, wherever pages are; no files left behind; failing disks."""

import errno
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import moments_basis

from effllm import EffllmError
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.layout import PAGE
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.offload import hardware, page_stream
from effllm.offload.direct_io import Interrupted
from effllm.offload.page_pool import DiskTier
from effllm.offload.page_stream import PagesLost
from effllm.quant.kv import PackedCodec, codec
from effllm.runtime.cache import KVCache
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape
from effllm.runtime.planning.memory_pressure import MemoryMonitor

PREADV, PWRITE = os.preadv, os.pwrite
SHAPE = CacheShape(1536, sink=64, window=16, chunk=256)
CUTS = (700, *[1] * 4, 3, 8, 200, *[1] * 5, 16, 260, 1)


def cache_of(pool: ThreadPool, disk: DiskTier | None, kv: str = "4bit", windows: tuple[int | None, ...] = (None, None), heads: int = 8,
             kv_heads: int = 2, head_dim: int = 64, shape: CacheShape = SHAPE, plain: bool = False) -> KVCache:
    """A layer for each of `windows`; `plain`: in the basis of a model without a profile."""
    form = codec(kv)
    ops = CpuOps(pool, Dims(8, heads, kv_heads, head_dim, 8, 8, chunk=shape.chunk, ctx=shape.ctx, logit_rows=1, packed_kv=form.is_packed,
                            spilled_kv=disk is not None))
    basis = moments_basis(kv_heads, head_dim) if form.is_packed and not plain else None
    codecs = [PackedCodec(((form.bits_k, form.bits_v),) * kv_heads, basis)] * len(windows) if basis else None
    specs = [AttnSpec(heads, kv_heads, head_dim, head_dim**-0.5, window) for window in windows]
    return build_cache([ops] * len(windows), specs, form, shape, codecs, disk)


class Feed:
    """Random q, k, v of every position and layer, and what a cache made of them."""

    def __init__(self, cache: KVCache, heads: int = 8, tokens: int = 1400, seed: int = 0, sinks: np.ndarray | None = None) -> None:
        rng, layout = np.random.default_rng(seed), cache.layouts[0]
        self.cache, self.sinks, self.layers = cache, sinks, len(cache.codecs)
        self.q = rng.standard_normal((self.layers, tokens, heads * layout.head_dim), np.float32) * 2
        self.k, self.v = rng.standard_normal((2, self.layers, tokens, layout.kv_heads * layout.head_dim), np.float32)
        self.out = np.full_like(self.q, np.nan)

    def run(self, tokens: int) -> None:
        for piece in self.cache.pieces(tokens):
            span = slice(self.cache.n, self.cache.n + piece)
            self.cache.begin(piece)
            for layer in range(self.layers):
                q, k, v = (np.ascontiguousarray(part[layer, span]) for part in (self.q, self.k, self.v))
                self.out[layer, span] = self.cache.layer(layer).attend(q, k, v, self.sinks)
            self.cache.commit()


def same(one: Feed, other: Feed) -> bool:
    """The same bits for every token that was run."""
    assert one.cache.n == other.cache.n and np.isfinite(one.out[:, : one.cache.n]).all()
    return np.array_equal(one.out, other.out, equal_nan=True)


def run_both(pool: ThreadPool, disk: DiskTier, cuts: tuple[int, ...] = CUTS, **more: object) -> tuple[Feed, Feed]:
    feeds = Feed(cache_of(pool, None, **more), more.get("heads", 8)), Feed(cache_of(pool, disk, **more), more.get("heads", 8))
    for feed in feeds:
        for cut in cuts:
            feed.run(cut)
    return feeds


@pytest.mark.parametrize("kv", ("4bit", "k3v6", "16bit", *(pytest.param(each, marks=pytest.mark.slow) for each in ("8bit", "32bit"))))
@pytest.mark.parametrize("first", (0, 3))
def test_the_bits_are_those_of_memory(pool, tmp_path, kv, first):
    memory, disk = run_both(pool, DiskTier(tmp_path, first), kv=kv)
    assert disk.cache.sealed == memory.cache.sealed > 6 and disk.cache.pool.stream.traffic.nbytes > 0
    assert same(memory, disk)
    for layer in range(2):
        for page in range(memory.cache.sealed):
            assert np.array_equal(memory.cache.pool.page(layer, page), disk.cache.pool.page(layer, page))
    disk.cache.close()


@pytest.mark.parametrize("heads,kv_heads,head_dim", ((4, 4, 80), (6, 2, 96), (8, 1, 128), (2, 1, 256), (3, 3, 16)))
@pytest.mark.parametrize("kv", ("4bit", pytest.param("16bit", marks=pytest.mark.slow)))
def test_shapes(pool, tmp_path, heads, kv_heads, head_dim, kv):
    memory, disk = run_both(pool, DiskTier(tmp_path, 1), heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv=kv)
    assert same(memory, disk)
    disk.cache.close()


@pytest.mark.parametrize("shape", (CacheShape(1536, sink=0, window=0, chunk=128), CacheShape(1536, sink=5, window=300, chunk=512)))
@pytest.mark.parametrize("kv", ("4bit", "16bit"))
def test_grids(pool, tmp_path, shape, kv):
    memory, disk = run_both(pool, DiskTier(tmp_path, 0), shape=shape, kv=kv)
    assert same(memory, disk)
    disk.cache.close()


@pytest.mark.parametrize("kv", ("4bit", "16bit"))
def test_windows_read_what_they_see(pool, tmp_path, kv):
    windows = (50, None, 300)
    memory, disk = run_both(pool, DiskTier(tmp_path, 0), windows=windows, kv=kv)
    assert same(memory, disk)
    disk.cache.begin(1)
    seen = [end - begin for begin, end in (disk.cache.layer(i).pages.spilled.reads() for i in range(3))]
    assert seen[1] == disk.cache.sealed and seen[0] <= 1 and seen[2] <= 3
    disk.cache.close()


def test_sinks_and_caps(pool, tmp_path):
    sinks = np.linspace(-3, 6, 8, dtype=np.float32)
    feeds = Feed(cache_of(pool, None), sinks=sinks), Feed(cache_of(pool, DiskTier(tmp_path, 0)), sinks=sinks)
    for feed in feeds:
        for cut in CUTS:
            feed.run(cut)
    assert same(*feeds)
    feeds[1].cache.close()


@pytest.mark.parametrize("ring,length", ((0, 1), (1 << 20, 70_000), (8 << 20, 1 << 20)))
def test_rings_and_runs_of_any_length(pool, tmp_path, monkeypatch, ring, length):
    monkeypatch.setattr(page_stream, "RUN_NBYTES", length)
    memory, disk = run_both(pool, DiskTier(tmp_path, 1, ring))
    assert same(memory, disk)
    disk.cache.close()


@settings(max_examples=12)
@given(steps=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 1200)), min_size=1, max_size=6), first=st.integers(0, 4),
       kv=st.sampled_from(("4bit", "16bit")))
def test_any_order_of_growing_and_forgetting(tmp_path_factory, steps, first, kv):
    """What was read ahead is never taken for a page that was made anew since."""
    pool = ThreadPool(1)
    feeds = Feed(cache_of(pool, None, kv)), Feed(cache_of(pool, DiskTier(tmp_path_factory.mktemp("spill"), first), kv))
    for turn, (more, keep) in enumerate(steps):
        for feed in feeds:
            feed.cache.truncate(keep)
            feed.q[:, feed.cache.n :] += turn  # other tokens than before
            feed.k[:, feed.cache.n :] *= 1 + turn / 8
            feed.run(min(more, 1400 - feed.cache.n))
        assert np.array_equal(feeds[0].out, feeds[1].out, equal_nan=True)
    feeds[1].cache.close()
    pool.close()


def test_bits_do_not_depend_on_threads(tmp_path):
    outs = []
    for workers in (1, 3):
        pool = ThreadPool(workers)
        feed = Feed(cache_of(pool, DiskTier(tmp_path, 1)))
        for cut in CUTS:
            feed.run(cut)
        outs.append(feed.out)
        feed.cache.close()
        pool.close()
    assert np.array_equal(*outs, equal_nan=True)


def test_the_reference_reads_pages_of_the_disk(pool, tmp_path):
    disk = Feed(cache_of(pool, DiskTier(tmp_path, 1), "16bit"))
    disk.run(900)
    k, _ = disk.cache.layer(0).pages.sides(1, 4)
    first = SHAPE.sinks + 4 * PAGE
    assert np.array_equal(k.reshape(PAGE, -1), disk.k[0, first : first + PAGE].astype(np.float16))
    disk.cache.close()


# -- what goes wrong -----------------------------------------------------------------------------------------------------------


def full_after(monkeypatch: pytest.MonkeyPatch, nbytes: int, number: int = errno.ENOSPC) -> list[int]:
    """A disk that takes so many bytes more."""
    room = [nbytes]

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if not room[0]:
            raise OSError(number, os.strerror(number))
        count = PWRITE(fd, data[: room[0]], offset)  # the last write is a short one
        room[0] -= count
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    return room


@pytest.mark.parametrize("number,said", ((errno.ENOSPC, "the disk is full: .* of the KV cache are in"), (errno.EIO, "cannot be written")))
def test_a_disk_that_fills_leaves_a_cache_that_continues(pool, tmp_path, monkeypatch, number, said):
    memory, disk = Feed(cache_of(pool, None)), Feed(cache_of(pool, DiskTier(tmp_path, 1)))
    memory.run(1200)
    room = full_after(monkeypatch, 200_000, number)
    with pytest.raises(EffllmError, match=said) as caught:
        disk.run(1200)
    assert "--spill-dir" in caught.value.hint and 0 < disk.cache.n < 1200
    held = disk.cache.n
    assert disk.cache.truncate(held) == held and disk.cache.sealed >= 1
    with pytest.raises(EffllmError, match=said):  # again, and nothing has moved
        disk.run(1200 - held)
    assert held - 2 * PAGE <= disk.cache.n <= held + PAGE
    room[0] = 1 << 30  # somebody made room
    disk.run(1200 - disk.cache.n)
    assert np.array_equal(memory.out[:, :1200], disk.out[:, :1200])
    disk.cache.close()


@pytest.mark.parametrize("number", (errno.EINVAL, errno.EIO))
def test_direct_reads_that_fail_are_made_through_the_page_cache(pool, tmp_path, monkeypatch, number):
    memory, disk = Feed(cache_of(pool, None)), Feed(cache_of(pool, DiskTier(tmp_path, 0)))
    own = disk.cache.pool.stream._reader._sources[disk.cache.pool.stream.spill.path].direct
    if own is None:
        pytest.skip("no direct reads here at all")

    def preadv(fd: int, buffers: list, offset: int) -> int:
        if fd == own:
            raise OSError(number, os.strerror(number))
        return PREADV(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    for feed in (memory, disk):
        feed.run(1000)
    assert np.array_equal(memory.out[:, :1000], disk.out[:, :1000])
    (said,) = disk.cache.pool.stream.announcements()
    assert "the KV cache is read through the page cache" in said
    disk.cache.close()


def test_short_reads(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: PREADV(fd, [buffers[0][:12_288]], offset))
    memory, disk = run_both(pool, DiskTier(tmp_path, 0))
    assert same(memory, disk)
    disk.cache.close()


def test_a_disk_that_reads_no_more(pool, tmp_path, monkeypatch):
    disk = Feed(cache_of(pool, DiskTier(tmp_path, 0)))
    disk.run(700)

    def preadv(fd: int, buffers: list, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with pytest.raises(PagesLost, match="the KV cache's file cannot be read: Input/output error"):
            for _ in range(3):  # what was read ahead is there
                disk.run(100)
    disk.cache.truncate(650)
    disk.run(1000 - disk.cache.n)
    memory = Feed(cache_of(pool, None))
    memory.run(650)
    memory.cache.truncate(650)
    memory.run(350)
    assert np.isfinite(disk.out[:, :1000]).all()
    disk.cache.close()


@pytest.mark.parametrize("name", ("preadv", "pwrite"))
def test_a_disk_that_hangs_can_be_left_and_taken_up_again(pool, tmp_path, monkeypatch, name):
    real, opens, ended = getattr(os, name), threading.Event(), []
    opens.set()

    def hanging(*more: object) -> int:
        assert opens.wait(60)
        return real(*more)

    monkeypatch.setattr(os, name, hanging)
    memory, disk = Feed(cache_of(pool, None)), Feed(cache_of(pool, DiskTier(tmp_path, 0, cancelled=lambda: bool(ended))))
    disk.run(700)
    opens.clear()
    ended.append(True)
    with pytest.raises(Interrupted):
        for _ in range(3):
            disk.run(100)
    ended.clear()
    opens.set()
    disk.run(1200 - disk.cache.n)
    memory.run(1200)
    assert np.isfinite(disk.out[:, :1200]).all()
    assert np.array_equal(memory.cache.pool.page(1, 2), disk.cache.pool.page(1, 2))
    disk.cache.close()


# -- memory that grows short ---------------------------------------------------------------------------------------------------


def proc_says(root: Path, swapped: int, faults: int) -> None:
    folder = root / "proc/self"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status").write_text(f"Name:\tpython\nVmRSS:\t  1000 kB\nVmSwap:\t  {swapped} kB\n")
    (folder / "stat").write_text(f"1 (a ) name) S 2 3 4 5 6 7 8 9 {faults} 11 12 13\n")


def test_what_the_system_takes_away_is_read_from_proc(tmp_path):
    proc_says(tmp_path, 77, 5)
    assert hardware.memory_lost(tmp_path) == (77 * 1024, 5)
    assert hardware.memory_lost(tmp_path / "none") == (0, 0)
    if Path("/proc/self/stat").exists():
        swapped, faults = hardware.memory_lost()
        assert faults == resource.getrusage(resource.RUSAGE_SELF).ru_majflt and swapped >= 0


def test_pages_go_to_the_disk_when_memory_grows_short(pool, tmp_path):
    memory, disk = Feed(cache_of(pool, None)), Feed(cache_of(pool, DiskTier(tmp_path / "spill", 6)))
    now = [0.0]
    watch = MemoryMonitor(root=tmp_path, clock=lambda: now[0])
    proc_says(tmp_path, 0, 4000)
    for feed in (memory, disk):
        feed.run(1000)
    watch.look(disk.cache)  # what was read before the first look is the program
    assert not watch.announcements()
    kept = [disk.cache.pool.page(1, index).copy() for index in range(7)]
    for swapped, faults, first in ((0, 4010, 6), (40_000, 4010, 3), (41_000, 4010, 3), (41_000, 5000, 1), (99_000, 5000, 0),
                                   (200_000, 5000, 0)):
        proc_says(tmp_path, swapped, faults)
        watch.look(disk.cache)  # too soon
        now[0] += 1.5
        before = disk.cache.pool.first
        watch.look(disk.cache)
        assert disk.cache.pool.first == first
        said = watch.announcements()
        if first < before:
            assert "memory is short" in said[0] and "of the KV cache were moved to disk" in said[0]
        assert len(said) == (first < before or (first == 0 and before == 0))
        for feed in (memory, disk):
            feed.run(20)
    assert "--ram SIZE" in said[0]
    assert all(np.array_equal(disk.cache.pool.page(1, index), page) for index, page in enumerate(kept))
    assert np.array_equal(memory.out, disk.out, equal_nan=True)
    now[0] += 1.5
    proc_says(tmp_path, 400_000, 9000)
    watch.look(disk.cache)
    assert not watch.announcements(), "once is enough"
    disk.cache.close()


def test_memory_that_is_nearly_gone_is_short_before_anything_is_swapped(pool, tmp_path):
    """A container without swap: its processes are ended rather than paged."""
    def free(mib):
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: {4 << 20} kB\nMemAvailable: {mib << 10} kB\n")

    proc_says(tmp_path, 0, 0)
    disk, now, weights = Feed(cache_of(pool, DiskTier(tmp_path / "spill", 6))), [0.0], [0, 3 << 20, 0]
    watch = MemoryMonitor(root=tmp_path, clock=lambda: now[0], shed=lambda: weights.pop())
    disk.run(1000)
    for mib, first, said in ((500, 6, ""), (33, 6, ""), (31, 3, "memory is short: 31.00 MiB are free; "), (28, 3, ""),
                             (20, 1, "were moved to disk; 3.00 MiB of experts were released"), (40, 1, ""), (5, 0, "5.00 MiB are")):
        free(mib)
        watch.look(disk.cache)
        now[0] += 1.5
        lines = watch.announcements()
        assert disk.cache.pool.first == first and len(lines) == bool(said) and said in "".join(lines)
    disk.cache.close()


def test_a_cache_without_a_disk_can_only_say_so(pool, tmp_path):
    cache, now = cache_of(pool, None), [0.0]
    proc_says(tmp_path, 0, 0)
    for mapped, lines in ((True, 0), (False, 1)):
        watch = MemoryMonitor(mapped, tmp_path, lambda: now[0])
        watch.look(cache)
        proc_says(tmp_path, 0, 10_000 + lines * 10_000)
        now[0] += 1.5
        watch.look(cache)
        assert len(watch.announcements()) == lines
