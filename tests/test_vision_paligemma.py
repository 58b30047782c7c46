"""PaliGemma 1 and 2: pixel values, rows, prompts and logits are those of transformers, with bidirectional attention in the prompt; a prompt
with another end is computed again."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import assert_close
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from vision_models import FIRST, PICTURES, SHAPES, TOWER, assert_encodes_as, change_config, fast_tokenizer, open_encoder, save_random_model

from effllm import UsageError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.images.media import open_media
from effllm.runtime.images.media_markers import media_marker
from effllm.runtime.kv.bidirectional import single_pass_options
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

OPTIONS = EngineOptions(kv="32bit", device="cpu", ctx=512, strict=False, exact=True)
SEE = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
KINDS = {"gemma": {"model_type": "gemma", "head_dim": 24},
         "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 24, "sliding_window": 64}}


@pytest.fixture(scope="module", params=KINDS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object, object]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_random_model("paligemma", folder, KINDS[request.param], SEE, ["<image>"], image_token_index=FIRST, projection_dim=48,
                              hidden_size=48)
    processor = SiglipImageProcessorPil(size={"height": 32, "width": 32}, image_seq_length=16)
    processor.save_pretrained(folder)
    change_config(folder, "tokenizer_config.json", chat_template=None)
    return folder, model, processor


@pytest.fixture(scope="module")
def engine(seen):
    folder = seen[0]
    engine = list(open_engine(folder, OPTIONS))[-1]
    engine.media = open_media(folder, engine.config)
    yield engine
    engine.close()


@pytest.mark.parametrize("name", SHAPES)
def test_rows(seen, name):
    folder, model, processor = seen
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(sight.values(picture).transpose(2, 0, 1), ready["pixel_values"][0])
    assert assert_encodes_as(sight, picture, model, {"pixel_values": ready["pixel_values"]}).bidirectional


def asked(engine, folder: Path, question: str, *names: str) -> list[int]:
    prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
    marks = "".join(media_marker(engine.media.add(PICTURES[name]).digest) for name in names)
    prompt = prompts.render([{"role": "user", "content": marks + question}], None)
    list(prompts.encode_media(prompt, engine, lambda: False))
    return prompts.tokenize(prompt)


def test_a_prompt_is_the_one_that_it_was_trained_on(seen, engine):
    folder, _, processor = seen
    words = fast_tokenizer(folder)
    words.bos_token = json.loads((folder / "tokenizer_config.json").read_text())["bos_token"]
    processor.image_seq_length = 16
    told = PaliGemmaProcessor(processor, words)(images=[PICTURES["photo"], PICTURES["tall"]], text="<image><image>where is it")["input_ids"]
    ids = asked(engine, folder, "where is it", "photo", "tall")
    assert [FIRST if token >= 1 << 40 else token for token in ids] == list(np.ravel(told))


def test_logits_of_prompt_and_answer(seen, engine):
    folder, model, processor = seen
    answer = [7, 300, 41, 9]
    for question in ("where is the fox", "where is the fox in the wood, and what does it do there"):  # the second has the first's tokens
        ids = asked(engine, folder, question, "photo")
        list(engine.prefill(ids))
        assert engine.num_cached_tokens == 0
        ours = np.stack([engine._logits.copy(), *(engine.forward_logits([token])[0].copy() for token in answer)])
        told = torch.tensor([[FIRST if token >= 1 << 40 else token for token in ids] + answer])
        kinds = torch.tensor([[0] * len(ids) + [1] * len(answer)])
        ready = processor(PICTURES["photo"], input_data_format="channels_last", return_tensors="pt")
        with torch.inference_mode():
            wanted = model(input_ids=told, token_type_ids=kinds, pixel_values=ready["pixel_values"], use_cache=False).logits[0].numpy()
        assert_close(ours, wanted[len(ids) - 1 :])


def test_a_prompt_of_text_alone_sees_what_is_before_it(seen, engine):
    ids = asked(engine, seen[0], "where is it")
    list(engine.prefill(ids))
    alone = engine._logits.copy()
    assert np.array_equal(alone, np.concatenate([each.copy() for _, each in engine.score(ids)])[-1])


def test_passes_are_as_long_as_prompts(seen):
    config = read_config(seen[0])
    assert config.prefix_lm
    assert single_pass_options(config, EngineOptions(ctx=1000, encoder_path=str(seen[0]))).chunk == 1024
    assert single_pass_options(config, EngineOptions(ctx=1000)).chunk == 512


@pytest.mark.parametrize(("options", "said"), [(EngineOptions(kv="32bit", device="cpu", ctx=256, chunk=128), "one batch holds"),
                                               (EngineOptions(kv="4bit", device="cpu", ctx=512), "--kv 4bit does not support")])
def test_what_such_a_prompt_cannot_do_is_named(seen, tmp_path, options, said):
    """A head of 32 numbers, which packed caches take."""
    folder = tmp_path / "wide"
    save_random_model("paligemma", folder, {"model_type": "gemma", "head_dim": 32}, SEE, ["<image>"], image_token_index=FIRST,
                      projection_dim=48)
    seen[2].save_pretrained(folder)
    change_config(folder, "tokenizer_config.json", chat_template=None)
    engine = list(open_engine(folder, replace(options, strict=False)))[-1]
    try:
        engine.media = open_media(folder, engine.config)
        ids = asked(engine, folder, "fox " * 120, "photo")
        with pytest.raises(UsageError, match=said):
            list(engine.prefill(ids))
    finally:
        engine.close()
