"""Granite Vision 4: query tokens over patch windows, and the layers that embeddings are added to, are those of transformers."""

import numpy as np
import pytest
import torch
from vision_cases import CASES
from vision_models import PICTURES, SHAPES, change_config, open_encoder, save_vision_model

from effllm.runtime.config_reader import ConfigError
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob

TARGETS = {0, 1, 2, 3, 4, 5}


@pytest.fixture(scope="module", params=["1/2", "2/4"])
def granite(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("granite")
    text, tower, words, more, processor = CASES["granite4_vision"]
    return folder, save_vision_model(folder, "granite4_vision",
                                     (text, tower, words, {**more, "downsample_rate": request.param}, processor)), processor


@pytest.mark.parametrize("name", SHAPES)
def test_rows_for_each_layer(granite, name):
    folder, model, processor = granite
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="pt")
    assert np.array_equal(np.stack(sight.values(picture)[0]).transpose(0, 3, 1, 2), ready["pixel_values"][0].numpy())
    strategy = model.config.vision_feature_select_strategy
    with torch.inference_mode():
        found = model.model.get_image_features(ready["pixel_values"], ready["image_sizes"], vision_feature_select_strategy=strategy)
    wanted = {layer: torch.cat(list(rows)).numpy() for layer, rows in found.deepstack_features}
    assert wanted.keys() == TARGETS
    seen = sight.encode(picture, EncodingJob())
    assert seen.tokens == (ROW_PLACEHOLDER,) * len(seen.rows) and len(seen.tokens) == sight.token_count(*picture.shape[:2])
    ours = {0: seen.rows, **{layer + 1: rows for layer, rows in zip(seen.deepstack_layers, seen.deepstack_rows, strict=True)}}
    assert ours.keys() == TARGETS
    for layer, rows in wanted.items():
        assert np.abs(ours[layer] - rows).max() < 2e-5 * np.abs(rows).max(), layer


@pytest.mark.parametrize(("changes", "said"), [
    ({"downsample_rate": "3/8"}, "downsample_rate"), ({"downsample_rate": "half"}, "downsample_rate"),
    ({"spatial_target_layers": [1, 9]}, "spatial_target_layers"), ({"deepstack_layer_map": [[9, 1]]}, "deepstack_layer_map"),
    ({"deepstack_layer_map": [1, 2]}, "deepstack_layer_map")])
def test_layers_and_windows_that_are_none_are_refused(granite, changes, said):
    folder = granite[0]
    before = (folder / "config.json").read_text()
    change_config(folder, "config.json", **changes)
    try:
        with pytest.raises(ConfigError, match=said):
            open_encoder(folder)
    finally:
        (folder / "config.json").write_text(before)
