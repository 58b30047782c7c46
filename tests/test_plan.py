"""The planner's arithmetic, its refusals with their figures, and sizes as users write them."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from effllm import DoesNotFit, MemoryTooSmall, UsageError
from effllm.offload.demand import BlockBytes, Demand
from effllm.offload.placement import Budget, Placement
from effllm.offload.plan import plan
from effllm.offload.size import format_size, parse_size

MB, GB = 10**6, 10**9


def demand(layers: int = 4, layer: int = 100 * MB, outer: int = 50 * MB, kv: int = 10_000, fixed: int = 0) -> Demand:
    weights = (BlockBytes("outer", outer), *(BlockBytes(str(i), layer) for i in range(layers)))
    return Demand(baseline=80 * MB, workspace=20 * MB, weights=weights, kv_bytes_per_token=kv, kv_fixed=fixed, layers=layers)


def test_the_sum() -> None:
    placed = plan(demand(fixed=7), Budget(GB), ctx_max=4096)
    assert placed.devices == ("cpu",) * 4
    assert (placed.ctx, placed.notes) == (4096, ())
    assert (placed.baseline_bytes, placed.workspace_bytes) == (80 * MB, 20 * MB)
    assert (placed.weights_bytes, placed.kv_bytes) == (450 * MB, 4096 * 10_000 + 7)
    parts = placed.baseline_bytes + placed.workspace_bytes + placed.weights_bytes + placed.kv_bytes
    assert parts * 105 <= placed.total_bytes * 100 < parts * 105 + 100
    assert placed.vram_bytes == 0


def test_the_last_byte_counts() -> None:
    need = plan(demand(), Budget(GB), ctx_max=4096).total_bytes
    assert plan(demand(), Budget(need), 4096, 4096).total_bytes == need
    with pytest.raises(DoesNotFit):
        plan(demand(), Budget(need - 1), 4096, 4096)
    assert plan(demand(), Budget(need - 1), 4096).ctx == 4096 - 128


def test_context_shrinks_to_the_budget_and_says_so() -> None:
    budget = Budget(plan(demand(), Budget(GB), 1024).total_bytes)
    placed = plan(demand(), budget, ctx_max=100_000)
    assert placed.ctx == 1024
    assert placed.notes == ("context 1024 of the model's 100000: the most that fits in the memory budget",)


def test_an_asked_context_is_kept_exactly_and_costs_whole_pages() -> None:
    placed = plan(demand(), Budget(GB), 4096, ctx_wanted=129)
    assert (placed.ctx, placed.kv_bytes, placed.notes) == (129, 256 * 10_000, ())


def test_a_context_beyond_the_model_is_announced() -> None:
    assert plan(demand(), Budget(GB), 512, ctx_wanted=1024).notes == (
        "a context of 1024 is beyond the 512 tokens that the model was trained for",
    )


def test_refusal_says_which_memory_is_too_small_and_what_would_do() -> None:
    """By its kind, which others act on; the words are for people."""
    with pytest.raises(MemoryTooSmall) as caught:
        plan(demand(), Budget(600 * MB), 4096, 4096)
    assert plan(demand(), Budget(caught.value.required_nbytes), 4096, 4096)
    assert plan(demand(), Budget(600 * MB), 4096, caught.value.fitting_ctx)
    with pytest.raises(DoesNotFit) as caught:
        plan(demand(), Budget(GB, 100 * MB), 4096, 4096, "cuda")
    assert not isinstance(caught.value, MemoryTooSmall)


def test_refusal_names_the_numbers_and_what_fits() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(demand(kv=1_000_000), Budget(GB), 4096, ctx_wanted=4096)
    assert caught.value.exit_code == 4
    assert caught.value.message == (
        "needs 4.54 GiB of memory (weights 429.15 MiB + KV cache 3.81 GiB for 4096 tokens + overhead 316.91 MiB), the budget is 953.67 MiB"
    )
    assert caught.value.hint == "-c 384 fits; 4096 tokens take --ram 4654Mi"
    assert plan(demand(kv=1_000_000), Budget(GB), 4096, ctx_wanted=384).total_bytes <= GB


def test_a_context_that_is_named_fits_a_program_that_is_a_little_larger_the_next_time() -> None:
    exact = plan(demand(), Budget(GB), 1024).total_bytes
    with pytest.raises(DoesNotFit) as caught:
        plan(demand(), Budget(exact), 4096, ctx_wanted=2048)
    assert caught.value.hint.startswith("-c 896 fits; 2048 tokens take --ram ")
    larger = replace(demand(), baseline=80 * MB + 2**19)
    assert plan(larger, Budget(exact), 4096, ctx_wanted=896).ctx == 896
    with pytest.raises(DoesNotFit):
        plan(larger, Budget(exact + 2**18), 4096, ctx_wanted=1024)


def test_refusal_where_nothing_fits_names_the_memory_it_takes() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(demand(), Budget(100 * MB), 4096)
    assert "the budget is 95.37 MiB" in caught.value.message
    size = caught.value.hint.split("--ram ")[1].split(",")[0]
    assert plan(demand(), Budget(parse_size(size)), 4096).ctx >= 128


# -- two devices ---------------------------------------------------------------------------------------------------------------


def test_everything_on_the_gpu() -> None:
    placed = plan(demand(), Budget(GB, GB), 4096, device="auto")
    assert placed.devices == ("cuda",) * 4
    assert placed.vram_bytes == (20 * MB + 400 * MB + 4096 * 10_000) * 105 // 100
    assert placed.total_bytes == (80 + 20 + 50) * MB * 105 // 100
    assert placed == plan(demand(), Budget(GB, GB), 4096, device="cuda")


def test_part_on_the_gpu() -> None:
    placed = plan(demand(), Budget(GB, 300 * MB), 4096, device="auto")
    assert placed.devices == ("cpu", "cpu", "cuda", "cuda")
    assert placed.notes == ("2 of 4 layers on the GPU, the rest on the CPU",)
    assert placed.vram_bytes <= 300 * MB < placed.vram_bytes + 100 * MB
    assert placed.weights_bytes == 450 * MB


def test_auto_on_a_gpu_too_small_for_one_layer_is_the_cpu() -> None:
    assert plan(demand(), Budget(GB, 60 * MB), 4096, device="auto").devices == ("cpu",) * 4


def test_auto_gives_up_context_before_it_gives_up() -> None:
    """Too little host memory for what the GPU leaves at a comfortable context: fewer tokens, more layers on the GPU."""
    placed = plan(demand(), Budget(200 * MB, 460 * MB), 8192)
    assert placed.devices == ("cuda",) * 4
    assert placed.ctx == 1792
    with pytest.raises(DoesNotFit):
        plan(demand(), Budget(200 * MB, 460 * MB), 8192, ctx_wanted=4096)


def test_layers_as_asked() -> None:
    assert plan(demand(), Budget(GB, GB), 4096, device="cuda", gpu_layers=1).devices == ("cpu", "cpu", "cpu", "cuda")
    assert plan(demand(), Budget(GB, GB), 4096, device="auto", gpu_layers=0).devices == ("cpu",) * 4
    assert plan(demand(), Budget(GB, GB), 4096, device="auto", gpu_layers=99).devices == ("cuda",) * 4
    assert plan(demand(), Budget(GB, GB), 4096, device="cpu").devices == ("cpu",) * 4


def test_card_too_small_for_what_was_asked() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(demand(), Budget(GB, 300 * MB), 4096, ctx_wanted=4096, device="cuda")
    assert "of GPU memory (weights 381.47 MiB" in caught.value.message
    assert caught.value.hint == "-ngl 2 fits"
    with pytest.raises(DoesNotFit) as caught:
        plan(demand(), Budget(GB, 30 * MB), 4096, device="cuda")
    assert caught.value.hint == "--device cpu fits"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"device": "tpu"}, "'tpu' is not a device"),
        ({"ctx_wanted": 0}, "a context of 0 tokens"),
        ({"ctx_wanted": -5}, "a context of -5 tokens"),
        ({"gpu_layers": -1}, "-ngl -1"),
        ({"gpu_layers": 2, "device": "cpu"}, "which --device cpu rules out"),
        ({"device": "cuda"}, "no GPU memory"),
        ({"gpu_layers": 2}, "no GPU memory"),
    ],
)
def test_contradictions(arguments: dict, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        plan(demand(), Budget(GB), 4096, **arguments)


def test_each_layer_has_its_block() -> None:
    with pytest.raises(ValueError, match="2 layers need one block"):
        Demand(0, 0, (BlockBytes("0", 1), BlockBytes("outer", 1)), 1, 0, layers=2)


SIZES = st.integers(0, 50_000)


@given(
    layers=st.integers(1, 6),
    numbers=st.tuples(SIZES, SIZES, SIZES, st.integers(0, 200), SIZES),
    budget=st.tuples(st.integers(0, 300_000), st.integers(0, 300_000)),
    ctx_max=st.integers(1, 3000),
)
def test_a_plan_is_kept_and_a_refusal_is_true(layers: int, numbers: tuple[int, ...], budget: tuple[int, int], ctx_max: int) -> None:
    """Any plan stays inside both budgets with every layer placed; a refused one does not fit the smallest context either."""
    outer, layer, base, kv, fixed = numbers
    wanted = Demand(base, 100, (BlockBytes("outer", outer), *(BlockBytes(str(i), layer) for i in range(layers))), kv, fixed, layers)
    ram, vram = budget
    try:
        placed: Placement | None = plan(wanted, Budget(ram, vram), ctx_max)
    except DoesNotFit:
        placed = None
    if placed:
        assert placed.total_bytes <= ram and placed.vram_bytes <= vram
        assert len(placed.devices) == layers and 1 <= placed.ctx <= ctx_max
        assert placed.weights_bytes == outer + layers * layer
        again = plan(wanted, Budget(ram, vram), ctx_max, ctx_wanted=placed.ctx, gpu_layers=placed.devices.count("cuda"))
        assert (again.devices, again.total_bytes, again.vram_bytes) == (placed.devices, placed.total_bytes, placed.vram_bytes)
        assume(placed.ctx + 128 <= ctx_max)
        with pytest.raises(DoesNotFit):
            plan(wanted, Budget(ram, vram), ctx_max, ctx_wanted=placed.ctx + 128, gpu_layers=placed.devices.count("cuda"))
    else:
        with pytest.raises(DoesNotFit):
            plan(wanted, Budget(ram, vram), ctx_max, ctx_wanted=1)


# -- sizes ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("6G", 6 * GB), ("512MiB", 512 << 20), ("16k", 16_000), ("16Ki", 16_384), ("1.5GB", 1_500_000_000), ("0.1G", 100_000_000),
     ("100", 100), ("100B", 100), ("2 GiB", 2 << 30), (" 3gib ", 3 << 30), ("1T", 10**12), ("1Ti", 1 << 40), ("0", 0)],
)  # fmt: skip
def test_parse_size(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "1e9", "nan", "inf", "6 G B", "6X", "1iB", "1..5G", ".5G", "٦G", "6G\n6G", "9" * 5000])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.exit_code == 2 and caught.value.hint
    assert len(caught.value.message) < 80


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1_320_702_444, "1.23 GiB"), ((1 << 30) - 1, "1.00 GiB"), (1 << 50, "1024.00 TiB")],
)
def test_format_size(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 1 << 49))
def test_a_printed_size_reads_back(nbytes: int) -> None:
    # Two decimals are half a percent at worst, and a fraction of a byte is dropped.
    assert abs(Fraction(parse_size(format_size(nbytes))) - nbytes) <= Fraction(nbytes, 200) + 1
