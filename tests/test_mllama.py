"""Llama 3.2 Vision: layers with cross-attention to images, end to end: which tokens attend to which images."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from config_samples import refused
from conversions import options, run
from family_models import assert_close
from hypothesis import given
from hypothesis import strategies as st
from lora_adapters import RANK, adapter, peft, random
from mllama_models import FIRST, PROCESSOR, TEXT, mllama, told, wanted
from safetensors.torch import load_file
from streamed_models import streaming
from transformers import MllamaForCausalLM
from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask
from vision_models import PICTURES, SHAPES, open_encoder

from effllm import EffllmError, UsageError
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.threads import ThreadPool
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.generation.batching import PendingToken, open_sequences
from effllm.runtime.images import EncodingJob
from effllm.runtime.images.media import open_media
from effllm.runtime.images.media_markers import MediaGone
from effllm.runtime.images.mrope import FIRST_MEDIA_ID, split_media_token
from effllm.runtime.kv import cross_attention_cache
from effllm.runtime.kv.cross_attention_cache import VisibleImages, cross_attention_nbytes
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.workspace_dims import dims

EXACT = {"kv": "32bit", "device": "cpu", "ctx": 512, "chunk": 128, "exact": True, "spec": "off"}
# Words, and names of images between them.
TEXTS = {"none": (11, 500, 313, 263), "first": ("photo", 500, 313, 263), "behind words": (11, 500, "wide", 313, 263, 18),
         "one after the other": (11, "tall", 500, 313, "odd", 263, 18, "tiny", 7, 8, 9),
         "side by side": (11, "tall", 500, 313, "odd", "tiny", "photo", 263, 18), "the same again": ("tiny", 5, 6, "tiny", "tiny", 7),
         "long": (11, "photo", *range(300, 340), "wide", *range(20, 150))}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    folder = tmp_path_factory.mktemp("mllama")
    return folder, mllama(folder)


def engine_of(folder: Path, **more: object) -> Engine:
    engine = list(open_engine(folder, EngineOptions(**{**EXACT, **more})))[-1]
    engine.media = open_media(folder, engine.config)
    return engine


@pytest.fixture(scope="module")
def shared(made) -> Iterator[Engine]:
    engine = engine_of(made[0])
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.reset()
    shared.model.cross_attention = None
    return shared


def ids_of(engine: Engine, text: Sequence[int | str]) -> list[int]:
    """Ids of text tokens and of encoded images, which are held as long as the album lives."""
    ids, held = [], engine.__dict__.setdefault("held_here", [])
    for each in text:
        if isinstance(each, str):
            held.append(picture := engine.media.add(PICTURES[each]))
            list(engine.media.encode([picture]))
            ids += picture.ids()
        else:
            ids.append(each)
    return ids


def points_of(text: Sequence[int | str]) -> list[np.ndarray]:
    return [PICTURES[each] for each in text if isinstance(each, str)]


def scored(engine: Engine, ids: Sequence[int], **how: object) -> np.ndarray:
    return np.concatenate([logits.copy() for _, logits in engine.score(ids, **how)])


def read(engine: Engine, ids: Sequence[int]) -> np.ndarray:
    list(engine.prefill(ids))
    return engine._logits.copy()


# -- the tower -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_rows_are_those_of_transformers(made, name: str) -> None:
    folder, model = made
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = PROCESSOR([[picture]], input_data_format="channels_last", return_tensors="pt")
    (tiles,), = ready.pop("num_tiles")
    ours = sight.values(picture)
    assert np.array_equal(ours.values.transpose(0, 3, 1, 2), ready["pixel_values"][0, 0, :tiles].numpy())
    assert ours.shape == int(ready["aspect_ratio_ids"])
    with torch.inference_mode():
        found = model.model.multi_modal_projector(model.model.vision_model(**ready).last_hidden_state)[0, 0, :tiles]
    expected, seen = found.reshape(-1, found.shape[-1]).numpy(), sight.encode(picture, EncodingJob())
    assert seen.rows.shape == expected.shape and np.abs(seen.rows - expected).max() < 2e-5 * np.abs(expected).max()
    assert len(seen.tokens) == sight.token_count(*picture.shape[:2]) == 1 and seen.placeholder_id == FIRST


@given(st.integers(1, 900), st.integers(1, 900))
def test_images_are_sized_as_by_transformers(made, height: int, width: int) -> None:
    from transformers.models.mllama import image_processing_pil_mllama as theirs

    sight = open_encoder(made[0])
    if max(height, width) <= 200 * min(height, width):
        canvas = theirs.get_optimal_tiled_canvas(height, width, 4, 32)
        assert tuple(32 * each for each in sight.grid(height, width)) == canvas
        assert sight.fitted(height, width) == theirs.get_image_size_fit_to_canvas(height, width, *canvas, 32)


@pytest.mark.parametrize(("changes", "file", "says"), [
    ({"size": {"height": 64, "width": 64}}, "preprocessor_config.json", "the 32 × 32"),
    ({"max_image_tiles": 2}, "preprocessor_config.json", "the 4"), ({"do_pad": False}, "preprocessor_config.json", "do_pad is False")])
def test_a_preprocessor_of_another_tower_is_refused(made, tmp_path: Path, changes: dict, file: str, says: str) -> None:
    for each in made[0].iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / file).unlink()
    (tmp_path / file).write_text(json.dumps({**json.loads((made[0] / file).read_text()), **changes}))
    with pytest.raises(EffllmError, match=says):
        open_encoder(tmp_path)


# -- what is seen --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=24), st.integers(0, 24))
def test_a_token_sees_what_the_mask_of_transformers_gives_it(kinds: list[int], known: int) -> None:
    """0 is a text token, all else an image; each of these is another one."""
    tokens = [7 if not kind else FIRST_MEDIA_ID | at << 26 for at, kind in enumerate(kinds)]
    spans = get_cross_attention_token_mask([FIRST if kind else 7 for kind in kinds], FIRST)
    numbers = [split_media_token(token)[0] for token in tokens if token >= FIRST_MEDIA_ID]
    masked = [tuple(number for number, (begin, end) in zip(numbers, spans, strict=True) if begin <= at < (len(tokens) if end < 0 else end))
              for at in range(len(tokens))]
    watched = VisibleImages(tokens[:known]).caught_up()
    assert [watched.after(token) for token in tokens[known:]] == masked[known:]


@pytest.mark.parametrize(("name", "by_token"), [*((name, False) for name in TEXTS), *((name, True) for name in TEXTS if name != "long")])
def test_logits_are_those_of_transformers(made, engine: Engine, name: str, by_token: bool) -> None:
    ids = ids_of(engine, TEXTS[name])
    assert_close(scored(engine, ids, by_token=by_token), wanted(made[1], ids, points_of(TEXTS[name])))
    assert (engine.model.cross_attention is None) == (name == "none")


def test_a_conversation_continues_and_back(made, engine: Engine) -> None:
    """As reading all of it would: after more text, another image, and an undone turn."""
    whole = ids_of(engine, TEXTS["one after the other"])
    exact = wanted(made[1], whole, points_of(TEXTS["one after the other"]))
    for back, end in ((0, 7), (7, 11), (3, 5), (5, 8), (1, 11)):
        assert engine.cache.truncate(back) == back
        engine.set_tokens(whole[:back])
        assert_close(engine.forward_logits(whole[back:end]).copy(), exact[back:end])


def test_the_word_of_an_image_in_a_text_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match=f"token id {FIRST} is outside") as caught:
        engine.check_prompt([5, FIRST])
    assert "image placeholder" in caught.value.hint


def test_images_give_way_and_come_again(made, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one large image a long text with several is read chunk by chunk."""
    monkeypatch.setattr(cross_attention_cache, "SLOTS", 3)
    ids = ids_of(engine, TEXTS["one after the other"])
    for _ in range(2):
        found = read(engine, ids)
        assert_close(found[None], wanted(made[1], ids, points_of(TEXTS["one after the other"]))[-1:])
        assert len(engine.model.cross_attention._images) < 3
        engine.reset()
    with pytest.raises(UsageError, match="images in a row"):
        read(engine, ids_of(engine, TEXTS["side by side"]))


def test_an_image_that_is_gone_is_asked_for_again(engine: Engine) -> None:
    """What is read goes on without it as long as its keys are there."""
    ids = ids_of(engine, ("photo", 500, 313))
    before = read(engine, ids), engine.forward_logits([263])[0].copy()
    read(engine, ids)
    engine.__dict__.pop("held_here")
    engine.media = open_media(engine.prepared.folder, engine.config)
    assert np.array_equal(engine.forward_logits([263])[0], before[1])
    engine.model.cross_attention = None
    with pytest.raises(MediaGone, match="needed again") as caught:
        engine.forward_logits([18])
    assert "--image FILE" in caught.value.hint and engine.cache.n == len(engine.tokens) == 4
    assert np.array_equal(read(engine, ids_of(engine, ("photo", 500, 313))), before[0])


def test_layers_on_a_gpu_read_text_and_refuse_an_image(made) -> None:
    """On a simulated GPU, for its operations alone."""
    prepared = prepare(made[0], EngineOptions(**EXACT))
    placement = replace(prepared.placement, devices=("cpu",) + ("cuda",) * 5)
    host = CpuOps(ThreadPool(1), dims(prepared.config, 512, prepared.shape.chunk, LOGIT_ROWS))
    engine = Engine(replace(prepared, placement=placement), {"cpu": host, "cuda": TorchOps("cpu")})
    try:
        list(engine.model.load())
        engine.media = open_media(made[0], engine.config)
        ids = list(range(5, 60))
        assert_close(scored(engine, ids), wanted(made[1], ids, ()))
        with pytest.raises(UsageError, match="not supported on a GPU") as caught:
            read(engine, ids_of(engine, ("photo", 500)))
        assert caught.value.hint == "use --device cpu"
    finally:
        engine.close()


# -- several texts, adapters, files, the disk --------------------------------------------------------------------------------------


def test_answers_at_once_are_what_each_is_alone(made) -> None:
    """Of texts with one image, another, two, and none."""
    engine = engine_of(made[0], parallel=4)
    texts = [ids_of(engine, each) for each in (("photo", 5), (9, "tiny", 7, 8), (11, "odd", "tall", 6), (3, 4, 5))]
    alone = []
    for text in texts:
        read(engine, text)
        alone.append([engine.forward_logits([token])[0].copy() for token in (21, 22, 23)])
    engines, said = open_sequences(engine, 4)
    assert not said
    for each, text in zip(engines, texts, strict=True):
        read(each, text)
    for step, token in enumerate((21, 22, 23)):
        wants = [PendingToken(each, token) for each in engines]
        engine.batched_passes.run(wants)
        for want, rows in zip(wants, alone, strict=True):
            assert want.error is None and np.array_equal(want.logits, rows[step])
    for other in engines[1:]:
        other.cache.close()
    engine.close()


def beside(folder: Path, seed: int) -> Path:
    """An adapter of matrices of layers of both kinds."""
    own, wide = {}, {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    for place in ("layers.1.self_attn", "layers.2.cross_attn", "layers.5.cross_attn"):
        for name, (rows, depth) in wide.items():
            own[f"model.language_model.{place}.{name}"] = (random(RANK, depth, seed=seed) * 0.1, random(rows, RANK, seed=seed + 9) * 0.1)
    return adapter(folder, peft(own), lora_alpha=RANK)


def test_adapters_are_beside_layers_that_attend_to_images(made, tmp_path: Path) -> None:
    """As they are in the weights; and of several texts each has its own, beside what an image's keys are made by too."""
    own = beside(tmp_path / "own", 1)
    engine = engine_of(made[0], lora=(str(own),), parallel=2)
    ids = ids_of(engine, ("photo", 5, 6, 7))
    with_it = scored(engine, ids)
    engine.adapter_scales = (0.0,)
    engine.reset()
    without = scored(engine, ids)
    assert_close(without, wanted(made[1], ids, points_of(("photo",))))
    model = mllama(tmp_path / "other")
    parts, pairs = model.state_dict(), load_file(own / "adapter_model.safetensors")
    with torch.no_grad():
        for name in [each for each in pairs if each.endswith("lora_A.weight")]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            parts[f"{module}.weight"] += pairs[name.replace("lora_A", "lora_B")] @ pairs[name]
    assert_close(with_it, wanted(model, ids, points_of(("photo",))))
    assert np.abs(with_it - without).max() > 0.01 * np.abs(without).max()
    engines, _ = open_sequences(engine, 2)
    engines[1].adapter_scales = (1.0,)
    rows = {}
    for each in engines:
        read(each, ids)
        rows[id(each)] = each.forward_logits([21])[0].copy()
        each.reset()
        read(each, ids)
    wants = [PendingToken(each, 21) for each in engines]
    engine.batched_passes.run(wants)
    for want in wants:
        assert want.error is None and np.array_equal(want.logits, rows[id(want.engine)])
    engines[1].cache.close()
    engine.close()


def test_weights_from_the_disk_give_the_same_bits(made) -> None:
    """Layers that cross-attention to images stay in memory, as a text leaves them out."""
    ids = None
    for text in ("behind words", "none"):
        found = []
        for engine in (engine_of(made[0]), streaming(made[0], **{key: EXACT[key] for key in EXACT if key != "device"})):
            engine.media = engine.media or open_media(made[0], engine.config)
            ids = ids_of(engine, TEXTS[text])
            found.append((read(engine, ids), engine.forward_logits([18])[0].copy(), engine.disk_nbytes))
            engine.close()
        assert all(np.array_equal(*pair) for pair in list(zip(*found, strict=True))[:2]) and found[1][2] > found[0][2]


def test_a_quantized_folder_sees(made, tmp_path: Path) -> None:
    run(made[0], tmp_path / "made", options("8bit"))
    engine = engine_of(tmp_path / "made")
    ids = ids_of(engine, TEXTS["behind words"])
    found, exact = scored(engine, ids), wanted(made[1], ids, points_of(TEXTS["behind words"]))
    engine.close()
    assert np.abs(found - exact).max() < 0.1 * np.abs(exact).max()
    assert (tmp_path / "made" / "sight.safetensors").is_file()


@pytest.mark.parametrize("method", ["gptq", "smooth", "spqr"])
def test_methods_that_learn_from_a_text_are_refused(made, tmp_path: Path, method: str) -> None:
    with pytest.raises(UsageError, match="attend to images") as caught:
        run(made[0], tmp_path / "made", options("4bit", method=method))
    assert "rtn or hqq" in caught.value.hint


def test_a_plan_counts_keys_of_images_for_every_sequence(made) -> None:
    asked = EngineOptions(**{**EXACT, "encoder_path": str(made[0])})
    plans = [prepare(made[0], replace(asked, parallel=count)) for count in (1, 3)]
    each = cross_attention_nbytes(plans[0].config, plans[0].codecs[0], 1)
    values = 4 * cross_attention_cache.SLOTS * 128 * 2 * 2 * 16 * 4  # layers, pages, tokens, sides, heads of 16, bytes
    assert values <= each < 1.2 * values
    assert sum(plans[1].media_nbytes.values()) - sum(plans[0].media_nbytes.values()) == 2 * each < plans[0].placement.total_bytes
    assert prepare(made[0], replace(asked, encoder_path=None)).media_nbytes == {}
    for plan in plans:
        plan.store.close()


def test_the_text_part_by_itself(made, tmp_path: Path) -> None:
    text = MllamaForCausalLM.from_pretrained(made[0], dtype=torch.float32)
    text.save_pretrained(tmp_path)
    engine = list(open_engine(tmp_path, EngineOptions(**EXACT)))[-1]
    ids = list(range(5, 40))
    found = scored(engine, ids)
    engine.close()
    assert_close(found, wanted(made[1], ids, ()))


@pytest.mark.parametrize("layers", [[0, 6], [-1], ["1"], 3, [0, 1, 2, 3, 4, 5]])
def test_layers_that_are_none_are_refused(layers: object) -> None:
    refused({"model_type": "mllama_text_model", **{key: TEXT[key] for key in TEXT if key != "cross_attention_layers"}, "intermediate_size":
             64, "cross_attention_layers": layers}, "cross_attention_layers")


def test_text_tokens_are_distinguished_from_images(engine: Engine) -> None:
    assert told(ids_of(engine, ("tiny", 5))) == [FIRST, 5]
