"""Janus Pro and DeepSeek VL: image rows are transformers'; their image generation is ignored."""

import json

import numpy as np
import pytest
import torch
from vision_cases import CASES
from vision_models import PICTURES, SHAPES, change_config, open_encoder, save_vision_model

from effllm import EffllmError
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob

# As transformers' layout of the model with a billion parameters is published.
PUBLISHED = {
    "architectures": ["JanusForConditionalGeneration"], "image_token_id": 100581, "model_type": "janus", "tie_word_embeddings": False,
    "text_config": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads":
                    16, "num_key_value_heads": 16, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                    "vocab_size": 102400, "bos_token_id": 100000, "eos_token_id": 100001, "tie_word_embeddings": False},
    "vision_config": {"model_type": "janus_vision_model", "projection_dim": 2048}, "vq_config": {"model_type": "janus_vqgan"}}


@pytest.fixture(scope="module", params=["janus", "deepseek_vl"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_vision_model(folder, request.param, CASES[request.param]), CASES[request.param][-1]


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_rows_are_those_of_transformers(both, name) -> None:
    folder, model, processor = both
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="pt")["pixel_values"]
    assert np.array_equal(sight.values(picture).transpose(2, 0, 1), ready[0].numpy())
    with torch.inference_mode():
        wanted = model.model.get_image_features(ready).pooler_output[0].numpy()
    seen = sight.encode(picture, EncodingJob())
    assert seen.tokens == (ROW_PLACEHOLDER,) * 36 and np.abs(seen.rows - wanted).max() < 2e-5 * np.abs(wanted).max()


def test_the_published_config_is_that_of_its_text_part() -> None:
    made = parse_config(PUBLISHED, strict=True)
    assert made.family == "llama" and made.vocab_size == 102_400 and not made.tie_word_embeddings


def test_what_is_made_otherwise_is_refused_by_name(tmp_path) -> None:
    save_vision_model(tmp_path, "janus", CASES["janus"])
    assert read_config(tmp_path, strict=True).family == "llama"
    raw = json.loads((tmp_path / "config.json").read_text())
    for change, told in (({"use_qk_norm": True}, "use_qk_norm is True, expected false"), ({"depth": 3}, "depth is 3, expected 2"),
                         ({"image_size": 40}, "expected the 40 × 40 that the tower takes")):
        change_config(tmp_path, "config.json", vision_config={**raw["vision_config"], **change})
        with pytest.raises(EffllmError, match=told):
            open_encoder(tmp_path)
