"""MiniCPM-V 4.7, which lays images out on a canvas: positions are transformers', wherever a pass begins."""

import json
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from family_models import assert_close
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model
from vision_cases import CASES
from vision_models import FIRST, PICTURES, assert_encodes_as, change_config, open_encoder, save_vision_model

from effllm import EffllmError, UsageError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.images.canvas import CanvasPositions, canvas_markers, row_tags, spread
from effllm.runtime.images.media import open_media
from effllm.runtime.images.minicpmv4_6 import OnCanvas
from effllm.runtime.images.mrope import FIRST_MEDIA_ID, media_token_id
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

BEGIN, END, SLICE, SLICED, LINE, IMAGE = 1, 2, 3, 4, 5, 6
MARKERS = (BEGIN, END, SLICE, SLICED, LINE)
# An image's height and width, points of a slice's side, points of a row's, most slices; what text is behind it.
SHOWN = st.tuples(st.integers(8, 3000), st.integers(8, 3000), st.sampled_from([(448, 56), (448, 28), (64, 32), (64, 16)]),
                  st.integers(1, 9), st.lists(st.sampled_from([9, 8, LINE]), max_size=4))


def laid_out(height: int, width: int, side: int, unit: int, most: int) -> tuple[list[int], list[tuple[int, int]], tuple[int, ...]]:
    """The tokens of an image of this size, sizes of its parts in rows, and what its rows state."""
    sight = object.__new__(OnCanvas)
    sight.resolution, sight.unit, sight.most, sight.slices, sight.grows = side, unit, most, True, True
    rows, columns = sight.grid(height, width) or (0, 0)
    small, *slices = ((high // unit, wide // unit) for high, wide in sight.sizes(height, width))
    ids = [BEGIN, *[IMAGE] * (small[0] * small[1]), END]
    for row in range(rows):
        ids += [LINE] * bool(row)
        for _ in range(columns):
            ids += [SLICE, *[IMAGE] * (slices[0][0] * slices[0][1]), SLICED]
    return ids, [small, *slices], sight.layout_tags(height, width)


def wanted(ids: list[int], sizes: list[tuple[int, int]]) -> np.ndarray:
    names = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
    asked = SimpleNamespace(config=SimpleNamespace(**dict(zip(names, MARKERS, strict=True)), downsample_mode="16x"),
                            _frame_end_idx=MiniCPMV4_7Model._frame_end_idx)
    for name in ("_group_visual_frames", "get_vision_position_ids"):
        setattr(asked, name, MethodType(getattr(MiniCPMV4_7Model, name), asked))
    kinds = torch.tensor([[int(token == IMAGE) for token in ids]])
    found, _ = MiniCPMV4_7Model.get_rope_index(asked, torch.tensor([ids]), kinds, 4 * torch.tensor(sizes))
    return found[:, 0].T.numpy()


@given(st.lists(SHOWN, min_size=1, max_size=3), st.integers(0, 3), st.floats(0, 1))
def test_places_are_those_of_transformers_wherever_a_pass_begins(shown, before, cut):
    ids, own, sizes = [9] * before, [9] * before, []
    for number, (height, width, (side, unit), most, text) in enumerate(shown):
        assume(max(height, width) < 40 * min(height, width))
        found, parts, said = laid_out(height, width, side, unit, most)
        rows = iter(enumerate(said))
        ids, sizes = ids + found + text, sizes + parts
        own += [media_token_id(5 + number % 2, *next(rows)[::-1]) if token == IMAGE else token for token in found] + text
    at, axes = int(cut * (len(ids) - 1)), np.arange(3)
    held = CanvasPositions(own[:at], markers=MARKERS)
    expected = wanted(ids, sizes)[at:]
    assert np.array_equal(held.position_triples(own[at:]), expected)
    found = held.positions_after(own[at:], axes)
    plain = (expected == expected[:, :1]).all()
    assert np.array_equal(np.arange(at, len(own))[:, None] if found is None else found.reshape(len(expected), -1),
                          expected[:, :1] if plain else expected)


def test_rows_are_spread_as_torch_does():
    for length in (1, 2, 7, 8, 24, 63, 72, 143):
        for count in range(1, 40):
            assert spread(length, count) == torch.linspace(0, length - 1, count).round().long().tolist()


def test_an_image_whose_canvas_has_no_room_is_refused():
    assert len(row_tags((3, 2), (0, 0), (0, 0))) == 6
    for small, grid, piece in (((64, 1), (9, 1), (256, 1)), ((1, 2), (3, 1), (2, 4)), ((1, 1024), (0, 0), (0, 0))):
        with pytest.raises(UsageError, match="too elongated for this model"):
            row_tags(small, grid, piece)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("canvas")
    model = save_vision_model(made, "minicpmv4_7", CASES["minicpmv4_7"])
    for name in ("photo", "tiny"):
        ready = CASES["minicpmv4_7"][-1](PICTURES[name], input_data_format="channels_last", return_tensors="np")
        seen = assert_encodes_as(open_encoder(made), PICTURES[name], model, {key: ready[key] for key in ("pixel_values", "target_sizes")})
        assert len(seen.layout_tags) == len(seen.rows)
    return made


def test_its_tokens_state_the_canvas(folder):
    media = open_media(folder, read_config(folder))
    photo = media.add(PICTURES["photo"])
    list(media.encode([photo]))
    rows = [token for token in photo.ids() if token >= FIRST_MEDIA_ID]
    assert [token >> 15 & 2047 for token in rows] == list(photo.encoded.layout_tags)
    assert media.markers == canvas_markers(json.loads((folder / "config.json").read_text())) == (*range(FIRST + 1, FIRST + 5), 203)


def test_a_text_is_read_the_same_token_by_token_and_continues_in_order(folder):
    """Words of a canvas have three numbers where no row is in the pass; what is written behind it is turned by its order again."""
    engine = list(open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=512, strict=False, exact=True)))[-1]
    try:
        engine.media = open_media(folder, engine.config)
        pictures = [engine.media.add(PICTURES[name]) for name in ("photo", "tall")]
        prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
        prompt = f"Once {pictures[0].marker}\n{pictures[1].marker} was a fox."
        list(prompts.encode_media(prompt, engine, lambda: False))
        ids = prompts.tokenize(prompt)
        whole, one = (np.concatenate([logits.copy() for _, logits in engine.score(ids, by_token=each)]) for each in (False, True))
        assert_close(one, whole)
    finally:
        engine.close()
    held = CanvasPositions(ids, markers=engine.media.markers)
    assert held.positions_after([9, 10], np.arange(3)).tolist() == [(last := max(held.position_triples([9])[0])), last + 1]


def test_a_config_without_the_words_around_images_is_refused(folder, tmp_path):
    for each in folder.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    change_config(tmp_path, "config.json", newline_id=None)
    with pytest.raises(EffllmError, match="newline_id"):
        raise open_media(tmp_path, read_config(tmp_path)).refused.popitem()[1]
