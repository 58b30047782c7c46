"""Videos for Qwen's models, with two frames per temporal patch: transformers' sizes, rows, timestamps, positions and logits. Its video
processors need torchvision; what does not is read from their source."""

import ast
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from command_line import CliRun
from family_models import assert_close
from hypothesis import given
from hypothesis import strategies as st
from mmproj_files import write_pair
from omni_models import save_qwen2_5_omni, save_qwen3_omni
from transformers import Qwen3VLProcessor
from video_files import as_video
from vision_cases import CASES
from vision_models import FIRST, open_encoder, save_vision_model

from effllm import UsageError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.images import EncodingJob, encoder_of
from effllm.runtime.images.media import open_media
from effllm.runtime.images.modality import IMAGE_INPUT
from effllm.runtime.images.mrope import track_positions
from effllm.runtime.images.video_file import Frame
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
VIDEO, MORE = FIRST + 3, ["<|vision_end|>", "<|video_pad|>"]
OPTIONS = EngineOptions(kv="32bit", device="cpu", ctx=512, strict=False, exact=True)


def theirs(family: str, name: str) -> object:
    """A function of a module, or of its class."""
    text = (Path(transformers.__path__[0]) / f"models/{family}/video_processing_{family}.py").read_text()
    (found,) = (each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef) and each.name == name)
    made: dict[str, object] = {"math": math, "torch": torch}
    exec(compile(ast.Module([found], []), family, "exec"), made)
    return made[name]


def frames(count: int, height: int = 40, width: int = 56, step: float = 1.0) -> list[Frame]:
    y, x = np.mgrid[:height, :width]
    rng = np.random.default_rng(4)
    made = [np.stack([np.sin((x + 5 * number) / (7 + 3 * each)) + np.cos(y / (11 - each)) for each in range(3)], -1)
            for number in range(count)]
    return [Frame(number * step, (50 * each + 127 + rng.normal(0, 9, each.shape)).clip(0, 255).astype(np.uint8))
            for number, each in enumerate(made)]


@pytest.fixture(scope="module", params=FAMILIES)
def qwen(request, tmp_path_factory):
    folder, (text, vision, words, more, processor) = tmp_path_factory.mktemp("film"), CASES[request.param]
    more = {**more, "vision_end_token_id": FIRST + 2, "video_token_id": VIDEO}
    vision = {**vision, "tokens_per_second": 3} if request.param == "qwen2_5_vl" else vision
    return request.param, folder, save_vision_model(folder, request.param, (text, vision, [*words, *MORE], more, processor))


def ready(sight, films, family) -> dict[str, torch.Tensor]:
    """What their processors make of frames that have the size that they are given."""
    whole = np.concatenate(films)
    values = torch.from_numpy(np.stack([sight.scale(each) for each in whole])).permute(0, 3, 1, 2)[None]
    patches, *grid = theirs("qwen3_vl", "patchify")(None, values, sight.patch, sight.joined, sight.frames)
    return {"pixel_values_videos": patches[0], "video_grid_thw": torch.tensor([grid])}


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_rows_are_those_of_transformers(qwen, count):
    family, folder, model = qwen
    sight = open_encoder(folder)
    films = [points for _, points, _ in sight.video_inputs(frames(count))]
    assert len(films) == (-(-count // 2) if family == "qwen3_vl" else 1) and sum(map(len, films)) == count + count % 2
    given = ready(sight, films, family)
    with torch.inference_mode():
        found = model.model.get_video_features(**given)
    seen = [sight.encode(each, EncodingJob()) for each in films]
    assert_close(np.concatenate([each.rows for each in seen]), torch.cat(list(found.pooler_output)).numpy())
    if family == "qwen3_vl":
        for number, deep in enumerate(found.deepstack_features):
            assert_close(np.concatenate([each.deepstack_rows[number] for each in seen]), torch.cat(list(deep)).numpy())
    for each, points in zip(seen, films, strict=True):
        assert len(each.rows) == sight.token_count(*points.shape[:-1]) == len(points) // 2 * math.prod(each.grid)


def test_a_video_of_one_frame_is_that_image(qwen):
    """As both frames, whose weights add."""
    _, folder, _ = qwen
    sight, (frame,) = open_encoder(folder), frames(1, 48, 64)
    (_, film, _), = sight.video_inputs([frame])
    assert np.array_equal(film[0], film[1]) and np.array_equal(film[0], frame.pixels)
    alone, twice = (sight.encode(each, EncodingJob()).rows for each in (frame.pixels, film))
    assert np.abs(alone - twice).max() < 2e-5 * np.abs(alone).max()


@given(st.sampled_from([2, 3, 4, 5, 7, 16, 255]), st.integers(1, 2000), st.integers(1, 2000),
       st.sampled_from([(4096, 25_165_824), (131_072, 786_432), (3136, 200_704)]))
def test_sizes_are_those_of_transformers(qwen, count, height, width, bounds):
    family, folder, _ = qwen
    if max(height, width) > 200 * min(height, width):
        return
    sight = open_encoder(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": dict(zip(
        ("shortest_edge", "longest_edge"), bounds, strict=True))}))
    try:
        own = sight.film_sized(count, height, width)
    finally:
        (folder / "video_preprocessor_config.json").unlink()
    said = {"factor": sight.patch * sight.joined, "min_pixels": bounds[0], "max_pixels": bounds[1]}
    if family == "qwen3_vl":
        assert own == theirs("qwen3_vl", "smart_resize")(count, height, width, **said)
    else:
        assert own == theirs("qwen2_vl", "smart_resize")(height, width, **said)


def test_seconds_are_those_in_the_middle(qwen):
    family, folder, _ = qwen
    given = frames(5, step=1.7)
    wanted = Qwen3VLProcessor._calculate_timestamps(None, [17 * number for number in range(5)], 10.0)
    captions = [caption for caption, _, _ in open_encoder(folder).video_inputs(given)]
    assert captions == ([f"<{second:.1f} seconds>" for second in wanted] if family == "qwen3_vl" else [""])
    assert family == "qwen3_vl" or open_encoder(folder).video_inputs(given)[0][2] == pytest.approx(3.4)


def told(prompts, engine, shown, words=("Once ", " was a fox in the wood.")):
    """Ids of a prompt with videos, each after its text."""
    marks = [f"{caption}<|vision_start|>{film.marker}<|vision_end|>" for caption, film in shown]
    prompt = "".join(marks).join(words)
    list(prompts.encode_media(prompt, engine, lambda: False))
    return prompts.tokenize(prompt)


@pytest.mark.parametrize(("count", "step"), [(3, 1.0), (6, 0.4), (8, 6.1)])
def test_logits_after_a_video_are_those_of_transformers(qwen, count, step):
    """Text goes on behind the last number of any of the three, as models were trained: transformers 5.23 counts a prompt's on behind rows
    and columns alone, and an answer's behind all."""
    family, folder, model = qwen
    engine = list(open_engine(folder, OPTIONS))[-1]
    try:
        engine.media = open_media(folder, engine.config)
        prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
        shown = engine.media.add_video(frames(count, step=step))
        ids = told(prompts, engine, shown)
        ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
        places = track_positions([], engine.media.axes).position_triples(ids)
    finally:
        engine.close()
    plain = torch.tensor([[VIDEO if token >= 1 << 40 else token for token in ids]])
    kinds = 2 * (plain == VIDEO).int()
    films = [points for _, points, _ in open_encoder(folder).video_inputs(frames(count, step=step))]
    given = ready(engine.media.encoders[IMAGE_INPUT], films, family)
    more = {} if family == "qwen3_vl" else {"second_per_grid_ts": torch.tensor([2 * step])}
    positions, _ = model.model.get_rope_index(plain, kinds, video_grid_thw=given["video_grid_thw"], **more)
    behind = int((plain[0] == VIDEO).nonzero().max()) + 1
    assert np.array_equal(places[:behind].T, positions[:, 0, :behind].numpy())
    positions[:, :, behind:] += int(positions[:, :, :behind].max()) + 1 - int(positions[0, 0, behind])
    assert np.array_equal(places.T, positions[:, 0].numpy())
    with torch.inference_mode():
        wanted = model(input_ids=plain, position_ids=positions, mm_token_type_ids=kinds, **given, use_cache=False).logits[0].numpy()
    assert_close(ours, wanted)


@pytest.mark.parametrize("written", [save_qwen2_5_omni, save_qwen3_omni])
def test_positions_of_omni_models_are_those_of_transformers(written, tmp_path):
    model = written(tmp_path)
    config = read_config(tmp_path)
    media, tokenizer = open_media(tmp_path, config), Tokenizer.load(tmp_path, config)
    ((caption, film),) = media.add_video(frames(5, step=1.0))
    assert not caption
    list(media.encode([film]))
    around = [tokenizer.added[each] for each in (("<|vision_bos|>", "<|vision_eos|>") if "2_5" in type(model).__module__ else (
        "<|vision_start|>", "<|vision_end|>"))]
    ids = [40, 41, around[0], *film.ids(), around[1], 42, 43, 44]
    sight = media.encoders[IMAGE_INPUT]
    lines, columns = film.encoded.grid
    video = model.config.video_token_id
    plain = torch.tensor([[video if token >= 1 << 40 else token for token in ids]])
    wanted, _ = model.get_rope_index(plain, video_grid_thw=torch.tensor([[3, 2 * lines, 2 * columns]]), use_audio_in_video=False,
                                     attention_mask=torch.ones_like(plain), second_per_grids=torch.tensor([2.0]))
    assert np.array_equal(track_positions([], media.axes).position_triples(ids).T, wanted[:, 0].long().numpy())
    assert sight.positions_per_second == 25
    cut = len(ids) - 9
    known = track_positions(ids[:cut], media.axes)
    assert np.array_equal(known.position_triples(ids[cut:]).T, wanted[:, 0, cut:].long().numpy()), "also gone on from amid the film"


def test_an_answer_is_about_a_video(qwen, tmp_path):
    family, folder, _ = qwen
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(as_video(5))
    ran = CliRun("run", str(folder), "Who?", "--video", str(clip), "--frames", "5", "--temp", "0", "-n", "4", "-c", "512", "--ignore-eos")
    assert ran.code == 0, ran.err
    assert f"video of 64 × 48, {'2 frames: 12' if family == 'qwen3_vl' else '6 frames: 36'} tokens" in ran.err


def test_a_pair_of_files_takes_videos_as_its_folder_does(qwen, tmp_path):
    """But for the pace of 2.5 VL, which no file states: it is that of its published models."""
    family, folder, _ = qwen
    model, _ = write_pair(folder, tmp_path / "files")
    media = open_media(model, read_config(model))
    wanted, ours = open_encoder(folder), media.encoders[IMAGE_INPUT]
    assert ours.positions_per_second == (2 if family == "qwen2_5_vl" else None)
    for (words, points, apart), theirs in zip(wanted.video_inputs(frames(4, 48, 64)), ours.video_inputs(frames(4, 48, 64)), strict=True):
        assert (words, apart) == (theirs[0], theirs[2]) and np.array_equal(points, theirs[1])
        assert np.array_equal(wanted.encode(points, EncodingJob()).rows, ours.encode(points, EncodingJob()).rows)


def test_videos_with_other_frame_rates_are_distinct_and_a_repeated_one_is_recognized(qwen):
    _, folder, _ = qwen
    media = open_media(folder, read_config(folder))
    one, same, slow = ([film for _, film in media.add_video(frames(4, step=step))] for step in (1.0, 1.0, 3.0))
    assert all(first is second for first, second in zip(one, same, strict=True))
    if len(one) == 1:  # of videos of two frames nothing is apart
        assert slow[0] is not one[0]


def test_a_video_that_is_too_wide_for_its_tokens_is_refused(qwen):
    _, folder, _ = qwen
    sight = open_encoder(folder)
    sight.most = 1 << 30
    with pytest.raises(UsageError, match="is too wide for this model"):
        sight.video_inputs(frames(2, 48, 8400))


def test_a_vision_tower_takes_images_and_videos_together(qwen):
    _, folder, _ = qwen
    sight, picture = encoder_of(folder, read_config(folder), IMAGE_INPUT), frames(1)[0].pixels
    before = sight.encode(picture, EncodingJob()).rows
    sight.encode(sight.video_inputs(frames(4))[0][1], EncodingJob())
    assert np.array_equal(sight.encode(picture, EncodingJob()).rows, before)
