"""Models with speech output (Qwen 2.5-Omni and 3-Omni): their text model is read as such, whatever else they hold."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import assert_close, oracle, our_logits
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from effllm.offload.checkpoint import TensorStore
from effllm.runtime.config import read_config
from effllm.runtime.source import open_store
from effllm.runtime.stores.unused_tensors import unused_tensor_notices
from effllm.runtime.tensors import check_tensors

TEXT = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": None}
SIGHT = {"depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64}
KINDS = {
    "qwen2_5_omni": (Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration, "Qwen2_5OmniModel", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}, "tie_word_embeddings": False},
        SIGHT, {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 64}),
    "qwen3_omni_moe": (Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration, "Qwen3OmniMoeForConditionalGeneration", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
        {**SIGHT, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 64,
         "downsample_hidden_size": 8})}


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """(the folder of a whole model, what writes in it), under the names with which they are published."""
    kind, folder = request.param, tmp_path_factory.mktemp("speaking") / "model"
    writer, model_type, whole, text, sight, sound = KINDS[kind]
    config = writer(text_config={**TEXT, **text}, vision_config=sight, audio_config=sound)
    torch.manual_seed(1)
    model = model_type._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    tensors = {f"thinker.{name.replace('model.language_model.', 'model.')}": value
               for name, value in load_file(folder / "model.safetensors").items()}
    tensors |= {f"talker.model.layers.0.{name}.weight": torch.ones(3, 3) for name in ("self_attn.q_proj", "mlp.gate_proj")}
    save_file({**tensors, "code2wav.decoder.0.weight": torch.ones(3), "token2wav.x.weight": torch.ones(3)}, folder / "model.safetensors",
              {"format": "pt"})
    inner = json.loads((folder / "config.json").read_text())
    raw = {"architectures": [whole], "model_type": kind, "thinker_config": inner, "talker_config": {}, "enable_audio_output": True,
           "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, model


def test_logits_are_those_of_what_writes(made: tuple[Path, torch.nn.Module]) -> None:
    folder, model = made
    ids = np.random.default_rng(3).integers(0, 300, 200).tolist()
    assert_close(our_logits(folder, ids), oracle(model, ids))


def test_nothing_of_the_text_part_is_ignored(made: tuple[Path, torch.nn.Module]) -> None:
    config = read_config(made[0], strict=True)
    assert config.family in ("qwen2", "qwen3_moe") and not config.tie_word_embeddings
    assert "takes images and audio too" in config.warnings[0] and len(config.warnings) == 1
    with open_store(made[0]) as store:
        assert unused_tensor_notices(config, store, check_tensors(config, store)) == ()
        assert "talker.model.layers.0.mlp.gate_proj.weight" in store.tensors and "lm_head.weight" in store.tensors


def test_quantized_it_is_the_text_part_alone(made: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    run(made[0], tmp_path / "8bit", options("8bit"))
    with TensorStore.open(tmp_path / "8bit") as store:
        assert not any("talker" in name or "visual" in name or "thinker" in name for name in store.tensors)
    ids = np.random.default_rng(4).integers(0, 300, 100).tolist()
    before, after = our_logits(made[0], ids), our_logits(tmp_path / "8bit", ids)
    assert np.median(np.abs(after - before)) < 5e-2 * np.abs(before).max()
