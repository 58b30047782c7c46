"""Idefics 3 and SmolVLM: tiles, rows, and the text between them are those of transformers."""

import numpy as np
import pytest
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from vision_models import PICTURES, SHAPES, TOWER, assert_encodes_as, fast_tokenizer, open_encoder, save_random_model

from effllm import UsageError
from effllm.runtime.images import ROW_PLACEHOLDER

WORDS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
         *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))]
CASES = {"idefics3": (Idefics3ImageProcessorPil(size={"longest_edge": 96}, max_image_size={"longest_edge": 32}), 32),
         "smolvlm": (SmolVLMImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}), 56),
         "smolvlm, whole": (SmolVLMImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 48},
                                                     do_image_splitting=False), 48)}


@pytest.fixture(scope="module", params=CASES)
def idefics(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("idefics")
    processor, side = CASES[request.param]
    model = save_random_model(request.param.split(",")[0], folder, {"model_type": "llama"}, {**TOWER, "image_size": side}, WORDS,
                              image_token_id=4096,
                              scale_factor=2, pad_token_id=0)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_rows_and_words_are_those_of_transformers(idefics, name):
    folder, model, processor = idefics
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    tiles = sight.values(picture)
    assert np.array_equal(np.stack(tiles).transpose(0, 3, 1, 2), ready["pixel_values"][0])
    seen = assert_encodes_as(sight, picture, model, ready)
    places = (processor.max_image_size["longest_edge"] // 16) ** 2
    told = Idefics3Processor(processor, fast_tokenizer(folder), image_seq_len=places)(images=picture, text="<image>")["input_ids"][0]
    assert [ROW_PLACEHOLDER if token == 4096 else token for token in told] == list(seen.tokens)


def test_an_image_with_an_extreme_aspect_ratio_is_refused(idefics):
    with pytest.raises(UsageError, match="1 × 300 is too elongated"):
        open_encoder(idefics[0]).token_count(300, 1)
