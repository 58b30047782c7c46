"""GGUF files of families with interleaved RoPE, as other programs write them: rows are those of the checkpoint."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from family_models import Case, rope
from gguf_samples import weights, write_model
from safetensors.torch import load_file, save_file
from saved_models import saved

from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.gguf.store import open_gguf_store
from effllm.runtime.prepare import EngineOptions

SIZES = {"intermediate_size": 96}  # whole blocks
CASES = {  # the family's model, and the architecture of its files
    "ernie4_5": (Case("ernie4_5", {**SIZES, "head_dim": 32, **rope("default")}), "ernie4_5"),
    "glm": (Case("glm", {**SIZES, "head_dim": 16}), "chatglm"),
    "glm, no biases": (Case("glm", {**SIZES, "head_dim": 16, "attention_bias": False}), "chatglm"),
    "glm4": (Case("glm4", {**SIZES, "head_dim": 32, "num_key_value_heads": 1}), "glm4"),
}
IDS = np.random.default_rng(4).integers(0, 300, 90).tolist()


def logits(path: Path, **options: object) -> np.ndarray:
    *_, engine = open_engine(path, EngineOptions(**{"device": "cpu", "kv": "32bit", "ctx": 128, "threads": 1, "exact": True, **options}))
    try:
        return np.concatenate([rows.copy() for _, rows in engine.score(IDS)])
    finally:
        engine.close()


def turning(case: Case) -> Callable[[gguf.GGUFWriter], None]:
    """How many channels turn, where that is not all of a head."""
    def change(writer: gguf.GGUFWriter) -> None:
        if case.family != "ernie4_5":
            writer.add_rope_dimension_count(case.changes["head_dim"] // 2)
    return change


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", CASES)
def test_a_file_answers_as_its_weights_in_a_folder(name: str, kind: str, tmp_path: Path) -> None:
    case, arch = CASES[name]
    saved(case, tmp_path / "source")
    meant = write_model(tmp_path / "source", tmp_path / "m.gguf", kind, arch, change=turning(case))
    assert read_config(tmp_path / "m.gguf", strict=True).family == case.family
    save_file({each: torch.from_numpy(np.ascontiguousarray(values)) for each, values in meant.items()},
              tmp_path / "source" / "model.safetensors")
    wanted = logits(tmp_path / "source")
    assert np.abs(logits(tmp_path / "m.gguf") - wanted).max() < 5e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ["glm", "glm, no biases"])
def test_files_of_the_first_glm_4_hold_q_k_and_v_in_one_and_no_width_of_heads(name: str, kind: str, tmp_path: Path) -> None:
    case, _ = CASES[name]
    saved(case, tmp_path / "source")
    before, held = load_file(tmp_path / "source" / "model.safetensors"), {}
    for each, values in before.items():
        part = each.replace(".q_proj.", ".qkv_proj.")
        if part != each:
            held[part] = torch.cat([before[each.replace(".q_proj.", f".{own}_proj.")] for own in "qkv"])
        elif ".k_proj." not in each and ".v_proj." not in each:
            held[each] = values
    joined = tmp_path / "joined"
    joined.mkdir()
    save_file(held, joined / "model.safetensors")
    raw = (tmp_path / "source" / "config.json").read_text()
    (joined / "config.json").write_text(raw.replace('"head_dim": 16', '"head_dim": null'))
    meant = write_model(joined, tmp_path / "m.gguf", kind, "chatglm", change=turning(case))
    config = read_config(tmp_path / "m.gguf", strict=True)
    assert (config.head_dim, config.rope.partial_rotary_factor) == (16, 0.5) and config.qkv_bias == (name == "glm")
    for each, values in meant.items():
        before |= {each: torch.from_numpy(np.ascontiguousarray(values))} if "qkv_proj" not in each else {
            each.replace("qkv_proj", f"{own}_proj"): torch.from_numpy(part.copy())
            for own, part in zip("qkv", np.split(values, np.cumsum([64, 32])), strict=True)}
    save_file(before, tmp_path / "source" / "model.safetensors")
    wanted = logits(tmp_path / "source")
    assert np.abs(logits(tmp_path / "m.gguf") - wanted).max() < 5e-5 * np.abs(wanted).max()


def test_rows_are_handed_over_as_they_lie(tmp_path: Path) -> None:
    """Nothing is moved, so that a file can be streamed, and what is made of one is what would be made of the folder."""
    saved(CASES["glm4"][0], tmp_path / "source")
    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", "glm4", change=turning(CASES["glm4"][0]))
    held = weights(tmp_path / "source")
    with open_gguf_store(tmp_path / "m.gguf", "f32") as store:
        for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.bias"):
            assert np.array_equal(store.read(store.tensors[name]).view(np.float32), held[name].reshape(-1))
            assert store.place(store.tensors[name]) is not None


def test_what_of_a_head_turns_is_all_of_it_where_a_file_does_not_say(tmp_path: Path) -> None:
    saved(CASES["glm4"][0], tmp_path / "source")
    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", "glm4")
    assert read_config(tmp_path / "m.gguf").rope.partial_rotary_factor == 1.0


@pytest.mark.parametrize("change, said", [
    (lambda made: made.add_rope_dimension_sections([1, 1, 0, 2]), "glm4.rope.dimension_sections"),
    (lambda made: made.add_sliding_window(24), "glm4.attention.sliding_window")])
def test_what_glm_does_not_have_is_refused(change: Callable[[gguf.GGUFWriter], None], said: str, tmp_path: Path) -> None:
    """Sections are of models that take images; of these some pairs of channels are in none."""
    saved(CASES["glm4"][0], tmp_path / "source")
    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", "glm4", change=change)
    with pytest.raises(CheckpointError, match=said):
        read_config(tmp_path / "m.gguf")
