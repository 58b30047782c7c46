"""NVFP4 in GGUF files: a scale per matrix, or per expert of a stack, in addition to the block scales."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_samples import FABLE, SCALES, add_expert_keys, add_scales, fable_gguf, write_model
from saved_models import saved
from test_gguf import IDS, folder_of, logits
from test_gguf_mixtures import MIXTURES

from effllm.offload.checkpoint import CheckpointError
from effllm.quant.weight import Weight
from effllm.runtime.gguf.store import open_gguf_store

SCALED = {"model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up", "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q",
          "model.layers.2.mlp.down_proj.weight": "blk.2.ffn_down"}


def test_nvfp4_has_a_scale_of_a_tensor_beside(tmp_path: Path) -> None:
    """To the last bit, as codes and as floats; a scale of another kind is named."""
    meant = fable_gguf(path := tmp_path / "m.gguf", "NVFP4", change=add_scales)
    scales = {name: np.float32(SCALES[SCALED[name]] if name in SCALED else 1.0) for name in meant}
    with open_gguf_store(path, low_bit=True) as store, open_gguf_store(path, "f32") as wide:
        assert set(store.tensors) == set(meant)
        for name, stored in store.container.tensors.items():
            weight = Weight.low_bit(stored.spec, stored.shape, store.read(store.tensors[name])).to_f32()
            np.testing.assert_array_equal(weight, meant[name] * scales[name])
            np.testing.assert_array_equal(wide.read(wide.tensors[name]).view(np.float32).reshape(weight.shape), weight)
    wanted = logits(folder_of({name: values * scales[name] for name, values in meant.items()}, FABLE, tmp_path / "folder"), IDS)
    assert np.abs(logits(path, IDS, exact=True) - wanted).max() < 2e-5 * np.abs(wanted).max()
    for wrong in (np.float32([1.0, 2.0]), np.float16([1.0]), np.float32([np.nan])):
        fable_gguf(tmp_path / "bad.gguf", "NVFP4", change=lambda writer, own=wrong: writer.add_tensor("blk.0.ffn_up.scale", own))
        with pytest.raises(CheckpointError, match="blk.0.ffn_up.scale"):
            open_gguf_store(tmp_path / "bad.gguf")
    fable_gguf(tmp_path / "other.gguf", "Q8_0", change=add_scales)
    with pytest.raises(CheckpointError, match="which no llama model has"):
        open_gguf_store(tmp_path / "other.gguf")


def test_each_expert_of_a_stack_has_its_own(tmp_path: Path) -> None:
    arch, case = MIXTURES["qwen3_moe"]
    case = replace(case, changes={**case.changes, "moe_intermediate_size": 64, "intermediate_size": 128})  # whole blocks
    saved(case, tmp_path / "source")
    keys = add_expert_keys(case)

    def change(own: object) -> object:
        def both(writer: object) -> None:
            keys(writer)
            writer.add_tensor("blk.0.ffn_up_exps.scale", own)
        return both

    count = case.changes["num_experts"]
    scales = np.arange(1, count + 1, dtype=np.float32) / np.float32(3)
    meant = write_model(tmp_path / "source", tmp_path / "m.gguf", "NVFP4", arch, change(scales))
    with open_gguf_store(tmp_path / "m.gguf", "f32") as wide, open_gguf_store(tmp_path / "m.gguf", low_bit=True) as store:
        seen = 0
        for name, stored in store.container.tensors.items():
            scaled = re.fullmatch(r".*layers\.0\..*experts\.(\d+)\.up_proj\.weight", name)
            scale = scales[int(scaled[1])] if scaled else np.float32(1)
            seen += scaled is not None
            weight = Weight.low_bit(stored.spec, stored.shape, store.read(store.tensors[name])).to_f32()
            np.testing.assert_array_equal(weight, meant[name] * scale)
            np.testing.assert_array_equal(wide.read(wide.tensors[name]).view(np.float32).reshape(weight.shape), weight)
        assert seen == count
    write_model(tmp_path / "source", tmp_path / "bad.gguf", "NVFP4", arch, change(scales[:-1]))
    with pytest.raises(CheckpointError, match="one an expert"):
        open_gguf_store(tmp_path / "bad.gguf")
