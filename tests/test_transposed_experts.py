"""Experts stored transposed (Qwen 3 VL's mixtures): each matrix accessed separately, paged and quantized like any other."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import CASES, assert_logits_match, our_logits, text, written
from safetensors.torch import load_file, save_file
from saved_models import saved
from test_paged_models import paged, resident
from transformers import AutoModelForImageTextToText

from effllm import EffllmError
from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.source import check_mapping, open_store

NAME = "qwen3_vl_moe"
JOINT = "model.language_model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As these models are published, which is not how a new one is saved."""
    made = tmp_path_factory.mktemp("turned") / "model"
    saved(CASES[NAME], made)
    path = made / "model.safetensors"
    save_file({name: value.transpose(1, 2).contiguous() if ".experts." in name else value for name, value in load_file(path).items()},
              path, {"format": "pt"})
    return made


def test_each_matrix_is_what_lies_in_the_tensor(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    gate_up, down = (stored[f"{JOINT}{part}_proj"].numpy() for part in ("gate_up", "down"))
    assert gate_up.shape == (12, 64, 80) and down.shape == (12, 40, 64), "inputs before outputs"
    with open_store(folder) as store:
        for expert in (0, 7, 11):
            parts = {"gate": gate_up[expert, :, :40].T, "up": gate_up[expert, :, 40:].T, "down": down[expert].T}
            for part, expected in parts.items():
                info = store.tensors[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"]
                assert info.shape == expected.shape and store.place(info) is None and store.stored_nbytes(info) == info.nbytes
                for begin, end in ((0, len(expected)), (3, 4), (5, 5)):
                    np.testing.assert_array_equal(store.read(info, begin, end).view(np.float32).reshape(-1, expected.shape[1]),
                                                  expected[begin:end])
                whole = np.empty(info.nbytes, np.uint8)
                calls = list(store.reads(info, whole))
                assert sum(nbytes for _, nbytes in calls) == info.nbytes
                for call, _ in calls:
                    call()
                np.testing.assert_array_equal(whole.view(np.float32).reshape(expected.shape), expected)
    with pytest.raises(EffllmError, match="mmap"):
        check_mapping(folder)


def test_they_come_from_the_disk_one_by_one(folder: Path) -> None:
    assert np.array_equal(paged(folder, 20), resident(folder))


def test_quantized_they_lie_like_any_others(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "4bit", options("4bit"))
    assert np.array_equal(paged(tmp_path / "4bit", 20), resident(tmp_path / "4bit"))


def test_those_that_lie_as_usual_stay_as_they_are(folder: Path, tmp_path: Path) -> None:
    model = written(CASES[NAME], tmp_path / "other")
    ids = text(model, 100)
    np.testing.assert_array_equal(our_logits(tmp_path / "other", ids), our_logits(folder, ids))
    assert_logits_match(folder, AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval(), ids)


def test_what_is_no_tensor_of_experts_is_refused(tmp_path: Path) -> None:
    saved(CASES[NAME], tmp_path / "flat")
    path = tmp_path / "flat" / "model.safetensors"
    stored = load_file(path)
    save_file({**stored, f"{JOINT}down_proj": stored[f"{JOINT}down_proj"].reshape(-1, 64)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts.down_proj' as F32 \[480, 64\]"):
        open_store(tmp_path / "flat")


@pytest.mark.parametrize("codes", [True, False])
def test_experts_together_in_a_quantized_checkpoint_are_refused(folder: Path, tmp_path: Path, codes: bool) -> None:
    """Whatever their own type is: what would scale them is not read."""
    path = tmp_path / "fp8"
    path.mkdir()
    stored = load_file(folder / "model.safetensors")
    save_file({name: value.to(torch.float8_e4m3fn) if codes and ".experts." in name else value for name, value in stored.items()},
              path / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    (path / "config.json").write_text(json.dumps({**raw, "quantization_config": section}))
    with pytest.raises(CheckpointError, match="the experts of a layer in one tensor, beside quantized weights") as caught:
        open_store(path)
    assert "16-bit" in caught.value.hint
