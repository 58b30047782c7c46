"""LFM2-VL: rows of tiles and of whole images, and the text between, are those of transformers."""

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from vision_models import FIRST, PICTURES, SHAPES, Lfm2Processor, assert_encodes_as, change_config, open_encoder, save_random_model

from effllm.runtime.config_reader import ConfigError
from effllm.runtime.images import ROW_PLACEHOLDER
from effllm.runtime.images.preprocessor import BILINEAR, resized

WORDS = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
         *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))]
TOWER = {"model_type": "siglip2_vision_model", "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
         "num_attention_heads": 3, "patch_size": 8, "num_patches": 36, "vision_use_head": False}
TEXT = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
CASES = {"usual": ({}, {}), "no norm, no small picture": ({"projector_use_layernorm": False, "projector_bias": False},
                                                         {"use_thumbnail": False}), "whole": ({}, {"do_image_splitting": False})}


@pytest.fixture(scope="module", params=CASES)
def lfm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lfm")
    outer, processor = CASES[request.param]
    model = save_random_model("lfm2_vl", folder, TEXT, TOWER, WORDS, image_token_id=FIRST, projector_hidden_size=56, **outer)
    ready = Lfm2Processor(**processor)
    ready.save_pretrained(folder)
    return folder, model, ready


@pytest.mark.parametrize("name", SHAPES)
def test_rows_and_words_are_those_of_transformers(lfm, name):
    folder, model, ready = lfm
    sight, picture = open_encoder(folder), PICTURES[name]
    seen = assert_encodes_as(sight, picture, model, ready(picture))
    named = object.__new__(Lfm2VlProcessor)  # without a preprocessor, which is not made without torchvision
    named.image_token, named.image_start_token, named.image_thumbnail_token, named.image_end_token = "#", "<|image_start|>", \
        "<|img_thumbnail|>", "<|image_end|>"
    whole = sight.sized(*picture.shape[:2])
    told = named._build_image_tokens(*sight.grid(*picture.shape[:2]), named._compute_tokens_per_tile(64, 8, 2),
                                     named._compute_tokens_for_image(list(whole), 8, 2), sight.with_small, True)
    for word in WORDS[1:]:
        told = told.replace(word, f" {word} ")
    ids = [token for piece in told.split() for token in ([ROW_PLACEHOLDER] * len(piece) if set(piece) == {"#"}
                                                         else [FIRST + WORDS.index(piece)])]
    assert ids == list(seen.tokens)


def test_resizing_is_that_of_torch_but_for_roundings():
    """Its preprocessor resizes bytes as torch does."""
    for height, width in ((64, 48), (200, 300)):
        whole = torch.tensor(PICTURES["photo"]).permute(2, 0, 1)[None]
        wanted = interpolate(whole, (height, width), mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()
        assert np.abs(resized(PICTURES["photo"], height, width, BILINEAR).astype(int) - wanted.astype(int)).max() <= 1


def test_a_folder_at_odds_with_its_tower(lfm, tmp_path):
    for each in lfm[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    change_config(tmp_path, "preprocessor_config.json", tile_size=40)
    with pytest.raises(ConfigError, match="tile_size"):
        open_encoder(tmp_path)
    change_config(tmp_path, "preprocessor_config.json", tile_size=64, encoder_patch_size=16)
    with pytest.raises(ConfigError, match="encoder_patch_size"):
        open_encoder(tmp_path)
