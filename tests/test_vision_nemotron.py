"""Nemotron 3 Nano Omni: sizes, pixel values and image rows are those of transformers, with the keys of both config layouts."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conversions import options
from hypothesis import example, given
from hypothesis import strategies as st
from vision_cases import CASES
from vision_models import PICTURES, SHAPES, NemotronProcessor, assert_encodes_as, change_config, open_encoder, save_vision_model

from effllm import EffllmError
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.convert import convert
from effllm.runtime.images import EncodingJob
from effllm.runtime.images.modality import AUDIO_INPUT
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN
from effllm.runtime.images.tower_ops import patches_of

FAMILY = "nemotron_h_omni"
PUBLISHED = {"text_config": "llm_config", "audio_config": "sound_config", "vision_hidden_size": "vit_hidden_size",
             "image_token_id": "img_context_token_id"}


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    folder = tmp_path_factory.mktemp("omni")
    return folder, save_vision_model(folder, FAMILY, CASES[FAMILY]), CASES[FAMILY][-1]


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_those_of_transformers(omni, name):
    folder, model, ready = omni
    sight, picture = open_encoder(folder), PICTURES[name]
    made = ready(picture)
    values = patches_of(sight.values(picture), 8)
    assert values.shape == made["pixel_values"].shape and np.abs(values - made["pixel_values"].numpy()).max() < 2e-5
    seen = assert_encodes_as(sight, picture, SimpleNamespace(model=model), made)
    rows, columns = made["image_grid_hw"][0].tolist()
    assert len(seen.rows) == rows * columns // 4 and len(seen.tokens) == len(seen.rows) + 2


def test_what_a_filter_makes_beyond_white_stays(omni):
    edge = np.zeros((50, 50, 3), np.uint8)
    edge[:, 25:] = 255
    sight = open_encoder(omni[0])
    made = sight.values(edge) * np.array(sight.scale.std, np.float32) + np.array(sight.scale.mean, np.float32)
    assert made.max() > 1.01 and made.min() < -0.01
    assert np.abs(patches_of(sight.values(edge), 8) - omni[2](edge)["pixel_values"].numpy()).max() < 2e-5


@example(4, 641, (40, 0, 24))
@example(641, 4, (40, 0, 24))
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([(40, 120, 16_384), (1024, 13_312, 16_384), (40, 0, 24), (60, 60, 9)]))
def test_sizes_are_those_of_transformers(omni, height, width, bounds):
    least, most, room = bounds
    sight, ready = open_encoder(omni[0]), NemotronProcessor(min_num_patches=least, max_num_patches=most or 1 << 20, max_model_len=room)
    sight.least, sight.most = least, max(min(max(4 * (room - 4), least), most or 1 << 20), least)
    if max(height, width) > 200 * min(height, width):
        return
    grid = sight.grid(height, width)
    assert min(grid) > 0
    rows, columns = (round(side / sight.patch + 0.5) for side in (height, width))
    if min(rows, columns) * min((sight.most / (rows * columns)) ** 0.5, 1.0) >= 1:  # else nothing is left of it there, by which it divides
        assert grid == ready.grid(height, width)


def test_the_config_that_was_published_is_the_same_model(omni, tmp_path):
    folder = shutil.copytree(omni[0], tmp_path / "published")
    raw = json.loads((folder / "config.json").read_text())
    raw = {PUBLISHED.get(key, key): value for key, value in raw.items()}
    (folder / "config.json").write_text(json.dumps({
        **raw, "model_type": "NemotronH_Nano_Omni_Reasoning_V3", "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"], "auto_map": {
            "AutoModel": "modeling.NemotronH_Nano_Omni_Reasoning_V3"}, "sound_config": {"model_type": "parakeet"}}))
    ready = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({
        **ready, "image_processor_type": "NemotronH_Nano_Omni_Reasoning_V3ImageProcessor", "norm_mean": [0.4, 0.5, 0.6],
        "norm_std": [0.5, 0.25, 0.5]}))
    config = read_config(folder, strict=True)
    same = read_config(omni[0], strict=True)
    assert (config.family, config.moe, config.recurrent_layers) == (same.family, same.moe, same.recurrent_layers)
    sight = open_encoder(folder)
    assert sight.scale.mean == (0.4, 0.5, 0.6) and len(sight.encode(PICTURES["tall"], EncodingJob()).rows) == sight.token_count(150, 37) - 2
    assert np.abs(sight.values(PICTURES["odd"]) - open_encoder(omni[0]).values(PICTURES["odd"])).max() > 0.01


def test_a_model_without_ears_sees_alone(omni):
    from effllm.runtime.images import encoders_of

    assert set(encoders_of(omni[0], read_config(omni[0]))) == {SEEN} and AUDIO_INPUT is not SEEN


@pytest.mark.parametrize(("file", "changes", "message"), [
    ("preprocessor_config.json", {"patch_size": 16}, "patch_size and downsample_ratio"),
    ("config.json", {"vision_hidden_size": 64}, "vision_hidden_size is 64, expected the 48 of vision_config"),
    ("config.json", {"vision_config": {**CASES[FAMILY][1], "model_type": "radio", "use_swiglu_ffn": True}}, "use_swiglu_ffn is True")])
def test_what_is_not_read_is_refused_by_name(omni, tmp_path, file, changes, message):
    folder = shutil.copytree(omni[0], tmp_path / "changed")
    change_config(folder, file, **changes)
    with pytest.raises(EffllmError) as caught:
        open_encoder(folder)
    assert message in caught.value.message, caught.value.message


def test_a_quantized_folder_sees_the_same(omni, tmp_path):
    list(convert(omni[0], tmp_path / "small", options("8bit")))
    first, second = (open_encoder(each).encode(PICTURES["photo"], EncodingJob()) for each in (omni[0], tmp_path / "small"))
    assert np.array_equal(first.rows, second.rows) and first.tokens == second.tokens


def test_layers_that_predict_ahead_are_left_out():
    text = {**CASES[FAMILY][0], "hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    plain, ahead = (parse_config({"model_type": FAMILY, "text_config": {**text, "num_nextn_predict_layers": layers}, "vision_config": {}})
                    for layers in (0, 1))
    assert ahead == plain


def test_places_are_the_corner_of_a_square():
    """Of an elongated image as well, whose square is never made."""
    from effllm.runtime.images.paddleocr_vl import bilinear

    table = torch.randn(1, 5, 9, 9)
    at = np.stack(np.divmod(np.arange(3 * 14), 14), axis=1)
    whole = torch.nn.functional.interpolate(table, size=(14, 14), mode="bilinear", align_corners=False)[0, :, :3].permute(1, 2, 0)
    ours = bilinear(np.ascontiguousarray(table[0].permute(1, 2, 0).numpy()), at, 14)
    assert np.abs(ours - whole.reshape(42, 5).numpy()).max() < 1e-5
