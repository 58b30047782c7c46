"""Plans for models larger than memory: what is streamed, the cost in bytes, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm import DoesNotFit
from effllm.offload.demand import BlockBytes, Demand
from effllm.offload.placement import Budget
from effllm.offload.plan import plan

MB = 10**6
BLOCK = 8 * MB


def demand(layers: int = 20, blocks: int = 5, always: int = 10 * MB, kv: int = 10_000) -> Demand:
    """Layers of `blocks` blocks; the embedding (30 MB) is neither in memory nor among the blocks when weights stream."""
    weights = (BlockBytes("outer", 30 * MB + always), *(BlockBytes(str(i), blocks * BLOCK) for i in range(layers)))
    return Demand(baseline=80 * MB, workspace=20 * MB, weights=weights, kv_bytes_per_token=kv, kv_fixed=0, layers=layers,
                  blocks=(BLOCK,) * (layers * blocks), always_nbytes=always)


def test_what_fits_does_not_stream() -> None:
    placed = plan(demand(), Budget(2000 * MB), 4096)
    assert placed.residency is None and placed.streamed_bytes == 0 and placed.ctx == 4096


def test_what_does_not_fit_streams_and_adds_up() -> None:
    placed = plan(demand(), Budget(600 * MB), 4096)
    kept = placed.residency
    assert placed.ctx == 4096 and placed.kv_bytes == 4096 * 10_000
    fixed = 80 * MB + 20 * MB + placed.kv_bytes
    assert placed.total_bytes == -(-fixed * 105 // 100) + 10 * MB + kept.pinned_nbytes + kept.ring_nbytes
    assert placed.pinned_bytes == 10 * MB + kept.pinned_nbytes and plan(demand(), Budget(2000 * MB), 4096).pinned_bytes == 840 * MB
    assert placed.total_bytes <= 600 * MB < placed.total_bytes + BLOCK, "no block more would fit"
    assert kept.pinned_nbytes + kept.streamed_nbytes == 100 * BLOCK
    assert placed.weights_bytes == 840 * MB and "do not fit in memory" in placed.notes[0]


def test_a_little_less_context_keeps_all_weights_in_memory() -> None:
    """Reading from the disk for every token costs more than a context that nobody asked for; below 512 tokens it does not."""
    whole = plan(demand(), Budget(3000 * MB), 4096, 512).total_bytes
    assert plan(demand(), Budget(whole), 4096).residency is None
    assert plan(demand(), Budget(whole), 4096).ctx == 512
    assert plan(demand(), Budget(whole - 1), 4096).residency is not None


def test_an_asked_context_comes_before_pinned_weights() -> None:
    short, long = (plan(demand(kv=50_000), Budget(600 * MB), 4096, ctx) for ctx in (512, 4096))
    assert short.ctx == 512 and long.ctx == 4096
    assert long.streamed_bytes > short.streamed_bytes + 150 * MB


def test_no_room_for_the_ring_says_what_it_takes() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(demand(), Budget(120 * MB), 4096)
    assert "even with weights read from the disk" in caught.value.message
    needed = int(caught.value.hint.split("--ram ")[1].split("Mi")[0]) << 20
    assert plan(replace(demand(), baseline=80 * MB + 2**19), Budget(needed), 4096), "a program that is half a MiB larger this time"
    assert plan(demand(), Budget(needed), 4096).residency is not None
    with pytest.raises(DoesNotFit):
        plan(demand(), Budget(needed - 2 * 2**20), 4096)
    with pytest.raises(DoesNotFit) as caught:
        plan(demand(), Budget(needed), 4096, 4096)
    shorter, most = caught.value.hint.split("; 4096 tokens take --ram ")
    assert shorter == "-c 128 fits" and plan(demand(), Budget(int(most.removesuffix("Mi")) << 20), 4096, 4096).ctx == 4096
    assert plan(demand(), Budget(needed), 4096, 256).ctx == 256, "to the last byte, which a program that is a little larger takes"
    assert plan(replace(demand(), baseline=80 * MB + 2**19), Budget(needed), 4096, 128).ctx == 128


def test_a_context_beyond_the_model_and_a_shortened_one_are_reported() -> None:
    assert any("beyond the 4096 tokens" in note for note in plan(demand(), Budget(600 * MB), 4096, 8192).notes)
    assert any("context 4096 of the model's 9000" in note for note in plan(demand(), Budget(600 * MB), 9000).notes)


def test_without_blocks_it_is_refused_as_before() -> None:
    from dataclasses import replace

    with pytest.raises(DoesNotFit, match="the budget is"):
        plan(replace(demand(), blocks=()), Budget(600 * MB), 4096)


@given(st.integers(150, 1500), st.integers(1, 4096) | st.none())
def test_the_budget_is_held(budget: int, ctx: int | None) -> None:
    try:
        placed = plan(demand(), Budget(budget * MB), 4096, ctx)
    except DoesNotFit:
        return
    assert placed.total_bytes <= budget * MB and (ctx is None or placed.ctx == ctx)


def test_the_embedding_alone_may_stay_on_the_disk() -> None:
    placed = plan(demand(), Budget(plan(demand(), Budget(3000 * MB), 4096, 512).total_bytes - 1), 4096, 512)
    assert placed.streamed_bytes == 0 and placed.notes[0].startswith("the embedding stays on disk")
