"""Folders quantized by bitsandbytes: NF4 and FP4 with their codebooks, int8 rows. Its own package is compared in `make test-peers`."""

import json
import subprocess
import sys
from importlib.util import find_spec
from math import gcd, prod
from pathlib import Path

import numpy as np
import pytest
import torch
from bitsandbytes_checkpoints import as_bytes_by_row, as_levels
from family_models import Case
from gguf_samples import weights
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from saved_models import saved
from test_imported_malformed import BASE, DEPTHS, read

from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.quant.codes import dequantize
from effllm.quant.imports import bitsandbytes
from effllm.quant.imports.repack import put_bitsandbytes
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Weight
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Notice
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.pull.shard_disk_peak import weight_key
from effllm.runtime.source import open_store, open_weights
from effllm.runtime.stores.expected_formats import expected_formats
from effllm.runtime.stores.import_config import check_method
from effllm.runtime.stores.imported import ImportedStore

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
EIGHT = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
IDS = [3, 17, 5, 90, 4, 11]
NO_SUCH = 1 << 50


def kept(parts: dict[str, object]) -> dict[str, torch.Tensor]:
    return {key: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value)).contiguous()
            for key, value in parts.items()}


@given(st.integers(1, 40), st.integers(1, 150), st.sampled_from(["nf4", "fp4"]), st.booleans(), st.sampled_from([64, 128, 256]))
def test_what_is_decoded_is_what_the_format_says(rows: int, depth: int, kind: str, double: bool, block: int) -> None:
    """Blocks go on in the next row where inputs do not fill them. To the last bit."""
    values = np.random.default_rng(rows * depth).standard_normal((rows, depth)).astype(np.float32)
    parts, meant = as_levels(values, kind, double, block=block)
    parts = {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in parts.items()}
    said = bitsandbytes.parse_quant_state(parts[f"weight.quant_state.bitsandbytes__{kind}"])
    scales = bitsandbytes.magnitudes(said, parts["weight.absmax"], parts.get("weight.nested_quant_map"), parts.get("weight.nested_absmax"))
    found = bitsandbytes.dequantize(parts["weight"].reshape(-1), parts["weight.quant_map"], scales, said.block, said.shape)
    assert said.shape == (rows, depth) and found.dtype == np.float32
    np.testing.assert_array_equal(found, meant)


@pytest.mark.parametrize(("depth", "block"), [(96, 64), (96, 4096), (250, 64)])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_rows_that_no_block_begins_with_arrive_as_they_are_read(tmp_path: Path, depth: int, block: int, storage: torch.dtype) -> None:
    """More rows than a step makes; `bnb_4bit_quant_storage` lets codes bear the type of floats."""
    values = np.random.default_rng(1).standard_normal((6000, depth)).astype(np.float32)
    parts, meant = as_levels(values, "nf4", True, storage, block)
    save_file({BASE + key: value for key, value in kept(parts).items()}, tmp_path / "model.safetensors")
    with TensorStore.open(tmp_path) as files, ImportedStore(files, FOUR, "f32", input_widths={f"{BASE}weight": depth}) as store:
        info = store.tensors[f"{BASE}weight"]
        (piece,), out = store.repack_plan([info]).pieces(), np.zeros(info.nbytes, np.uint8)
        raws = [np.empty(own.nbytes, np.uint8) for own in piece.ranges]
        for own, raw in zip(piece.ranges, raws, strict=True):
            store.read_at(own.file, own.offset, memoryview(raw))
        piece.put(raws, [out])
        np.testing.assert_array_equal(out.view(np.float32).reshape(6000, depth), meant)
        np.testing.assert_array_equal(store.read(info, 77, 79).view(np.float32).reshape(2, depth), meant[77:79])


def rounded_parts(values: np.ndarray, kind: str, block: int) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]:
    """What `bitsandbytes.packable` takes, and what that means before it is rounded."""
    parts, meant = as_levels(values, kind, block=block)
    return (parts["weight"].numpy().reshape(-1), parts["weight.quant_map"], parts["weight.absmax"], block), meant


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(["nf4", "fp4"]), st.sampled_from([32, 64, 128, 4096]),
       st.integers(-30, 30), st.integers(0, 99))
def test_codes_stay_and_what_is_beside_them_is_rounded_by_little(rows: int, groups: int, kind: str, block: int, power: int,
                                                                 seed: int) -> None:
    """Of every weight at most half a whole level, and of its 256 inputs' largest magnitude what scales lose. Blocks may go on in the next
    row and be of very different sizes."""
    rng, shape = np.random.default_rng(seed), (rows, 16 * groups)
    values = (rng.standard_normal(shape) * np.exp2(rng.uniform(-9, 9, (rows, 1)) + power)).astype(np.float32)
    taken, meant = rounded_parts(values, kind, block)
    codes = bitsandbytes.packable(*taken, shape)
    pairs = np.stack([taken[0] >> 4, taken[0] & 15], axis=1).reshape(shape)
    np.testing.assert_array_equal(codes.codes, pairs)
    blob = np.zeros(bitsandbytes.SPEC.nbytes(shape), np.uint8)
    put_bitsandbytes(blob, shape, 0, *taken)
    found = Weight.low_bit(bitsandbytes.SPEC, shape, blob).to_f32()
    _, unit, most = bitsandbytes.integer_levels(taken[1])
    each = np.repeat(taken[2], block)[: meant.size].reshape(shape)
    padded = np.pad(each, ((0, 0), (0, -shape[1] % 256))).reshape(rows, -1, 256)
    largest = np.repeat(padded.max(2), 256, axis=1)[:, : shape[1]]
    scale = np.sqrt(256 / gcd(block, shape[1], 256)) / 2 / most + 2.0**-10  # beside it a half
    assert (np.abs(found - meant) <= 1.01 * (each * unit / 2 + largest * scale)).all()


@pytest.mark.parametrize(("kind", "share"), [("nf4", 0.006), ("fp4", 0.003)])
def test_what_rounding_adds_is_little_beside_the_format(kind: str, share: float) -> None:
    """Of its own squared error with normal weights."""
    values = np.random.default_rng(5).standard_normal((256, 1024)).astype(np.float32) / 50
    taken, meant = rounded_parts(values, kind, 64)
    found = dequantize(bitsandbytes.packable(*taken, values.shape), bitsandbytes.SPEC)
    added, own = np.square(found - meant).mean(), np.square(meant - values).mean()
    assert 0 < added < share * own


@pytest.mark.parametrize(("shape", "scales", "kept"), [
    ((64, 256), 256, True), ((64, 576), 576, True), ((64, 128), 128, True), ((64, 64), 64, False), ((64, 264), 264, False),
    ((64, 256), 4, True), ((64, 256), 700, False), ((64, 256), 0, False)])
def test_codes_run_where_they_are_the_smaller(shape: tuple[int, int], scales: int, kept: bool) -> None:
    """Than halves, inputs being padded to 256; not of blocks that the package does not make, nor of groups in part."""
    assert bitsandbytes.spec_of(shape, scales) == (bitsandbytes.SPEC if kept else None)


def test_levels_that_are_all_zero_or_large_beyond_measure() -> None:
    packed, scales = np.arange(128, dtype=np.uint8), np.full(4, 2.0, np.float32)
    none = bitsandbytes.packable(packed, np.zeros(16, np.float32), scales, 64, (1, 256))
    assert not dequantize(none, bitsandbytes.SPEC).any()
    with pytest.raises(ValueError, match="more than float32"):
        bitsandbytes.packable(packed, np.full(16, 3e38, np.float32), 1e3 * scales, 64, (1, 256))
    with pytest.raises(ValueError, match="end within"):
        bitsandbytes.packable(packed, np.ones(16, np.float32), np.ones(11, np.float32), 24, (1, 256))


def test_scales_of_rows_lose_what_half_precision_cannot_hold(tmp_path: Path) -> None:
    """At most half a unit in its last place, which is what every weight would lose if it were widened."""
    values = np.random.default_rng(3).standard_normal((192, 256)).astype(np.float32)
    parts, meant = as_bytes_by_row(values, exact=False)
    save_file({BASE + key: value for key, value in kept(parts).items()}, tmp_path / "model.safetensors")
    with TensorStore.open(tmp_path) as files, ImportedStore(files, EIGHT, "f16", True, input_widths=DEPTHS) as store:
        stored = store.container.tensors[f"{BASE}weight"]
        found = Weight.low_bit(stored.spec, stored.shape, store.read(store.tensors[f"{BASE}weight"])).to_f32()
    assert str(stored.spec) == "offset8:128"
    error = np.abs(found - meant) / np.where(meant == 0, 1, np.abs(meant))
    assert 0 < error.max() <= 2.0**-11 * 1.001


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A small mixture whose matrices are NF4 with codes as scales but for what a section leaves out, and what its tensors mean."""
    path = tmp_path_factory.mktemp("levels") / "m"
    saved(Case("phi3", {"intermediate_size": 96}), path)
    tensors, meant = {}, weights(path)
    for name, values in meant.items():
        if not name.endswith("_proj.weight") or "layers.1.mlp" in name:
            tensors[name] = torch.from_numpy(values)
            continue
        parts, meant[name] = as_levels(values, "nf4", True)
        tensors |= {name.removesuffix("weight") + key: value for key, value in kept(parts).items()}
    save_file(tensors, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    section = {**FOUR, "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]}
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": section}))
    return path, meant


def test_they_run_as_what_they_mean(folder: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Phi 3 reads rows of joined matrices; transformers computes the same from the weights that are meant."""
    from transformers import AutoModelForCausalLM

    path, meant = folder
    *events, engine = open_engine(path, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=1, exact=True))
    found = engine.forward_logits(IDS).copy()
    engine.close()
    said = [event.text for event in events if isinstance(event, Notice)]
    assert any("bitsandbytes weights are widened to f16" in text for text in said)
    assert any("repacked for the kernels, their levels and scales rounded to whole numbers," in text for text in said)
    with open_weights(path)[0] as store:
        low = {name: Weight.low_bit(own.spec, own.shape, store.read(store.tensors[name])).to_f32()
               for name, own in store.container.tensors.items()}
    assert set(low) == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 2)}
    raw, whole = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    whole = {name for name, values in whole.items() if values.is_floating_point()}
    plain = path.parent / "plain"
    plain.mkdir()
    halved = {name: torch.from_numpy(low.get(name, values)) if name in whole or name in low
              else torch.from_numpy(values).half().float() for name, values in meant.items()}
    save_file(halved, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key != "quantization_config"}))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_shapes_are_known_before_a_byte_is_here(folder: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    """A pull that quantizes plans from headers: the bytes behind them are a hole."""
    path, meant = folder
    whole = (path / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    (tmp_path / "model.safetensors").write_bytes(whole[:length] + bytes(len(whole) - length))
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    with open_store(tmp_path, dequant_dtype="f32", drop_tied=False) as store:
        assert {name: info.shape for name, info in store.tensors.items()} == {name: values.shape for name, values in meant.items()}
        with pytest.raises(CheckpointError, match="not JSON"):
            store.read(store.tensors["model.layers.0.mlp.down_proj.weight"])


def test_parts_of_a_weight_wait_for_one_another() -> None:
    base = "model.layers.0.mlp.up_proj"
    endings = ("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4", "SCB", "qweight")
    assert {weight_key(f"{base}.{ending}") for ending in endings} == {base}


def test_a_plan_expects_what_the_files_hold(folder: tuple[Path, dict[str, np.ndarray]]) -> None:
    from effllm.runtime import families

    path, _ = folder
    config, formats = read_config(path), expected_formats(json.loads((path / "config.json").read_text())["quantization_config"])
    rules = {f"{layer}.{role}": (role, rule) for layer in range(config.num_hidden_layers)
             for role, rule in families.get(config.family).layer_tensors(config, layer).items()}
    found = {name: formats(*each) for name, each in rules.items()}
    assert found["0.q"] == QuantSpec.raw("f16") and found["1.down"] is found["0.input_norm"] is None
    store, container = open_weights(path)
    store.close()
    stored = {name: own.spec for name, own in container.tensors.items()}
    assert stored == {rules[name][1].name: spec for name, spec in found.items() if spec == bitsandbytes.SPEC}
    expected = expected_formats(EIGHT)(*rules["0.o"])
    assert str(expected) == "offset8:64"


@pytest.mark.parametrize(("change", "named"), [
    ({"blocksize": 0}, "block sizes"), ({"shape": [192, 128]}, "[192, 128], expected [192, 256]"), ({"shape": 7}, "its shape"),
    ({"nested_offset": float("nan")}, "mean of its scales"), ({"nested_offset": 10**400}, "mean of its scales"),
    ({"blocksize": 128}, "768 scales"), ({"nested_blocksize": NO_SUCH}, "block sizes"), ({"nested_blocksize": 128}, "768 scales")])
def test_what_a_weight_says_of_itself_is_checked(tmp_path: Path, change: dict[str, object], named: str) -> None:
    values = np.random.default_rng(4).standard_normal((192, 256)).astype(np.float32)
    parts = kept(as_levels(values, "nf4", True)[0])
    key = "weight.quant_state.bitsandbytes__nf4"
    parts[key] = torch.frombuffer(bytearray(json.dumps(json.loads(bytes(parts[key].tolist())) | change).encode()), dtype=torch.uint8)
    from test_imported import CASES

    assert CASES["nf4"][0]["load_in_4bit"] and prod(values.shape) == 64 * 768
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, "nf4", parts, False)
    assert named in caught.value.message and "up_proj" in caught.value.message


def test_bytes_in_the_order_of_a_gpu_are_refused(tmp_path: Path) -> None:
    parts = kept(as_bytes_by_row(np.ones((192, 256), np.float32))[0])
    for low_bit in (False, True):
        with pytest.raises(CheckpointError, match="order of a GPU"):
            read(tmp_path, "bytes by row", parts | {"weight_format": torch.tensor(2, dtype=torch.uint8)}, low_bit)


def test_either_way_is_a_method() -> None:
    check_method(FOUR)
    check_method(EIGHT)


# Quantizes a folder as the package does, and keeps what its own functions make of each weight.
WRITE = """
import sys, torch
from bitsandbytes import functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
source, out, meant, kind, double = sys.argv[1:]
config = BitsAndBytesConfig(load_in_8bit=True) if kind == "int8" else BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double == "1", bnb_4bit_compute_dtype=torch.float32)
model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.float32, device_map="cpu").eval()
model.save_pretrained(out)
kept = {}
for name, module in model.named_modules():
    weight = getattr(module, "weight", None)
    if getattr(weight, "quant_state", None) is not None:
        kept[name + ".weight"] = F.dequantize_4bit(weight.data, weight.quant_state).float().contiguous()
    elif type(module).__name__ == "Linear8bitLt":
        kept[name + ".weight"] = F.int8_vectorwise_dequant(module.weight.data, module.weight.SCB).float().contiguous()
save_file(kept, meant)
"""


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="the bitsandbytes package is not installed")
@pytest.mark.parametrize(("kind", "double"), [("nf4", "0"), ("nf4", "1"), ("fp4", "1"), ("int8", "0")])
def test_folders_of_the_package_mean_what_it_says(tmp_path: Path, kind: str, double: str) -> None:
    saved(Case("llama", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}), tmp_path / "source")
    words = tmp_path / "source", tmp_path / "m", tmp_path / "meant", kind, double
    ran = subprocess.run([sys.executable, "-P", "-c", WRITE, *map(str, words)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    meant = load_file(tmp_path / "meant")
    with open_store(tmp_path / "m", dequant_dtype="f32") as store:
        assert len(meant) >= 7
        for name, values in meant.items():
            found = store.read(store.tensors[name]).view(np.float32).reshape(values.shape)
            if kind == "int8":  # the package multiplies by a 127th, we divide
                np.testing.assert_allclose(found, values.numpy(), rtol=3e-7)
            else:
                np.testing.assert_array_equal(found, values.numpy(), err_msg=name)
    store, container = open_weights(tmp_path / "m")
    with store:
        assert {name: own.spec.scheme for name, own in container.tensors.items()} == dict.fromkeys(
            meant, "offset" if kind == "int8" else "table")
        for name, own in container.tensors.items():
            found = Weight.low_bit(own.spec, own.shape, store.read(store.tensors[name])).to_f32()
            assert np.square(found - meant[name].numpy()).mean() < 2e-4 * np.square(meant[name].numpy()).mean()  # NF4's own is 9e-3
    *_, engine = open_engine(tmp_path / "m", EngineOptions(device="cpu", ctx=64, threads=1))
    assert np.isfinite(engine.forward_logits(IDS)).all()
    engine.close()
