"""Layers that differ in key-value heads and head size, and layers that share another's keys and values: attention, bytes, truncation, pages
on disk and in files."""

from dataclasses import replace

import numpy as np
import pytest

from effllm.kernels import reference
from effllm.kernels.cpu.ops import CpuOps, plan_workspace
from effllm.kernels.device_memory import gpu_workspace
from effllm.kernels.layout import PAGE
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.offload.page_pool import DiskTier
from effllm.quant.kv import codec
from effllm.quant.kv_lossless import most_exact, pack_exact, unpack_exact
from effllm.runtime.cache import KVCache
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape, SharedPages, cache_nbytes, exact_nbytes, page_sizes

HEADS, SHAPE = 4, CacheShape(1024, sink=64, window=16, chunk=PAGE)
SPECS = [AttnSpec(HEADS, 2, 32, 0.2, 40), AttnSpec(HEADS, 1, 64, 0.1), AttnSpec(HEADS, 2, 32, 0.2, 40), AttnSpec(HEADS, 4, 16, 0.3)]
SHARED = [SharedPages(1), SharedPages(2)]  # the last layers
SIZES = [(spec.kv_heads, spec.head_dim) for spec in SPECS]
DIMS = Dims(8, HEADS, 2, 32, 8, 8, chunk=PAGE, ctx=1024, logit_rows=1, packed_kv=True, other_kv_heads=((1, 64), (4, 16)))


def opened(pool: ThreadPool, kv: str, disk: DiskTier | None = None) -> KVCache:
    ops = CpuOps(pool, replace(DIMS, spilled_kv=disk is not None or "+" in kv))
    every = [*SPECS, *SHARED]
    return build_cache([ops] * len(every), every, codec(kv), SHAPE, disk=disk)


def fed(cache: KVCache, tokens: int, seed: int = 0, begin: int = 0) -> list[np.ndarray]:
    """What every layer attended to, [tokens, H * D]: the same numbers for a position whatever came before it in the call."""
    rng, specs = np.random.default_rng(seed), [*SPECS, *(SPECS[each.layer] for each in SHARED)]
    found = [[] for _ in specs]
    rows = [[rng.standard_normal((1024, heads * spec.head_dim)).astype(np.float32) for heads in (HEADS, spec.kv_heads, spec.kv_heads)]
            for spec in specs]
    at = begin
    for piece in cache.pieces(tokens):
        step = cache.begin(piece)
        watched = cache.probes is not None and cache.probes.begin(step.positions)
        for layer, (own, spec) in enumerate(zip(rows, specs, strict=True)):
            q, k, v = (np.ascontiguousarray(side[at : at + piece]) for side in own)
            k, v = (k, v) if layer < len(SPECS) else (None, None)
            if watched:
                cache.probes.see("q", layer, q)
            out = cache.layer(layer).attend(q, k, v).copy()
            pages = cache.layer(layer).pages
            sides = [pages.sides(sealed, index) for sealed, index, _, _ in step.blocks]
            keys, values = (np.concatenate([each[side][:count] for each, (*_, count) in zip(sides, step.blocks)]).astype(np.float32)
                            for side in (0, 1))
            seen = np.concatenate([first + np.arange(count) for _, _, first, count in step.blocks])
            want = reference.attend(q.reshape(piece, HEADS, -1), keys, values, at, seen, spec.scale, spec.window, spec.softcap)
            assert np.abs(out - want.reshape(out.shape)).max() < 0.02 * np.abs(want).max() + 1e-3
            found[layer].append(out)
        cache.commit()
        at += piece
    return [np.concatenate(each) for each in found]


@pytest.mark.parametrize("kv", ["32bit", "16bit", "8bit", "4bit", "k8v4", "4bit+zipcache"])
def test_each_layer_attends_in_its_own_heads(pool, kv):
    cache = opened(pool, kv)
    fed(cache, 700)
    assert cache.sealed == 4 and cache.n == 700 and (cache.probes is None) == ("+" not in kv)
    fixed, page = cache_nbytes(cache.codecs, cache.layouts, SHAPE)
    assert fixed >= sum(map(len, cache.slots.memory)) == sum(exact_nbytes(layout, SHAPE) for layout in cache.layouts)
    assert page >= cache.sealed_nbytes == sum(page_sizes(cache.codecs, cache.layouts))
    used = sum(cache.slots.used.values()) * sum(layout.part_nbytes for layout in cache.layouts)
    assert cache.allocated_nbytes == used + cache._packed_nbytes and (cache._kinds.count(2) > 0) == ("+" in kv)
    values = 2 * sum(kv_heads * size for kv_heads, size in SIZES)
    if not cache.is_packed:
        assert cache.packed_bits == 8 * cache.sealed_nbytes / (PAGE * values) >= int(kv[:2])
        assert cache.bits_per_value == pytest.approx(8 * cache.allocated_nbytes / (values * 700))


@pytest.mark.parametrize("kv", ["16bit", "4bit"])
def test_what_is_forgotten_leaves_no_trace(pool, kv):
    cache, straight = opened(pool, kv), opened(pool, kv)
    fed(cache, 700)
    held = cache.truncate(500)
    assert held == 500 if kv == "16bit" else held <= 500
    again, want = fed(cache, 600 - held, begin=held), fed(straight, 600)
    for ours, theirs in zip(again, want, strict=True):
        if kv == "16bit":
            assert np.array_equal(ours, theirs[held:])
    assert [page.tobytes() for page in cache.read(2)] == [page.tobytes() for page in straight.read(2)]


@pytest.mark.parametrize("kv", ["16bit", "4bit"])
def test_pages_on_a_disk_are_the_same(pool, kv, tmp_path):
    spilled, held = opened(pool, kv, DiskTier(tmp_path, 1, ring=1 << 16)), opened(pool, kv)
    for ours, theirs in zip(fed(spilled, 700), fed(held, 700), strict=True):
        assert np.allclose(ours, theirs, atol=1e-5)
    assert spilled.pool.first == 1 and [page.tobytes() for page in spilled.read(3)] == [page.tobytes() for page in held.read(3)]
    spilled.close()


@pytest.mark.parametrize("kv", ["16bit", "4bit"])
def test_exact_tokens_and_pages_go_into_another_cache(pool, kv):
    one, other = opened(pool, kv), opened(pool, kv)
    fed(one, 700)
    other.adopt(700, one.sealed)
    for page in range(one.sealed):
        other.write(page, one.read(page))
    blocks = one.exact_blocks()
    counts = [count for _, count in blocks]
    data = pack_exact([one.read(page) for page, _ in blocks], counts, one.layouts)
    assert len(data) <= most_exact(counts, one.layouts)
    for (page, _), layers in zip(blocks, unpack_exact(data, counts, one.layouts), strict=True):
        other.write(page, layers)
    for ours, theirs in zip(fed(other, 40, begin=700), fed(one, 40, begin=700), strict=True):
        assert np.array_equal(ours, theirs)


def test_working_memory_is_the_most_that_a_layer_needs():
    plans, whole = [plan_workspace(own, 2) for own in DIMS.by_layer_kind], plan_workspace(DIMS, 2)
    assert [(own.num_key_value_heads, own.head_dim) for own in DIMS.by_layer_kind] == [(2, 32), (1, 64), (4, 16)]
    assert whole == {name: max(plan[name] for plan in plans) for name in whole} and whole not in plans[:1]
    assert gpu_workspace(DIMS, 8, 8) == max(gpu_workspace(own, 8, 8) for own in DIMS.by_layer_kind)


def test_packed_pages_ask_for_a_workspace_that_has_room_for_them(pool: ThreadPool) -> None:
    small = CpuOps(pool, replace(DIMS, packed_kv=False))
    with pytest.raises(ValueError, match="packed_kv"):
        build_cache([small] * len(SPECS), SPECS, codec("4bit"), SHAPE)
    build_cache([small] * len(SPECS), SPECS, codec("16bit"), SHAPE)
