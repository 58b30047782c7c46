"""HunyuanVL: pixel values, rows and tokens are those of transformers, from folders of both layouts; positions follow from the tokens
alone."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLModel
from transformers.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor
from vision_cases import CASES, HUNYUAN
from vision_models import FIRST, PICTURES, SHAPES, assert_encodes_as, change_config, open_encoder, open_quantized_encoder, save_vision_model

from effllm import EffllmError
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Notice
from effllm.runtime.images import EncodingJob
from effllm.runtime.images.mrope import ORDER, media_token_id, mrope_axes, track_positions
from effllm.runtime.prepare import EngineOptions

ROPE = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "xdrope",
        "xdrope_section": [2, 4, 4, 2]}


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hunyuan")
    return folder, save_vision_model(folder, "hunyuan_vl", CASES["hunyuan_vl"]), CASES["hunyuan_vl"][-1]


def copied(folder, to):
    for each in folder.iterdir():
        (to / each.name).write_bytes(each.read_bytes())
    return to


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_those_of_transformers(hunyuan, name):
    folder, model, processor = hunyuan
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    patches, grid = sight.values(picture)
    assert np.array_equal(patches, ready["pixel_values"]) and [1, *grid] == ready["image_grid_thw"][0].tolist()
    seen = assert_encodes_as(sight, picture, model, ready)
    image, begin, end = HUNYUAN
    words = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>", extra_special_tokens={
        "image_token": image, "image_start_token": begin, "image_end_token": end})
    counted = HunYuanVLProcessor(processor, words)(images=picture, text=f"{begin}{image}{end}")["input_ids"][0]
    assert counted.count(FIRST) == len(seen.tokens) and sight.placeholder_text == f"{begin}{image}{end}"


def test_the_filter_that_files_state_is_none(hunyuan, tmp_path):
    folder, _, _ = hunyuan
    change_config(copied(folder, tmp_path), "preprocessor_config.json", resample=1, size=None, min_pixels=1600, max_pixels=8100)
    assert np.array_equal(open_encoder(tmp_path).values(PICTURES["photo"])[0], open_encoder(folder).values(PICTURES["photo"])[0])


def test_a_folder_by_the_newer_names_is_the_same(hunyuan, tmp_path):
    folder, _, _ = hunyuan
    names = {"vit.perceive.proj.0.": "model.vision_tower.patch_merger.proj_conv.",
             "vit.perceive.proj.2.": "model.vision_tower.patch_merger.proj_out.",
             "vit.perceive.": "model.vision_tower.patch_merger.", "vit.": "model.vision_tower.", "mlp.dense_h_to_4h": "mlp.fc1",
             "mlp.dense_4h_to_h": "mlp.fc2"}
    made = {}
    for name, each in load_file(folder / "model.safetensors").items():
        if name.startswith("vit."):
            for older, newer in (*names.items(), ("input_layernorm", "layer_norm1"), ("post_attention_layernorm", "layer_norm2")):
                name = name.replace(older, newer)
        else:
            name = name.replace("model.", "model.language_model.", 1)
        made[name] = each
    assert not any("vit." in name or "perceive" in name for name in made)
    save_file(made, copied(folder, tmp_path) / "model.safetensors")
    older, newer = (open_encoder(each).encode(PICTURES["odd"], EncodingJob()).rows for each in (folder, tmp_path))
    assert np.array_equal(older, newer)


def test_positions_are_known_by_both_names(hunyuan, tmp_path):
    """A folder may say of the text model all in the outer object, as HunyuanOCR does, or in one of its own."""
    raw = json.loads((hunyuan[0] / "config.json").read_text())
    inner = {key: value for key, value in raw.pop("text_config").items() if key not in ("model_type", "rope_parameters")}
    for said in ({**raw, **inner, "rope_theta": 10_000.0, "rope_scaling": ROPE},
                 {**raw, "text_config": {**inner, "model_type": "hunyuan_vl_text", "rope_parameters": {**ROPE, "rope_theta": 10_000.0}}}):
        (tmp_path / "config.json").write_text(json.dumps(said))
        config = read_config(tmp_path, strict=True)
        assert config.family == "hunyuan_v1_dense" and config.tie_word_embeddings
        assert config.ropes[0].kind == "default" and config.ropes[0].theta == pytest.approx(10_000 * 1000 ** (24 / 22))
        assert (mrope_axes(tmp_path, config) - ORDER).tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    wrong = {**said, "text_config": {**said["text_config"], "rope_parameters": {**ROPE, "xdrope_section": [2, 4, 4, 3]}}}
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(EffllmError, match="xdrope_section is .2, 4, 4, 3., which does not add up to 12 channel pairs"):
        mrope_axes(tmp_path, config)


def test_a_published_config_is_known_to_the_last_key():
    raw = {"architectures": ["HunYuanVLForConditionalGeneration"], "attention_bias": False, "attention_dropout": 0.0,
           "attention_head_dim": 128, "bos_token_id": 120_000, "dtype": "bfloat16", "eod_token_id": 120_020, "eos_token_id": 120_007,
           "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "image_end_token_id": 120_119, "image_newline_token_id": 120_121,
           "image_start_token_id": 120_118, "image_token_id": 120_120, "initializer_range": 0.02, "intermediate_size": 3584,
           "max_position_embeddings": 32_768, "mlp_bias": False, "model_type": "hunyuan_vl", "norm_type": "rms",
           "num_attention_heads": 16, "num_experts": 1, "num_hidden_layers": 24, "num_key_value_heads": 8, "org_vocab_size": 120_818,
           "pad_id": 120_002, "pad_token_id": -1, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": {
               **ROPE, "xdrope_section": [16] * 4}, "rope_theta": 10_000.0, "routed_scaling_factor": 1.0, "sep_token_id": 0,
           "text_end_id": 7, "text_start_id": 6, "tie_word_embeddings": True, "use_cache": True, "use_cla": False, "use_qk_norm": True,
           "vision_config": {"model_type": "hunyuan_vl"}, "vocab_size": 120_818}
    config = parse_config(raw, strict=True)
    assert (config.family, config.head_dim, config.ropes[0].kind, config.eos_token_ids) == ("hunyuan_v1_dense", 128, "default", (120_007,))
    with pytest.raises(EffllmError, match="num_experts = 8 is not supported"):
        parse_config({**raw, "num_experts": 8})


def test_three_numbers_leave_the_order_out(hunyuan, tmp_path):
    raw = json.loads((hunyuan[0] / "config.json").read_text())
    raw["text_config"]["rope_parameters"] |= {"mrope_section": [4, 4, 4]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert (mrope_axes(tmp_path, read_config(tmp_path)) - ORDER).tolist() == [1] * 4 + [2] * 4 + [3] * 4


def test_places_follow_from_the_tokens_alone():
    axes = np.array([0, 1, 2, 3]) + ORDER
    one, other = ([media_token_id(number, columns if 0 < row <= lines * columns else 0, row) for row in range(lines * columns + 2)]
                  for number, lines, columns in ((5, 2, 3), (6, 2, 2)))
    held = track_positions([9, 9], axes)
    places = held.positions_after([*one, 9, *other, 9], axes)
    assert places[:, 0].tolist() == list(range(2, 18))
    assert places[:, 1].tolist() == [2, 0, 1, 2, 0, 1, 2, 9, 10, 11, 0, 1, 0, 1, 16, 17]
    assert places[:, 2].tolist() == [2, 0, 0, 0, 1, 1, 1, 9, 10, 11, 0, 0, 1, 1, 16, 17]
    assert places[:, 3].tolist() == [2, 0, 0, 0, 0, 0, 0, 9, 10, 11, 1, 1, 1, 1, 16, 17]
    held.tokens.extend([*one[:5]])
    assert held.positions_after(one[5:], axes).tolist() == [[7, 1, 1, 0], [8, 2, 1, 0], [9] * 4], "a chunk may begin inside an image"
    held.tokens.extend([*one[5:], *one])
    assert held.positions_after([9], axes) is None, "a word is turned by its order"
    assert held.positions_after(other[:2], axes)[1].tolist() == [19, 0, 0, 2], "the same picture twice counts twice"


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(5, 6)), min_size=1, max_size=4),
       st.floats(0, 1))
def test_places_are_those_of_transformers_wherever_a_chunk_begins(shown, cut):
    """Of images of so many lines and columns, with so many words behind each, two of which may be the same one."""
    ids, kinds, grids = [9, 9], [0, 0], []
    for lines, columns, words, number in shown:
        rows = lines * (columns + 1)
        ids += [media_token_id(number, columns + 1 if 0 < row <= rows else 0, row) for row in range(rows + 2)] + [9] * words
        kinds += [1] * (rows + 2) + [0] * words
        grids.append([1, 2 * lines, 2 * columns])
    config = SimpleNamespace(text_config=SimpleNamespace(rope_parameters={"mrope_section": [1] * 4}),
                             vision_config=SimpleNamespace(spatial_merge_size=2))
    asked = SimpleNamespace(config=config, get_vision_position_ids=partial(HunYuanVLModel.get_vision_position_ids, None))
    wanted, further = HunYuanVLModel.get_rope_index(asked, torch.zeros(1, len(ids), dtype=torch.int64), torch.tensor([kinds]),
                                                    torch.tensor(grids))
    at, axes = int(cut * (len(ids) - 1)), np.arange(4) + ORDER
    held = track_positions(ids[:at], axes)
    found = held.positions_after([*ids[at:], *ids[2:6]], axes)[: len(ids) - at]
    assert np.array_equal(found, wanted[:, 0, at:].T) and not further.any()


@pytest.mark.parametrize(("changes", "said"), [({"interpolate_mode": "bicubic"}, "interpolate_mode .bicubic. is not supported"),
                                               ({"temporal_patch_size": 2}, "temporal_patch_size is 2, expected 1")])
def test_a_tower_of_another_make_is_refused_by_name(hunyuan, changes, said, tmp_path):
    vision = json.loads((hunyuan[0] / "config.json").read_text())["vision_config"]
    change_config(copied(hunyuan[0], tmp_path), "config.json", vision_config={**vision, **changes})
    with pytest.raises(EffllmError, match=said):
        open_encoder(tmp_path)


def test_nothing_of_the_tower_is_taken_for_more_of_the_text_part(hunyuan):
    *said, engine = open_engine(hunyuan[0], EngineOptions(device="cpu", ctx=128))
    engine.close()
    assert not [each for each in said if isinstance(each, Notice) and "not used" in each.text]


def test_a_quantized_model_sees_the_same(tmp_path):
    text, *rest = CASES["hunyuan_vl"]
    save_vision_model(tmp_path / "whole", "hunyuan_vl", ({**text, "hidden_size": 64, "intermediate_size": 96}, *rest))
    open_quantized_encoder(tmp_path)
