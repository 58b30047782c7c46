"""Idefics 2: image quarters, position ids, the perceiver resampler, and the text around adjacent images are those of transformers."""

import json

import numpy as np
import pytest
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.idefics2.processing_idefics2 import Idefics2Processor
from vision_cases import CASES
from vision_models import (
    FIRST,
    PICTURES,
    SHAPES,
    assert_encodes_as,
    change_config,
    fast_tokenizer,
    open_encoder,
    open_quantized_encoder,
    save_vision_model,
)

from effllm import EffllmError
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.images import EncodingJob
from effllm.runtime.images.media import open_media
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

AROUND = FIRST + 1
READY = {"quarters": CASES["idefics2"][-1], "whole": Idefics2ImageProcessorPil(size={"shortest_edge": 17, "longest_edge": 60})}


@pytest.fixture(scope="module", params=READY)
def idefics(request, tmp_path_factory):
    folder, processor = tmp_path_factory.mktemp("idefics"), READY[request.param]
    return folder, save_vision_model(folder, "idefics2", (*CASES["idefics2"][:-1], processor)), processor


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_rows_are_those_of_transformers(idefics, name):
    folder, model, processor = idefics
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="pt")
    for part, theirs in zip(sight.values(picture), ready["pixel_values"][0].numpy(), strict=True):
        assert np.array_equal(part.transpose(2, 0, 1), theirs[:, : part.shape[0], : part.shape[1]])
    seen = assert_encodes_as(sight, picture, model, dict(ready))
    parts = 5 if processor.do_image_splitting else 1
    assert seen.tokens.count(AROUND) == parts + 1 and seen.tokens[0] == seen.tokens[-1] == AROUND and len(seen.rows) == 5 * parts


@pytest.mark.parametrize("said", ["Once {0} was", "Once {0}was a {1}<end_of_utterance>", "{0}{1}fox", "{0}{0}{1}\n{1}", "a fox {1}"])
def test_words_around_images_are_those_of_its_processor(idefics, said):
    folder, _, processor = idefics
    config = read_config(folder)
    media, words = open_media(folder, config), Tokenizer.load(folder, config)
    prompts, pictures = PromptBuilder(words, media=media), [media.add(PICTURES[name]) for name in ("odd", "tiny")]
    list(media.encode(pictures))
    prompt = said.format(*(each.marker for each in pictures))
    ids = prompts.tokenize(prompt)
    whole = Idefics2Processor(processor, fast_tokenizer(folder), image_seq_len=5)
    wanted = whole(text=said.replace("{0}", "<image>").replace("{1}", "<image>"), add_special_tokens=False)["input_ids"][0]
    assert [FIRST if token >= 1 << 40 else token for token in ids] == wanted
    assert prompts.count(prompt) == len(ids)


@pytest.mark.parametrize(("where", "changes", "said"), [
    ("preprocessor_config.json", {"size": {"shortest_edge": 4, "longest_edge": 60}}, "a shortest_edge of 8 or more"),
    ("preprocessor_config.json", {"do_resize": False}, "do_resize is False, expected true"),
    ("perceiver_config", {"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a number that divides 4"),
    ("processor_config.json", {"image_seq_len": 64}, "image_seq_len is 64, expected 5")])
def test_what_is_made_otherwise_is_refused_by_name(idefics, tmp_path, where, changes, said):
    for each in idefics[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "processor_config.json").write_text("{}")
    if where == "perceiver_config":
        raw = json.loads((tmp_path / "config.json").read_text())
        change_config(tmp_path, "config.json", perceiver_config={**raw["perceiver_config"], **changes})
    else:
        change_config(tmp_path, where, **changes)
    with pytest.raises(EffllmError, match=said):
        open_encoder(tmp_path).encode(PICTURES["tiny"], EncodingJob())


def test_an_image_without_quarters_is_refused(idefics):
    sight = open_encoder(idefics[0])
    if sight.splits:
        with pytest.raises(EffllmError, match="an image of 1 × 7 is too small"):
            sight.token_count(7, 1)
    else:
        assert sight.token_count(7, 1) == 7


def test_a_quantized_model_sees_the_same(tmp_path):
    text, vision, words, more, processor = CASES["idefics2"]
    more = {**more, "perceiver_config": {**more["perceiver_config"], "hidden_size": 64}}
    save_vision_model(tmp_path / "whole", "idefics2", ({**text, "hidden_size": 64, "intermediate_size": 96}, vision, words, more,
                                                       processor))
    open_quantized_encoder(tmp_path)


def test_a_published_config_is_known_to_the_last_key():
    raw = {"architectures": ["Idefics2ForConditionalGeneration"], "image_token_id": 32_001, "model_type": "idefics2",
           "perceiver_config": {"model_type": "idefics2", "resampler_n_latents": 64}, "text_config": {
               "max_position_embeddings": 32_768, "model_type": "mistral", "pad_token_id": 0, "rms_norm_eps": 1e-5, "vocab_size": 32_003},
           "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True,
           "vision_config": {"hidden_size": 1152, "image_size": 980, "intermediate_size": 4304, "model_type": "idefics2",
                             "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}}
    config = parse_config(raw, strict=True)
    assert (config.family, config.hidden_size, config.vocab_size, config.tie_word_embeddings) == ("mistral", 4096, 32_003, False)
