"""GGUF files of BitNet: ternary blocks, and keys particular to such files; the format of Microsoft's own files is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from bitnet_models import ONLINE, is_linear, ternary, write
from gguf.quants import quantize
from gguf_samples import write_model
from safetensors.torch import load_file, save_file

from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, EngineOptions, open_engine

CHANGES = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of floats that are ternary already, each matrix with its number."""
    found = tmp_path_factory.mktemp("model")
    write(found, "bitnet", ONLINE, dtype="float16", **CHANGES)
    tensors = load_file(found / "model.safetensors")
    for name, tensor in tensors.items():
        if is_linear(name):
            values, mean = ternary(tensor)
            tensors[name] = (values * mean).half()
    save_file(tensors, found / "model.safetensors", {"format": "pt"})
    raw = json.loads((found / "config.json").read_text())
    del raw["quantization_config"]
    (found / "config.json").write_text(json.dumps({**raw, "rope_theta": 500_000.0, "eos_token_id": None}))
    return found


def file_of(folder: Path, path: Path, kind: str, act: str | None = "relu2") -> dict[str, np.ndarray]:
    """What its weights mean."""
    def change(writer: gguf.GGUFWriter) -> None:
        if act is not None:
            writer.add_string("bitnet.hidden_activation", act)

    return write_model(folder, path, kind, "bitnet", change=change)


def scores(path: Path, ids: list[int]) -> np.ndarray:
    *_, engine = open_engine(path, EngineOptions(kv="32bit", device="cpu", ctx=256, strict=True))
    assert isinstance(engine, Engine)
    try:
        return np.concatenate([rows.copy() for _, rows in engine.score(ids)])
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_ternary_blocks_mean_what_the_folder_does(kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder that holds what the blocks mean: those of a matrix are its numbers, to the last bit of half precision."""
    monkeypatch.setattr("gguf_samples.quantize_blocks", lambda values, name: quantize(values, gguf.GGMLQuantizationType[name]))
    path, ids = tmp_path / "m.gguf", np.random.default_rng(1).integers(0, 4096, 40).tolist()
    meant = file_of(folder, path, kind)
    config = read_config(path, strict=True)
    assert (config.family, config.hidden_act, config.tie_word_embeddings, config.norm_eps) == ("bitnet", "relu2", True, pytest.approx(1e-5))
    before = load_file(folder / "model.safetensors")
    assert all(np.array_equal(meant[name], before[name].float().numpy()) for name in before if is_linear(name))
    held = tmp_path / "held"
    held.mkdir()
    save_file({name: torch.from_numpy(values.astype(np.float32)) for name, values in meant.items()}, held / "model.safetensors")
    (held / "config.json").write_text((folder / "config.json").read_text())
    want, got = scores(held, ids), scores(path, ids)
    assert np.abs(got - want).mean() < 0.02 * np.abs(want).max() and np.mean(got.argmax(-1) == want.argmax(-1)) > 0.7


def test_a_file_that_names_no_activation_means_silu(folder: Path, tmp_path: Path) -> None:
    file_of(folder, tmp_path / "m.gguf", "F16", None)
    assert read_config(tmp_path / "m.gguf").hidden_act == "silu"
    file_of(folder, tmp_path / "n.gguf", "F16", "gelu")
    with pytest.raises(CheckpointError, match="bitnet.hidden_activation .*gelu"):
        read_config(tmp_path / "n.gguf")


def test_scales_beside_matrices_are_refused(folder: Path, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q.scale", np.ones(1, np.float32))

    write_model(folder, tmp_path / "m.gguf", "F16", "bitnet", change=change)
    with pytest.raises(CheckpointError, match="blk.0.attn_q.scale"):
        read_config(tmp_path / "m.gguf")


def test_files_of_microsofts_program_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    file_of(folder, tmp_path / "m.gguf", "TQ2_0")
    raw = (tmp_path / "m.gguf").read_bytes()
    name = b"blk.0.attn_q.weight"
    at = raw.index(name) + len(name) + 4 + 16  # behind the rank and two dimensions
    assert int.from_bytes(raw[at : at + 4], "little") == 35
    (tmp_path / "i2_s.gguf").write_bytes(raw[:at] + (36).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(CheckpointError, match="i2_s") as found:
        read_config(tmp_path / "i2_s.gguf")
    assert "safetensors" in found.value.hint
    for architecture in ("bitnet-b1.58", "bitnet-25"):
        write_model(folder, tmp_path / f"{architecture}.gguf", "F16", architecture)
        with pytest.raises(CheckpointError, match="bitnet.cpp") as found:
            read_config(tmp_path / f"{architecture}.gguf")
        assert "safetensors" in found.value.hint
