"""Molmo 2: overlapping crops, rows pooled over patch windows, and text tokens that are rows too are those of transformers; the text starts
as its processor starts it, and images have bidirectional attention."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.molmo2 import image_processing_molmo2 as theirs
from transformers.models.molmo2.processing_molmo2 import Molmo2Processor
from vision_cases import CASES
from vision_models import FIRST, PICTURES, SHAPES, change_config, fast_tokenizer, open_encoder, open_quantized_encoder, save_vision_model

from effllm import EffllmError, UsageError
from effllm.runtime.config import parse_config
from effllm.runtime.engine import open_engine
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob
from effllm.runtime.images.media import open_media
from effllm.runtime.images.media_markers import media_marker
from effllm.runtime.images.molmo2 import Molmo2, between
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

WORDS = CASES["molmo2"][2]
TEMPLATE = """{%- for message in messages -%}{{ '[' + message['role'] + ']' }}
{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}
{%- for part in message['content'] -%}{{ '<|image|>' if part['type'] == 'image' else part['text'] }}{%- endfor -%}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '[assistant]' }}{%- endif -%}"""
OPTIONS = EngineOptions(kv="32bit", device="cpu", ctx=512, strict=False, exact=True)


@pytest.fixture(scope="module")
def molmo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("molmo")
    return folder, save_vision_model(folder, "molmo2", CASES["molmo2"]), CASES["molmo2"][-1]


def numbers(folder) -> dict[str, int]:
    return {word: number for number, word in enumerate(WORDS, start=FIRST)}


def wanted_rows(model, ready, told, folder) -> np.ndarray:
    """The rows that transformers' text model receives at image positions."""
    patches = told == numbers(folder)["<im_patch>"]
    with torch.inference_mode():
        made = model.get_input_embeddings()(told).clone()
        made[patches] += torch.cat(model.model.get_image_features(**{key: ready[key] for key in (
            "pixel_values", "image_token_pooling", "image_grids")}).pooler_output)
    return made.numpy()


def processed(processor, folder, picture):
    """Values and words as transformers' processor makes them."""
    tokenizer = fast_tokenizer(folder)
    whole = object.__new__(Molmo2Processor)
    whole.image_use_col_tokens, whole.use_single_crop_col_tokens, whole.use_single_crop_start_token = True, None, True
    ready = processor(picture, input_data_format="channels_last", return_tensors="pt")
    text = whole.replace_image_token(ready, 0)
    return ready, torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_those_of_transformers(molmo, name):
    folder, model, processor = molmo
    sight, picture = open_encoder(folder), PICTURES[name]
    ready, told = processed(processor, folder, picture)
    squares, windows, _ = sight.values(picture)
    cut = np.stack(squares).reshape(len(squares), 4, 8, 4, 8, 3).swapaxes(2, 3).reshape(len(squares), 16, -1)
    off = np.abs(cut - ready["pixel_values"].numpy())
    assert off.max() < 2.001 / 255 and (off > 1e-6).mean() < 1e-2  # halves are rounded by what torch makes of them
    ready["pixel_values"] = torch.from_numpy(cut)
    assert np.array_equal(windows, ready["image_token_pooling"].numpy())
    wanted, seen = wanted_rows(model, ready, told, folder), sight.encode(picture, EncodingJob())
    assert np.abs(seen.rows - wanted).max() < 2e-5 * np.abs(wanted).max()
    assert seen.tokens == (ROW_PLACEHOLDER,) * len(told) and sight.token_count(*picture.shape[:2]) == len(told) and seen.bidirectional


def test_points_between_others_are_those_of_torch():
    rng = np.random.default_rng(5)
    for height, width, high, wide in rng.integers(1, 90, (40, 4)).tolist():
        picture = rng.integers(0, 256, (height, width, 3), np.uint8)
        wanted = torch.nn.functional.interpolate(torch.from_numpy(picture).permute(2, 0, 1)[None].float(), size=(high, wide),
                                                 mode="bilinear", align_corners=False)[0].permute(1, 2, 0).round().numpy()
        off = np.abs(between(picture, high, wide) - wanted)
        assert off.max() <= 1 and (off > 0).mean() < 2e-2


@given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 9), st.tuples(st.integers(0, 3), st.integers(0, 3)),
       st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_canvas_and_windows_are_those_of_its_processor(height, width, most, margins, pool):
    sight = object.__new__(Molmo2)
    sight.most, sight.margins, sight.pool, sight.across = most, margins, pool, 7
    sight.__dict__ |= {"side": 70, "patch": 10}
    if max(height, width) > 200 * min(height, width):
        return
    *shape, _, _ = theirs.compute_crop_geometry(height, width, most, list(margins), 70, 10)
    assert list(sight.canvas(height, width)) == shape
    processor = CASES["molmo2"][-1].__class__(size={"height": 70, "width": 70}, patch_size=10, max_crops=most,
                                              overlap_margins=list(margins), pooling_size=list(pool))
    grid, count = processor.get_image_grid_and_crops(height, width)
    small, whole = sight.windows(height, width)
    assert [*small.shape[:2], *whole.shape[:2]] == grid and shape[0] * shape[1] + 1 == count
    ready = processor(np.zeros((height, width, 3), np.uint8), input_data_format="channels_last", return_tensors="pt") \
        if height * width < 4000 else None
    if ready is not None:
        wanted = ready["image_token_pooling"].numpy()
        assert np.array_equal(np.concatenate([each.reshape(-1, each.shape[-1]) for each in (small, whole)]), wanted)


def test_a_folder_by_the_first_names_is_the_same(molmo, tmp_path):
    """Which says more layers than are stored, and counts them from the end."""
    folder = molmo[0]
    for each in folder.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    vision, adapter = raw.pop("vision_config"), raw["adapter_config"]
    older = {"image_size": "image_default_input_size", "patch_size": "image_patch_size", "num_position_embeddings": "image_num_pos"}
    raw["vit_config"] = {older.get(key, key): value for key, value in vision.items()} | {"model_type": "molmo2", "num_hidden_layers": 5}
    del adapter["vision_feature_layer"]
    raw["adapter_config"] = {**adapter, "model_type": "molmo2", "vit_layers": [-3, -5]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert np.array_equal(*(open_encoder(each).encode(PICTURES["odd"], EncodingJob()).rows for each in (folder, tmp_path)))


@pytest.mark.parametrize(("where", "changes", "said"), [
    ("preprocessor_config.json", {"resample": 3}, "resample is 3, expected 2"),
    ("preprocessor_config.json", {"overlap_margins": [2, 2]}, "overlap_margins and pooling_size"),
    ("preprocessor_config.json", {"pooling_size": [2]}, "pooling_size is .2., expected two whole numbers"),
    ("preprocessor_config.json", {"size": {"height": 64, "width": 64}}, "size is .*, expected the 32 × 32 that the tower takes"),
    ("adapter_config", {"pooling_attention_mask": False}, "pooling_attention_mask is False, expected true"),
    ("adapter_config", {"num_key_value_heads": 1}, "num_key_value_heads is 1, expected 3"),
    ("adapter_config", {"vision_feature_layer": [3]}, "a list of layers, each less than 3")])
def test_what_is_made_otherwise_is_refused_by_name(molmo, tmp_path, where, changes, said):
    for each in molmo[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    if where == "adapter_config":
        raw = json.loads((tmp_path / "config.json").read_text())
        change_config(tmp_path, "config.json", adapter_config={**raw["adapter_config"], **changes})
    else:
        change_config(tmp_path, where, **changes)
    with pytest.raises(EffllmError, match=said):
        open_encoder(tmp_path).encode(PICTURES["tiny"], EncodingJob())


def test_texts_begin_with_the_word_that_its_processor_puts_there(molmo, tmp_path):
    for each in molmo[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    for changes, first in (({}, "<|endoftext|>"), ({"bos_token": None}, "<|end|>")):
        change_config(tmp_path, "tokenizer_config.json", **{"chat_template": None, **changes})
        tokenizer = Tokenizer.load(tmp_path, open_encoder(tmp_path).config)
        assert tokenizer.render_chat([{"role": "user", "content": "a fox"}]) == f"{first}[user]a fox[assistant]"
        assert tokenizer.encode("a fox")[0] == tokenizer.bos_id == tokenizer.encode(first, add_special_tokens=False)[0]
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}" + TEMPLATE)
    again = Tokenizer.load(tmp_path, open_encoder(tmp_path).config)
    assert again.render_chat([{"role": "user", "content": "a fox"}]) == "<|end|>[user]a fox[assistant]"


@pytest.fixture(scope="module")
def reading(molmo):
    """An engine, and what reads a prompt with it: the logits behind, and how many tokens were gone on from."""
    engine = list(open_engine(molmo[0], replace(OPTIONS, chunk=128, encoder_path=str(molmo[0]))))[-1]
    engine.media = open_media(molmo[0], engine.config)
    prompts = PromptBuilder(Tokenizer.load(molmo[0], engine.config), media=engine.media)

    def read(prompt: str, anew: bool = False) -> tuple[np.ndarray, int]:
        if anew:
            engine.reset()
        list(prompts.encode_media(prompt, engine, lambda: False))
        list(engine.prefill(prompts.tokenize(prompt)))
        return engine._logits.copy(), engine.num_cached_tokens

    yield engine, read
    engine.close()


def test_images_that_see_each_other_are_read_again_with_another(reading):
    """And with other words between; what comes behind the last of them, and an image by itself, goes on as ever."""
    engine, read = reading
    one, other = (media_marker(engine.media.add(PICTURES[name]).digest) for name in ("tiny", "odd"))
    first = f"Once upon a time {one} was"
    texts = [first, f"{first} a fox.", f"{first} a fox, and {other} was", f"{first} a fox, and {other} was another.",
             f"{first} a cat, and {other} was", first, f"{first} it, {one} too"]
    for text in texts:
        gone_on, reused = read(text)
        wanted, _ = read(text, anew=True)
        assert np.abs(gone_on - wanted).max() < 2e-5 * np.abs(wanted).max(), text
        words = len(engine.tokens) - sum(token >= 1 << 40 for token in engine.tokens)
        assert reused <= words if text in (texts[2], texts[4], texts[5], texts[6]) else True
    long = f"{texts[2]} another.{' It is so.' * 60}"
    read(long, anew=True)
    behind = max(place for place, token in enumerate(engine.tokens) if token >= 1 << 40)
    assert read(f"{long} And so on.")[1] > behind, "it goes on behind both pictures"


def test_a_pass_holds_all_images_and_what_is_between(molmo, reading):
    engine, read = reading
    one, other = (media_marker(engine.media.add(PICTURES[name]).digest) for name in ("tiny", "odd"))
    assert engine.cache.shape.chunk == 512, "as long as the context"
    near, far = (read(f"Once {one} was {'a fox ' * count}and {other} was", anew=True)[0] for count in (2, 130))
    assert not np.allclose(near, far)
    narrow = list(open_engine(molmo[0], replace(OPTIONS, chunk=128)))[-1]  # as where no image may come
    try:
        narrow.media = engine.media
        prompts = PromptBuilder(Tokenizer.load(molmo[0], narrow.config), media=engine.media)
        with pytest.raises(UsageError, match="the images, with the text between them, take [0-9]+ tokens that attend to each other"):
            list(narrow.prefill(prompts.tokenize(f"Once {one} was {'a fox ' * 130}and {other} was")))
    finally:
        narrow.close()


def test_a_quantized_model_sees_the_same(tmp_path):
    text, vision, words, more, processor = CASES["molmo2"]
    more = {**more, "adapter_config": {**more["adapter_config"], "text_hidden_size": 64}}
    save_vision_model(tmp_path / "whole", "molmo2", ({**text, "hidden_size": 64, "intermediate_size": 96}, vision, words, more, processor))
    open_quantized_encoder(tmp_path)


def test_published_configs_are_known_to_the_last_key():
    text = {"additional_vocab_size": 128, "attention_dropout": 0.0, "attn_implementation": "sdpa", "embedding_dropout": 0.0, "head_dim":
            128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12_288, "layer_norm_eps":
            1e-6, "max_position_embeddings": 36_864, "model_type": "molmo2_text", "norm_after": False, "num_attention_heads": 32,
            "num_hidden_layers": 36, "num_key_value_heads": 8, "qk_norm_type": "qwen3", "qkv_bias": False, "residual_dropout": 0.0,
            "rope_scaling": None, "rope_scaling_layers": None, "rope_theta": 1e6, "use_cache": True, "use_qk_norm": True, "vocab_size":
            151_936}
    raw = {"adapter_config": {"model_type": "molmo2"}, "architectures": ["Molmo2ForConditionalGeneration"],
           "auto_map": {"AutoConfig": "configuration_molmo2.Molmo2Config"}, "dtype": "float32", "frame_end_token_id": 151_944,
           "frame_start_token_id": 151_943, "image_col_id": 151_939, "image_end_token_id": 151_937, "image_low_res_id": 151_942,
           "image_patch_id": 151_938, "image_start_token_id": 151_936, "initializer_range": 0.02, "low_res_image_start_token_id": 151_940,
           "model_type": "molmo2", "text_config": text, "tie_word_embeddings": False, "use_frame_special_tokens": True,
           "vit_config": {"model_type": "molmo2"}}
    config = parse_config(raw, strict=True)
    assert (config.family, config.extra_embeddings, config.tie_word_embeddings, config.norm_eps) == ("molmo2_text", 128, False, 1e-6)
    olmo = {**text, "norm_after": True, "qk_norm_type": "olmo", "layer_norm_eps": 1e-5, "rope_scaling_layers": [3, 7],
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}}
    config = parse_config({**raw, "text_config": olmo}, strict=True)
    assert config.qk_norm_full_width and config.norm_eps == 1e-5
    assert [layer for layer, each in enumerate(config.ropes) if each.kind == "yarn"] == [3, 7] and config.ropes[0].theta == 1e6
    with pytest.raises(EffllmError, match="norm_after = true is not supported"):
        parse_config({**raw, "text_config": {**olmo, "qk_norm_type": "qwen3"}})
