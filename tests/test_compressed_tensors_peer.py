"""compressed-tensors folders against its own package, read by transformers: those we write, and those the package writes.

In processes of their own, because the package changes torch modules when it is imported. `make test-peers` installs it.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from gguf_samples import FABLE
from safetensors.numpy import load_file
from saved_models import saved
from test_compressed_tensors_families import CASES as FAMILIES
from test_compressed_tensors_families import logits

from effllm.runtime.conversion.compressed_tensors import export_compressed
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.source import open_store, open_weights

IDS = [0, 1, 17, 300, 2, 400]
# Loads a folder, lets the package unpack it at the first pass, and keeps logits and weights in float32.
READ = f"""
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.no_grad():
    kept = {{"logits": model(torch.tensor([{IDS}])).logits[0].clone()}}
kept |= {{name: value.clone() for name, value in model.state_dict().items() if name.endswith("proj.weight")}}
save_file({{name: value.float().contiguous() for name, value in kept.items()}}, sys.argv[2])
"""
# Loads a folder of any family and says what it missed or did not know; keeps the logits of tokens that small vocabularies have.
READ_ANY = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, output_loading_info=True)
assert not any(info.values()), info
with torch.no_grad():
    save_file({"logits": model.eval()(torch.tensor([[0, 1, 17, 200, 2, 40]])).logits[0].float().contiguous()}, sys.argv[2])
"""
# Writes a folder as the package does, with scales of the largest values.
WRITE = """
import sys, torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from transformers import AutoModelForCausalLM
source, out, written, kind, bits, strategy = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
weights = {"num_bits": int(bits), "type": kind, "symmetric": True, "strategy": strategy}
weights |= {"group": {"group_size": 64}, "block": {"block_structure": [64, 128]}}.get(strategy, {})
config = {"group_0": {"targets": ["Linear"], "weights": weights}}
apply_quantization_config(model, QuantizationConfig(config_groups=config, ignore=["lm_head"], format=written))
top = 2 ** (int(bits) - 1) - 1 if kind == "int" else 448
for module in model.modules():
    if hasattr(module, "weight_scale"):
        scale, weight = module.weight_scale, module.weight.detach()
        high, wide = (1, 1) if scale.dim() < 2 else scale.shape
        most = weight.abs().reshape(high, weight.shape[0] // high, wide, weight.shape[1] // wide).amax((1, 3))
        scale.data.copy_((most / top).reshape(scale.shape))
compressor = ModelCompressor.from_pretrained_model(model, quantization_format=written)
compressor.compress_model(model)
model.save_pretrained(out)
compressor.update_config(out)
"""
pytestmark = [pytest.mark.slow, pytest.mark.peer,
              pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="the compressed-tensors package is not installed")]


def child(code: str, *words: object) -> None:
    ran = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


def compared(folder: Path, out: Path) -> np.ndarray:
    """Holds our reading of a folder against theirs, weights to the last bit; returns their logits."""
    child(READ, folder, out)
    theirs = load_file(out)
    logits = theirs.pop("logits")
    assert len(theirs) == 42
    with open_store(folder, dequant_dtype="f32") as store:
        for name, values in theirs.items():
            np.testing.assert_array_equal(store.read(store.tensors[name]).view(np.float32).reshape(values.shape), values, err_msg=name)
    *_, engine = open_engine(folder, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=1, exact=True))
    assert isinstance(engine, Engine)
    ours = engine.forward_logits(IDS).copy()
    engine.close()
    assert np.abs(ours - logits).max() < 1e-3 * np.abs(logits).max()  # ours of what is widened are in half precision
    return logits


@pytest.mark.parametrize(("kind", "bound"), [("INT8", 0.02), ("INT4", 0.25)])
def test_transformers_reads_it(tmp_path: Path, kind: str, bound: float) -> None:
    """As we read it, and near the model that was exported."""
    list(export_compressed(FABLE, tmp_path / "out", kind))
    logits = compared(tmp_path / "out", tmp_path / "theirs")
    child(READ, FABLE, tmp_path / "source")
    source = load_file(tmp_path / "source")["logits"]
    assert np.abs(logits - source).max() < bound * np.abs(source).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_every_kind_of_family(name: str, tmp_path: Path) -> None:
    """Experts, joined matrices, a text model: nothing is missing, nothing is left over, and it computes what we compute."""
    saved(FAMILIES[name], tmp_path / "model")
    list(export_compressed(tmp_path / "model", tmp_path / "out", "INT4"))
    child(READ_ANY, tmp_path / "out", tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs")["logits"]
    assert np.abs(logits(tmp_path / "out") - theirs).max() < 0.02 * np.abs(theirs).max()


@pytest.mark.parametrize(("written", "kind", "bits", "strategy"), [
    ("int-quantized", "int", 8, "channel"), ("int-quantized", "int", 8, "group"), ("int-quantized", "int", 8, "tensor"),
    ("int-quantized", "int", 4, "group"), ("naive-quantized", "int", 8, "channel"), ("pack-quantized", "int", 4, "group"),
    ("float-quantized", "float", 8, "channel"), ("float-quantized", "float", 8, "tensor"),
    ("float-quantized", "float", 8, "block"), ("naive-quantized", "float", 8, "channel"),
])
def test_what_the_package_writes_is_read_as_it_reads_it(tmp_path: Path, written: str, kind: str, bits: int, strategy: str) -> None:
    child(WRITE, FABLE, tmp_path / "m", written, kind, bits, strategy)
    store, container = open_weights(tmp_path / "m")
    store.close()
    assert len(container.tensors) == 42  # they run from their own codes
    compared(tmp_path / "m", tmp_path / "theirs")
