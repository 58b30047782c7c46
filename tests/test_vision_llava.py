"""LLaVA 1.5: pixel values, rows and tokens are those of transformers."""

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from vision_models import PICTURES, SHAPES, TOWER, assert_encodes_as, change_config, fast_tokenizer, open_encoder, save_random_model

from effllm import UsageError
from effllm.offload.checkpoint import CheckpointError
from effllm.offload.hardware import cpu_threads
from effllm.runtime.config import read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.images import EncodingJob, tower
from effllm.runtime.images.media import open_media
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN
from effllm.runtime.images.tower_ops import WorkerPool

SQUARE = {"height": 32, "width": 32}
CASES = {
    "CLIP": ({"model_type": "clip_vision_model"}, {}, CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE)),
    "CLIP, squared, several layers": (
        {"model_type": "clip_vision_model"}, {"vision_feature_layer": [-2, 1], "vision_feature_select_strategy": "full"},
        LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE, do_pad=True)),
    "CLIP, cropped wider": ({"model_type": "clip_vision_model"}, {"vision_feature_layer": -3, "projector_hidden_act": "gelu_pytorch_tanh"},
                            CLIPImageProcessorPil(size={"shortest_edge": 21}, crop_size=SQUARE, resample=2)),
    "SigLIP": ({"model_type": "siglip_vision_model", "vision_use_head": False},
               {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}, SiglipImageProcessorPil(size=SQUARE)),
}


@pytest.fixture(scope="module", params=CASES)
def llava(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    vision, outer, processor = CASES[request.param]
    model = save_random_model("llava", folder, {"model_type": "llama"}, {**TOWER, **vision}, ["<image>"], image_token_index=4096, **outer)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_those_of_transformers(llava, name):
    folder, model, processor = llava
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last")
    assert np.array_equal(sight.values(picture)[0].transpose(2, 0, 1), ready["pixel_values"][0])
    seen = assert_encodes_as(sight, picture, model, ready)
    beside = int("clip" in sight.tower)
    counted = LlavaProcessor(processor, fast_tokenizer(folder), patch_size=8, num_additional_image_tokens=beside,
                             vision_feature_select_strategy=model.config.vision_feature_select_strategy)
    assert counted(images=picture, text="<image>")["input_ids"][0].count(4096) == len(seen.tokens)


def test_a_folder_without_image_preprocessing(llava, tmp_path):
    folder = tmp_path / "copied"
    folder.mkdir()
    for each in llava[0].iterdir():
        (folder / each.name).symlink_to(each)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UsageError, match=r"has no preprocessor_config\.json"):
        open_encoder(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "DonutImageProcessor"}')
    with pytest.raises(UsageError, match="image preprocessor 'DonutImageProcessor' is not supported"):
        open_encoder(folder)
    (folder / "preprocessor_config.json").write_text('{"size": {"shortest_edge": -3}}')
    with pytest.raises(ConfigError, match="size is"):
        open_encoder(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 64, "crop_size": 64}')
    with pytest.raises(ConfigError, match="become 64 × 64, but the tower takes 32 × 32"):
        open_encoder(folder)


def test_a_tower_that_is_not_known_or_damaged(llava, tmp_path):
    folder = tmp_path / "copied"
    folder.mkdir()
    for each in llava[0].iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    inside = llava[1].config.vision_config.to_dict()
    change_config(folder, "config.json", vision_config={**inside, "intermediate_size": 80})
    with pytest.raises(CheckpointError, match="config.json says"):
        open_encoder(folder).encode(PICTURES["tiny"], EncodingJob())
    change_config(folder, "config.json", vision_config={**inside, "model_type": "owl_vision_model"})
    with pytest.raises(UsageError, match="tower of type 'owl_vision_model'"):
        open_encoder(folder)


def test_an_image_that_would_become_too_large_is_refused(llava):
    """Its shorter side is made as long as the tower's, or its longer one a square."""
    sight = open_encoder(llava[0])
    with pytest.raises(UsageError, match="60000 × 1 is too elongated"):
        sight.encode(np.zeros((1, 60_000, 3), np.uint8), EncodingJob())
    if sight.processor.flag("do_pad", False):
        with pytest.raises(UsageError, match="12000 × 100 is too large"):
            sight.encode(np.zeros((100, 12_000, 3), np.uint8), EncodingJob())


def test_bytes_are_known_before_anything_is_read(llava):
    sight = open_encoder(llava[0])
    assert sum(each.numel() for name, each in llava[1].named_parameters() if "language" not in name and "lm_head" not in name) * 4 \
        < sight.bytes_needed() < 500_000 + 1_250_000 * cpu_threads()
    assert sight._rows is None


def test_a_runs_threads_look(llava, monkeypatch):
    seen = []

    class Counted(WorkerPool):
        def __init__(self, threads, work):
            seen.append(threads)
            super().__init__(threads, work)

    monkeypatch.setattr(tower, "WorkerPool", Counted)
    own, usual = (open_media(llava[0], read_config(llava[0]), threads=threads).encoders[SEEN] for threads in (5, None))
    rows = [sight.encode(PICTURES["odd"], EncodingJob()).rows for sight in (own, usual)]
    assert seen == [5, cpu_threads()] and np.abs(rows[0] - rows[1]).max() < 1e-5 * np.abs(rows[1]).max()
    assert (own.bytes_needed() > usual.bytes_needed()) == (cpu_threads() < 5)
