"""Llama 4: tiles, rows and the text between them are those of transformers; pixel values are rounded in the same way."""

import json

import numpy as np
import pytest
import torch
from family_models import assert_close
from transformers.models.llama4.processing_llama4 import Llama4Processor
from vision_models import FIRST, PICTURES, SHAPES, open_encoder, save_random_model

from effllm.runtime.engine import open_engine
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob
from effllm.runtime.images.media import open_media
from effllm.runtime.images.media_markers import media_marker
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

WORDS = ["<|patch|>", "<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|image_end|>"]
TEXT = {"model_type": "llama4_text", "intermediate_size_mlp": 64, "num_local_experts": 2, "interleave_moe_layer_step": 2}
TOWER = {"hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 32, "patch_size": 8,
         "projector_input_dim": 56, "projector_output_dim": 56, "vision_output_dim": 56}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = save_random_model("llama4", folder, TEXT, TOWER, WORDS, image_token_index=FIRST)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 32, "width": 32}, "max_patches": 6}))
    return folder, model


def tiles_of(sight, picture):
    return torch.tensor(np.stack(sight.values(picture)).transpose(0, 3, 1, 2))


@pytest.mark.parametrize("name", SHAPES)
def test_rows_and_words_are_those_of_transformers(llama, name):
    folder, model = llama
    sight, picture = open_encoder(folder), PICTURES[name]
    with torch.inference_mode():
        found = model.get_image_features(pixel_values=tiles_of(sight, picture)).last_hidden_state
        wanted = model.multi_modal_projector(found.reshape(-1, found.shape[-1])).numpy()
    seen = sight.encode(picture, EncodingJob())
    assert seen.rows.shape == wanted.shape and np.abs(seen.rows - wanted).max() < 2e-5 * np.abs(wanted).max()
    told = Llama4Processor._prompt_split_image(object.__new__(Llama4Processor), sight.grid(*picture.shape[:2]), 4)
    ids = [FIRST + WORDS.index(f"<|{word}|>") for word in told.removeprefix("<|").removesuffix("|>").split("|><|")]
    assert [ROW_PLACEHOLDER if token == FIRST else token for token in ids] == list(seen.tokens)


def test_values_are_rounded_to_bfloat16_at_every_step(llama):
    wanted = (torch.arange(256).to(torch.bfloat16) * (1 / 255) - torch.tensor(0.5, dtype=torch.bfloat16)) / 0.5
    assert np.array_equal(open_encoder(llama[0]).scale.table[:, 0], wanted.float().numpy())


def test_logits_after_an_image_are_those_of_transformers(llama):
    folder, model = llama
    engine = list(open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=512, strict=False, exact=True)))[-1]
    try:
        engine.media = open_media(folder, engine.config)
        picture = engine.media.add(PICTURES["photo"])
        prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
        prompt = f"Once {media_marker(picture.digest)} was a fox in the wood."
        list(prompts.encode_media(prompt, engine, lambda: False))
        ids = prompts.tokenize(prompt)
        ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
    finally:
        engine.close()
    told = torch.tensor([[FIRST if token >= 1 << 40 else token for token in ids]])
    with torch.inference_mode():
        wanted = model(input_ids=told, pixel_values=tiles_of(open_encoder(folder), PICTURES["photo"]), use_cache=False).logits[0].numpy()
    assert (told == FIRST).sum() == len(picture.encoded.rows) > 16
    assert_close(ours, wanted)
