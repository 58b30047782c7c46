"""MLX folders of vision-language models: vision towers with other names and transposed weights, and heads tied to the embedding."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options
from mlx_checkpoints import affine
from safetensors.torch import load_file, save_file
from vision_cases import CASES
from vision_models import PICTURES, open_encoder, save_vision_model

from effllm import EffllmError
from effllm.offload.checkpoint import TensorStore
from effllm.runtime.config import read_config
from effllm.runtime.convert import convert
from effllm.runtime.files import model_folder_files
from effllm.runtime.images import EncodingJob, encoders_of
from effllm.runtime.images.tower_weights import tower_store
from effllm.runtime.source import open_weights

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
TOWERS = {"gemma3": "vision_tower.vision_model.", "qwen3_vl": "vision_tower."}  # as mlx-vlm calls them


def as_mlx(source: Path, folder: Path, kind: str) -> None:
    """The text model of a folder in codes, its tower as mlx-vlm has it."""
    folder.mkdir()
    tensors = {}
    for name, values in load_file(source / "model.safetensors").items():
        own = name.removeprefix("model.")
        if own.startswith(("vision_tower.", "visual.")):
            values = values.movedim(1, -1).contiguous() if values.ndim > 3 else values
            tensors[TOWERS[kind] + own.partition(".")[2].removeprefix("vision_model.")] = values
        elif own.startswith("multi_modal") or values.ndim != 2:
            tensors[own.replace("language_model.", "language_model.model.", 1) if "language_model.model." not in own else own] = values
        else:
            name = own.replace("language_model.", "language_model.model.", 1) if own.startswith("language_model.") and (
                "language_model.model." not in own) else own
            parts, _ = affine(values.numpy(), 4, 32)
            tensors |= {name.removesuffix("weight") + ending: part.contiguous() for ending, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    raw = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization": {"bits": 4, "group_size": 32}}))


@pytest.fixture(scope="module", params=TOWERS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model as published, and as MLX has it."""
    kind, folder = request.param, tmp_path_factory.mktemp("sees")
    text, vision, words, more, processor = CASES[kind]
    wide = {"out_hidden_size": 64} if kind == "qwen3_vl" else {}
    save_vision_model(folder / "source", kind, ({**text, **SIZES}, vision, words, more, processor), **wide)
    as_mlx(folder / "source", folder / "mlx", kind)
    return folder / "source", folder / "mlx"


def test_images_are_seen_as_before(folders: tuple[Path, Path]) -> None:
    theirs, ours = map(open_encoder, folders)
    for picture in PICTURES.values():
        wanted, seen = theirs.encode(picture, EncodingJob()), ours.encode(picture, EncodingJob())
        assert np.array_equal(seen.rows, wanted.rows) and seen.tokens == wanted.tokens


def test_what_is_made_of_it_sees_as_before(folders: tuple[Path, Path], tmp_path: Path) -> None:
    *_, result = convert(folders[1], tmp_path / "small", options())
    seen, wanted = (open_encoder(each).encode(PICTURES["photo"], EncodingJob()) for each in (tmp_path / "small", folders[0]))
    assert np.array_equal(seen.rows, wanted.rows)
    with TensorStore.of_file(tmp_path / "small" / model_folder_files.TOWER) as kept, tower_store(folders[1]) as store:
        assert kept.tensors and all(np.array_equal(kept.read(info), store.read(store.tensors[name])) for name, info in kept.tensors.items())


def test_one_whose_tower_was_left_out_says_so(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for file in folders[1].glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folders[1] / "model.safetensors")
    save_file({name: part for name, part in tensors.items() if name.startswith("language_model.")}, tmp_path / "model.safetensors")
    (error,) = encoders_of(tmp_path, read_config(tmp_path)).values()
    assert isinstance(error, EffllmError) and "holds only the text model" in error.message and "original folder" in error.hint


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (48, 0, 8, 3), (48, 9, 8, 3), (8, 3)])
@pytest.mark.parametrize("folders", ["gemma3"], indirect=True)
def test_patches_of_another_shape_are_named(folders: tuple[Path, Path], tmp_path: Path, shape: tuple[int, ...]) -> None:
    for file in folders[1].glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folders[1] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("patch_embedding.weight"))
    save_file(tensors | {name: torch.zeros(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(EffllmError, match="patch_embedding.weight is"):
        open_encoder(tmp_path).encode(PICTURES["tiny"], EncodingJob())


@pytest.mark.parametrize("folders", ["gemma3"], indirect=True)
@pytest.mark.parametrize("changed", [False, True])
def test_a_head_that_is_the_embedding_again_is_left_out(folders: tuple[Path, Path], tmp_path: Path, changed: bool) -> None:
    for file in folders[1].glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors, embed = load_file(folders[1] / "model.safetensors"), "language_model.model.embed_tokens."
    head = {name.replace(embed, "language_model.lm_head."): part.clone() for name, part in tensors.items() if name.startswith(embed)}
    if changed:
        head["language_model.lm_head.biases"] += 1
    save_file(tensors | head, tmp_path / "model.safetensors")
    store, container = open_weights(tmp_path)
    with store:
        assert any(name.endswith("lm_head.weight") for name in container.tensors) == changed
        assert not any(name.startswith("language_model.lm_head.") and not name.endswith(".weight") for name in store.tensors)
        assert any("another matrix" in str(notice) for notice in store.notices) == changed
