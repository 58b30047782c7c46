"""BLIP-2: image rows are transformers', and a question about an image uses its training prompt."""

import numpy as np
import pytest
import torch
from vision_cases import CASES
from vision_models import PICTURES, change_config, open_encoder, save_vision_model

from effllm import EffllmError
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob
from effllm.runtime.images.media import open_media
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

# As published, of the model with 2.7 billion parameters.
PUBLISHED = {
    "architectures": ["Blip2ForConditionalGeneration"], "image_text_hidden_size": 256, "image_token_index": 50_265,
    "initializer_factor": 1.0, "initializer_range": 0.02, "model_type": "blip-2",
    "num_query_tokens": 32, "qformer_config": {"model_type": "blip_2_qformer"},
    "text_config": {
        "_remove_final_layer_norm": False, "activation_function": "relu", "bos_token_id": 2, "do_layer_norm_before": True, "dropout": 0.1,
        "eos_token_id": 50_118, "ffn_dim": 10_240, "hidden_size": 2560, "max_position_embeddings": 2048, "model_type": "opt",
        "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16",
        "vocab_size": 50_304, "word_embed_proj_dim": 2560},
    "torch_dtype": "float16", "use_decoder_only_language_model": True, "vision_config": {"model_type": "blip_2_vision_model"}}


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("blip")
    model = save_vision_model(folder, "blip-2", CASES["blip-2"])
    change_config(folder, "tokenizer_config.json", chat_template=None)
    return folder, model


@pytest.mark.parametrize("name", ["photo", "tall", "wide", "tiny"])
def test_values_and_rows_are_those_of_transformers(blip, name) -> None:
    folder, model = blip
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = CASES["blip-2"][-1](picture, input_data_format="channels_last", return_tensors="pt")
    assert np.array_equal(sight.values(picture).transpose(2, 0, 1), ready["pixel_values"][0].numpy())
    with torch.inference_mode():
        wanted = model.get_image_features(ready["pixel_values"]).pooler_output[0].numpy()
    seen = sight.encode(picture, EncodingJob())
    assert seen.tokens == (ROW_PLACEHOLDER,) * 6 and np.abs(seen.rows - wanted).max() < 2e-5 * np.abs(wanted).max()


def test_a_question_follows_its_image(blip) -> None:
    """Before the word that begins a text, as its processor has them."""
    folder, _ = blip
    tokenizer, config = Tokenizer.load(folder, read_config(folder)), read_config(folder)
    prompts = PromptBuilder(tokenizer, media=open_media(folder, config))
    photo = prompts.media.add(PICTURES["photo"])
    list(prompts.media.encode([photo]))
    ids = prompts.tokenize(prompts.render([{"role": "user", "content": f"{photo.marker}Is it a fox?"}], None))
    rows = [token >= 1 << 40 for token in ids]
    assert rows == [True] * 6 + [False] * (len(ids) - 6)
    assert tokenizer.decode(ids[6:]).endswith("Question: Is it a fox? Answer:")
    alone = prompts.tokenize(prompts.render([{"role": "user", "content": photo.marker}], None))
    assert len(alone) - 6 <= 1, "an image without a question is described"


def test_the_published_config_is_that_of_its_text_part() -> None:
    made = parse_config(PUBLISHED, strict=True)
    assert made.family == "opt" and made.hidden_size == 2560 and made.intermediate_size == 10_240 and made.position_offset == 2
    with pytest.raises(EffllmError, match="of model type 't5', expected opt"):
        parse_config({**PUBLISHED, "text_config": {"model_type": "t5"}}, strict=True)


def test_what_is_made_otherwise_is_refused_by_name(blip, tmp_path) -> None:
    folder, _ = blip
    for each in folder.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    change_config(tmp_path, "preprocessor_config.json", size={"height": 48, "width": 48})
    with pytest.raises(EffllmError, match="size is .*, expected the 40 × 40 that the tower takes"):
        open_encoder(tmp_path)
    change_config(tmp_path, "preprocessor_config.json", size={"height": 40, "width": 40})
    change_config(tmp_path, "config.json", num_query_tokens=7)
    with pytest.raises(EffllmError, match=r"query_tokens is \[1, 6, 36\], but config.json says \[7, 36\]"):
        open_encoder(tmp_path).encode(PICTURES["photo"], EncodingJob())
