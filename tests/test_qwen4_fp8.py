"""Qwen 4 Exp in FP8, as published: experts with block scales, and an n-gram table whose shards share one scale."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import Case, written
from fp8_fp4_checkpoints import as_fp8
from hybrid_models import CTX, IDS, opened, read_afresh
from more_family_cases import QWEN_4
from quantization_checks import assert_answers_stay_near
from safetensors.torch import load_file, save_file
from streamed_models import paging

from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.source import open_store
from effllm.runtime.stores.container import read_container
from effllm.runtime.stores.fp8_ngram_tables import ScaledTable

EXPERT, TABLE = re.compile(r".+\.experts\.\d+\.(?:gate|up|down)_proj\.weight"), "ngram_embedding."
SCALE = "model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale"
SAYS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The published form, and what it means."""
    base = tmp_path_factory.mktemp("qwen4")
    case = Case("qwen4_exp_text", {**QWEN_4, "hidden_size": 128, "moe_intermediate_size": 128, "max_position_embeddings": CTX})
    written(case, base / "source")
    stored, meant = {}, {}
    scale = torch.tensor([0.0101], dtype=torch.bfloat16)
    for name, values in load_file(base / "source" / "model.safetensors").items():
        if EXPERT.fullmatch(name):
            parts, dense = as_fp8(values.numpy(), "blocks")
            stored |= {name.removesuffix("weight") + part: torch.as_tensor(each) for part, each in parts.items()}
            meant[name] = torch.from_numpy(dense)
        elif TABLE in name:
            stored[name] = (values / scale.float()).to(torch.float8_e4m3fn)
            meant[name], stored[SCALE] = (stored[name].float() * scale.float()).half(), scale
        else:
            stored[name] = meant[name] = values
    config = json.loads((base / "source" / "config.json").read_text())
    return saved(base / "fp8", stored, {**config, "quantization_config": SAYS}), saved(base / "meant", meant, config)


def saved(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    folder.mkdir(parents=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_it_answers_as_what_it_means_in_memory_and_from_the_disk(folders: tuple[Path, Path]) -> None:
    """Codes of experts are multiplied as they are, and rows of the table are those that a token needs."""
    engines = (opened(folders[0], kv="32bit", exact=True), opened(folders[1], kv="32bit", exact=True),
               paging(folders[0], 9, kv="32bit", ctx=CTX, chunk=128, exact=True))
    assert any("rows of n-grams are widened to f16 as they are read" in line for line in engines[0].model.store.notices)
    assert {str(tensor.spec) for role, tensor in engines[0].model.tensors[0].items() if role.startswith("experts.")} == {"float8:128"}
    found = [read_afresh(engine, IDS[:200]).copy() for engine in engines]
    for engine in engines:
        engine.close()
    assert np.abs(found[0] - found[1]).max() < 1e-4 * np.abs(found[1]).max() and np.array_equal(found[0], found[2])


def test_a_row_is_read_without_the_others(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(folders[0], low_bit=True) as store, open_store(folders[1]) as meant:
        name = SCALE.removesuffix("_scale")
        info = store.tensors[name]
        whole, rows = store.read(info).view(np.float16), info.shape[0]
        assert info.dtype == "F16" and np.array_equal(whole, meant.read(meant.tensors[name]).view(np.float16))
        assert SCALE not in store.tensors and store.files_of(info) == {folders[0] / "model.safetensors"}
        fetched, read = [], ScaledTable.read
        monkeypatch.setattr(ScaledTable, "read", lambda self, of, begin, end: (fetched.append(end - begin), read(self, of, begin, end))[1])
        for row in (0, 37, rows - 1):
            assert np.array_equal(store.read(info, row, row + 1).view(np.float16), whole.reshape(rows, -1)[row])
        assert fetched == [1, 1, 1]


def test_it_is_quantized_again_with_its_table(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run(folders[0], tmp_path / "made", options("8bit"))
    assert not read_container(tmp_path / "made").tensors[SCALE.removesuffix("_scale")].spec.is_raw
    assert_answers_stay_near(folders[1], tmp_path / "made", 0.1)


@pytest.mark.parametrize(("change", "said"), [
    (lambda tensors: tensors.pop(SCALE), "without one scale for it"),
    (lambda tensors: tensors.update({SCALE: torch.tensor([0.0])}), "expected one number above 0"),
    (lambda tensors: tensors.update({SCALE: torch.tensor([1.0, 2.0])}), "expected one number above 0"),
    (lambda tensors: next(each for name, each in tensors.items() if TABLE in name and each.ndim == 2).view(torch.uint8).fill_(0x7F),
     "NaN or infinity")])
def test_a_table_that_means_nothing_is_named(folders: tuple[Path, Path], tmp_path: Path, change, said: str) -> None:
    tensors = load_file(folders[0] / "model.safetensors")
    change(tensors)
    folder = saved(tmp_path / "made", tensors, json.loads((folders[0] / "config.json").read_text()))
    with pytest.raises(CheckpointError, match=said):
        engine = opened(folder)
        try:
            read_afresh(engine, IDS[:100])
        finally:
            engine.close()
