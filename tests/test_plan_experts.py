"""Plans for mixtures larger than memory: how many experts stay, the cost in bytes, what is refused; and the predicted speed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm import DoesNotFit
from effllm.offload.demand import BlockBytes, Demand, Experts
from effllm.offload.placement import Budget
from effllm.offload.plan import plan
from effllm.offload.predict import KindRate, PagedExpertCost, Rates, WeightCost, Work, decode, prompt

MB = 10**6
EXPERTS = Experts(layers=20, count=20 * 32, per_token=4, slot_nbytes=2 * MB)


def demand(experts: Experts = EXPERTS, kv: int = 10_000, always: int = 150 * MB) -> Demand:
    weights = (BlockBytes("outer", 30 * MB + always), *(BlockBytes(str(i), 64 * MB) for i in range(experts.layers)))
    return Demand(baseline=80 * MB, workspace=20 * MB, weights=weights, kv_bytes_per_token=kv, kv_fixed=0, layers=experts.layers,
                  always_nbytes=always, experts=experts)


def test_what_fits_is_not_paged() -> None:
    placed = plan(demand(), Budget(3000 * MB), 4096)
    assert placed.expert_slots is None and placed.ctx == 4096


def test_what_does_not_fit_is_paged_and_adds_up() -> None:
    placed = plan(demand(), Budget(1000 * MB), 4096)
    fixed = -(-(100 * MB + 4096 * 10_000) * 105 // 100) + 150 * MB
    assert placed.ctx == 4096 and placed.residency is None
    assert placed.total_bytes == fixed + placed.expert_slots * 2 * MB <= 1000 * MB < placed.total_bytes + 2 * MB, "no expert more would fit"
    assert f"{placed.expert_slots} of 640 experts stay in memory" in placed.notes[0]


def test_fewer_slots_than_two_tokens_need_are_refused_with_the_number() -> None:
    """k slots a layer would be driven out by the next token before they are used again."""
    with pytest.raises(DoesNotFit) as caught:
        plan(demand(), Budget(560 * MB), 4096, 512)
    held = (560 * MB - (-(-(100 * MB + 512 * 10_000) * 105 // 100) + 150 * MB)) // (2 * MB)
    assert held < EXPERTS.min_slots == 160
    assert f"hold {held} of 640 experts" in caught.value.message and "it takes 160, 8 a layer" in caught.value.message
    needed = int(caught.value.hint.split("--ram ")[1].split("Mi")[0]) << 20
    assert plan(demand(), Budget(needed), 4096, 512).expert_slots >= 160
    with pytest.raises(DoesNotFit):
        plan(demand(), Budget(needed - 3 * MB), 4096, 512)


def test_a_shorter_context_that_fits_is_named() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(demand(kv=50_000), Budget(620 * MB), 4096, 4096)
    shorter, most = caught.value.hint.split("; 4096 tokens take --ram ")
    ctx = int(shorter.removeprefix("-c ").removesuffix(" fits"))
    assert plan(demand(kv=50_000), Budget(int(most.removesuffix("Mi")) << 20), 4096, 4096).ctx == 4096
    larger = demand(kv=50_000)  # the program, the next time
    assert plan(replace(larger, baseline=larger.baseline + 2**19), Budget(620 * MB), 4096, ctx).expert_slots >= 160
    with pytest.raises(DoesNotFit):
        plan(demand(kv=50_000), Budget(620 * MB), 4096, ctx + 128)


def test_a_mixture_of_few_experts_needs_no_more_than_there_are() -> None:
    assert Experts(4, 4 * 8, 6, MB).min_slots == 32 and EXPERTS.min_slots == 2 * 4 * 20


@given(st.integers(500, 1500), st.integers(1, 32))
def test_slots_are_never_too_many_nor_too_few(budget: int, top: int) -> None:
    experts = replace(EXPERTS, per_token=top)
    try:
        placed = plan(demand(experts), Budget(budget * MB), 4096)
    except DoesNotFit:
        return
    assert placed.total_bytes <= budget * MB
    assert placed.expert_slots is None or experts.min_slots <= placed.expert_slots <= experts.count


# ---- how fast

RATES = Rates(memory=10e9, token_s=0.001, layer_s=0.0, kinds={"4bit": KindRate(10e9, 100e9)}, attention={"16bit": KindRate(1e12, 1e12)},
              disk=1e9, disk_depth1=0.5e9)


def work(hit_rate: float) -> Work:
    paged = PagedExpertCost(20, 32, 4, 2 * MB, 0.5, hit_rate)
    parts = (WeightCost("4bit", 150 * MB, 300 * MB), WeightCost("4bit", 160 * MB, 320 * MB, routed=True))
    return Work(parts, 0, (None,) * 20, "16bit", 0, round(paged.nbytes(1)), is_moe=True, paged=paged)


def test_a_token_takes_the_disk_and_the_processor_one_after_the_other() -> None:
    made = decode(work(0.5), RATES)
    assert made.disk_s == pytest.approx(20 * 2 * 2e6 / 1e9) and made.limit == "disk"
    assert made.seconds == pytest.approx(0.001 + 0.031 + made.disk_s)
    known = decode(work(1.0), RATES)
    assert known.disk_s == 0 and known.seconds == pytest.approx(0.001 + 0.031)


def test_a_disk_is_slower_for_one_expert_at_a_time() -> None:
    assert decode(work(0.9), RATES).disk_s == pytest.approx(20 * 0.4 * 2e6 / 0.5e9)
    assert decode(work(0.9), replace(RATES, disk_depth1=None)).disk_s == pytest.approx(20 * 0.4 * 2e6 / 1e9)
    assert decode(work(0.5), replace(RATES, disk=None)) is None


def test_a_prompt_reads_what_a_chunk_visits() -> None:
    paged = PagedExpertCost(20, 32, 4, 2 * MB, 0.25, 0.9)
    assert paged.nbytes(512) == pytest.approx(20 * 32 * 0.75 * 2 * MB)
    assert paged.nbytes(4) == pytest.approx(20 * 32 * (1 - 0.875**4) * 0.75 * 2 * MB)
    made = prompt(replace(work(0.5), paged=paged, chunk=512), RATES, 1000)
    assert made.disk_s == pytest.approx(2 * paged.nbytes(500) / 1e9)
