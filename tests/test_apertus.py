"""Apertus: its activation with parameters per layer, on both backends and in files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from config_samples import LLAMA, refused
from conversions import options, run
from export_models import exported, model, scores
from family_models import CASES
from gguf_samples import Reader
from safetensors.torch import load_file, save_file
from saved_models import saved
from transformers import Apertus1p5Config

from effllm import EffllmError
from effllm.kernels import reference
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.registry import Call
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.offload.checkpoint import TensorStore
from effllm.quant.weight import Linear, Norm, Weight, XieluParams
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.config_rope import RopeConfig
from effllm.runtime.conversion.compressed_tensors import export_compressed
from effllm.runtime.families import get
from effllm.runtime.gguf import apertus
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.stores.unused_tensors import unused_tensors
from effllm.runtime.tensors import check_tensors

OWN = XieluParams(0.83, 1.27)
EXTREMES = (0.0, -0.0, 1e-7, -1e-7, -1e-6, -2e-6, 1e-3, -1e-3, -0.349, -0.35, -0.351, -1.0, -5.0, -80.0, -1e4, 3.0, 1e4)
PUBLISHED = {  # 8B
    "architectures": ["ApertusForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 68,
    "hidden_act": "xielu", "initializer_range": 0.02, "max_position_embeddings": 65_536, "mlp_bias": False, "model_type": "apertus",
    "pad_token_id": 3, "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-5, "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
        "type": "llama3"}, "rope_theta": 12_000_000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True}


def test_the_definition_by_hand() -> None:
    x = np.array([2.0, -1.0, 0.0])
    assert np.allclose(reference.curved(x, 0.5, 2.0), [0.5 * 2 + 0.5 * 4, -0.5 + 2 * np.exp(-1), 2 * np.expm1(-1e-6)])


@pytest.mark.parametrize("workers", (1, 2))
def test_kernels_compute_the_definition(workers: int) -> None:
    """To the last bits of float32, near zero too, where exponentials alone would leave nothing."""
    pool = ThreadPool(workers)
    ops, slow = (CpuOps(pool, Dims(64, 1, 1, 32, 4096, 11, 256, 512, 1), registry)
                 for registry in (default_registry(), default_registry("reference")))
    rng = np.random.default_rng(0)
    for rows in (1, 3, 70):
        values = rng.standard_normal((rows, 513), np.float32) * np.float32(10.0) ** rng.integers(-6, 2, (rows, 513)).astype(np.float32)
        values[0, : len(EXTREMES)] = EXTREMES
        expected = reference.curved(values, OWN.alpha_p, OWN.alpha_n)
        for each in (ops, slow):
            y = each.workspace.take("gate", *values.shape)
            y[:] = values
            each.registry.select(Call("curve")).candidate.run(each, y, OWN)
            each.flush()
            assert (np.abs(y - expected) <= 2e-6 * np.abs(expected) + 2e-7 * np.minimum(np.abs(values), 1)).all()
    pool.close()


def test_both_backends_run_the_mlp() -> None:
    rng, pool = np.random.default_rng(3), ThreadPool(1)
    ops, other = CpuOps(pool, Dims(64, 1, 1, 32, 96, 11, 64, 512, 1)), TorchOps("cpu")
    up, down = (rng.standard_normal(shape, np.float32) / 8 for shape in ((96, 64), (64, 96)))
    x, ones = rng.standard_normal((5, 64), np.float32), np.ones(64, np.float32)
    norm, seen = Norm("rms", ones), []
    inside = reference.curved(reference.normalise(x, "rms", ones, None, norm.eps) @ up.T, OWN.alpha_p, OWN.alpha_n)
    expected = x + inside @ down.T
    linears = [Linear(Weight.raw("f32", each.shape, each)) for each in (up, down)]
    ours = ops.mlp(ops.from_host(x), norm, *linears, "none", seen.append, xielu=OWN)
    ops.flush()
    most = 5e-6 * np.abs(expected).max()
    assert np.abs(ours - expected).max() < most and np.abs(seen[0] - inside).max() < most
    own = [each.weight for each in linears]
    placed = [Linear(Weight(each.spec, each.shape, {"data": other.put(each.parts["data"], "f32")})) for each in own]
    theirs = other.mlp(torch.from_numpy(x.copy()), Norm("rms", torch.from_numpy(ones)), *placed, "none", xielu=OWN)
    assert np.abs(theirs.numpy() - expected).max() < most
    pool.close()


# ---- configs and folders


def test_the_published_config_is_known_to_the_last_key() -> None:
    config = parse_config({**LLAMA, **PUBLISHED}, strict=True)
    assert config.hidden_act == "xielu" and config.qk_norm and config.activation_params == () and config.rope.kind == "llama3"
    silent = {key: value for key, value in {**LLAMA, **PUBLISHED}.items() if not key.startswith("rope_")}
    assert parse_config(silent, strict=True).ropes == config.ropes, "as transformers takes for granted"
    assert parse_config({**silent, "rope_theta": 12_000_000}, strict=True).ropes == config.ropes
    plain = parse_config({**silent, "rope_parameters": {"rope_type": "default"}}, strict=True)
    assert plain.rope == RopeConfig(12_000_000.0, "default", {})


def test_a_theta_without_a_section_is_refused() -> None:
    """transformers stretches and turns by what it takes for granted then, whatever the theta is."""
    silent = {key: value for key, value in {**LLAMA, **PUBLISHED}.items() if not key.startswith("rope_")}
    refused({**silent, "rope_theta": 5e5}, "rope_theta")


@pytest.mark.parametrize(("key", "value"), [
    ("hidden_act", "silu"), ("sliding_window", 40), ("mlp_bias", True), ("xielu_alpha_p", [1.0] * 3), ("xielu_alpha_n", [1.0] * 4),
    ("xielu_alpha_p", [1.0, 2.0, 3.0, float("nan")])])
def test_what_is_not_supported_is_named(key: str, value: object) -> None:
    refused({**LLAMA, **PUBLISHED, key: value}, "xielu_alpha" if key == "xielu_alpha_n" else key)


def test_numbers_that_every_curve_has_are_looked_into(tmp_path: Path) -> None:
    """Others than the usual ones would mean another activation."""
    model("apertus", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    for name, value, left in (("beta", 0.5, ()), ("beta", 0.75, ("model.layers.1.mlp.act_fn.beta",)),
            ("eps", -1e-3, ("model.layers.1.mlp.act_fn.eps",))):
        changed = {**tensors, f"model.layers.1.mlp.act_fn.{name}": torch.tensor(value, dtype=torch.bfloat16)}
        save_file(changed, tmp_path / "model.safetensors")
        with TensorStore.open(tmp_path) as store:
            read = [tensor.info for roles in check_tensors(config, store).values() for tensor in roles.values()]
            assert unused_tensors(config, store, read) == left


def test_a_quantized_folder_keeps_its_curves(tmp_path: Path) -> None:
    source = model("apertus", tmp_path / "source")
    run(source, tmp_path / "out", options("8bit"))
    ids = list(range(5, 90))
    expected, got = scores(source, ids), scores(tmp_path / "out", ids)
    assert 0 < np.square(got - expected).mean() < 1e-2 * np.square(expected).mean()


# ---- Apertus 1.5: tokens of images and audio are read and never generated


def later(**text: object) -> dict[str, object]:
    """A config as transformers writes it."""
    return json.loads(Apertus1p5Config(text_config={"output_vocab_size": 131_272, **text}).to_json_string())


def test_the_head_of_a_later_model_has_no_rows_for_images_and_audio() -> None:
    config = parse_config(later(), strict=True)
    assert (config.family, config.vocab_size, config.extra_embeddings, config.tie_word_embeddings) == (
        "apertus", 131_272, 266_752 - 131_272, False)
    rules = get("apertus").outer_tensors(config)
    assert rules["embed"].shape == (266_752, 4096) and rules["head"].shape == (131_272, 4096)
    silent = parse_config({"model_type": "apertus1p5", "text_config": {"model_type": "apertus1p5_text", "output_vocab_size": 131_272}})
    assert replace(silent, dtype=config.dtype, warnings=config.warnings) == config, "as transformers takes for granted"
    assert parse_config(later(output_vocab_size=None), strict=True).extra_embeddings == 0
    raw = later()
    refused({**raw, "text_config": {**raw["text_config"], "output_vocab_size": 266_753}}, "output_vocab_size")
    refused({**later(), "tie_word_embeddings": True}, "output_vocab_size")


def test_a_later_model_is_quantized_but_not_exported_without_a_whole_head(tmp_path: Path) -> None:
    saved(CASES["apertus1p5"], tmp_path / "source")
    run(tmp_path / "source", tmp_path / "8bit", options("8bit"))
    ids = list(range(220, 300))  # those of images and audio too
    expected, got = scores(tmp_path / "source", ids), scores(tmp_path / "8bit", ids)
    assert expected.shape[-1] == 260 and 0 < np.square(got - expected).mean() < 1e-2 * np.square(expected).mean()
    with pytest.raises(EffllmError, match="fewer rows than its embedding"):
        list(export_gguf(tmp_path / "source", tmp_path / "m.gguf", "F16", "m"))
    with pytest.raises(EffllmError, match="as many rows in the head"):
        list(export_compressed(tmp_path / "source", tmp_path / "out", "INT8"))


# ---- GGUF files


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict], object]) -> None:
    real = apertus.export_keys

    def stated(config: object) -> dict:
        keys = real(config)
        change(keys)
        return keys

    monkeypatch.setattr(apertus, "export_keys", stated)


@pytest.mark.parametrize(("change", "said"), [
    (lambda keys: keys.pop("xielu.alpha_p"), "xielu.alpha_p that is not a number for each of 3 layers"),
    (lambda keys: keys.update({"xielu.alpha_n": np.zeros(2, np.float32)}), "xielu.alpha_n that is not a number for each"),
    (lambda keys: keys.update({"xielu.alpha_n": np.full(3, np.inf, np.float32)}), "xielu.alpha_n that is not a number for each"),
    (lambda keys: keys.update({"xielu.beta": np.array([0.5, 0.5, 0.6], np.float32)}), "xielu.beta that is not 0.5 in every layer"),
    (lambda keys: keys.update({"xielu.eps": "small"}), "xielu.eps that is not a number for each")])
def test_damaged_lists_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable, said: str) -> None:
    changed(monkeypatch, change)
    path = exported(model("apertus", tmp_path / "source"), tmp_path / "m.gguf")
    with pytest.raises(EffllmError, match=said):
        read_config(path)


def test_a_file_states_its_curves_and_becomes_a_folder(tmp_path: Path) -> None:
    source = model("apertus", tmp_path / "source")
    path = exported(source, tmp_path / "m.gguf")
    fields, tensors = Reader(path).fields, load_file(source / "model.safetensors")
    for end in ("alpha_p", "alpha_n"):
        own = [float(tensors[f"model.layers.{layer}.mlp.act_fn.{end}"][0]) for layer in range(3)]
        assert np.allclose(fields[f"xielu.{end}"].contents(), own, rtol=1e-6)
    config = read_config(path, strict=True)
    assert len(config.activation_params) == 3 and config.warnings == ()
    run(path, tmp_path / "folder", options("8bit"))
    raw = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert parse_config(raw, strict=True).activation_params == config.activation_params
    ids = list(range(5, 60))
    assert np.square(scores(tmp_path / "folder", ids) - scores(path, ids)).mean() < 1e-2 * np.square(scores(path, ids)).mean()
