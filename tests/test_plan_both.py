"""What is said where a card, or a card and memory, are too small for what was asked: following it leads to a plan."""

import re

import pytest

from effllm import DoesNotFit
from effllm.offload.plan import BlockBytes, Budget, Demand, Placement
from effllm.offload.plan_gpu import plan_split
from effllm.offload.size import parse_size

MIB = 1 << 20
LAYERS, LAYER, OUTER, PER_TOKEN = 5, 45 * MIB, 49 * MIB, 2048


def asked(ram: int, vram: int, ctx: int | None = 1024, layers: int | None = None, streams: bool = True, device: str = "auto") -> Placement:
    """A plan for 5 layers of 45 MiB, in MiB of memory and of a card."""

    def host(above: int) -> Demand:
        left = LAYERS - above
        weights = (BlockBytes("outer", OUTER), *(BlockBytes(str(i), LAYER) for i in range(left)))
        cut = {"blocks": (LAYER // 2,) * (2 * left), "always": OUTER} if streams and left else {}
        return Demand(100 * MIB, 10 * MIB, weights, PER_TOKEN * left, MIB * left, left, card_workspace=20 * MIB,
                      kv_layers=(PER_TOKEN,) * left, **cut)

    return plan_split(host, Budget(ram * MIB, vram * MIB), 8192, ctx, device, layers, None)


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
