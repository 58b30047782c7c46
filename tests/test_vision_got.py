"""GOT-OCR 2: SAM windows that extend beyond a page, relative position tables, convolutions, and the prompt of a page are transformers'."""

import numpy as np
import pytest
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.got_ocr2.processing_got_ocr2 import GotOcr2Processor
from vision_cases import CASES
from vision_models import FIRST, PICTURES, assert_encodes_as, change_config, fast_tokenizer, open_encoder, save_vision_model

from effllm.runtime.config import read_config
from effllm.runtime.images import ROW_PLACEHOLDER
from effllm.runtime.images.media import open_media
from effllm.runtime.images.media_markers import media_marker
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

TOWERS = {"small": {}, "large": {"image_size": 144, "window_size": 5, "qkv_bias": False},  # in whose layer without windows lines are apart
          "plain": {"use_rel_pos": False, "use_abs_pos": False, "window_size": 10}}


@pytest.fixture(scope="module", params=TOWERS)
def got(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("got")
    text, tower, words, more, _ = CASES["got_ocr2"]
    side = TOWERS[request.param].get("image_size", 80)
    processor = GotOcr2ImageProcessorPil(size={"height": side, "width": side}, max_patches=4, crop_to_patches=request.param == "small")
    model = save_vision_model(folder, "got_ocr2", (text, tower, words, more, processor), **TOWERS[request.param])
    change_config(folder, "tokenizer_config.json", chat_template=None)
    return folder, model, processor


@pytest.mark.parametrize("name", ["photo", "tall", "tiny"])
def test_rows(got, name):
    folder, model, processor = got
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)).transpose(0, 3, 1, 2), ready["pixel_values"])
    assert_encodes_as(sight, picture, model, {"pixel_values": ready["pixel_values"]})


@pytest.mark.parametrize(("pages", "asked"), [(1, "OCR:"), (1, "OCR with format:"), (2, "OCR across multi pages:")])
def test_a_prompt_is_the_one_that_it_was_trained_on(got, pages, asked):
    folder, _, processor = got
    config = read_config(folder)
    media = open_media(folder, config)
    prompts = PromptBuilder(Tokenizer.load(folder, config), media=media)
    points = [PICTURES[name] for name in ("photo", "tall")[:pages]]
    shown = [media.add(each) for each in points]
    list(media.encode(shown))
    ids = prompts.tokenize(prompts.render([{"role": "user", "content": "".join(media_marker(each.digest) for each in shown) + asked}],
                                           None))
    _, text, *_ = GotOcr2Processor(processor, fast_tokenizer(folder)).prepare_inputs_layout(
        images=points[0] if pages == 1 else [points], format="format" in asked, multi_page=pages > 1, images_kwargs={})
    rows = sum(each.encoded.tokens.count(ROW_PLACEHOLDER) for each in shown)
    told = fast_tokenizer(folder).encode(text[0].replace("<imgpad>", "<imgpad>" * rows), add_special_tokens=False)
    assert [FIRST if token >= 1 << 40 else token for token in ids] == told
