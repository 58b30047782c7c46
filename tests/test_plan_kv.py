"""Plans with part of the KV cache on disk: what stays in memory, what is refused, and when the disk is not probed at all."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm import DoesNotFit
from effllm.offload.demand import BlockBytes, Demand, Experts, with_slack
from effllm.offload.placement import Budget, Placement, Units
from effllm.offload.plan import plan
from effllm.offload.plan_kv import PAGE, Spill, plan_tiers
from effllm.offload.predict import KindRate, Rates, WeightCost, Work, decode, prompt
from effllm.offload.size import parse_size

MB = 10**6
BLOCK = 8 * MB
SPILL = Spill(ring=20 * MB, workspace=5 * MB, ram=None, disk=10**12, limit_source="/spill has")


def demand(layers: int = 20, kv: int = 100_000, blocks: bool = True) -> Demand:
    """800 MB of layers, 40 MB around them; the cache's bytes of each layer rounded up, as a run states them."""
    weights = (BlockBytes("outer", 40 * MB), *(BlockBytes(str(i), 5 * BLOCK) for i in range(layers)))
    return Demand(baseline=80 * MB, workspace=20 * MB, weights=weights, kv_bytes_per_token=kv, kv_fixed=7 * MB, layers=layers,
                  blocks=(BLOCK,) * (layers * 5) if blocks else (), always_nbytes=10 * MB, kv_layers=(-(-kv // layers),) * layers)


def tiers(ram: int, ctx: int | None, spill: Spill | None = SPILL, **more: object) -> Placement:
    return plan_tiers(demand(**more), Budget(ram * MB), 32_768, ctx, spill)


def test_a_cache_that_fits_stays_in_memory() -> None:
    for ctx in (None, 4096):
        assert tiers(2000, ctx) == plan(demand(), Budget(2000 * MB), 32_768, ctx, "cpu")
        assert tiers(2000, ctx).kv_pages is None


def test_an_asked_context_that_does_not_fit_goes_to_the_disk_and_adds_up() -> None:
    placed = tiers(1200, 16_384)
    in_memory = placed.kv_bytes - placed.kv_ring_bytes
    assert placed.kv_ring_bytes == SPILL.ring and in_memory + placed.kv_disk_bytes == tiers(4000, 16_384).kv_bytes, "no byte is in both"
    page, pages = 100_000 * PAGE, placed.kv_pages
    assert placed.ctx == 16_384 and placed.residency is None, "all weights stay: they are read from the first token on"
    assert placed.kv_bytes == 7 * MB + 20 * MB + pages * page and placed.kv_disk_bytes == (128 - pages) * page
    parts = 80 * MB + 25 * MB + 840 * MB + placed.kv_bytes
    assert placed.total_bytes == -(-parts * 105 // 100) <= 1200 * MB < placed.total_bytes + page * 105 // 100
    (note,) = placed.notes
    assert "of the KV cache are on disk, read for every token" in note


def test_a_context_that_nobody_asked_for_is_shortened_as_ever() -> None:
    assert tiers(1200, None) == plan(demand(), Budget(1200 * MB), 32_768, None, "cpu")


def test_weights_that_do_not_fit_stream_and_the_context_stays_while_it_can() -> None:
    assert tiers(700, 4096) == plan(demand(), Budget(700 * MB), 32_768, 4096, "cpu")
    placed = tiers(700, 16_384)
    assert placed.kv_pages == 0 and placed.residency.streamed and placed.kv_disk_bytes == 128 * 100_000 * PAGE
    assert placed.total_bytes <= 700 * MB < placed.total_bytes + BLOCK
    assert "read for every token" in placed.notes[0] and "read for every token too" in placed.notes[1]
    with pytest.raises(DoesNotFit, match="needs .* of memory even with weights and the KV cache read from the disk") as caught:
        tiers(150, 16_384)
    least = int(caught.value.hint.split("--ram ")[1].split("Mi")[0]) if "--ram" in caught.value.hint else 0
    assert caught.value.hint.startswith("-c ") or tiers(-(-least * 2**20 // MB), 16_384).kv_pages == 0


def test_weights_that_cannot_stream_have_to_fit() -> None:
    assert tiers(1200, 16_384, blocks=False).kv_pages is not None
    with pytest.raises(DoesNotFit, match="needs .* of memory even with the KV cache read from the disk"):
        tiers(700, 16_384, blocks=False)


def test_memory_for_the_cache_as_asked() -> None:
    spill = replace(SPILL, ram=100 * MB)
    placed = tiers(3000, None, spill)
    assert placed.ctx == 32_768 and placed.kv_bytes <= 100 * MB < placed.kv_bytes + 100_000 * PAGE
    assert tiers(3000, 512, spill).kv_pages is None, "all of it is less than that"
    streamed = tiers(700, 16_384, spill)
    assert streamed.kv_bytes <= 100 * MB and streamed.residency.streamed and streamed.total_bytes <= 700 * MB
    said = r"--kv-ram 9.54 MiB is too small: 2\d.* MiB of the cache must be in memory .* sink and window tokens"
    with pytest.raises(DoesNotFit, match=said) as caught:
        tiers(3000, None, replace(SPILL, ram=10 * MB))
    assert caught.value.hint == "--kv-ram 26Mi"
    assert tiers(3000, None, replace(SPILL, ram=26 << 20)).kv_pages == 0


@pytest.mark.parametrize("blocks", (True, False))
def test_memory_for_the_cache_that_is_not_there_refuses_no_context(blocks: bool) -> None:
    """A cache that 600 MB hold and memory does not goes to the disk, as a longer one does."""
    ram, spill = 400 if blocks else 1150, replace(SPILL, ram=600 * MB)
    for ctx in (1024, 4096, 5000, 16_384):
        placed = tiers(ram, ctx, spill, blocks=blocks)
        assert placed.ctx == ctx and placed.kv_bytes <= 600 * MB and placed.total_bytes <= ram * MB
        assert (placed.kv_pages is None) == (ctx == 1024)
    with pytest.raises(DoesNotFit, match="needs .* of memory") as caught:  # a ring that takes more than the cache is no help
        tiers(150, 128, replace(SPILL, ram=20 * MB))
    assert "--kv-ram" not in caught.value.message


def test_the_disk_is_a_budget_too() -> None:
    with pytest.raises(DoesNotFit, match="622.56 MiB of .* 16384 tokens would be on disk, --disk allows 95.37 MiB") as caught:
        tiers(1200, 16_384, replace(SPILL, disk=100 * MB, limit_source="--disk allows"))
    ctx = int(caught.value.hint.split("-c ")[1].split()[0])
    assert tiers(1200, ctx, replace(SPILL, disk=100 * MB)).ctx == ctx
    placed = tiers(3000, None, replace(SPILL, ram=100 * MB, disk=100 * MB))
    assert placed.ctx < 32_768 and placed.kv_disk_bytes <= 100 * MB
    assert placed.notes[-1] == f"context {placed.ctx} of the model's 32768: the most that the disk holds"


def test_a_disk_that_was_capped_is_told_by_how_much_and_a_full_one_by_another() -> None:
    capped = replace(SPILL, ram=100 * MB, disk=1000, limit_source="--disk allows", is_requested=True)
    with pytest.raises(DoesNotFit) as caught:
        tiers(3000, 32_768, capped)
    assert caught.value.hint.startswith("-c 896 fits, or --disk "), "what memory holds alone"
    assert tiers(3000, 896, capped).kv_pages is None
    more = parse_size(caught.value.hint.split("--disk ")[1])
    assert tiers(3000, None, replace(capped, disk=more)).ctx == 32_768
    small = replace(capped, ring=5 * MB, ram=15 * MB)
    with pytest.raises(DoesNotFit) as caught:
        tiers(3000, None, small)
    assert caught.value.hint.startswith("--disk "), "no page in memory, and none on the disk"
    with pytest.raises(DoesNotFit) as caught:
        tiers(3000, None, replace(small, limit_source="/spill has", is_requested=False))
    assert caught.value.hint == "--spill-dir DIR for another disk"


@pytest.mark.parametrize("disk,ctx,pages", ((1000, 960, None), (26 * MB, 960, None), (39 * MB, 1088, 5), (64 * MB, 1344, 5)))
def test_a_small_disk_makes_no_context_shorter_than_memory_alone_holds(disk: int, ctx: int, pages: int | None) -> None:
    """100 MB hold seven pages behind 64 tokens, or five beside what pages of the disk are read with."""
    spill, sinks = replace(SPILL, ram=100 * MB, disk=disk, limit_source="--disk allows", is_requested=True), replace(demand(), kv_sinks=64)

    def placed(asked: int | None) -> Placement:
        return plan_tiers(sinks, Budget(3000 * MB), 32_768, asked, spill)

    found = placed(None)
    assert (found.ctx, found.kv_pages) == (ctx, pages) and found.kv_bytes <= 100 * MB
    assert found.kv_disk_bytes == (0 if pages is None else disk // (100_000 * PAGE) * 100_000 * PAGE)
    assert f"context {ctx} of the model's 32768: the most that " + ("--kv-ram" if pages is None else "the disk") in found.notes[-1]
    with pytest.raises(DoesNotFit) as caught:
        placed(ctx + 1)
    assert caught.value.hint.startswith(f"-c {ctx} fits, or --disk ") and placed(ctx).ctx == ctx


def test_a_small_cache_is_not_worth_a_ring() -> None:
    whole = plan(demand(), Budget(3000 * MB), 32_768, 256).total_bytes
    with pytest.raises(DoesNotFit):
        plan_tiers(demand(blocks=False), Budget(whole - 1), 32_768, 256, replace(SPILL, ring=30 * MB))


@given(ram=st.integers(100, 3000), ctx=st.one_of(st.none(), st.integers(1, 32_768)), cap=st.one_of(st.none(), st.integers(1, 4000)),
       disk=st.integers(0, 4000), blocks=st.booleans())
def test_a_plan_is_kept(ram: int, ctx: int | None, cap: int | None, disk: int, blocks: bool) -> None:
    try:
        placed = tiers(ram, ctx, replace(SPILL, ram=cap and cap * MB, disk=disk * MB), blocks=blocks)
    except DoesNotFit as error:
        assert error.exit_code == 4 and error.hint
        return
    assert placed.total_bytes <= ram * MB and placed.kv_disk_bytes <= disk * MB
    assert ctx is None or placed.ctx == ctx
    if placed.kv_pages is not None:
        assert placed.kv_pages >= 0 and placed.kv_disk_bytes > 0
        assert placed.kv_pages * PAGE * 100_000 + placed.kv_disk_bytes >= placed.ctx * 100_000
        assert cap is None or placed.kv_bytes <= cap * MB


# -- beside experts and neurons ------------------------------------------------------------------------------------------------

EXPERTS = Experts(layers=20, count=20 * 16, per_token=2, slot_nbytes=2 * MB)
UNITS = (Units(4096, 8192),) * 20


def shared(ram: int, ctx: int | None, spill: Spill, **more: object) -> Placement:
    """800 MB of layers, of which 640 MB are experts or neurons."""
    whole = {**{"blocks": () if "experts" in more else (BLOCK,) * 20, "always_nbytes": 200 * MB}, **more}
    return plan_tiers(replace(demand(), **whole), Budget(ram * MB), 32_768, ctx, spill)


@pytest.mark.parametrize("kind", ({"experts": EXPERTS}, {"units": UNITS}), ids=("experts", "neurons"))
def test_memory_for_the_cache_as_asked_beside_weights_that_come_and_go(kind: dict[str, object]) -> None:
    spill = replace(SPILL, ram=100 * MB)
    placed = shared(800, 16_384, spill, **kind)
    page = 100_000 * PAGE
    assert placed.kv_pages == (100 * MB - 27 * MB) // page and placed.kv_bytes == 27 * MB + placed.kv_pages * page
    assert placed.kv_disk_bytes == (128 - placed.kv_pages) * page and placed.kv_bytes_per_token == 100_000
    held = placed.expert_slots if "experts" in kind else sum(placed.slots)
    assert placed.total_bytes <= 800 * MB and held > 0
    more = shared(800, 16_384, replace(SPILL, ram=50 * MB), **kind)
    assert (more.expert_slots or sum(more.slots)) > held, "what the cache does not get is theirs"
    assert any("of the KV cache are on disk" in note for note in placed.notes)
    assert len(placed.notes) == len(set(placed.notes))


@pytest.mark.parametrize("kind", ({"experts": EXPERTS}, {"units": UNITS}), ids=("experts", "neurons"))
def test_a_context_that_fits_only_on_the_disk_beside_weights_that_come_and_go(kind: dict[str, object]) -> None:
    placed = shared(700, 16_384, SPILL, **kind)
    assert placed.kv_pages == 0 and placed.kv_disk_bytes == 128 * 100_000 * PAGE and placed.total_bytes <= 700 * MB
    assert shared(700, 512, SPILL, **kind).kv_pages is None
    with pytest.raises(DoesNotFit) as caught:
        shared(200, 16_384, SPILL, **kind)
    needed = int(caught.value.hint.split("--ram ")[1].split("Mi")[0]) << 20
    assert shared(-(-needed // MB), 16_384, SPILL, **kind).kv_pages == 0


def parts_of(placed: Placement) -> int:
    """The sum of the plan's components, slack included where it belongs to them."""
    every_pass = placed.baseline_bytes + placed.workspace_bytes + placed.kv_bytes
    if placed.residency is None and placed.expert_slots is None:
        return with_slack(every_pass + placed.weights_bytes)
    ring = placed.residency.nbytes if placed.residency else 0
    return with_slack(every_pass) + placed.always_bytes + placed.window_bytes + ring + (placed.expert_slots or 0) * EXPERTS.slot_nbytes


@pytest.mark.parametrize("kind,ram,cap", (({"experts": EXPERTS}, 540, 60), ({"experts": EXPERTS}, 620, 200), ({"units": UNITS}, 580, 60)))
def test_a_plan_that_leaves_the_disk_alone_adds_up(kind: dict[str, object], ram: int, cap: int) -> None:
    placed = shared(ram, None, replace(SPILL, ram=cap * MB, disk=0, limit_source="--disk allows", is_requested=True), **kind)
    assert placed.kv_pages is None and placed.total_bytes == parts_of(placed) <= ram * MB
    assert sum("experts stay" in note or "neurons are on the disk" in note for note in placed.notes) == 1


@given(ram=st.integers(200, 1200), ctx=st.one_of(st.none(), st.integers(1, 32_768)), cap=st.one_of(st.none(), st.integers(1, 1000)),
       disk=st.one_of(st.integers(0, 150), st.just(10**6)), kind=st.sampled_from(({"experts": EXPERTS}, {"units": UNITS})))
def test_a_plan_beside_weights_that_come_and_go_is_kept(ram: int, ctx: int | None, cap: int | None, disk: int,
                                                        kind: dict[str, object]) -> None:
    try:
        placed = shared(ram, ctx, replace(SPILL, ram=cap and cap * MB, disk=disk * MB), **kind)
    except DoesNotFit as error:
        assert error.exit_code == 4 and error.hint
        return
    assert placed.total_bytes == parts_of(placed) <= ram * MB and (ctx is None or placed.ctx == ctx)
    assert placed.kv_disk_bytes <= disk * MB and len(placed.notes) == len(set(placed.notes))
    assert cap is None or placed.kv_bytes <= cap * MB, "whatever else does not fit"
    if placed.kv_pages is not None:
        assert placed.kv_pages * PAGE * 100_000 + placed.kv_disk_bytes >= placed.ctx * 100_000


# -- how fast ------------------------------------------------------------------------------------------------------------------

RATES = Rates(memory=10e9, token_s=1e-3, layer_s=1e-4, kinds={"bf16": KindRate(8e9, 1e11)}, attention={"16bit": KindRate(1e10, 1e11)},
              disk=1e9)


def work(**more: object) -> Work:
    return Work(parts=(WeightCost("bf16", 10**9, 5 * 10**8),), attention_width=4096, windows=(None, None), kv="16bit",
                kv_bytes=100_000, **more)


def test_the_disk_limits_deep_contexts_alone() -> None:
    placed = work(resident_kv_tokens=1000)
    assert decode(placed, RATES, 1000) == decode(work(), RATES, 1000)
    assert placed.kv_disk_bytes(11_000) == 10_000 * 100_000
    deep = decode(placed, RATES, 11_000)
    assert deep.disk_s == pytest.approx(1.0) and deep.limit == "disk" and deep.seconds == pytest.approx(1.0)
    assert decode(replace(placed, streamed=10**9), RATES, 11_000).disk_s == pytest.approx(2.0)
    assert decode(placed, replace(RATES, disk=None), 500) is not None and decode(placed, replace(RATES, disk=None), 1500) is None


def test_windows_read_no_more_than_they_see() -> None:
    assert replace(work(resident_kv_tokens=1000), windows=(None, 512)).kv_disk_bytes(11_000) == (10_000 + 512) * 100_000 // 2


def test_a_prompt_reads_what_came_before_each_chunk() -> None:
    found = prompt(work(resident_kv_tokens=1000, chunk=500), RATES, 2500)
    assert found.disk_s == pytest.approx((0 + 0 + 0 + 500 + 1000) * 100_000 / 1e9)
