"""GPT-2 folders: transposed matrices, under the tensor names of the first checkpoints and of later ones."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import Case, our_logits, text, written
from safetensors.torch import load_file, save_file
from saved_models import saved

from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.config import read_config
from effllm.runtime.source import open_store
from effllm.runtime.tensors import check_tensors

TINY = Case("gpt2", {"eos_token_id": 7, "bos_token_id": 7})


def test_the_first_ones_have_no_prefix_and_hold_their_masks(tmp_path: Path) -> None:
    """scored() opens it with strict: a tensor that nobody asks for would be an error."""
    model = written(TINY, tmp_path)
    ids = text(model, 70)
    expected, tensors = our_logits(tmp_path, ids), load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert "h.0.attn.c_attn.weight" in tensors and "wte.weight" in tensors
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)},
              tmp_path / "model.safetensors")
    assert np.array_equal(our_logits(tmp_path, ids), expected)


def test_rows_of_a_matrix_are_columns_of_what_is_stored(tmp_path: Path) -> None:
    saved(TINY, tmp_path)
    stored, config = load_file(tmp_path / "model.safetensors"), read_config(tmp_path)
    with open_store(tmp_path) as store:
        found = check_tensors(config, store)[1]
        for role, first in (("q", 0), ("k", 64), ("v", 128)):
            whole = stored["transformer.h.1.attn.c_attn.weight"][:, first : first + 64].T.contiguous()
            for begin, end in ((0, 64), (3, 5), (63, 64)):
                rows = store.read(found[role].info, begin, end).view(np.float32).reshape(-1, 64)
                assert np.array_equal(rows, whole[begin:end].numpy()), role
            bias = stored["transformer.h.1.attn.c_attn.bias"][first : first + 64]
            assert np.array_equal(store.read(found[f"{role}_bias"].info).view(np.float32), bias.numpy())


def test_what_is_made_of_one_lies_as_any_other(tmp_path: Path) -> None:
    model = written(TINY, tmp_path / "model")
    run(tmp_path / "model", tmp_path / "out", options("8bit"))
    ids = text(model, 40)
    expected = our_logits(tmp_path / "model", ids)
    assert np.abs(our_logits(tmp_path / "out", ids) - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(("change", "said"), [
    (lambda tensor: tensor.T.contiguous(), "expected 64 inputs before its outputs"),
    (lambda tensor: tensor.to(torch.int8), "are transposed")])
def test_what_cannot_be_transposed_is_refused(tmp_path: Path, change: object, said: str) -> None:
    saved(TINY, tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "transformer.h.0.attn.c_attn.weight"
    save_file({**tensors, name: change(tensors[name])}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said) as caught:
        open_store(tmp_path)
    assert caught.value.hint and "\n" not in caught.value.message


def test_sizes_under_either_name(tmp_path: Path) -> None:
    saved(TINY, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    own = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_positions":
           "max_position_embeddings"}
    assert set(own) <= set(raw)
    expected = read_config(tmp_path, strict=True)
    (tmp_path / "config.json").write_text(json.dumps({own.get(key, key): value for key, value in raw.items()}))
    assert read_config(tmp_path, strict=True) == expected
