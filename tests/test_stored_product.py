"""Fused dequantize-and-multiply kernels in Triton: run on the GPU where there is one, otherwise in Triton's interpreter, and compiled for a
GPU."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from conversions import options, run
from family_models import Case
from gpu_runs import divergence, logits, opened, simulated
from low_bit_samples import FORMATS, WITH_OUTLIERS, low_bit, random_codes, seed_of
from saved_models import saved

from effllm.kernels.cuda import matmul, triton_matmul
from effllm.kernels.cuda.device import CudaDevice, SimulatedDevice
from effllm.kernels.cuda.low_bit import Format
from effllm.kernels.cuda.low_bit import dequantize as opened_by_torch
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Linear, Norm, Weight

ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SOME = ("codebook4:16", "affine5:64", "symmetric8:128", "ternary:32", "block4:32", "mxfp4:32", "offset8:32", "super5:32",
        "signed6:16", "nibble2:16", "table4:16", "float8:128", "nvfp4:16", "minimum5:32", "codebook2:16+0.05")
TURNS = {"even": 2048, "a part of the last turn": 2304, "long": 4352}
AT_ONCE = (("affine3:128+0.02", "a part of the last turn"), ("codebook3:16", "long"))
TYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
EVERY = [pytest.param(each, marks=() if each in SOME else pytest.mark.slow) for each in (*FORMATS, *WITH_OUTLIERS)]


def sample(text: str, rows: int, inputs: int) -> tuple[Weight, Format]:
    spec = QuantSpec.parse(text)
    weight = low_bit(random_codes(np.random.default_rng(seed_of(text)), spec, (rows, inputs)), spec)
    return weight, Format(spec.bits, spec.group, spec.scheme, weight.shape, spec.sections(weight.shape))


def guarded(blob: np.ndarray) -> torch.Tensor:
    """The same bytes, with no memory behind them: a read beyond ends the process."""
    if ON.type == "cuda":
        return torch.from_numpy(blob.copy()).to(ON)
    end = -(-blob.size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, end + mmap.PAGESIZE), np.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + end), mmap.PAGESIZE, 0) == 0
    own = memory[end - blob.size : end]
    own[:] = blob
    return torch.from_numpy(own)


@pytest.mark.parametrize("text", EVERY)
def test_weights_are_opened_to_the_same_bits_and_multiplied(text: str) -> None:
    rng, (weight, form) = np.random.default_rng(1), sample(text, 37, 150)
    blob, bias = guarded(weight.parts["data"]), torch.from_numpy(rng.standard_normal(37, np.float32)).to(ON)
    assert torch.equal(triton_matmul.dequantize(blob, form, 1, 3), opened_by_torch(blob, form, 1, 3))
    for tokens, added in ((1, None), (3, bias)):
        x = torch.from_numpy(rng.standard_normal((tokens, 150), np.float32)).to(ON)
        want = x.double() @ torch.from_numpy(weight.to_f32()).to(ON).double().T + (0 if added is None else added)
        assert (triton_matmul.low_bit_matmul(x, blob, form, added) - want).abs().max() <= 2e-6 * max(1, want.abs().max())


@pytest.mark.parametrize("text, inputs", [pytest.param(text, inputs, id=f"{said}-{text}",
                                                       marks=() if (text, said) in AT_ONCE else pytest.mark.slow)
                                          for text in ("codebook4:16", "super4:32", "affine3:128+0.02", "codebook3:16")
                                          for said, inputs in TURNS.items()])
def test_rows_of_several_turns(text: str, inputs: int) -> None:
    """What is read ahead is what comes next, and nothing counts twice; products are added to what is there."""
    rng, (weight, form) = np.random.default_rng(2), sample(text, 32, inputs)
    assert inputs // 32 >= triton_matmul.TILES_OF_WARP * triton_matmul.WARPS
    blob, weight = guarded(weight.parts["data"]), torch.from_numpy(weight.to_f32()).to(ON).double()
    for tokens in (1, 2):
        x, there = (torch.from_numpy(rng.standard_normal((tokens, each), np.float32)).to(ON) for each in (inputs, 32))
        product = x.double() @ weight.T
        assert (triton_matmul.low_bit_matmul(x, blob, form, None) - product).abs().max() <= 2e-6 * product.abs().max()
        want, into = there + 0.5 * product, there.clone()
        assert triton_matmul.low_bit_matmul(x, blob, form, None, into, 0.5) is into
        assert (into - want).abs().max() <= 2e-6 * product.abs().max()


@pytest.mark.parametrize("stored", TYPES)
def test_sixteen_bit_weights_are_multiplied(stored: str) -> None:
    rng = np.random.default_rng(2)
    for tokens, rows, inputs in ((1, 20, 600), (5, 9, 40), (2, 8, 512)):
        x, bias = (torch.from_numpy(rng.standard_normal(shape, np.float32)).to(ON) for shape in ((tokens, inputs), rows))
        weight = torch.from_numpy(rng.standard_normal((rows, inputs), np.float32)).to(ON, TYPES[stored])
        for added in (None, bias):
            want = x.double() @ weight.double().T + (0 if added is None else added)
            assert (triton_matmul.half_matmul(x, weight, added) - want).abs().max() <= 2e-6 * want.abs().max()
            found = triton_matmul.half_matmul(x, weight, added, torch.ones_like(want, dtype=torch.float32), -2.0)
            assert (found - (1 - 2 * want)).abs().max() <= 4e-6 * want.abs().max()


@pytest.mark.skipif(ON.type == "cuda", reason="what a simulated card has is on the CPU, and Triton compiles here")
@pytest.mark.parametrize("made", ["wide", *(pytest.param(made, marks=pytest.mark.slow) for made in ("4bit", "3bit"))])
def test_a_model_is_multiplied_by_them(made: str, tmp_path: Path) -> None:
    """All of its layers, passes that are run again among them."""
    folder = tmp_path / "wide"
    saved(Case("llama", {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 1}, dtype="bfloat16"), folder)
    if made != "wide":
        run(tmp_path / "wide", folder := tmp_path / made, options(made))
    card = SimulatedDevice(link=1.0, compiles=True)
    engine, _ = opened(folder, card)
    several, own, one = opened(folder, simulated())[0], engine.backends["cuda"].products, engine.backends["cuda"].kernel_choice
    found, want = (logits(each, 12, 9) for each in (engine, several))
    assert divergence(found, want) < 1e-9 and not np.array_equal(found, want)
    assert {known[-1] for known in own.kinds} == ({1} if made == "wide" else {1, 16})
    assert {"norm", "gate", "rope", "write", "attend"} < {kind[0] for kind in one.declined} and not any(one.declined.values())
    assert not own.is_slow and engine.announcements() == []


def failing(error: Exception) -> object:
    def fails(*of: object) -> torch.Tensor:
        raise error

    return fails


@pytest.mark.parametrize("kernel, said", [
    (lambda *of: torch.ones(len(of[0]), 48, device=ON),
     "the GPU multiplies codebook-4 weights with several kernels each: the results of the single kernel differ"),
    (lambda *of: torch.full((len(of[0]), 48), torch.nan, device=ON),
     "the GPU multiplies codebook-4 weights with several kernels each: the results of the single kernel differ"),
    (failing(subprocess.CalledProcessError(1, ["gcc"])),
     "the GPU runs the stages of a layer with several kernels each: Triton cannot compile here: it needs a C compiler, Python's headers "
     "and a cache folder"),
    (failing(ImportError("triton")),
     "the GPU runs the stages of a layer with several kernels each: Triton is not installed (pip install 'effllm[cuda]')"),
    (failing(torch.OutOfMemoryError("none left")), None)])
def test_kernels_that_fail_or_err_are_not_taken_and_told_once(kernel: object, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_kernels", lambda: SimpleNamespace(low_bit_matmul=kernel))
    ops, linear, wide = placed("4bit", 48, 64)
    for tokens in (1, 2, 3, 1):
        x = np.random.default_rng(3).standard_normal((tokens, 64), np.float32)
        found = ops.to_host(ops.norm_linear(ops.from_host(x), Norm("none"), [linear])[0])
        np.testing.assert_allclose(found, x @ wide.T, rtol=1e-4, atol=1e-5)
    assert ops.announcements() == ([] if said is None else [said]) and ops.announcements() == []
    assert ops.products.is_slow == (said is not None)


@pytest.mark.parametrize("text", ["4bit", "3bit", "affine3:64+0.02"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_single_kernels_are_used(text: str, tokens: int) -> None:
    """An error in calling them would be taken for that of a compiler, and the ops of torch would answer in silence."""
    ops, linear, wide = placed(text, 48, 64)
    x = np.random.default_rng(3).standard_normal((tokens, 64), np.float32)
    found = ops.to_host(ops.norm_linear(ops.from_host(x), Norm("none"), [linear])[0])
    np.testing.assert_allclose(found, x @ wide.T, rtol=1e-4, atol=1e-5)
    assert ops.kernel_choice.broken == "" and set(ops.kernel_choice.declined.values()) == {""}


def test_a_kernel_that_fails_later_leaves_its_products_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shape is compiled anew, when the disk may be full."""
    ops, linear, wide = placed("4bit", 48, 64)
    x = np.random.default_rng(3).standard_normal((1, 64), np.float32)

    def product() -> np.ndarray:
        return ops.to_host(ops.norm_linear(ops.from_host(x), Norm("none"), [linear])[0])

    first = product()
    assert np.array_equal(first, product()) and not ops.products.is_slow, "the first one is the kernel's too"
    monkeypatch.setattr(matmul, "_kernels", lambda: SimpleNamespace(low_bit_matmul=failing(RuntimeError("no space left"))))
    np.testing.assert_allclose(product(), x @ wide.T, rtol=1e-4, atol=1e-5)
    assert ops.announcements() == ["the GPU runs the stages of a layer with several kernels each: no space left"]


def placed(text: str, rows: int, inputs: int) -> tuple[TorchOps, Linear, np.ndarray]:
    ops, (weight, _) = TorchOps(CudaDevice() if ON.type == "cuda" else SimulatedDevice(compiles=True)), sample(text, rows, inputs)
    there = {"data": ops.put(weight.parts["data"], weight.spec.scheme)}
    return ops, Linear(Weight(weight.spec, weight.shape, there), None), weight.to_f32()


@pytest.mark.slow
@pytest.mark.parametrize("capability, texts", [("90", ("codebook4:16",)), ("90", ("affine3:64+0.02",)), ("80", (*FORMATS, *WITH_OUTLIERS))])
def test_kernels_compile_for_a_gpu(capability: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    """What the interpreter runs is not all that the compiler takes; neither needs a GPU."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    program = Path(__file__).with_name("compiled_triton_kernels.py")
    done = subprocess.run([sys.executable, str(program), capability, *texts], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 2 * len(texts)
