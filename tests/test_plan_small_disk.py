"""Plans for a disk with room for little of the KV cache: none refuses what memory holds alone, and hints name what is planned next."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streamed_models import random_model
from test_plan_kv import BLOCK, EXPERTS, MB, SPILL, UNITS, demand

from effllm import DoesNotFit
from effllm.offload.demand import Demand
from effllm.offload.placement import Budget, Placement
from effllm.offload.plan import plan
from effllm.offload.plan_kv import PAGE, Spill, plan_tiers
from effllm.offload.size import SPARE, parse_size
from effllm.runtime.planning import process_memory
from effllm.runtime.prepare import EngineOptions, prepare

SMALL = replace(SPILL, limit_source="--disk allows", is_requested=True)
PAGE_NBYTES = 100_000 * PAGE
KINDS = {"streams": demand(), "fits": demand(blocks=False),
         "experts": replace(demand(blocks=False), always_nbytes=200 * MB, experts=EXPERTS),
         "neurons": replace(demand(), blocks=(BLOCK,) * 20, always_nbytes=200 * MB, units=UNITS)}


def placed(whole: Demand, ram: int, ctx: int | None, spill: Spill | None) -> Placement:
    return plan_tiers(whole, Budget(ram), 32_768, ctx, spill)


def is_placed(whole: Demand, ram: int, ctx: int, spill: Spill | None) -> bool:
    try:
        return bool(placed(whole, ram, ctx, spill))
    except DoesNotFit:
        return False


@pytest.mark.parametrize("disk", (0, 3 * PAGE_NBYTES))
@pytest.mark.parametrize("ram,ctx", ((1100, 2048), (1200, 4096), (700, 4096), (1500, 8192)))
def test_what_memory_holds_alone_is_not_refused_for_a_small_disk(ram: int, ctx: int, disk: int) -> None:
    """Weights that stream make room for the cache; with all of them in memory, as they are with pages on the disk, there is none."""
    found = placed(demand(), ram * MB, ctx, replace(SMALL, disk=disk))
    assert found == plan(demand(), Budget(ram * MB), 32_768, ctx, "cpu") and found.residency.streamed


@pytest.mark.parametrize("kind", ("streams", "experts", "neurons"))
def test_what_memory_and_a_small_disk_hold_together_is_not_refused(kind: str) -> None:
    whole, ram, disk = KINDS[kind], 1000 * MB, 30 * PAGE_NBYTES
    alone = next(ctx for ctx in range(32_768, 0, -PAGE) if is_placed(whole, ram, ctx, None))
    found = placed(whole, ram, alone + 10 * PAGE, replace(SMALL, disk=disk))
    assert found.kv_disk_bytes <= disk and found.kv_pages > 0 and found.total_bytes <= ram


def following(error: DoesNotFit) -> Iterator[tuple[str, int]]:
    """What a hint says to ask for: (option, value)."""
    for option, value in re.findall(r"-(c|-disk|-ram|-kv-ram) (\d+\w*)", error.hint):
        yield option.lstrip("-"), int(value) if option == "c" else parse_size(value)


@given(kind=st.sampled_from(sorted(KINDS)), sinks=st.sampled_from((0, 64, 128)), ram=st.integers(100, 2000), cap=st.one_of(
    st.none(), st.integers(1, 600)), ring=st.integers(1, 30), disk=st.one_of(st.integers(0, 60 * PAGE_NBYTES), st.just(10**12)),
    ctx=st.one_of(st.none(), st.integers(1, 32_768)), share=st.floats(0, 1))
def test_a_hint_is_planned_and_a_shorter_context_than_one_that_is(kind: str, sinks: int, ram: int, cap: int | None, ring: int, disk: int,
                                                                  ctx: int | None, share: float) -> None:
    whole, ram = replace(KINDS[kind], kv_sinks=sinks), ram * MB
    spill = replace(SMALL, ram=cap and cap * MB, ring=ring * MB, disk=disk)
    try:
        placed(whole, ram, ctx, spill)
    except DoesNotFit as error:
        asked = dict(following(error))
        if "c" in asked:
            assert asked["c"] < (ctx or 32_769) and is_placed(whole, ram, asked["c"], spill), error
            longer = asked["c"] + PAGE
            assert longer >= (ctx or 32_768) or not is_placed(whole, ram - SPARE, longer, spill), (error.hint, longer)
        if "disk" in asked:
            placed(whole, ram, ctx, replace(spill, disk=asked["disk"]))
        if "ram" in asked and ctx is not None and cap is None:
            assert is_placed(whole, asked["ram"], ctx, spill), error
        return
    if ctx is not None:
        assert is_placed(whole, ram, max(1, int(ctx * share)), spill), "a shorter one"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 MB of layers that can stream, 8 KiB a token of cache."""
    return random_model(tmp_path_factory.mktemp("models") / "long", num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
                        head_dim=128, intermediate_size=8192, max_position_embeddings=16_384)


def test_hints_of_a_model_are_followed(long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "baseline", lambda kinds: 200 << 20)  # the memory of a test process varies between two plans

    def planned(ctx: int, **more: str) -> Placement:
        prepared = prepare(long, EngineOptions(device="cpu", threads=1, ctx=ctx, spill_dir=str(tmp_path), **more))
        prepared.store.close()
        return prepared.placement

    total = planned(2048).total_bytes
    more = {"ram": str(total - (8 << 20)), "disk": "1M"}
    assert planned(2048, **more).kv_pages is None
    with pytest.raises(DoesNotFit, match="of memory even with weights read|--disk allows 976.56 KiB") as refused:
        planned(16_384, **more)
    asked = dict(following(refused.value))
    assert 2048 <= asked["c"] and planned(asked["c"], **more).ctx == asked["c"]
    with pytest.raises(DoesNotFit):
        planned(asked["c"] + 512, **more)
