"""GGUF files of families that are read but not exported: Nanbeige and Ouro, which loop over their layers, and DeepSeek-OCR."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from family_models import CASES, Case
from gguf_samples import write_model
from more_family_cases import MORE_CASES
from safetensors.torch import load_file, save_file
from saved_models import saved

from effllm.offload.safetensors_header import CheckpointError
from effllm.runtime.config import ModelConfig, read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.prepare import EngineOptions

LOOPED = {"nanbeige": "nanbeige, three rounds, biases, bfloat16", "ouro": "ouro"}
IDS = list(range(1, 200))


def logits(path: Path) -> np.ndarray:
    *_, engine = open_engine(path, EngineOptions(device="cpu", kv="32bit", ctx=256, threads=1, exact=True))
    try:
        return np.concatenate([rows.copy() for _, rows in engine.score(IDS)])
    finally:
        engine.close()


def written(folder: Path, arch: str, **keys: object) -> ModelConfig:
    """Of `folder / "source"` a file beside it, and its config."""
    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"{arch}.{key.replace('__', '.')}", value)

    write_model(folder / "source", folder / "m.gguf", "F32", arch, change)
    return read_config(folder / "m.gguf", strict=True)


@pytest.mark.parametrize("family", LOOPED)
def test_layers_that_are_gone_through_again(tmp_path: Path, family: str) -> None:
    """A file counts them once."""
    saved(CASES[LOOPED[family]], tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "early_exit" not in name}, path)
    more = {"attention__head_dim": 16} if family == "nanbeige" else {}
    config = written(tmp_path, family, num_loops=3, skip_loop_final_norm=False, **more)
    assert (config.loops, config.num_hidden_layers, config.stored_layers) == (3, 6, 2) and config.family == family
    np.testing.assert_array_equal(logits(tmp_path / "m.gguf"), logits(tmp_path / "source"))
    assert written(tmp_path, family).loops == 1
    with pytest.raises(CheckpointError, match="skip_loop_final_norm"):
        written(tmp_path, family, num_loops=3, skip_loop_final_norm=True)
    with pytest.raises(CheckpointError, match="more than any model has"):
        written(tmp_path, family, num_loops=2000)


def pages(folder: Path, arch: str = "deepseek2-ocr", **keys: object) -> ModelConfig:
    """The text model of a model that reads pages, as a folder and as a file."""
    case = MORE_CASES["deepseek_ocr2_text"]
    own = {"attention_bias": False, "routed_scaling_factor": 1.0, "num_key_value_heads": 4}
    saved(Case(case.family, case.changes | own, inside=case.inside), folder / "source")
    raw = json.loads((folder / "source" / "config.json").read_text())["text_config"]
    (folder / "source" / "config.json").write_text(json.dumps({**raw, "model_type": "deepseek_ocr2_text"}))
    path = folder / "source" / "model.safetensors"
    text = ("model.layers", "model.embed", "model.norm", "lm_head")
    save_file({name: tensor for name, tensor in load_file(path).items() if name.startswith(text)}, path)
    counts = {"expert_count": raw["n_routed_experts"], "expert_used_count": raw["num_experts_per_tok"], "expert_shared_count":
              raw["n_shared_experts"], "expert_feed_forward_length": raw["moe_intermediate_size"], "leading_dense_block_count": 1}
    return written(folder, arch, **(counts | keys))


def test_deepseek_ocr(tmp_path: Path) -> None:
    """A file says that no channel turns, as latent attention has none to turn apart; all of them do."""
    config = pages(tmp_path, rope__dimension_count=0)
    told = read_config(tmp_path / "source", strict=True)
    assert (config.family, config.moe, config.head_dim, config.rope) == (told.family, told.moe, told.head_dim, told.rope)
    np.testing.assert_array_equal(logits(tmp_path / "m.gguf"), logits(tmp_path / "source"))


def test_unlimited_ocr_is_a_deepseek_ocr_with_a_window(tmp_path: Path) -> None:
    assert pages(tmp_path, attention__sliding_window=40).answer_window == 40
    with pytest.raises(CheckpointError, match="expert_gating_func"):
        pages(tmp_path, expert_gating_func=2)
    with pytest.raises(CheckpointError, match="dimension_count 8"):
        pages(tmp_path, rope__dimension_count=8)
