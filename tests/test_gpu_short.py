"""A GPU with too little memory, or requested where there is none: what a run does, and what the user is told."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from conversions import FABLE
from gpu_runs import logits, opened, simulated, typed
from test_gpu_tier import planned

from effllm import DoesNotFit, UsageError
from effllm.kernels.cuda import device
from effllm.kernels.cuda.device import CudaDevice, SimulatedDevice
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.offload.plan_gpu import CopiedLayers
from effllm.offload.size import format_size
from effllm.runtime.planning import devices
from effllm.runtime.planning.process_memory import program_of
from effllm.runtime.prepare import EngineOptions

LINK = 2e9


def test_a_gpu_that_is_nearly_full_is_left_alone() -> None:
    """Nothing asked for it: the CPU answers, with a notice; the transfer rate is not measured, which would take GPU memory."""
    card = simulated(16 << 20, LINK)
    code, out, err = typed("run", FABLE, "Once", "-n", 4, "--seed", 1, card=card)
    assert code == 0 and out and "no layer fits on the GPU: one takes" in err and "running on the CPU" in err and card.peak == 0


class Costly(SimulatedDevice):
    """Its libraries take host memory once it is used."""

    host_nbytes = 448 << 20


@pytest.mark.parametrize("vram", (16 << 20, 8 << 30))
def test_memory_of_libraries_that_are_not_loaded_is_not_planned(vram: int) -> None:
    cpu = planned(FABLE, None, device="cpu").placement
    ram = str(cpu.total_bytes + (64 << 20))
    found = planned(FABLE, Costly(vram), ram=ram)
    assert "cuda" not in found.placement.devices and found.placement.baseline_bytes < cpu.baseline_bytes + (16 << 20)
    assert any("running on the CPU" in line for line in found.notices)
    with pytest.raises(DoesNotFit) as refused:
        planned(FABLE, Costly(8 << 30), ram=ram, gpu_layers=3)
    assert refused.value.hint.endswith("--device cpu")
    used = planned(FABLE, Costly(8 << 30), gpu_layers=3)
    more = used.placement.baseline_bytes - planned(FABLE, simulated(8 << 30), gpu_layers=3).placement.baseline_bytes
    assert abs(more - Costly.host_nbytes) < 16 << 20
    assert program_of(used).nbytes < used.placement.baseline_bytes - (440 << 20), "what it is compared with pays for itself"


def test_no_room_to_measure_is_no_room_for_copies() -> None:
    card = simulated(1 << 30, LINK)
    placed = planned(FABLE, card, gpu_layers=1)
    assert placed.placement.copied_from is not None and card.peak == 32 << 20
    card.allocated = card.memory - placed.placement.vram_bytes
    card.link_rate = lambda: card.take(card.memory)
    assert planned(FABLE, card, gpu_layers=1).placement.copied_from is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB."),
                                   RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")])
def test_running_out_of_the_gpus_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(TorchOps, "_linear", fails)
    code, _, err = typed("run", FABLE, "Once", "-n", 4, "-ngl", 3, card=simulated(8 << 30))
    assert code == 4 and "the GPU ran out of memory during a pass" in err and "fewer layers with -ngl" in err


def test_other_errors_of_torch_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), TorchOps("cpu").within_memory("none left"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


class Unpinned(SimulatedDevice):
    """The system pins no memory."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")


def test_without_pinned_memory_layers_are_computed_where_they_lie() -> None:
    engine, said = opened(FABLE, Unpinned(8 << 30, LINK), gpu_layers=1)
    assert engine.placement.copied_from is not None and engine.model.copied_from is None
    assert any("not copied to the GPU but computed where they lie" in line for line in said)
    assert (logits(engine) == logits(opened(FABLE, simulated(8 << 30), gpu_layers=1)[0])).all()
    with pytest.raises(UsageError, match="computed where they lie"):
        opened(FABLE, Unpinned(8 << 30, LINK), gpu_layers=1, strict=True)


def test_a_request_that_comes_to_nothing_is_said() -> None:
    code, out, err = typed("plan", FABLE, "--no-probe", "-c", 512, "--vram", "60Mi", card=simulated(8 << 30))
    said = out + err
    assert code == 0 and "no layer fits on the GPU: one takes" in said and "60.00 MiB may be used" in said
    assert typed("plan", FABLE, "--no-probe", "-c", 512, "--vram", "60Mi", "--strict", card=simulated(8 << 30))[0] == 2
    code, out, err = typed("plan", FABLE, "--no-probe", "-c", 512, "--vram", "20G", card=simulated(8 << 30))
    assert code == 0 and "--vram 20G: the GPU has 8.00 GiB free, using that" in out + err


def test_what_one_layer_takes_is_enough_for_one() -> None:
    one = planned(FABLE, simulated(8 << 30), gpu_layers=1).placement.vram_bytes
    assert planned(FABLE, simulated(8 << 30), vram=str(one)).placement.devices.count("cuda") == 1
    (line,) = [line for line in planned(FABLE, simulated(8 << 30), vram=str(one - 1)).notices if "no layer fits" in line]
    assert f"one takes {format_size(one)}, cache and workspace included" in line


@pytest.mark.parametrize("words", [("--device", "cuda"), ("--vram", "1G")])
def test_no_layers_beside_a_gpu_that_is_asked_for(words: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = typed("plan", FABLE, "--no-probe", "-ngl", 0, *words, card=simulated(8 << 30))
    assert code == 2 and f"-ngl 0 rules out the GPU that {' '.join(words)} asks for" in err
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settings = tmp_path / "effllm" / "config.toml"
    settings.parent.mkdir()
    settings.write_text('vram = "1G"\n' if words[0] == "--vram" else 'device = "cuda"\n')
    for asked, status in (((), 0), (("-ngl", 0), 0), (("-ngl", 0, *words), 2), (("--device", "auto"), 0)):
        card = simulated(8 << 30)
        assert typed("plan", FABLE, "--no-probe", *asked, card=card)[0] == status
    settings.write_text(settings.read_text() + "gpu-layers = 0\n")
    assert typed("plan", FABLE, "--no-probe", card=simulated(8 << 30))[0] == 2, "the file is read"


def test_no_answer_copies_layers_by_an_assumed_rate() -> None:
    """A processor that nobody measured may read its memory faster than the way to the GPU is."""
    fast = planned(FABLE, simulated(8 << 30, 25e9), gpu_layers=1)
    assert fast.placement.copied_from == 2 and not any("1 tokens" in line for line in fast.notices)
    assert any("passes of 2 tokens or more copy" in line for line in fast.notices)
    measured = CopiedLayers(1 << 20, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "copied", lambda *_: measured)
        assert any(line.startswith("all passes copy") for line in planned(FABLE, simulated(8 << 30), gpu_layers=1).notices)


def test_a_full_gpu_refuses_what_was_asked() -> None:
    with pytest.raises(DoesNotFit, match="of GPU memory"):
        planned(FABLE, simulated(16 << 20), gpu_layers=2)


@pytest.mark.parametrize("error, reason", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nmore"), "other programs are using the GPU's memory"),
    (RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore"),
     "CUDA error: no kernel image is available for execution on the device")])
def test_a_gpu_that_is_there_and_cannot_be_used_is_reported_with_its_reason(
        error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", fails)
    monkeypatch.setattr(devices, "DRIVER", Path("/dev/null"))
    notices: list[str] = []
    assert devices.gpu(EngineOptions(), notices) is None
    assert notices == [f"a GPU is here and cannot be used: running on the CPU ({reason})"]
    with pytest.raises(UsageError, match=f"--device cuda: {reason}"):
        devices.gpu(EngineOptions(device="cuda"), notices)


def test_what_bits_depend_on_is_known_of_builds_that_name_triton_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    assert CudaDevice().kind.startswith(f"a card {torch.__version__} ")
    monkeypatch.setattr(device, "version", unknown)
    assert CudaDevice().kind in (f"a card {torch.__version__} {found}" for found in (True, False))
