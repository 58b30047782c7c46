"""Messages where a GPU, or a GPU and memory, are too small for the request: following them leads to a valid plan."""

import re

import pytest

from effllm import DoesNotFit
from effllm.offload.demand import BlockBytes, Demand
from effllm.offload.notes import Fallback
from effllm.offload.placement import Budget, Placement
from effllm.offload.plan_gpu import plan_split
from effllm.offload.size import parse_size

MIB = 1 << 20
LAYERS, LAYER, OUTER, PER_TOKEN = 5, 45 * MIB, 49 * MIB, 2048


def asked(ram: int, vram: int, ctx: int | None = 1024, layers: int | None = None, streams: bool = True, device: str = "auto",
          beside: int = 0) -> Placement:
    """A plan for 5 layers of 45 MiB, in MiB of memory and of a GPU that takes `beside` of memory once it is used."""

    def host(above: int) -> Demand:
        left = LAYERS - above
        weights = (BlockBytes("outer", OUTER), *(BlockBytes(str(i), LAYER) for i in range(left)))
        cut = {"blocks": (LAYER // 2,) * (2 * left), "always_nbytes": OUTER} if streams and left else {}
        return Demand(100 * MIB, 10 * MIB, weights, PER_TOKEN * left, MIB * left, left, gpu_workspace=20 * MIB,
                      kv_layers=(PER_TOKEN,) * left, **cut)

    return plan_split(host, Budget(ram * MIB, vram * MIB), 8192, ctx, device, layers, None, None, beside * MIB)


def test_fewer_layers_fit_where_the_others_stream() -> None:
    with pytest.raises(DoesNotFit, match="of GPU memory") as refused:
        asked(224, 74, layers=2)
    assert refused.value.hint == "-ngl 1 fits"
    placed = asked(224, 74, layers=1)
    assert placed.devices.count("cuda") == 1 and placed.streamed_bytes > 0
    with pytest.raises(DoesNotFit) as refused:
        asked(300, 40, layers=2)
    assert refused.value.hint == "--device cpu fits" and asked(300, 40, device="cpu").streamed_bytes > 0


def test_a_shorter_context_that_is_named_is_planned() -> None:
    with pytest.raises(DoesNotFit) as refused:
        asked(290, 150, ctx=8192, layers=2)
    ctx = int(re.fullmatch(r"-c (\d+) fits", refused.value.hint)[1])
    assert asked(290, 150, ctx=ctx, layers=2).ctx == ctx
    with pytest.raises(DoesNotFit):
        asked(290, 150, ctx=ctx + 128, layers=2)


@pytest.mark.parametrize("streams", [False, True])
def test_both_budgets_are_named_where_both_are_too_small(streams: bool) -> None:
    with pytest.raises(DoesNotFit) as refused:
        asked(121, 52, layers=2, streams=streams)
    found = re.findall(r"--(v?ram) (\d+[A-Za-z]+)", refused.value.hint)
    assert sorted(name for name, _ in found) == ["ram", "vram"]
    enough = {name: parse_size(size) // MIB for name, size in found}
    assert asked(**enough, layers=2, streams=streams).devices.count("cuda") == 2
    for name, less in (("ram", 121), ("vram", 52)):
        with pytest.raises(DoesNotFit):
            asked(**{**enough, name: less}, layers=2, streams=streams)


# -- what a GPU takes of the host's memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ram,vram", ((420, 8192), (420, 20), (500, 8192), (500, 20)))
@pytest.mark.parametrize("streams", [False, True])
def test_a_gpu_that_is_merely_there_makes_no_run_fail(ram: int, vram: int, streams: bool) -> None:
    """The model takes 402 MiB of memory on the CPU; with a GPU its libraries take 448, used or not."""
    cpu, found = asked(ram, 0, device="cpu", streams=streams), asked(ram, vram, streams=streams, beside=448)
    assert found.devices == cpu.devices and found.total_bytes == cpu.total_bytes and found.baseline_bytes == cpu.baseline_bytes
    note = found.notes[-1]
    assert isinstance(note, Fallback) and "running on the CPU" in note
    assert ("no layer fits on the GPU" if vram == 20 else "libraries take 448.00 MiB of memory") in note


def test_a_gpu_that_is_used_is_paid_for() -> None:
    found = asked(800, 8192, beside=448)
    assert found.devices.count("cuda") == LAYERS and found.baseline_bytes == 548 * MIB
    assert 0 <= asked(800, 8192).total_bytes + -(-448 * MIB * 105 // 100) - found.total_bytes <= 1
    least = -(-found.total_bytes // MIB)
    assert "cuda" in asked(least, 8192, beside=448).devices and "cuda" not in asked(least - 1, 8192, beside=448).devices


def test_no_weights_are_read_from_the_disk_to_make_room_for_a_gpu() -> None:
    """One layer fits the GPU, which takes more memory than that."""
    assert asked(710, 80, beside=448).streamed_bytes == 0 and "cuda" not in asked(710, 80, beside=448).devices
    assert asked(710, 80, layers=1, beside=448).streamed_bytes > 0, "unless it was asked for"
    deep = {"ctx": 1 << 16, "beside": 64}
    with pytest.raises(DoesNotFit):
        asked(750, 512, device="cpu", **deep)
    assert asked(750, 512, **deep).streamed_bytes > 0, "or the CPU alone does not hold it"


@pytest.mark.parametrize("more", ({"layers": 3}, {"device": "cuda"}))
def test_the_cpu_is_named_where_it_would_do(more: dict[str, object]) -> None:
    with pytest.raises(DoesNotFit) as refused:
        asked(450, 8192, beside=448, **more)
    assert refused.value.hint.endswith(", or --device cpu") and asked(450, 8192, device="cpu", beside=448)
    enough = parse_size(re.search(r"--ram (\d+Mi)", refused.value.hint)[1]) // MIB
    assert "cuda" in asked(enough, 8192, beside=448, **more).devices
    with pytest.raises(DoesNotFit) as refused:
        asked(130, 8192, beside=448, **more)
    assert "--device cpu" not in refused.value.hint, "nor does that fit"


@pytest.mark.parametrize("vram", (20, 80, 8192))
def test_what_is_missing_is_what_the_cpu_lacks(vram: int) -> None:
    with pytest.raises(DoesNotFit) as refused:
        asked(170, vram, ctx=8192, beside=448)
    named = re.fullmatch(r"it takes --ram (\d+Mi), or a smaller model|-c (\d+) fits", refused.value.hint)
    ram, ctx = parse_size(named[1]) // MIB if named[1] else 170, int(named[2]) if named[2] else 8192
    assert ram < 400 and "cuda" not in asked(ram, vram, ctx=ctx, beside=448).devices
