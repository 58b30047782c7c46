"""Tensors of a checkpoint that its config does not use are reported, and refused by --strict; known harmless ones are not."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import odd_model, options, run
from family_models import CASES
from safetensors.torch import load_file, save_file
from saved_models import saved

from effllm import UsageError
from effllm.runtime.prepare import EngineOptions, prepare

SAID = "not used, because config.json does not ask for it"
LAYER, SEEING = "model.layers.1.", {"vision_tower.patch.weight": np.ones((2, 2), np.float32)}


def notices(folder: Path) -> list[str]:
    prepared = prepare(folder, EngineOptions(device="cpu", ctx=64))
    prepared.store.close()
    return [line for line in prepared.notices if SAID in line]


def with_tensors(folder: Path, **more: np.ndarray) -> Path:
    return odd_model(folder, change=lambda tensors: tensors.update(more))


def of_family(model_type: str, folder: Path) -> Path:
    raw = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def fewer_layers(folder: Path) -> Path:
    raw = json.loads((odd_model(folder) / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


MEANT: dict[str, tuple[Callable[[Path], Path], str]] = {
    "more layers": (fewer_layers, f"'{LAYER}input_layernorm.weight' and 8 more"),
    "a bias": (lambda folder: with_tensors(folder, **{f"{LAYER}self_attn.q_proj.bias": np.ones(48, np.float32)}),
               f"'{LAYER}self_attn.q_proj.bias'"),
    "a norm": (lambda folder: with_tensors(folder, **{f"{LAYER}self_attn.q_norm.weight": np.ones(12, np.float32)}),
               f"'{LAYER}self_attn.q_norm.weight'"),
    "an encoder of images in a family that no model which takes images has": (
        lambda folder: of_family("helium", with_tensors(folder, **SEEING)), "'vision_tower.patch.weight'"),
}


@pytest.mark.parametrize("what", MEANT)
def test_what_the_config_does_not_ask_for_is_reported(what: str, tmp_path: Path) -> None:
    make, named = MEANT[what]
    folder = make(tmp_path / "model")
    assert notices(folder) == [f"{SAID}: {named}"]
    with pytest.raises(UsageError, match="--strict refuses"):
        prepare(folder, EngineOptions(device="cpu", ctx=64, strict=True))
    made, _ = run(folder, tmp_path / "made", options())
    assert not notices(made.folder)  # it is not there any more


@pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "self_attn.rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.k_scale",
                                  "self_attn.q_proj.input_scale"])
def test_what_changes_nothing_is_ignored(name: str, tmp_path: Path) -> None:
    folder = with_tensors(tmp_path / "model", **{LAYER + name: np.ones(4, np.float32)})
    assert not notices(folder)


def test_a_bias_of_zeros_adds_nothing(tmp_path: Path) -> None:
    """Some tools write one beside every matrix."""
    folder = with_tensors(tmp_path / "model", **{f"{LAYER}self_attn.q_proj.bias": np.zeros(48, np.float32)})
    assert not notices(folder)


def test_layers_of_multi_token_prediction_are_ignored(tmp_path: Path) -> None:
    """As many as the config says: one more does not belong to it."""
    saved(CASES["glm4_moe"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.{layer}.eh_proj.weight": torch.ones(4) for layer in (3, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    for count, left in ((0, ["'model.layers.3.eh_proj.weight' and 1 more"]), (1, ["'model.layers.4.eh_proj.weight'"]), (2, [])):
        (tmp_path / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": count}))
        assert [said.rpartition(": ")[2] for said in notices(tmp_path)] == left


def test_keys_and_values_of_layers_that_have_none_are_ignored(tmp_path: Path) -> None:
    """Gemma 4's checkpoints keep them, and its encoders."""
    saved(CASES["gemma4_text"], tmp_path)
    tensors, sight = load_file(tmp_path / "model.safetensors"), "model.embed_vision.embedding_projection.weight"
    kept = [f"model.layers.5.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    save_file(tensors | {name: torch.ones(4) for name in (*kept, sight)}, tmp_path / "model.safetensors")
    assert not notices(tmp_path)
    save_file(tensors | {"model.layers.6.self_attn.k_proj.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert len(notices(tmp_path)) == 1


@pytest.mark.parametrize("name", ["gemma3", "gemma4_unified", "phi3", "glm4", "gpt_oss", "qwen3_moe", "qwen2_moe", "glm4_moe", "opt"])
def test_no_model_has_tensors_that_are_not_used(name: str, tmp_path: Path) -> None:
    """An encoder of images, matrices that are stored as one, experts that are taken apart; nor has what is made of them."""
    saved(CASES[name], tmp_path / "model")
    assert not notices(tmp_path / "model")
    made, _ = run(tmp_path / "model", tmp_path / "made", options())
    assert not notices(made.folder)
