"""GGUF files of gpt-oss: experts in MXFP4 are kept as published, in files we write and read, in memory and streamed from disk."""

import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from export_models import exported, model, scores
from safetensors.torch import load_file, save_file
from test_mxfp4 import packed_model
from test_paged_models import paged, resident

from effllm import EffllmError
from effllm.quant.imports.gguf import quantize
from effllm.runtime.config import read_config
from effllm.runtime.events import Notice
from effllm.runtime.gguf.export import export_gguf

TOKENIZER = {"tokenizer.ggml.model": "no_vocab"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("oss") / "source"
    packed_model(made)
    return made


def packed(folder: Path, out: Path, kind: str = "Q8_0") -> list[str]:
    """What is said while the file is made."""
    return [event.text for event in export_gguf(folder, out, kind, "a name", tokenizer=TOKENIZER) if isinstance(event, Notice)]


def test_experts_stay_what_they_are(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    experts, rounded = packed(folder, path)
    assert experts == "experts stay in MXFP4, as they were published" and rounded.startswith("llama.cpp rounds the YaRN boundaries")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert {kind for name, kind in kinds.items() if re.search(r"ffn_\w+_exps\.weight", name)} == {"MXFP4"}
    assert {kinds[name] for name in ("blk.0.ffn_up_exps.bias", "blk.0.attn_sinks.weight", "blk.0.ffn_gate_inp.bias")} == {"F32"}
    assert kinds["blk.0.attn_q.weight"] == "Q8_0"
    ours, theirs = read_config(path, strict=True), read_config(folder)
    for field in ("ropes", "windows", "moe", "hidden_act", "o_bias", "qkv_bias", "head_dim"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert np.array_equal(paged(path, 12), resident(path))


def test_the_same_model_runs_from_either(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "half"
    shutil.copytree(folder, source)
    for file in source.glob("*.safetensors"):  # so that 16 bits round nothing
        save_file({name: each.half() if each.is_floating_point() else each for name, each in load_file(file).items()}, file)
    packed(source, tmp_path / "m.gguf", "F16")
    ids = np.random.default_rng(3).integers(0, read_config(folder).vocab_size, 60).tolist()
    expected = scores(source, ids)
    assert np.abs(scores(tmp_path / "m.gguf", ids) - expected).max() < 2e-4 * np.abs(expected).max()


def test_codes_of_eight_values_and_more_are_exact() -> None:
    """Of every power, and whatever levels a block has of those there are."""
    rng = np.random.default_rng(1)
    blocks = np.concatenate([rng.integers(0, 250, (4000, 1), np.uint8), rng.integers(0, 256, (4000, 16), np.uint8)], 1)
    blocks[:300, 1:] &= 0x99  # of a half, and of one
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    again = gguf.quants.dequantize(quantize(values, "MXFP4"), gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(again, values) and np.isfinite(values).all()


def test_a_model_without_windows_or_biases(tmp_path: Path) -> None:
    source = model("gpt_oss", tmp_path / "source", attention_bias=False)
    with pytest.raises(EffllmError, match="has no biases"):
        exported(source, tmp_path / "m.gguf")
    source = model("gpt_oss", tmp_path / "other", layer_types=["full_attention"] * 4)
    with pytest.raises(EffllmError, match="every 2th layer"):
        exported(source, tmp_path / "m.gguf")
