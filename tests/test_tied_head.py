"""Models with tied embeddings in their config: the stored tensors decide, as in transformers, for runs and for conversions."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import CASES, Case, assert_logits_match, oracle, our_logits, text, written
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from saved_models import saved
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from effllm.runtime import convert as convert_module
from effllm.runtime.conversion.compressed_tensors import export_compressed
from effllm.runtime.conversion.convert_plan import plan_conversion
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.library.verify import Verified, verify
from effllm.runtime.source import open_store
from effllm.runtime.stores.container import read_container

IDS = 150


def assert_alike(ours: np.ndarray, expected: np.ndarray) -> None:
    """As weights of fewer bits make them; another head makes logits that have nothing in common."""
    assert np.linalg.norm(ours - expected) <= 0.1 * np.linalg.norm(expected)


def with_head(folder: Path, name: str = "lm_head.weight", like: float = 0.0) -> None:
    """Store a head beside the embedding: another one, or with `like` 1 the same once more."""
    tensors = load_file(folder / "model.safetensors")
    table = next(value for key, value in tensors.items() if key.endswith("embed_tokens.weight"))
    torch.manual_seed(7)
    tensors[name] = like * table + (1 - like) * (0.2 * torch.randn_like(table))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reread(folder: Path, images: bool = False) -> PreTrainedModel:
    kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", ["llama, tied, one KV head", "qwen3", "opt", "gemma3", "gpt_oss, bfloat16"])
def test_a_head_that_is_stored_is_used(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ids, tied = text(model := written(case, tmp_path), IDS), oracle(model, text(model, IDS))
    with_head(tmp_path)
    untied = reread(tmp_path, case.images)
    assert np.abs(oracle(untied, ids) - tied).max() > 0.1  # transformers does not tie them
    assert_logits_match(tmp_path, untied, ids)
    with open_store(tmp_path) as store:
        assert "lm_head.weight" in store.tensors and "another matrix: it is used" in store.notices[-1]


def test_a_head_that_is_the_embedding_again_stays_tied(tmp_path: Path) -> None:
    model = written(CASES["qwen3"], tmp_path)
    with_head(tmp_path, like=1.0)
    with open_store(tmp_path) as store:
        assert "lm_head.weight" not in store.tensors and store.nbytes == sum(info.nbytes for info in store.tensors.values())
        assert not store.notices
    ids = text(model, IDS)
    assert_logits_match(tmp_path, model, ids)
    # One value at the end makes it another matrix, in a file that was seen before.
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with open_store(tmp_path) as store:
        assert "lm_head.weight" in store.tensors


def test_what_is_made_of_a_model_has_its_head(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    saved(Case("llama", {"tie_word_embeddings": True, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}), folder)
    with_head(folder)
    model = reread(folder)
    ids = text(model, IDS)
    expected = oracle(model, ids)
    made, said = run(folder, tmp_path / "low", options("8bit"))
    assert not any("left out" in line for line in said)
    assert_alike(our_logits(made.folder, ids), expected)
    *_, file = export_gguf(folder, tmp_path / "model.gguf", "F16", "model", tokenizer={})
    assert_alike(our_logits(file.path, ids), expected)
    *_, compressed = export_compressed(folder, tmp_path / "words", "INT8")
    raw = json.loads((compressed.folder / "config.json").read_text())
    assert raw["tie_word_embeddings"] is False
    with safe_open(compressed.folder / "model.safetensors", "np") as tensors:
        assert "lm_head.weight" in tensors.keys()
    assert_alike(our_logits(compressed.folder, ids), expected)


def test_a_head_is_kept_while_nobody_can_tell(tmp_path: Path) -> None:
    """Of weights that are still missing both look the same."""
    saved(CASES["qwen3"], tmp_path)
    with_head(tmp_path, like=1.0)
    for whole, roles in ((True, {"embed"}), (False, {"embed", "head"})):
        with (plan := plan_conversion(tmp_path, options().recipe, whole=whole)).store:
            assert {job.role for job in plan.jobs} & {"embed", "head"} == roles


def test_what_was_kept_so_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was quantized while its weights came holds the table twice; a run needs it once."""
    model = written(CASES["qwen3"], tmp_path / "model")
    with_head(tmp_path / "model", like=1.0)
    monkeypatch.setattr(convert_module, "plan_conversion", partial(plan_conversion, whole=False))
    made, _ = run(tmp_path / "model", tmp_path / "low", options("8bit"))
    assert "lm_head.weight" in read_container(made.folder).tensors
    *_, verified = verify(made.folder)
    assert isinstance(verified, Verified) and not verified.damaged
    with open_store(made.folder) as store:
        assert "lm_head.weight" not in store.tensors and not store.notices
    ids = text(model, IDS)
    assert_alike(our_logits(made.folder, ids), oracle(model, ids))


@pytest.mark.parametrize("name", ["llama, float16", "opt", "gemma2"])
def test_an_embedding_that_is_stored_as_the_head_is_found(name: str, tmp_path: Path) -> None:
    """safetensors keeps the first name of tensors that share their memory."""
    model = written(CASES[name], tmp_path)
    save_model(model, str(tmp_path / "model.safetensors"))
    with safe_open(tmp_path / "model.safetensors", "np") as tensors:
        assert "lm_head.weight" in tensors.keys() and not any("embed_tokens" in each for each in tensors.keys())
    ids = text(model, IDS)
    assert_logits_match(tmp_path, model, ids)
    made, _ = run(tmp_path, tmp_path / "low", options("8bit"))
    assert_alike(our_logits(made.folder, ids), oracle(model, ids))
