"""Outliers with altered positions: refused with the tensor's name before a kernel reads out of bounds, which used to crash the process."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conversions import run, short_fable
from low_bit_samples import random_codes

from effllm.kernels.tiles import MAX_SPARSE_COLUMNS, ROWS
from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.offload.shards import Planned, plan_files
from effllm.quant.pack import pack
from effllm.quant.spec import QuantSpec
from effllm.runtime.convert import ConvertOptions, recipe_of
from effllm.runtime.engine import Engine, EngineOptions, open_engine
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.stores.container import read_container
from effllm.runtime.tensors import ModelTensor
from effllm.runtime.weights import outliers
from effllm.runtime.weights.outliers import check_outliers

SPEC, SHAPE = QuantSpec.parse("codebook4:16+2%"), (40, 100)  # 80 outliers in three blocks, the last of 8 rows
AT = SPEC.sections(SHAPE)
Change = Callable[[np.ndarray, np.ndarray], None]


def change(blob: np.ndarray, at: object, alter: Change) -> None:
    words = blob[at.sparse :][: 4 * (at.rows // ROWS + 1 + at.sparse_count)].view("<u4")
    alter(words[: at.rows // ROWS + 1], words[at.rows // ROWS + 1 :])


def stored(folder: Path, alter: Change) -> tuple[dict, TensorStore]:
    blob = pack(random_codes(np.random.default_rng(3), SPEC, SHAPE), SPEC)
    change(blob, AT, alter)
    (file,) = plan_files([[Planned("w", "U8", (len(blob),), len(blob))]], {})
    (folder / file.name).write_bytes(file.head + blob.tobytes() + bytes(file.size - len(file.head) - len(blob)))
    store = TensorStore.open(folder)
    return {0: {"q": ModelTensor(store.tensors["w"], SPEC, SHAPE)}}, store


@pytest.mark.parametrize("alter", [
    lambda starts, places: starts.__setitem__(0, 1),
    lambda starts, places: starts.__setitem__(-1, AT.sparse_count + 1),
    lambda starts, places: starts.__setitem__(-1, 0),
    lambda starts, places: starts.__setitem__(1, 2**32 - 1),
    lambda starts, places: starts.__setitem__(2, starts[1] - 1),
    lambda starts, places: places.__setitem__(0, SHAPE[1]),
    lambda starts, places: places.__setitem__(-1, MAX_SPARSE_COLUMNS - 1),
    lambda starts, places: places.__setitem__(AT.sparse_count // 2, 2**32 - 1),
    lambda starts, places: places.__setitem__(-1, 8 * MAX_SPARSE_COLUMNS),  # row 8 of 8
])
@pytest.mark.parametrize("piece", [1 << 20, 7])
def test_what_lies_outside_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alter: Change, piece: int) -> None:
    monkeypatch.setattr(outliers, "PIECE", piece)
    tensors, store = stored(tmp_path, alter)
    with store, pytest.raises(CheckpointError, match="tensor w has outliers out of bounds") as caught:
        check_outliers(tensors, store)
    assert caught.value.hint


@pytest.mark.parametrize("piece", [1 << 20, 7])
def test_what_lies_inside_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(outliers, "PIECE", piece)

    def corners(starts: np.ndarray, places: np.ndarray) -> None:
        places[0], places[-1] = SHAPE[1] - 1, 7 * MAX_SPARSE_COLUMNS + SHAPE[1] - 1

    tensors, store = stored(tmp_path, corners)
    with store:
        check_outliers(tensors, store)


def test_neither_a_run_nor_an_export_follows_them(tmp_path: Path) -> None:
    source, out = short_fable(tmp_path / "short"), tmp_path / "out"
    recipe = recipe_of("4bit", (), "spqr")
    text = "Once upon a time a fox met a king at the river, and they talked about the weather and the price of bread. " * 25
    run(source, out, ConvertOptions(recipe, "4bit", method="spqr", calibration_text=text, calibration_tokens=512))
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = read_container(out).tensors[name]
    with TensorStore.open(out) as store:
        info, blob = store.tensors[name], store.read(store.tensors[name])
    change(blob, tensor.spec.sections(tensor.shape), lambda starts, places: places.fill(2**32 - 1))
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(info.offset)
        file.write(blob)
    said = re.escape(f"tensor {name} has outliers out of bounds")
    with pytest.raises(CheckpointError, match=said):
        for item in open_engine(out, EngineOptions(device="cpu", ctx=64)):
            if isinstance(item, Engine):
                item.close()
    with pytest.raises(CheckpointError, match=said):
        list(export_gguf(out, tmp_path / "model.gguf", "F16", "a model"))
    assert not (tmp_path / "model.gguf").exists()
