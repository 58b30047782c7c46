"""The cache's planned bytes equal those it allocates, page for page, and a longer context takes what the plan says."""

import json
from pathlib import Path

import numpy as np
import pytest

import effllm
from effllm import DoesNotFit
from effllm.kernels.layout import PAGE
from effllm.offload.demand import BlockBytes, Demand
from effllm.offload.placement import Budget
from effllm.offload.plan import plan
from effllm.offload.size import parse_size
from effllm.runtime.cache import KVCache
from effllm.runtime.engine import Engine, open_prepared
from effllm.runtime.measuring.bench import prepare_synthetic
from effllm.runtime.measuring.synthetic import SHAPES
from effllm.runtime.planning.needed_kernels import folder_kinds
from effllm.runtime.prepare import EngineOptions, Prepared, prepare

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
LENGTHS = (1, 128, 192, 193, 300, 1024, 1100, 2048)  # 192 tokens are 64 sinks and a page, 300 end within the first half of one


def asked(kv: str, ctx: int, **more: object) -> EngineOptions:
    return EngineOptions(device="cpu", kv=kv, ctx=ctx, threads=1, **more)


def set_aside(prepared: Prepared) -> tuple[int, KVCache]:
    """Bytes of a planned run's cache, and the cache; nothing of it is filled."""
    engine = Engine(prepared)
    try:
        cache = engine.cache
        return cache.pool.nbytes + sum(map(len, cache.slots.memory)), cache
    finally:
        engine.close()


@pytest.mark.parametrize("sink", [64, 0, 100])
@pytest.mark.parametrize("kv", ["32bit", "16bit", "8bit", "4bit", "2bit", "k8v4"])
def test_the_plan_counts_what_the_cache_sets_aside(kv: str, sink: int) -> None:
    for ctx in LENGTHS:
        prepared = prepare(FABLE, asked(kv, ctx, kv_sink=sink))
        assert set_aside(prepared)[0] == prepared.placement.kv_bytes, ctx


def test_a_page_of_an_odd_number_of_cache_lines_is_counted_whole(tmp_path: Path) -> None:
    """One KV head and three layers: a page is no multiple of its 128 tokens."""
    config = {**SHAPES["tinyllama-1.1b"], "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 1, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prepared = prepare_synthetic(str(tmp_path / "config.json"), asked("8bit", 1024))
    held, cache = set_aside(prepared)
    assert cache.sealed_nbytes % PAGE == 64
    assert held == prepared.placement.kv_bytes


@pytest.mark.parametrize("kv", ["16bit", "4bit"])
def test_pages_on_the_disk_are_those_that_the_plan_put_there(kv: str, tmp_path: Path) -> None:
    """`--kv-ram` holds the first and newest tokens, what pages are read with, and a few pages; the others are on the disk."""
    for ctx in (1850, 2048):  # the first ends within the first half of a page
        whole = prepare(FABLE, asked(kv, ctx)).placement.kv_bytes
        prepared = prepare(FABLE, asked(kv, ctx, kv_ram=str(whole - 1), spill_dir=str(tmp_path)))
        placed = prepared.placement
        held, cache = set_aside(prepared)
        assert held == placed.kv_bytes < whole
        assert placed.kv_disk_bytes == (cache.pool.pages - cache.pool.first) * cache.sealed_nbytes > 0


@pytest.mark.parametrize("kv_read", ["exact", "sparse"])
@pytest.mark.parametrize("kv", ["16bit", "4bit"])
def test_the_least_memory_that_a_refusal_names_is_enough(kv: str, kv_read: str, tmp_path: Path) -> None:
    """Whatever was asked for first: what pages are read with is the larger, the more the cache may take."""
    more = {"kv_read": kv_read, "spill_dir": str(tmp_path)}
    whole = prepare(FABLE, asked(kv, 2048)).placement.kv_bytes
    for first in range(0, whole, whole // 23):
        named = str(first)
        try:
            prepared = prepare(FABLE, asked(kv, 2048, kv_ram=named, **more))
        except DoesNotFit as error:
            named = error.hint.removeprefix("--kv-ram ")
            prepared = prepare(FABLE, asked(kv, 2048, kv_ram=named, **more))
        assert prepared.placement.kv_pages is not None and prepared.placement.kv_bytes <= parse_size(named)
        if kv_read == "exact":  # what pages are picked by is set aside elsewhere
            assert set_aside(prepared)[0] == prepared.placement.kv_bytes


@pytest.mark.parametrize("kv", ["16bit", "4bit"])
def test_a_context_that_the_disk_shortens_takes_no_more_than_was_planned(kv: str, tmp_path: Path) -> None:
    """Less is set aside beside the ring than for the whole context; the ring is not to grow by more than that."""
    whole, shortened = prepare(FABLE, asked(kv, 2048)).placement.kv_bytes, 0
    for share in range(30, 90, 5):
        options = EngineOptions(device="cpu", kv=kv, threads=1, kv_ram=str(whole * share // 100), disk=str(whole * 9 // 40),
                                spill_dir=str(tmp_path))
        try:
            placed = (prepared := prepare(FABLE, options)).placement
        except DoesNotFit:
            continue
        held, cache = set_aside(prepared)
        assert held <= placed.kv_bytes <= parse_size(options.kv_ram), share
        shortened += placed.ctx < 2048 and cache.pool.stream is not None
    assert shortened


@pytest.mark.parametrize("kv", ["16bit", "8bit", "4bit"])
def test_a_longer_context_takes_what_the_plan_says(kv: str) -> None:
    """Contexts of 640 and 1,536 tokens, full but for a token: exact tokens take the same in both, so all that grows is pages."""
    ids = np.random.default_rng(1).integers(5, 4000, 1535).tolist()
    planned, used = [], []
    for ctx in (640, 1536):
        options = asked(kv, ctx)
        *_, engine = open_prepared(lambda: prepare(FABLE, options), folder_kinds(FABLE, options))  # noqa: B023
        try:
            for _ in engine.prefill(ids[: ctx - 1]):
                continue
            planned.append(engine.placement.kv_bytes)
            used.append(engine.cache.allocated_nbytes)
            assert engine.cache.n == ctx - 1
            assert used[-1] <= planned[-1]
        finally:
            engine.close()
    assert used[1] - used[0] == planned[1] - planned[0] == 7 * engine.cache.sealed_nbytes


def test_pages_begin_after_the_sinks() -> None:
    def kv_bytes(ctx: int) -> int:
        demand = Demand(baseline=0, workspace=0, weights=(BlockBytes("outer", 1), BlockBytes("0", 1)), kv_bytes_per_token=10, kv_fixed=7,
                        layers=1, kv_sinks=64, kv_page=1281)
        return plan(demand, Budget(10**9), 4096, ctx).kv_bytes

    assert [(kv_bytes(ctx) - 7) / 1281 for ctx in (1, 64, 65, 192, 193, 320, 321, 4096)] == [1, 1, 1, 1, 2, 2, 3, 32]
