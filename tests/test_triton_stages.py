"""A layer's operations other than products, one Triton kernel each, against torch's operations: on the GPU where there is one, otherwise in
Triton's interpreter."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from effllm.kernels.cuda.device import CudaDevice, SimulatedDevice
from effllm.kernels.cuda.kernel_choice import FEW_TOKENS
from effllm.kernels.cuda.pages import TorchLayerPages
from effllm.kernels.cuda.stages import ACTIVATE
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.layout import F16, F32, PageLayout
from effllm.quant.weight import Norm


def both() -> tuple[TorchOps, TorchOps]:
    """Kernels of ours, and torch's operations, on one kind of device."""
    pair = [TorchOps(CudaDevice() if torch.cuda.is_available() else SimulatedDevice(compiles=True)) for _ in range(2)]
    pair[1].kernel_choice.broken = "not asked"
    return tuple(pair)


def random(ops: TorchOps, *shape: int, seed: int = 0) -> torch.Tensor:
    return ops.from_host(np.random.default_rng(seed).standard_normal(shape, np.float32) * 3)


def close(found: torch.Tensor, wanted: torch.Tensor, ops: TorchOps) -> None:
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() <= 2e-6
    assert ops.kernel_choice.declined and not any(ops.kernel_choice.declined.values()) and not ops.kernel_choice.broken


@pytest.mark.parametrize("kind, with_bias, width", [("rms", False, 96), ("rms+1", False, 64), ("layer", True, 80), ("layer", False, 33)])
def test_norms(kind: str, with_bias: bool, width: int) -> None:
    ours, torchs = both()
    norm = Norm(kind, random(ours, width, seed=1), random(ours, width, seed=2) if with_bias else None)
    x = random(ours, 5, width) + 1
    close(ours.stages.normalise(x, norm), torchs.stages.normalise(x, norm), ours)


@pytest.mark.parametrize("act", ACTIVATE)
def test_gates(act: str) -> None:
    ours, torchs = both()
    gate, up = random(ours, 3, 700), random(ours, 3, 700, seed=1)
    found = gate.clone()
    assert ours.stages.gated(found, up, act) is found
    close(found, torchs.stages.gated(gate.clone(), up, act), ours)


@pytest.mark.parametrize("depth, turned", [(64, 64), (96, 96), (80, 20)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions(depth: int, turned: int, interleaved: bool) -> None:
    ours, torchs = both()
    y, cos, sin = random(ours, 3, 5 * depth), random(ours, 3, 1, turned // 2, seed=1), random(ours, 3, 1, turned // 2, seed=2)
    found = y.clone()
    assert ours.stages.rotated(found, 5, depth, cos, sin, interleaved) is found
    close(found, torchs.stages.rotated(y.clone(), 5, depth, cos, sin, interleaved), ours)


@pytest.mark.parametrize("layout, group, tokens, window, cap, with_sinks", [
    (PageLayout(1, 80, F32), 3, 3, 100, 50.0, True), pytest.param(PageLayout(2, 64, F16), 4, 1, None, None, False, marks=pytest.mark.slow),
    pytest.param(PageLayout(2, 128, F16), 8, 8, 100, None, True, marks=pytest.mark.slow),
    pytest.param(PageLayout(1, 80, F32), 3, 3, None, 50.0, True, marks=pytest.mark.slow),
    pytest.param(PageLayout(4, 32, F16), 1, 2, None, None, False, marks=pytest.mark.slow)])
def test_pages_are_written_and_read(layout: PageLayout, group: int, tokens: int, window: int | None, cap: float | None,
                                    with_sinks: bool) -> None:
    """Sealed ones and an open one, more than are merged at once; what does not fit a half saturates, and infinities stay."""
    ours, torchs = both()
    width, sealed = layout.kv_heads * layout.head_dim, 18
    pages = [ops.kv_layer(layout, np.zeros(2 * layout.layer_page_nbytes, np.uint8), np.zeros(sealed * layout.layer_page_nbytes, np.uint8),
                          layout.head_dim ** -0.5, window, cap) for ops in (ours, torchs)]
    for page in range(sealed + 1):
        count, slot = (128, 0) if page < sealed else (70, 1)
        k, v = random(ours, count, width, seed=page), random(ours, count, width, seed=100 + page)
        if page == sealed:
            k[5, 3], v[7, 1], k[6, 0], v[2, 2] = 1e6, -3e5, float("inf"), float("-inf")
        for own in pages:
            if page < sealed:
                own.write(k, v, np.full(count, slot, np.int64), np.arange(count))
                own.write_page(page, own.read_slot(0))
            else:
                fill(own, k, v, slot)
    assert np.array_equal(pages[0].read_slot(1), pages[1].read_slot(1))
    k[6, 0], v[2, 2] = 1.0, 1.0
    for own in pages:
        fill(own, k, v, 1)
    blocks = np.array([[1, page, 128 * page, 128] for page in range(sealed)] + [[0, 1, 128 * sealed, 70]], np.int64)
    q, sinks = random(ours, tokens, width * group, seed=50) / 9, random(ours, layout.kv_heads * group, seed=51) if with_sinks else None
    found, wanted = (own.attend(q, 128 * sealed + 70 - tokens, blocks, sinks) for own in pages)
    close(found, wanted, ours)
    assert {"write", "attend"} <= {kind[0] for kind in ours.kernel_choice.declined}


def fill(own: TorchLayerPages, k: torch.Tensor, v: torch.Tensor, slot: int) -> None:
    """In steps that a kernel is for."""
    for begin in range(0, len(k), FEW_TOKENS):
        some = slice(begin, begin + FEW_TOKENS)
        own.write(k[some], v[some], np.full(len(k[some]), slot, np.int64), np.arange(begin, begin + len(k[some])))
