"""FastVLM: convolutions by channel, stages and the rows of a picture are those of transformers, whose tower is timm's."""

import json

import numpy as np
import pytest
import torch
from conversions import options
from fastvit_torch import ARGS
from hypothesis import given
from hypothesis import strategies as st
from sight_cases import CASES
from sight_models import FIRST, PICTURES, config_changed, held_against, opened, seeing, words_of
from torch.nn import functional as F
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor

from effllm import EffllmError
from effllm.runtime.config import parse_config
from effllm.runtime.convert import convert
from effllm.runtime.images import Work
from effllm.runtime.images.fastvit import ByChannel
from effllm.runtime.images.tower_parts import Crew, gelu

SQUARE = {"height": 192, "width": 192}
PROCESSORS = {"cropped": CLIPImageProcessorPil(size={"shortest_edge": 192}, crop_size=SQUARE, image_mean=[0.0] * 3, image_std=[1.0] * 3),
              "squared": LlavaImageProcessorPil(size={"shortest_edge": 192}, crop_size=SQUARE, do_pad=True)}


@pytest.fixture(scope="module", params=PROCESSORS)
def fast(request, tmp_path_factory):
    folder, processor = tmp_path_factory.mktemp("fast"), PROCESSORS[request.param]
    return folder, seeing(folder, "fast_vlm", (*CASES["fast_vlm"][:-1], processor)), processor


@pytest.mark.parametrize("name", ["photo", "tall", "tiny"])
def test_rows_are_those_of_transformers(fast, name):
    folder, model, processor = fast
    sight, picture = opened(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(sight.values(picture)[0].transpose(2, 0, 1), ready["pixel_values"][0])
    seen = held_against(sight, picture, model, ready)
    counted = LlavaProcessor(processor, words_of(folder), patch_size=64, vision_feature_select_strategy="full")
    assert counted(images=picture, text="<image>")["input_ids"][0].count(FIRST) == len(seen.tokens) == 9


@given(st.data())
def test_a_convolution_by_channel_is_torchs(data):
    draw = data.draw
    channels, times, side, stride = (draw(st.sampled_from(each)) for each in ((1, 3, 8), (1, 2, 3), (1, 3, 7), (1, 2)))
    height, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    x, weight, bias = (rng.normal(size=shape).astype(np.float32)
                       for shape in ((channels, height, width), (channels * times, side, side), channels * times))
    with Crew(draw(st.sampled_from([1, 3])), Work()) as crew:
        ours = ByChannel(weight, bias, stride, gelu)(x, crew)
    theirs = F.gelu(F.conv2d(torch.tensor(x), torch.tensor(weight)[:, None], torch.tensor(bias), stride, side // 2, groups=channels))
    assert ours.shape == theirs.shape and np.abs(ours - theirs.numpy()).max() < 2e-5


def test_maps_larger_than_a_piece_are_those_of_small_ones(fast, monkeypatch):
    sight = opened(fast[0])
    rows = sight.see(PICTURES["photo"], Work()).rows
    monkeypatch.setattr("effllm.runtime.images.fastvit.PIECE", 1)
    assert np.array_equal(opened(fast[0]).see(PICTURES["photo"], Work()).rows, rows)


def test_a_published_config_is_known_to_the_last_key():
    text = {"attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
            "layer_types": ["full_attention"] * 24, "max_position_embeddings": 32_768, "max_window_layers": 24, "model_type": "qwen2",
            "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_scaling": None,
            "rope_theta": 1e6, "sliding_window": None, "use_cache": True, "use_sliding_window": False, "vocab_size": 151_936}
    config = parse_config({
        "architectures": ["FastVlmForConditionalGeneration"], "dtype": "bfloat16", "image_seq_length": 256, "image_token_index": 151_646,
        "model_type": "fast_vlm", "multimodal_projector_bias": True, "projector_hidden_act": "gelu", "text_config": text,
        "tie_word_embeddings": True, "vision_config": {"model_type": "timm_wrapper"}, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full"}, strict=True)
    assert (config.family, config.hidden_size, config.tie_word_embeddings) == ("qwen2", 896, True)


def test_what_is_done_of_a_picture_is_said(fast):
    work = Work()
    opened(fast[0]).see(PICTURES["odd"], work)
    assert work.done == work.total == sum(ARGS["layers"])


@pytest.mark.parametrize(("changes", "said"), [
    ({"architecture": "fastvit_sa12"}, "a tower 'fastvit_sa12', which is not known"),
    ({"model_args": {}}, "holds the branches that it was trained with"),
    ({"model_args": {**ARGS, "se_downsamples": [True] * 5, "act_layer": "relu"}}, "act_layer, se_downsamples are not known"),
    ({"model_args": {**ARGS, "layers": [1, 2]}}, "layers is .1, 2., expected 5 whole numbers"),
    ({"model_args": {**ARGS, "embed_dims": [8, 16, 32, 64, 80]}}, "embed_dims is .* expected widths"),
    ({"model_args": {**ARGS, "embed_dims": [8, 16, 32, 64, 128]}}, "hidden_size is 128, but the tower makes 256")])
def test_a_tower_of_another_make_is_refused_by_name(fast, changes, said, tmp_path):
    for each in fast[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    config_changed(tmp_path, "config.json", vision_config={**vision, **changes})
    with pytest.raises(EffllmError, match=said):
        opened(tmp_path)


def test_pictures_that_are_no_squares_of_whole_rows_are_refused(fast, tmp_path):
    for each in fast[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    config_changed(tmp_path, "preprocessor_config.json", crop_size={"height": 200, "width": 200})
    with pytest.raises(EffllmError, match="become 200 × 200, but the tower takes squares of a multiple of 64"):
        opened(tmp_path)
    config_changed(tmp_path, "preprocessor_config.json", crop_size=SQUARE)
    config_changed(tmp_path, "config.json", vision_feature_layer=-2)
    with pytest.raises(EffllmError, match="vision_feature_layer is -2, expected -1"):
        opened(tmp_path)


def test_a_quantized_model_sees_the_same(tmp_path):
    """Counters that its norms were stored with, which are whole numbers, are kept beside the rest."""
    text, *rest = CASES["fast_vlm"]
    seeing(tmp_path / "whole", "fast_vlm", ({**text, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}, *rest))
    list(convert(tmp_path / "whole", tmp_path / "small", options()))
    first, second = (opened(tmp_path / each) for each in ("whole", "small"))
    assert np.array_equal(first.see(PICTURES["odd"], Work()).rows, second.see(PICTURES["odd"], Work()).rows)
    assert first.bytes_needed() == second.bytes_needed() > 4 * 192 * 192 * (3 + 35 / 4)
