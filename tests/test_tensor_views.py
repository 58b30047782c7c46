"""Folders with interleaved matrices (Qwen 3 Next): the views a store makes of them, whatever they contain."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import CASES
from hybrid_models import CALM, IDS, answer, opened, read_afresh
from safetensors.torch import load_file, save_file
from saved_models import saved

from effllm import EffllmError
from effllm.offload.checkpoint import TensorStore
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.source import check_mapping, open_store

# Every token visits all experts, so that no rounding chooses others.
CASE = replace(CASES["qwen3_next"], changes={**CASES["qwen3_next"].changes, **CALM, "num_experts": 3})
PREFIX = "model.layers.0.linear_attn."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("joined") / "model"
    saved(CASE, made)
    return made


def rewritten(source: Path, out: Path, changes: dict[str, torch.Tensor], **config: object) -> Path:
    out.mkdir()
    save_file({**load_file(source / "model.safetensors"), **changes}, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), **config}))
    return out


def score(path: Path, **asked: object) -> np.ndarray:
    *_, engine = open_engine(path, EngineOptions(device="cpu", kv="32bit", ctx=256, **asked))
    try:
        return np.concatenate([rows.copy() for _, rows in engine.score(IDS[:200])])
    finally:
        engine.close()


def test_any_rows_of_a_matrix_are_those_that_its_model_reads(folder: Path) -> None:
    """As transformers parts what the joined matrices give."""
    from transformers import AutoModelForCausalLM

    layer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.layers[0].linear_attn
    joined = load_file(folder / "model.safetensors")
    whole = [joined[f"{PREFIX}in_proj_{part}.weight"].T[None] for part in ("qkvz", "ba")]
    q, k, v, *rest = layer.fix_query_key_value_ordering(*whole)
    parts = {"qkv": torch.cat([each.flatten(2) for each in (q, k, v)], 2), **dict(zip("zba", (each.flatten(2) for each in rest)))}
    with open_store(folder) as store:
        assert not any("qkvz" in name or "in_proj_ba" in name for name in store.tensors)
        for part, expected in parts.items():
            info = store.tensors[f"{PREFIX}in_proj_{part}.weight"]
            rows = expected[0].T.numpy()
            assert info.shape == rows.shape and store.place(info) is None and store.stored_nbytes(info) == info.nbytes
            for begin, end in ((0, len(rows)), (1, len(rows)), (len(rows) // 2, len(rows) // 2 + 1), (2, 2)):
                np.testing.assert_array_equal(store.read(info, begin, end).view(np.float32), rows[begin:end].ravel())
            whole = np.empty(info.nbytes, np.uint8)
            store.read_into(info, whole)
            np.testing.assert_array_equal(whole.view(np.float32), rows.ravel())
            assert store.files_of(info) == {folder / "model.safetensors"}
        other = store.tensors["model.norm.weight"]
        assert store.place(other) == other.offset and store.read(other).nbytes == other.nbytes


def test_quantized_it_holds_them_by_themselves(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "8bit", options("8bit"))
    with TensorStore.open(tmp_path / "8bit") as store:
        assert f"{PREFIX}in_proj_qkv.weight" in store.tensors and not any("qkvz" in name for name in store.tensors)
    before, after = score(folder), score(tmp_path / "8bit")
    assert np.square(after - before).mean() < 3e-2 * np.square(before - before.mean()).mean()
    run(folder, tmp_path / "4bit", options("4bit"))
    kept = opened(tmp_path / "4bit", kv="4bit", kv_window=32)
    try:
        first = read_afresh(kept, IDS[:300])
        tokens = answer(kept, 20)
        assert np.array_equal(read_afresh(kept, IDS[:300]), first) and answer(kept, 20) == tokens
    finally:
        kept.close()


def test_what_another_tool_quantized_is_widened_first(folder: Path, tmp_path: Path) -> None:
    """FP8 with a scale for every block of 128 by 128."""
    stored, changes, meant = load_file(folder / "model.safetensors"), {}, {}
    for name, values in stored.items():
        if name.endswith("in_proj_qkvz.weight"):
            rows, width = values.shape
            scale = torch.rand(-(-rows // 128), -(-width // 128)) / 64 + 1 / 64
            codes = (values / scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :width]).to(torch.float8_e4m3fn)
            changes |= {name: codes, f"{name}_scale_inv": scale}
            meant[name] = codes.float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :width]
    assert len(changes) == 6
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    quantized = rewritten(folder, tmp_path / "fp8", changes, quantization_config=section)
    plain = rewritten(folder, tmp_path / "plain", meant)
    expected = score(plain)
    assert np.abs(score(quantized) - expected).max() < 2e-2 * np.abs(expected).max()  # 16 bits of each weight
    with open_store(quantized, dequant_dtype="f32") as store, open_store(plain) as beside:
        assert any("fp8 weights" in said for said in store.notices)
        for part in ("qkv", "z"):
            name = f"{PREFIX}in_proj_{part}.weight"
            np.testing.assert_allclose(store.read(store.tensors[name]).view(np.float32),
                                       beside.read(beside.tensors[name]).view(np.float32), rtol=1e-6)


def test_another_height_is_refused(folder: Path, tmp_path: Path) -> None:
    whole = load_file(folder / "model.safetensors")[f"{PREFIX}in_proj_qkvz.weight"]
    short = rewritten(folder, tmp_path / "short", {f"{PREFIX}in_proj_qkvz.weight": whole[:-1].contiguous()})
    with pytest.raises(EffllmError, match=r"in_proj_qkvz.weight has shape \[255, 64\], the config says 256 rows") as caught:
        open_store(short)
    assert caught.value.hint
    with pytest.raises(EffllmError, match="mmap"):
        check_mapping(folder)
    assert read_config(folder).recurrent_layers == (0, 1, 2)
