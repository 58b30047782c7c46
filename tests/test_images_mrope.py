"""Families with M-RoPE for images: positions, channels and the embeddings added in early layers are those of transformers."""

import json

import numpy as np
import pytest
import torch
from family_models import assert_close
from family_sizes import Case
from vision_language_models import IMAGE_ID, picture, written_with_words
from vision_models import fix_rope_pairs

from effllm import UsageError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.generation.batching import open_sequences
from effllm.runtime.generation.served_model import GenerationOptions, ServedModel
from effllm.runtime.images import ROW_PLACEHOLDER, EncodedMedia
from effllm.runtime.images.media import MediaCache
from effllm.runtime.images.modality import IMAGE_INPUT
from effllm.runtime.images.mrope import FIRST_MEDIA_ID, MropePositions, media_token_id, mrope_axes, split_media_token
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.tokenizer import Tokenizer

WORDS = {"vocab_size": 4100, "eos_token_id": 4, "bos_token_id": 0, "max_position_embeddings": 1024, "initializer_range": 0.2}
PLACED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}}
CASES = {
    "qwen2_5_vl": Case("qwen2_5_vl_text", {**WORDS, **PLACED}, inside="qwen2_5_vl"),
    "qwen3_vl": Case("qwen3_vl_text", {**WORDS, **PLACED, "head_dim": 16}, inside="qwen3_vl"),
    "hunyuan_vl": Case("hunyuan_vl_text", {**WORDS, "head_dim": 32, "rope_parameters": {
        "rope_type": "xdrope", "alpha": 50.0, "factor": 1.0, "rope_theta": 10_000.0, "mrope_section": [5, 4, 4, 3]}}, inside="hunyuan_vl"),
    "qwen3_5": Case("qwen3_5_text", {
        **WORDS, "head_dim": 32, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
                                                         "mrope_section": [3, 3, 2]}}, images=True)}


class GridSight:
    """What transformers' tower makes of patches seeded by an image's pixels; 20 of them in height and width are one position."""

    placeholder = placeholder_text = "<image>"
    joint_attention = shares_border = False

    def __init__(self, model) -> None:
        self.model = model
        self.vision = model.config.vision_config
        self.joined, self.num_border_rows = self.vision.spatial_merge_size, int(model.config.model_type == "hunyuan_vl")

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return height // 20, width // 20

    def values(self, points: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = (each * self.joined for each in self.grid(*points.shape[:2]))
        depth = 3 * self.vision.temporal_patch_size * self.vision.patch_size**2
        draw = np.random.default_rng(int(points[:4].sum()))
        return torch.from_numpy(draw.normal(size=(rows * columns, depth)).astype(np.float32)), torch.tensor([[1, rows, columns]])

    def encode(self, points: np.ndarray, work: object) -> EncodedMedia:
        values, grid = self.values(points)
        with torch.inference_mode():
            found = self.model.model.get_image_features(values, grid)
        deep = getattr(found, "deepstack_features", None)
        deep = np.stack([torch.cat(list(each)).numpy() for each in deep]) if deep else None
        rows = torch.cat(list(found.pooler_output)).numpy()
        lines, columns = self.grid(*points.shape[:2])
        return EncodedMedia(rows, (ROW_PLACEHOLDER,) * len(rows), (lines, columns + self.num_border_rows), deepstack_rows=deep,
                            num_border_rows=self.num_border_rows)

    def token_count(self, height: int, width: int) -> int:
        rows, columns = self.grid(height, width)
        return rows * (columns + self.num_border_rows) + 2 * self.num_border_rows

    def bytes_needed(self) -> int:
        return 0


@pytest.fixture(scope="module", params=CASES)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = written_with_words(CASES[request.param], folder)
    if request.param == "hunyuan_vl":
        fix_rope_pairs(model.model.language_model.rotary_emb)
    engine = list(open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=512, exact=True)))[-1]
    yield folder, model, engine
    engine.close()


@pytest.fixture
def session(made):
    folder, model, engine = made
    engine.reset()
    engine.media = MediaCache({IMAGE_INPUT: GridSight(model)}, mrope_axes(folder, engine.config))
    return Session(engine, Tokenizer.load(folder, engine.config), SamplerSettings(temperature=0), max_tokens=10, ignore_eos=True)


def told(sight, ids, points) -> dict:
    values, grids = zip(*(sight.values(each) for each in points), strict=True)
    kinds = [[int(token >= FIRST_MEDIA_ID) for token in ids]]
    return {"input_ids": torch.tensor([[IMAGE_ID if token >= FIRST_MEDIA_ID else token for token in ids]]),
            "pixel_values": torch.cat(values),
            "image_grid_thw": torch.cat(grids), "mm_token_type_ids": torch.tensor(kinds)}


def prompt_of(session, text, *points) -> list[int]:
    pictures = [session.add_media(each) for each in points]
    list(session.engine.media.encode(pictures))
    words = session.tokenizer.encode(text)
    return [*words, *(token for each in pictures for token in (*each.ids(), *words[:3])), *words]


def test_logits_are_those_of_transformers(made, session):
    """Whole, in chunks that end inside an image, and token by token after it."""
    _, model, engine = made
    points = [picture(1, 81, 61), picture(2, 40, 120), picture(3, 160, 100)]
    ids = [*np.random.default_rng(1).integers(10, 4000, 112).tolist(), *prompt_of(session, "It is so, said the fox.", *points)]
    assert FIRST_MEDIA_ID <= min(ids[127:129]), "the first lies across the border of two pages"
    shown = told(engine.media.encoders[IMAGE_INPUT], ids, points)
    model.double()
    with torch.inference_mode():
        expected = model(**{**shown, "pixel_values": shown["pixel_values"].double()}, use_cache=False).logits[0].numpy()
    model.float()
    whole = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
    assert_close(whole, expected)
    assert_close(np.concatenate([logits.copy() for _, logits in engine.score(ids, pages=1)]), expected)
    assert_close(np.concatenate([logits.copy() for _, logits in engine.score(ids, by_token=True)]), expected)


def test_answers_continue_where_the_image_ends(made, session):
    """Also with drafts, which a pass verifies several of."""
    _, model, engine = made
    points = picture(4, 81, 61)
    list(session.ask("What is it?", [session.add_media(points)]))
    ids = engine.tokens[: -len(session.stats.token_ids) + 1]
    assert sum(token >= FIRST_MEDIA_ID for token in ids) == engine.media.encoders[IMAGE_INPUT].token_count(81, 61) >= 12
    with torch.inference_mode():
        wanted = model.generate(**told(engine.media.encoders[IMAGE_INPUT], ids, [points]), max_new_tokens=10, min_new_tokens=10,
                                do_sample=False)
    assert list(session.stats.token_ids) == wanted[0][len(ids) :].tolist()
    list(session.ask("What is it?"))
    assert engine.num_cached_tokens >= len(ids)


def test_sequences_side_by_side_have_each_their_own_places(made, session):
    _, _, engine = made
    engines, _ = open_sequences(engine, 2)
    try:
        replies = ServedModel(engines[0], session.tokenizer, other_engines=engines[1:])
        wish = GenerationOptions(SamplerSettings(temperature=0), max_tokens=8, ignore_eos=True)
        prompts = [prompt_of(session, "Who?", picture(seed, *size)) for seed, size in ((5, (81, 61)), (6, (40, 120)))]
        alone = []
        for ids in prompts:
            engine.reset()
            list(engine.prefill(ids))
            alone.append(engine.tokens[:] and [step.token for step in _steps(engine, wish)])
        found = []
        for own, ids in zip(engines, prompts, strict=True):
            own.reset()
            list(own.prefill(ids))
            own._logits = own._logits.copy()  # as whoever waits for a shared pass has read them
        for _ in range(6):
            wants = [_want(own) for own in engines]
            engine.batched_passes.run(wants)
            found.append([want.token for want in wants])
            for want in wants:
                assert want.error is None
                want.engine._logits = want.logits.copy()
        assert [list(each) for each in zip(*found, strict=True)] == [each[:6] for each in alone]
        assert replies.accepts_images
    finally:
        engine.batched_passes = None
        engines[1].cache.close()


def _steps(engine, wish):
    from effllm.runtime.events import Yield
    from effllm.runtime.sampler import Sampler

    shares, engine.batched_passes = engine.batched_passes, None
    try:
        yield from (step for step in engine.generate(Sampler(wish.settings, engine.config.vocab_size), 8, frozenset(), True)
                    if not isinstance(step, Yield))
    finally:
        engine.batched_passes = shares


def _want(engine):
    from effllm.runtime.generation.batching import PendingToken

    return PendingToken(engine, int(engine._logits.argmax()))


def test_places_follow_from_the_tokens_alone():
    axes = np.array([0, 1, 2, 1, 2])
    one, other = ([media_token_id(number, columns, row) for row in range(rows * columns)] for number, rows,
                  columns in ((5, 2, 3), (6, 4, 2)))
    held = MropePositions([9, 9])
    places = held.positions_after([*one, 9, *other, 9, 9], axes)
    assert places[:, 0].tolist() == [2] * 6 + [5] + [6] * 8 + [10, 11]
    assert places[:, 1].tolist() == [2, 2, 2, 3, 3, 3, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 11]
    assert places[:, 2].tolist() == [2, 3, 4, 2, 3, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7, 10, 11]
    assert held.positions_after([9, 9], axes) is None, "their order is what turns them"
    held.tokens.extend([*one[:4]])
    assert held.positions_after([*one[4:], 9], axes)[:, 1].tolist() == [3, 3, 5], "a chunk may begin inside an image"
    held.tokens.extend([*one[4:], *one])
    assert held.positions_after([9], axes).tolist() == [8] and split_media_token(one[4]) == (5, 3, 4)


def test_sections_that_share_out_other_channels_are_refused(made, tmp_path):
    folder, _, engine = made
    wrong = (folder / "config.json").read_text().replace('"mrope_section": [', '"mrope_section": [1, ', 1)
    (tmp_path / "config.json").write_text(wrong)
    with pytest.raises(UsageError, match="mrope_section"):
        mrope_axes(tmp_path, engine.config)


def test_sections_are_those_of_the_layers_that_turn(tmp_path):
    """Of North Micro Vision, whose config says them kind by kind: whatever stands before them, and one sharing out for all."""
    window, whole = {"rope_theta": 5e4, "mrope_section": [6, 5, 5]}, {"rope_theta": 1e6, "mrope_section": [10, 3, 3]}
    text = {"model_type": "cohere_compass_text", "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100, "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"]}

    def axes(**sections: object) -> list[int]:
        raw = {"model_type": "cohere_compass", "vision_config": {}, "text_config": {**text, "rope_parameters": sections}}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return mrope_axes(tmp_path, read_config(tmp_path)).tolist()

    found = axes(sliding_attention=window, full_attention=None)
    assert [found.count(axis) for axis in range(3)] == [6, 5, 5]
    assert axes(full_attention={**whole, **window}, sliding_attention=window) == found
    with pytest.raises(UsageError, match="full_attention and sliding_attention have different M-RoPE sections"):
        axes(full_attention=whole, sliding_attention=window)
