"""FastVLM: depthwise convolutions, stages and image rows are those of transformers, whose tower is timm's."""

import json

import numpy as np
import pytest
import torch
from fastvit_torch import ARGS, LAYERS, WIDTHS
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from torch.nn import functional as F
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from vision_cases import CASES
from vision_models import (
    FIRST,
    PICTURES,
    assert_encodes_as,
    change_config,
    fast_tokenizer,
    open_encoder,
    open_quantized_encoder,
    save_vision_model,
)

from effllm import EffllmError
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Notice
from effllm.runtime.images import EncodingJob, fast_vlm
from effllm.runtime.images.fastvit import ByChannel
from effllm.runtime.images.tower_ops import WorkerPool, gelu
from effllm.runtime.prepare import EngineOptions

SQUARE = {"height": 192, "width": 192}
PROCESSORS = {"cropped": CLIPImageProcessorPil(size={"shortest_edge": 192}, crop_size=SQUARE, image_mean=[0.0] * 3, image_std=[1.0] * 3),
              "squared": LlavaImageProcessorPil(size={"shortest_edge": 192}, crop_size=SQUARE, do_pad=True)}


@pytest.fixture(scope="module", params=PROCESSORS)
def fast(request, tmp_path_factory):
    folder, processor = tmp_path_factory.mktemp("fast"), PROCESSORS[request.param]
    return folder, save_vision_model(folder, "fast_vlm", (*CASES["fast_vlm"][:-1], processor)), processor


@pytest.mark.parametrize("name", ["photo", "tall", "tiny"])
def test_rows_are_those_of_transformers(fast, name):
    folder, model, processor = fast
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(sight.values(picture)[0].transpose(2, 0, 1), ready["pixel_values"][0])
    seen = assert_encodes_as(sight, picture, model, ready)
    counted = LlavaProcessor(processor, fast_tokenizer(folder), patch_size=64, vision_feature_select_strategy="full")
    assert counted(images=picture, text="<image>")["input_ids"][0].count(FIRST) == len(seen.tokens) == 9


@given(st.data())
def test_a_convolution_by_channel_is_torchs(data):
    draw = data.draw
    channels, times, side, stride = (draw(st.sampled_from(each)) for each in ((1, 3, 8), (1, 2, 3), (1, 3, 7), (1, 2)))
    height, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    x, weight, bias = (rng.normal(size=shape).astype(np.float32)
                       for shape in ((channels, height, width), (channels * times, side, side), channels * times))
    with WorkerPool(draw(st.sampled_from([1, 3])), EncodingJob()) as crew:
        ours = ByChannel(weight, bias, stride, gelu)(x, crew)
    theirs = F.gelu(F.conv2d(torch.tensor(x), torch.tensor(weight)[:, None], torch.tensor(bias), stride, side // 2, groups=channels))
    assert ours.shape == theirs.shape and np.abs(ours - theirs.numpy()).max() < 2e-5


def test_maps_larger_than_a_piece_are_those_of_small_ones(fast, monkeypatch):
    sight = open_encoder(fast[0])
    rows = sight.encode(PICTURES["photo"], EncodingJob()).rows
    monkeypatch.setattr("effllm.runtime.images.fastvit.PIECE", 1)
    assert np.array_equal(open_encoder(fast[0]).encode(PICTURES["photo"], EncodingJob()).rows, rows)


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


STEPS = ("stages.0.blocks", "stages.1.downsample", "stages.1.blocks", "stages.2.downsample", "stages.2.blocks", "stages.3.downsample",
         "stages.3.pos_emb", "stages.3.blocks", "stages.4.downsample", "stages.4.pos_emb", "stages.4.blocks")
OF_TOWER = {".mlp.": ".convffn.", "stem.": "patch_embed.", "final_conv.": "conv_exp.", "se.fc1": "se.reduce", "se.fc2": "se.expand",
            ".gamma": "", "proj.0.reparam_conv": "proj.0.lkb_reparam",
            "model.vision_tower.timm_model.": "model.vision_tower.vision_tower.model."}
OF_OTHERS = {"model.multi_modal_projector.linear_1": "model.mm_projector.0", "model.multi_modal_projector.linear_2": "model.mm_projector.2",
             "model.language_model.": "model."}


def as_first_published(folder, to):
    """A folder of transformers as Apple published it: tensors by other names, and a config without parts."""
    raw, made = json.loads((folder / "config.json").read_text()), {}
    for name, each in load_file(folder / "model.safetensors").items():
        for number, step in enumerate(STEPS):
            name = name.replace(f"timm_model.{step}.", f"timm_model.network.{number}.")
        for newer, older in (OF_TOWER if "vision_tower" in name else OF_OTHERS).items():
            name = name.replace(newer, older)
        made[name] = each
    for each in folder.iterdir():
        (to / each.name).write_bytes(each.read_bytes())
    (to / "preprocessor_config.json").unlink()
    save_file({**made, "model.vision_tower.vision_tower.model.head.proj": np.zeros((4, 4), np.float32)}, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps({
        **raw["text_config"], "architectures": ["LlavaQwen2ForCausalLM"], "auto_map": {"AutoConfig": "llava_qwen.LlavaConfig"},
        "freeze_mm_mlp_adapter": False, "image_aspect_ratio": "pad", "image_grid_pinpoints": None, "mm_hidden_size": 128,
        "mm_patch_merge_type": "flat", "mm_projector_lr": None, "mm_projector_type": "mlp2x_gelu", "mm_use_im_patch_token": False,
        "mm_use_im_start_end": False, "mm_vision_select_feature": "patch", "mm_vision_select_layer": -2,
        "mm_vision_tower": "mobileclip_l_192", "model_type": "llava_qwen2", "tie_word_embeddings": raw["tie_word_embeddings"],
        "tokenizer_model_max_length": 8192, "tokenizer_padding_side": "right", "tune_mm_mlp_adapter": False,
        "unfreeze_mm_vision_tower": True, "use_mm_proj": True}))
    return to


def test_a_folder_as_first_published_sees_the_same(fast, tmp_path, monkeypatch):
    monkeypatch.setitem(fast_vlm.ARCHITECTURES, "fastvit_mci3", (LAYERS, WIDTHS))
    first, folder = as_first_published(fast[0], tmp_path), fast[0]
    assert read_config(first, strict=True).family == "qwen2"
    sight, processor = open_encoder(first), LlavaImageProcessorPil(size={"shortest_edge": 192}, crop_size=SQUARE, image_mean=[0.0] * 3,
                                                                   image_std=[1.0] * 3, do_pad=True)
    values = processor(PICTURES["photo"], input_data_format="channels_last", return_tensors="np")["pixel_values"][0]
    assert np.array_equal(sight.values(PICTURES["photo"])[0].transpose(2, 0, 1), values) and sight.placeholder_text == "<image>\n"
    change_config(folder, "preprocessor_config.json", do_pad=True, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    assert np.array_equal(sight.encode(PICTURES["photo"], EncodingJob()).rows,
                          open_encoder(folder).encode(PICTURES["photo"], EncodingJob()).rows)
    *said, engine = open_engine(first, EngineOptions(device="cpu", ctx=128))
    engine.close()
    assert not [each for each in said if isinstance(each, Notice) and "not used" in each.text]
    for changes, error in (({"mm_vision_tower": "google/siglip-so400m-patch14-384"}, "vision tower 'google/siglip-so400m-patch14-384'"),
                           ({"mm_vision_tower": "mobileclip_l_192", "image_aspect_ratio": "anyres"}, "image_aspect_ratio 'anyres'"),
                           ({"image_aspect_ratio": "pad", "mm_projector_type": "linear"}, "mm_projector_type 'linear'")):
        change_config(first, "config.json", **changes)
        with pytest.raises(EffllmError, match=error):
            open_encoder(first)


def test_progress_on_an_image_is_reported(fast):
    work = EncodingJob()
    open_encoder(fast[0]).encode(PICTURES["odd"], work)
    assert work.done == work.total == sum(ARGS["layers"])


@pytest.mark.parametrize(("changes", "said"), [
    ({"architecture": "fastvit_sa12"}, "vision tower 'fastvit_sa12' is not supported"),
    ({"model_args": {}}, "holds the separate branches of training"),
    ({"model_args": {**ARGS, "se_downsamples": [True] * 5, "act_layer": "relu"}}, "act_layer, se_downsamples are not known"),
    ({"model_args": {**ARGS, "layers": [1, 2]}}, "layers is .1, 2., expected 5 whole numbers"),
    ({"model_args": {**ARGS, "embed_dims": [8, 16, 32, 64, 80]}}, "embed_dims is .* expected widths"),
    ({"model_args": {**ARGS, "embed_dims": [8, 16, 32, 64, 128]}}, "hidden_size is 128, but the tower makes 256")])
def test_a_tower_of_another_make_is_refused_by_name(fast, changes, said, tmp_path):
    for each in fast[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    change_config(tmp_path, "config.json", vision_config={**vision, **changes})
    with pytest.raises(EffllmError, match=said):
        open_encoder(tmp_path)


def test_images_that_are_no_squares_of_whole_rows_are_refused(fast, tmp_path):
    for each in fast[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    change_config(tmp_path, "preprocessor_config.json", crop_size={"height": 200, "width": 200})
    with pytest.raises(EffllmError, match="become 200 × 200, but the tower takes squares of a multiple of 64"):
        open_encoder(tmp_path)
    change_config(tmp_path, "preprocessor_config.json", crop_size=SQUARE)
    change_config(tmp_path, "config.json", vision_feature_layer=-2)
    with pytest.raises(EffllmError, match="vision_feature_layer is -2, expected -1"):
        open_encoder(tmp_path)


def test_a_quantized_model_sees_the_same(tmp_path):
    """Counters that its norms were stored with, which are whole numbers, are kept beside the rest."""
    text, *rest = CASES["fast_vlm"]
    save_vision_model(tmp_path / "whole", "fast_vlm", ({**text, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}, *rest))
    assert open_quantized_encoder(tmp_path).bytes_needed() > 4 * 192 * 192 * (3 + 35 / 4)
