"""Granite Docling: page tiles, more for dense pages, rows by tile position, embeddings added in early layers, and the text between tiles
are those of transformers."""

import numpy as np
import pytest
import torch
from transformers.models.granite_docling.image_processing_pil_granite_docling import GraniteDoclingImageProcessorPil
from transformers.models.granite_docling.processing_granite_docling import GraniteDoclingProcessor
from vision_models import FIRST, PICTURES, SHAPES, TOWER, assert_encodes_as, change_config, fast_tokenizer, open_encoder, save_random_model

from effllm.runtime.config_reader import ConfigError
from effllm.runtime.images import ROW_PLACEHOLDER

WORDS = ["<image>", "<fake_token_around_image>", "<global-img>",
         *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))]
ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 4, "embedding_multiplier": 1.0}  # rows are held before that
SQUARE = {"height": 32, "width": 32}
READY = {"coarse": {}, "fine": {"fine_route": True}, "dense": {"dense_max_patches": 6, "dense_max_scale": 0.5},
         "wide": {"dense_max_patches": 6, "dense_min_aspect": 1.2, "dense_max_aspect": 5.0}, "whole": {"crop_to_patches": False}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docling")
    tower = {**TOWER, "num_hidden_layers": 4, "scale_factor": 4, "deepstack_visual_indexes": [0, 3], "out_hidden_size": 48}
    return folder, save_random_model("granite_docling", folder, ENDS, tower, WORDS, image_token_id=FIRST, pad_token_id=0)


@pytest.fixture(scope="module", params=READY)
def ready(request):
    return GraniteDoclingImageProcessorPil(size=SQUARE, max_patches=4, **READY[request.param])


@pytest.mark.parametrize("name", SHAPES)
def test_rows_and_words_are_those_of_transformers(model, ready, name):
    folder, theirs = model
    ready.save_pretrained(folder)
    sight, picture = open_encoder(folder), PICTURES[name]
    given = ready(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)).transpose(0, 3, 1, 2), given["pixel_values"][0])
    shown = {key: given[key] for key in ("pixel_values", "pixel_attention_mask", "tile_fine_mask") if key in given}
    seen = assert_encodes_as(sight, picture, theirs, shown)
    with torch.inference_mode():
        deep = theirs.model.get_image_features(**{key: torch.as_tensor(each) for key, each in shown.items()}).deepstack_features
    wanted = np.stack([np.concatenate([part.numpy() for part in each]) for each in deep])
    assert np.abs(seen.deepstack_rows - wanted).max() < 2e-5 * np.abs(wanted).max()
    words = fast_tokenizer(folder)
    told = words.encode(GraniteDoclingProcessor(ready, words, image_seq_len=1).replace_image_token(given, 0), add_special_tokens=False)
    assert [ROW_PLACEHOLDER if token == FIRST else token for token in told] == list(seen.tokens)


def test_finer_rows_of_a_model_that_has_none_are_refused(model):
    folder = model[0]
    GraniteDoclingImageProcessorPil(size=SQUARE, fine_route=True).save_pretrained(folder)
    before = (folder / "config.json").read_text()
    try:
        change_config(folder, "config.json", vision_config={**TOWER, "use_fine_route": False, "scale_factor": 2})
        with pytest.raises(ConfigError, match="fine_route"):
            open_encoder(folder)
    finally:
        (folder / "config.json").write_text(before)
