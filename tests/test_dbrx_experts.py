"""Experts whose gate, up or down matrices are stacked in one tensor (DBRX): each accessed separately, paged and quantized like any
other."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import CASES
from safetensors.torch import load_file, save_file
from saved_models import saved
from test_paged_models import paged, resident

from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.source import open_store

PLACE = "transformer.blocks.1.ffn.experts."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rows") / "model"
    saved(CASES["dbrx"], made)
    return made


def test_each_matrix_is_what_lies_in_the_tensor(folder: Path) -> None:
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    gate, up, down = (stored[f"{PLACE}mlp.{name}"].numpy().reshape(6, 40, 64) for name in ("w1", "v1", "w2"))
    with open_store(folder) as store:
        assert not [name for name in store.tensors if ".mlp." in name]
        for expert in (0, 5):
            for name, expected in (("w1", gate[expert]), ("v1", up[expert]), ("w2", down[expert].T)):
                info = store.tensors[f"{PLACE}{expert}.{name}.weight"]
                assert info.shape == expected.shape and (store.place(info) is None) == (name == "w2")
                for begin, end in ((0, len(expected)), (3, 4)):
                    np.testing.assert_array_equal(store.read(info, begin, end).view(np.float32).reshape(-1, expected.shape[1]),
                                                  expected[begin:end])


def test_a_quantized_folder_comes_from_the_disk_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "out", options("4bit"))
    assert np.array_equal(paged(tmp_path / "out", 12), resident(tmp_path / "out"))


def changed(folder: Path, out: Path, tensors: dict[str, torch.Tensor], **keys: object) -> Path:
    """A folder of one file with other tensors, or keys of its config."""
    out.mkdir()
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file({**stored, **tensors}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **keys}))
    return out


@pytest.mark.parametrize("shape", [(241, 64), (240,), (6, 40, 64)])
def test_what_is_no_number_of_experts_is_named(shape: tuple[int, ...], folder: Path, tmp_path: Path) -> None:
    made = changed(folder, tmp_path / "broken", {f"{PLACE}mlp.w2": torch.zeros(shape)})
    with pytest.raises(CheckpointError, match="mlp.w2"):
        open_store(made)


def test_such_experts_beside_quantized_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    with pytest.raises(CheckpointError, match="beside quantized weights"):
        open_store(changed(folder, tmp_path / "codes", {}, quantization_config=section))
