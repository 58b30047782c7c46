"""The layer for multi-token prediction in GGUF files: as llama.cpp's converter writes it, and as it is exported here."""

import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_linear import CASES, write
from safetensors.numpy import load_file, save_file

from effllm import UsageError
from effllm.runtime.prepare import EngineOptions, prepare

sys.path.insert(0, str(Path(__file__).parent))
from hybrid_models import opened
from mtp_models import own_logits, with_layer

DENSE = "qwen3_5_text"
IDS = np.random.default_rng(5).integers(0, 300, 150).tolist()
PARTS = {"fc": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm",
         "norm": "nextn.shared_head_norm", "layers.0.input_layernorm": "attn_norm",
         "layers.0.post_attention_layernorm": "post_attention_norm",
         **{f"layers.0.self_attn.{own}_proj": f"attn_{name}" for own, name in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))},
         **{f"layers.0.self_attn.{own}_norm": f"attn_{own}_norm" for own in "qk"},
         **{f"layers.0.mlp.{own}_proj": f"ffn_{own}" for own in ("gate", "up", "down")}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mtp") / "model"
    with_layer(CASES[DENSE], made)
    return made


def as_llamacpp_writes_it(folder: Path, at: Path, leave_out: str = "") -> Path:
    """A file with the layer behind the last, and the copies of tables that some files have, but for one tensor."""
    tensors = load_file(folder / "model.safetensors")
    plain = at / "plain"
    shutil.copytree(folder, plain)
    save_file({name: value for name, value in tensors.items() if not name.startswith("mtp.")}, plain / "model.safetensors")

    def behind(writer: gguf.GGUFWriter) -> None:
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        writer.kv_data[0].pop("qwen35.block_count")
        writer.add_block_count(layers + 1)
        writer.add_nextn_predict_layers(1)
        for own, part in PARTS.items():
            values = tensors[f"mtp.{own}.weight"]
            if part != leave_out:
                writer.add_tensor(f"blk.{layers}.{part}.weight", values + np.float32(1) if "norm" in own else values)
        for part in ("embed_tokens", "shared_head_head"):
            writer.add_tensor(f"blk.{layers}.nextn.{part}.weight", tensors["model.embed_tokens.weight"])

    write(plain, at / "m.gguf", change=behind)
    return at / "m.gguf"


def test_a_file_of_llamacpp_is_what_the_folder_is(folder: Path, tmp_path: Path) -> None:
    found = []
    for path in (folder, as_llamacpp_writes_it(folder, tmp_path)):
        engine = opened(path, ctx=256, spec="mtp")
        found.append(own_logits(engine, IDS))
        engine.close()
    assert np.abs(found[0] - found[1]).max() < 1e-3 * np.abs(found[0]).max()


def test_a_file_that_lacks_some_of_it_runs_without(folder: Path, tmp_path: Path) -> None:
    path = as_llamacpp_writes_it(folder, tmp_path, "attn_k")
    made = prepare(path, EngineOptions(device="cpu", ctx=256))
    made.store.close()
    assert not made.speculating.mtp and not any("not used" in each for each in made.notices)
    with pytest.raises(UsageError, match="was left out of these weights"):
        prepare(path, EngineOptions(device="cpu", ctx=256, spec="mtp"))
