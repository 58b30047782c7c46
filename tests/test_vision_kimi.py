"""Kimi K2.5: images at native aspect ratio, interpolated position embeddings, rotated patches and merged patches are transformers'."""

import json
import math
import re

import gguf
import numpy as np
import pytest
import torch
from command_line import run_cli
from hypothesis import assume, given
from hypothesis import strategies as st
from mmproj_files import split_rope_axes, write_projector
from remapped_checkpoints import as_kimi
from safetensors.torch import load_file, save_file
from vision_cases import CASES
from vision_models import (
    FIRST,
    PICTURES,
    SHAPES,
    assert_encodes_as,
    change_config,
    navit_resize,
    open_encoder,
    open_quantized_encoder,
    save_vision_model,
)

from effllm import EffllmError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob
from effllm.runtime.images.kimi_k25 import KimiK25
from effllm.runtime.images.kimi_vl import LONGEST, KimiVl
from effllm.runtime.images.media import open_media
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN
from effllm.runtime.images.tower_ops import patches_of
from effllm.runtime.prepare import EngineOptions


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    model = save_vision_model(folder, "kimi_k25", CASES["kimi_k25"])
    as_kimi(folder)
    return folder, model, CASES["kimi_k25"][-1]


def copied(folder, to):
    for each in folder.iterdir():
        (to / each.name).write_bytes(each.read_bytes())
    return to


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_those_of_transformers(kimi, name):
    folder, model, processor = kimi
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="pt")
    values = patches_of(sight.values(picture), 8)
    assert np.abs(values - ready["pixel_values"].numpy().reshape(values.shape)).max() < 1e-6
    seen = assert_encodes_as(sight, picture, model, dict(ready))
    assert seen.tokens == (ROW_PLACEHOLDER,) * (int(ready["image_grid_thw"].prod()) // 4)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(16, 900), st.integers(4, 90))
def test_sizes_are_those_of_its_processor(height, width, most, longest):
    assume(max(height, width) < 200 * min(height, width))
    sight = object.__new__(KimiK25)
    sight.most, sight.longest, sight.joined = most, longest, 2
    sight.__dict__["patch"] = 14
    assert sight.sized(height, width) == navit_resize()(height, width, 14, 2, most, longest)


def test_a_folder_as_it_was_published_is_the_same(kimi, tmp_path):
    """Which has other names for its tower's settings, and the image preprocessing in an object of its own."""
    names = {"hidden_size": "vt_hidden_size", "intermediate_size": "vt_intermediate_size", "num_hidden_layers": "vt_num_hidden_layers",
             "num_attention_heads": "vt_num_attention_heads", "pos_emb_height": "init_pos_emb_height", "pos_emb_width":
             "init_pos_emb_width"}
    raw = json.loads((copied(kimi[0], tmp_path) / "config.json").read_text())
    vision = {names.get(key, key): value for key, value in raw["vision_config"].items() if key not in ("model_type", "rope_parameters")}
    change_config(tmp_path, "config.json", vision_config={**vision, "mm_projector_type": "patchmerger", "projector_ln_eps": 1e-5})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": {
        "fixed_output_tokens": None, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "in_patch_limit": 120, "merge_kernel_size": 2,
        "patch_limit_on_one_side": 20, "patch_size": 8}}))
    assert np.array_equal(*(open_encoder(each).encode(PICTURES["tall"], EncodingJob()).rows for each in (kimi[0], tmp_path)))
    assert open_encoder(tmp_path).placeholder_text.count(open_encoder(tmp_path).placeholder) == 1


def as_kimi_vl(folder):
    """As Kimi-VL was published, whose limit is of patches alone and whose text model does not say of what type it is."""
    path = folder / "model.safetensors"
    parts = {r"^(model\.)?mm_projector\.": "multi_modal_projector.", r"proj\.(linear_1|0)\.": "linear_1.",
             r"proj\.(linear_2|2)\.": "linear_2.", r"encoder\.patch_embed": "patch_embed"}
    tensors = load_file(path)
    for old, own in parts.items():
        tensors = {re.sub(old, own, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    raw = json.loads((folder / "config.json").read_text())
    vision = {key: value for key, value in raw["vision_config"].items() if not key.startswith("pos_emb") and key != "rope_parameters"}
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["KimiVLForConditionalGeneration"], "auto_map": {"AutoModelForCausalLM":
        "modeling_kimi_vl.KimiVLForConditionalGeneration"}, "ignore_index": -100, "media_placeholder_token_id": FIRST,
        "model_type": "kimi_vl", "text_config": {key: value for key, value in raw["text_config"].items() if key != "model_type"},
        "vision_config": {**vision, "model_type": "moonvit", "init_pos_emb_height": 5, "init_pos_emb_width": 5}}))
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "auto_map": {"AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor"}, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3, "in_token_limit": 120, "num_pooled_tokens": 1024, "pad_input": True, "patch_size": 8}))


def test_kimi_vl_is_the_same_tower_under_other_names(kimi, tmp_path):
    as_kimi_vl(copied(kimi[0], tmp_path))
    config = read_config(tmp_path)
    assert config.family == "deepseek_v3" and not config.tie_word_embeddings
    sight = open_encoder(tmp_path)
    assert sight.placeholder_text.count(sight.placeholder) == 1
    for name in ("photo", "odd", "tiny"):
        first, second = (each.encode(PICTURES[name], EncodingJob()) for each in (open_encoder(kimi[0]), sight))
        assert np.array_equal(first.rows, second.rows) and first.tokens == second.tokens
    ids = list(range(3, 40))
    ours = []
    for folder in (kimi[0], tmp_path):
        *_, engine = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=64))
        ours.append(np.concatenate([rows.copy() for _, rows in engine.score(ids)]))
        engine.close()
    assert np.array_equal(*ours)
    change_config(tmp_path, "preprocessor_config.json", pad_input=False)
    with pytest.raises(EffllmError, match="pad_input"):
        open_encoder(tmp_path)


def test_files_of_kimi_vl_see_as_its_folder(kimi, tmp_path):
    """Which have queries, keys and values apart and places in one row; others' do not say how many patches an image may have."""
    (tmp_path / "folder").mkdir()
    as_kimi_vl(copied(kimi[0], tmp_path / "folder"))
    change_config(tmp_path / "folder", "preprocessor_config.json", in_token_limit=4096)
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj-model-f16.gguf"
    assert run_cli("export", tmp_path / "folder", "-o", model)[0] == 0
    write_projector(tmp_path / "folder", mmproj, "kimivl", json.loads((tmp_path / "folder" / "config.json").read_text()))
    found, wanted = open_media(model, read_config(model)).encoders[SEEN], open_encoder(tmp_path / "folder")
    for name in ("photo", "odd", "tiny"):
        first, second = (each.encode(PICTURES[name], EncodingJob()) for each in (found, wanted))
        assert np.array_equal(first.rows, second.rows) and first.tokens == second.tokens
    assert found.placeholder_text == wanted.placeholder_text and found.longest == wanted.longest
    change_config(tmp_path / "folder", "preprocessor_config.json", in_token_limit=120)
    exported, wanted = tmp_path / "exported.gguf", open_encoder(tmp_path / "folder")
    code, _, err = run_cli("export", tmp_path / "folder", "-o", exported, "--mmproj")
    assert code == 0, err
    assert {each.name: each.shape.tolist() for each in gguf.GGUFReader(exported).tensors} == {
        each.name: each.shape.tolist() for each in gguf.GGUFReader(mmproj).tensors}
    found = open_media(model, read_config(model), str(exported)).encoders[SEEN]
    for name in ("photo", "odd", "tiny"):
        first, second = (each.encode(PICTURES[name], EncodingJob()) for each in (found, wanted))
        assert first.tokens == second.tokens and np.abs(first.rows - second.rows).max() < 5e-3 * np.abs(second.rows).max()


@pytest.mark.peer
@pytest.mark.slow
def test_llamacpp_sees_the_same_in_an_export_of_kimi_vl(kimi, tmp_path):
    """Two departures of llama.cpp are undone: it turns the first half of a head by columns and the second by lines, where the model's pairs
    alternate, and it interpolates places bilinearly, so there is one for each patch here."""
    peer = pytest.importorskip("llama_cpp")
    from test_projector_end_to_end import of_llamacpp

    (tmp_path / "folder").mkdir()
    folder, model, mmproj = as_kimi_vl_of(kimi[0], tmp_path / "folder", places=8), tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    points = np.ascontiguousarray(np.tile(PICTURES["square"], (2, 2, 1))[:64, :64])
    wanted = open_encoder(folder).encode(points, EncodingJob()).rows
    tensors = {name: torch.from_numpy(split_rope_axes(tensor.numpy(), 3)) if ".wqkv." in name else tensor
               for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    assert run_cli("export", folder, "-o", model)[0] == run_cli("export", folder, "-o", mmproj, "--mmproj")[0] == 0
    rows, _ = of_llamacpp(peer, model, mmproj, points)
    assert rows.shape == wanted.shape and np.abs(rows - wanted).max() < 1e-2 * np.abs(wanted).max()


def as_kimi_vl_of(source, folder, places):
    """The folder, with as many learned places a side."""
    as_kimi_vl(copied(source, folder))
    tensors, name = load_file(folder / "model.safetensors"), "vision_tower.patch_embed.pos_emb.weight"
    name = next(each for each in tensors if each.endswith(name))
    torch.manual_seed(5)
    tensors[name] = torch.randn(places, places, tensors[name].shape[-1]) * tensors[name].std()
    save_file(tensors, folder / "model.safetensors")
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    change_config(folder, "config.json", vision_config={**vision, "init_pos_emb_height": places, "init_pos_emb_width": places})
    return folder


@given(st.integers(14, 5000), st.integers(14, 5000), st.integers(16, 5000))
def test_sizes_of_kimi_vl_are_those_of_its_processor(height, width, most):
    """Which scales down images that have more whole patches, by one factor, and pads them."""
    assume(max(height, width) < 200 * min(height, width))
    sight = object.__new__(KimiVl)
    sight.most, sight.longest, sight.joined = most, LONGEST, 2
    sight.__dict__["patch"] = 14
    patches = (height // 14) * (width // 14)
    factor = math.sqrt(most / patches) if patches > most else 1
    own = int(height * factor), int(width * factor)
    assume(min(own) and max(own) <= LONGEST * 14)
    assert sight.sized(height, width) == (own, tuple(side + -side % 28 for side in own))


@pytest.mark.parametrize(("where", "changes", "said"), [
    ("preprocessor_config.json", {"merge_size": 3}, "patch_size and merge_size"),
    ("preprocessor_config.json", {"size": {"max_height": 20, "max_width": 21}}, "size is .*, expected as many patches down as across"),
    ("preprocessor_config.json", {"fixed_output_tokens": 64}, "fixed_output_tokens is 64, expected null"),
    ("vision_config", {"pos_emb_width": 6}, "pos_emb_width is 6, expected as many places"),
    ("vision_config", {"num_attention_heads": 8}, "num_attention_heads is 8, expected a divisor of 48")])
def test_what_is_made_otherwise_is_refused_by_name(kimi, tmp_path, where, changes, said):
    copied(kimi[0], tmp_path)
    if where == "vision_config":
        raw = json.loads((tmp_path / "config.json").read_text())
        change_config(tmp_path, "config.json", vision_config={**raw["vision_config"], **changes})
    else:
        change_config(tmp_path, where, **changes)
    with pytest.raises(EffllmError, match=said):
        open_encoder(tmp_path)


def test_a_quantized_model_sees_the_same(tmp_path):
    text, vision, words, more, processor = CASES["kimi_k25"]
    save_vision_model(tmp_path / "whole", "kimi_k25", ({**text, "hidden_size": 64, "intermediate_size": 96}, vision, words, more,
                                                       processor))
    as_kimi(tmp_path / "whole")
    sight = open_quantized_encoder(tmp_path)
    assert sight.placeholder in sight.tokenizer.added and sight.token_id(sight.placeholder) == FIRST
