"""Checkpoints whose tensors are named, fused or widened differently from their family's: the same logits as transformers."""

from pathlib import Path

import pytest
import torch
from conversions import options, run
from family_models import CASES, Case, assert_close, assert_logits_match, oracle, text, written
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_models import saved
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from effllm import UsageError
from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.source import check_mapping, open_store


@pytest.mark.parametrize("name", ["mixtral", "granitemoe", "qwen2_moe", "ernie4_5_moe", "qwen3_moe, bfloat16", "lfm2_moe", "minimax_m2",
                                  "deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in (
                                      "glm4_moe", "qwen3_moe, some layers dense", "olmoe", "exaone_moe", "deepseek_v2", "glm4_moe_lite"))])
def test_experts_that_are_stored_together(name: str, tmp_path: Path) -> None:
    model = written(CASES[name], tmp_path / "apart")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "apart", dtype="auto")
    stored.save_pretrained(tmp_path / "joint", save_original_format=False)
    with safe_open(tmp_path / "joint" / "model.safetensors", "np") as file:
        assert any(each.endswith(".experts.gate_up_proj") for each in file.keys())
    contents = {}
    for folder in ("apart", "joint"):
        with open_store(tmp_path / folder) as store:
            contents[folder] = {name: (info.shape, store.read(info).tobytes()) for name, info in store.tensors.items()}
    assert contents["joint"] == contents["apart"]
    ids = text(model, 150)
    assert_logits_match(tmp_path / "joint", model, ids)
    made, said = run(tmp_path / "joint", tmp_path / "low", options("8bit"))
    corrections = sum(own.numel() for name, own in model.named_buffers() if name.endswith(("correction_bias", "expert_bias")))
    assert made.weights == model.num_parameters() + corrections and not any("left out" in line for line in said)


@pytest.mark.parametrize("shape", [(5, 64), (5, 175, 64), (5, 0, 64), (70_000, 2, 1)])
def test_experts_together_in_no_form_that_there_is(shape: tuple[int, ...], tmp_path: Path) -> None:
    saved(CASES["mixtral"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(shape)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="mlp.experts.gate_up_proj"):
        open_store(tmp_path)


@pytest.mark.parametrize("case", [CASES["qwen3"], CASES["opt"], Case("phi3", {"tie_word_embeddings": True}),
                                  Case("gemma3_text", {"head_dim": 16}, images=True), Case("gemma3_text", {"head_dim": 16})],
                         ids=lambda case: case.family + ", images" * case.images)
def test_a_model_that_was_saved_without_its_head(case: Case, tmp_path: Path) -> None:
    model = written(case, tmp_path)
    model.model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text((tmp_path / "config.json").read_text())
    with safe_open(tmp_path / "base" / "model.safetensors", "np") as file:
        assert not any(each.startswith("model.") for each in file.keys())
    kind = AutoModelForImageTextToText if case.images else AutoModelForCausalLM
    ids = text(model, 150)
    again = kind.from_pretrained(tmp_path / "base", attn_implementation="eager").eval()
    assert_close(oracle(again, ids), oracle(model, ids))
    assert_logits_match(tmp_path / "base", again, ids)


def test_weights_in_double_precision_are_rounded(tmp_path: Path) -> None:
    """Of all or of some tensors; what a checkpoint of 32 bits holds, to the last bit."""
    model = written(CASES["llama, biases"], tmp_path / "wide")
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    doubled = {name: value.double() * (1 + 1e-12) for name, value in tensors.items() if "layers.1" not in name}
    save_file(tensors | doubled, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    with open_store(tmp_path / "wide") as store:
        assert f"{len(doubled)} tensors of 64 bits are rounded" in store.notices[0]
        for name, value in tensors.items():
            assert store.read(store.tensors[name], 1, 7).tobytes() == value[1:7].numpy().tobytes()
    ids = text(model, 150)
    assert_logits_match(tmp_path / "wide", model, ids)
    made, _ = run(tmp_path / "wide", tmp_path / "low", options("8bit"))
    save_file(tensors, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    same, _ = run(tmp_path / "wide", tmp_path / "same", options("8bit"))
    for path in made.folder.glob("*.safetensors"):
        assert path.read_bytes() == (same.folder / path.name).read_bytes()


def test_weights_in_double_precision_are_not_mapped(tmp_path: Path) -> None:
    saved(CASES["llama, float16"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    check_mapping(tmp_path)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].double()}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="mmap"):
        check_mapping(tmp_path)
