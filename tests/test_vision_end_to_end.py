"""From an image's pixels to logits, with our vision tower and text model, against transformers' processor and model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from family_models import assert_close
from remapped_checkpoints import PUBLISHED_LAYOUTS
from vision_cases import CASES
from vision_models import FIRST, PICTURES, save_random_model

from effllm.runtime.engine import open_engine
from effllm.runtime.images import ROW_PLACEHOLDER
from effllm.runtime.images.media import open_media
from effllm.runtime.images.media_markers import media_marker
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

OPTIONS = EngineOptions(kv="32bit", device="cpu", ctx=512, strict=False, exact=True)


SEVERAL = ("cohere_compass", "ernie4_5_vl_moe", "exaone4_5", "glm_ocr", "hunyuan_vl", "lighton_ocr", "minicpmv4_7", "molmo2",
           "paddleocr_vl")  # of which two images of other shapes are held as well: the newest


@pytest.mark.parametrize(("family", "shown"), [*((family, ("photo",)) for family in CASES),
                                               *((family, ("tall", "wide")) for family in SEVERAL)])
def test_logits_after_images_are_those_of_transformers(family, shown, tmp_path):
    text, tower, words, more, processor = CASES[family]
    model = save_random_model(family.split(",")[0], tmp_path, text, tower, words, **more)
    if family in PUBLISHED_LAYOUTS:
        PUBLISHED_LAYOUTS[family](tmp_path)
    processor.save_pretrained(tmp_path)
    points = [PICTURES[name] for name in shown]
    engine = list(open_engine(tmp_path, replace(OPTIONS, ctx=text.get("max_position_embeddings", OPTIONS.ctx))))[-1]
    try:
        engine.media = open_media(tmp_path, engine.config)
        pictures = [engine.media.add(each) for each in points]
        prompts = PromptBuilder(Tokenizer.load(tmp_path, engine.config), media=engine.media)
        around = ("<|IMAGE_START|>", "<|IMAGE_END|>") if family == "ernie4_5_vl_moe" else ("", "")  # which visit experts of images too
        prompt = "Once " + "and ".join(f"{media_marker(each.digest).join(around)} was a fox in the wood " for each in pictures) + "."
        list(prompts.encode_media(prompt, engine, lambda: False))
        ids = prompts.tokenize(prompt)
        ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
    finally:
        engine.close()
    ready = processor(points if len(points) > 1 else points[0], input_data_format="channels_last", return_tensors="pt")
    for counted in ("grids", "num_patches", "num_soft_tokens_per_image"):
        ready.pop(counted, None)
    told = torch.tensor([[FIRST if token >= 1 << 40 else token for token in ids]])
    counts = [len(each.encoded.rows) for each in pictures]
    assert min(counts) > 4 and (told == FIRST).sum() == sum(counts)
    if family == "ovis2":  # of whose rows some are words for what is between tiles
        sight = engine.media.encoders[SEEN]
        told[told == FIRST] = torch.tensor([word for size in points for part in sight.parts(*size.shape[:2]) for word in
                                            (sight.lines**2 * [FIRST] if part == ROW_PLACEHOLDER else [FIRST + 2 + part])])
    if family == "molmo2":  # of which every word is a row
        seen = [engine.media.encoders[SEEN].values(each) for each in points]
        told[told == FIRST] = torch.tensor([FIRST + words.index(each) for _, _, tokens in seen for each in tokens])
        squares = [square for each, _, _ in seen for square in each]
        cut = np.stack(squares).reshape(len(squares), 4, 8, 4, 8, 3).swapaxes(2, 3).reshape(len(squares), 16, -1)
        ready["pixel_values"] = torch.from_numpy(cut)  # of which bytes are one more or less now and then
        ready["mm_token_type_ids"] = torch.tensor([[token >= 1 << 40 for token in ids]]).int()
    if family == "ernie4_5_vl_moe":
        ready["moe_mm_token_type_ids"] = torch.isin(told, torch.tensor([FIRST, FIRST + 1, FIRST + 2])).int()
    if family == "gemma3":
        ready["token_type_ids"] = (told == FIRST).int()
    elif family.startswith(("cohere_compass", "ernie", "qwen", "glm", "gemma4", "hunyuan", "minicpmv4_7", "paddle")):
        ready["mm_token_type_ids"] = (told == FIRST).int()
    if family == "gemma4_unified":  # by the masks of its generation: without them a pass sees behind itself in layers without a window too
        ready["attention_mask"] = model.create_masks_for_generate(
            model.config, model.get_input_embeddings()(told), None, None, torch.arange(told.shape[1])[None],
            mm_token_type_ids=ready["mm_token_type_ids"])
    with torch.inference_mode():
        wanted = model(input_ids=told, **ready, use_cache=False).logits[0].numpy()
    assert_close(ours, wanted)
