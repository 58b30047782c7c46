"""Gemma 4: patches, rows and tokens are those of transformers, and in which layers an image's tokens attend to each other."""

import numpy as np
import pytest
import torch
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from vision_models import FIRST, PICTURES, SHAPES, Gemma4UnifiedProcessor, assert_encodes_as, change_config, open_encoder, save_random_model

from effllm.runtime.config_reader import ConfigError
from effllm.runtime.images import ROW_PLACEHOLDER

WORDS = ["<|image|>", "<|image>", "<image|>"]
TOWER = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3,
         "head_dim": 24, "patch_size": 4, "position_embedding_size": 220}
TEXT = {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100, "global_head_dim": 32,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
CASES = {"plain": ({}, {}), "clipped, standard": ({"use_clipped_linears": True, "standardize": True},
                                                  {"use_bidirectional_attention": "vision"})}


@pytest.fixture(scope="module", params=CASES)
def gemma(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    vision, text = CASES[request.param]
    model = save_random_model("gemma4", folder, {**TEXT, **text}, {**TOWER, **vision}, WORDS, image_token_id=FIRST, boi_token_id=FIRST + 1,
                              eoi_token_id=FIRST + 2, audio_config=None)
    for name, each in model.model.vision_tower.named_buffers():
        if name.endswith(("_min", "_max")):
            each.fill_(-1.5 if name.endswith("_min") else 1.0)
        elif name.startswith("std_"):
            each.copy_(torch.randn_like(each))
    model.save_pretrained(folder)
    processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_those_of_transformers(gemma, name):
    folder, model, processor = gemma
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    count = int(ready.pop("num_soft_tokens_per_image")[0])
    values = sight.values(picture)
    rows, columns = values.shape[0] // 4, values.shape[1] // 4
    assert np.array_equal(values.reshape(rows, 4, columns, 4, 3).swapaxes(1, 2).reshape(rows * columns, -1),
                          ready["pixel_values"][0][: rows * columns])
    seen = assert_encodes_as(sight, picture, model, ready)
    assert seen.tokens == (FIRST + 1, *(ROW_PLACEHOLDER,) * count, FIRST + 2)
    assert seen.sliding_window_only and seen.bidirectional == (model.config.text_config.use_bidirectional_attention == "vision")


@pytest.fixture(scope="module")
def unified(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unified")
    tower = {"patch_size": 4, "mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 70}
    text = {key: value for key, value in TEXT.items() if key != "hidden_size_per_layer_input"}
    model = save_random_model("gemma4_unified", folder, {**text, "model_type": "gemma4_unified_text"}, tower, WORDS, image_token_id=FIRST,
                              boi_token_id=FIRST + 1, eoi_token_id=FIRST + 2, audio_config=None)
    ready = Gemma4UnifiedProcessor()
    ready.save_pretrained(folder)
    return folder, model, ready


@pytest.mark.parametrize("name", SHAPES)
def test_rows_without_a_tower(unified, name):
    folder, model, ready = unified
    sight, picture = open_encoder(folder), PICTURES[name]
    made_ready = ready(picture)
    seen = assert_encodes_as(sight, picture, model, made_ready)
    same = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)(picture, input_data_format="channels_last", return_tensors="np")
    count = int(same["num_soft_tokens_per_image"][0])
    assert seen.tokens == (FIRST + 1, *(ROW_PLACEHOLDER,) * count, FIRST + 2) and seen.bidirectional and seen.sliding_window_only
    assert np.isclose(made_ready["pixel_values"].double().sum(), same["pixel_values"].astype(float).sum())


def test_a_folder_at_odds_with_its_tower(gemma, tmp_path):
    for each in gemma[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    change_config(tmp_path, "preprocessor_config.json", pooling_kernel_size=2)
    with pytest.raises(ConfigError, match="pooling_kernel_size"):
        open_encoder(tmp_path)
    change_config(tmp_path, "preprocessor_config.json", pooling_kernel_size=3)
    vocabulary = tmp_path / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace("<image|>", "<an end>"))
    with pytest.raises(ConfigError, match="no <image|>"):
        open_encoder(tmp_path).token_count(5, 5)
