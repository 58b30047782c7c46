"""Ovis 2: tiles, probabilities over the visual vocabulary, and what stands between tiles are those of transformers."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.ovis2 import image_processing_pil_ovis2 as theirs
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.ovis2.processing_ovis2 import Ovis2Processor
from vision_cases import CASES
from vision_models import FIRST, PICTURES, SHAPES, change_config, fast_tokenizer, open_encoder, open_quantized_encoder, save_vision_model

from effllm import EffllmError
from effllm.runtime.config import parse_config
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob, ovis2
from effllm.runtime.images.ovis2 import Ovis2

SQUARE = {"height": 48, "width": 48}
TOWERS = {"covered": ({}, CASES["ovis2"][-1]),
          "nearest shape": ({"hidden_stride": 1, "qkv_bias": False, "mlp_bias": True},
                            Ovis2ImageProcessorPil(size=SQUARE, max_patches=6, crop_to_patches=True, use_covering_area_grid=False)),
          "whole": ({"hidden_stride": 3}, Ovis2ImageProcessorPil(size=SQUARE))}


@pytest.fixture(scope="module", params=TOWERS)
def ovis(request, tmp_path_factory):
    folder, (tower, processor) = tmp_path_factory.mktemp("ovis"), TOWERS[request.param]
    return folder, save_vision_model(folder, "ovis2", (*CASES["ovis2"][:-1], processor), **tower), processor


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_those_of_transformers(ovis, name):
    folder, model, processor = ovis
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="pt")
    tiles, _ = sight.values(picture)
    assert np.array_equal(np.stack(tiles).transpose(0, 3, 1, 2), ready["pixel_values"].numpy())
    with torch.inference_mode():
        found = model.model.get_image_features(ready["pixel_values"])
    counted = Ovis2Processor(processor, fast_tokenizer(folder), image_seq_length=sight.lines**2)
    told = counted(images=picture, text="<image>", return_tensors="pt")["input_ids"][0]
    wanted = torch.empty(len(told), 48)
    wanted[told == FIRST] = found.pooler_output.reshape(-1, 48)
    for number, word in enumerate(model.config.visual_indicator_token_ids):
        wanted[told == word] = found.visual_indicator_features[number]
    seen, wanted = sight.encode(picture, EncodingJob()), wanted.numpy()
    assert np.abs(seen.rows - wanted).max() < 2e-5 * np.abs(wanted).max()
    assert seen.tokens == (ROW_PLACEHOLDER,) * len(told) and sight.token_count(*picture.shape[:2]) == len(told)


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 9))
def test_the_tiles_are_those_that_its_processor_chooses(height, width, most):
    sight = object.__new__(Ovis2)
    sight.least, sight.most, sight.covers, sight.side = 1, most, True, 40
    columns, rows = theirs.get_min_tile_covering_grid((height, width), 40, most) if most > 1 else (1, 1)
    assert sight.grid(height, width) == (rows, columns)


def test_words_a_few_at_a_time_make_the_same_rows(ovis, monkeypatch):
    sight = open_encoder(ovis[0])
    rows = sight.encode(PICTURES["photo"], EncodingJob()).rows
    monkeypatch.setattr(ovis2, "WORDS", 7)
    monkeypatch.setattr(ovis2, "FEW", 1)
    again = open_encoder(ovis[0]).encode(PICTURES["photo"], EncodingJob()).rows
    assert np.abs(rows - again).max() < 1e-5 * np.abs(rows).max()


@pytest.mark.parametrize(("changes", "said"), [
    ({"tokenize_function": "gumbel_argmax"}, "tokenize_function .gumbel_argmax. is not supported"),
    ({"num_visual_indicator_tokens": 4}, "num_visual_indicator_tokens is 4, expected 5"),
    ({"hidden_stride": 4}, "6 patches in a row are not a multiple of 4")])
def test_a_tower_of_another_make_is_refused_by_name(ovis, changes, said, tmp_path):
    for each in ovis[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    change_config(tmp_path, "config.json", vision_config={**vision, **changes})
    with pytest.raises(EffllmError, match=said):
        open_encoder(tmp_path)


def test_a_processor_that_counts_other_rows_is_refused(ovis, tmp_path):
    for each in ovis[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "processor_config.json").write_text('{"image_seq_length": 256}')
    with pytest.raises(EffllmError, match="image_seq_length is 256, but a tile becomes"):
        open_encoder(tmp_path)


def test_a_published_config_is_known_to_the_last_key():
    text = {"hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
            "max_position_embeddings": 32_768,
            "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": None, "use_cache": True, "use_sliding_window": False,
            "vocab_size": 151_936}
    config = parse_config({
        "architectures": ["Ovis2ForConditionalGeneration"], "hidden_size": 896, "image_token_id": 151_665, "model_type": "ovis2",
        "text_config": text, "torch_dtype": "bfloat16", "vision_config": {"model_type": "ovis2_vision"},
        "visual_indicator_token_ids": [151_666, 151_667, 151_668, 151_669, 151_670], "vocab_size": 151_936}, strict=True)
    assert (config.family, config.hidden_size, config.tie_word_embeddings) == ("qwen2", 896, True)


def test_a_quantized_model_sees_the_same(tmp_path):
    text, vision, words, more, processor = CASES["ovis2"]
    save_vision_model(tmp_path / "whole", "ovis2",
                      ({**text, "hidden_size": 64, "intermediate_size": 96}, vision, words, {**more, "hidden_size": 64},
                                                    processor))
    sight = open_quantized_encoder(tmp_path)
    assert sight.bytes_needed() > 4 * 90 * sight.lines**2
