"""Pairs of GGUF files, from an image to logits: against the folder's model in transformers, on the command line, and against llama.cpp's
output for the same files."""

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from command_line import run_cli
from family_models import assert_close
from mmproj_files import EXPORTED, PAIRS, VISION_CASES, save_as_published, write_pair
from PIL import Image
from safetensors.torch import load_file, save_file
from vision_models import FIRST, PICTURES, open_encoder, save_vision_model

from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob, hunyuan_vl
from effllm.runtime.images.media import open_media
from effllm.runtime.images.media_markers import media_marker, render_with_media
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN
from effllm.runtime.images.position_embeddings import bilinear
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

FAMILIES = [family for family in VISION_CASES if family in PAIRS]
QUICK = ("llava_next", "qwen3_vl")  # with tiles, with places and early rows; rows of all are held in test_projector.py
OPTIONS = EngineOptions(kv="32bit", device="cpu", ctx=512, strict=False, exact=True)
# What an export leaves as wide as it is, of what has rows.
KEPT_WIDE = ("router.weight", "mlp.gate.weight", "conv1d.weight", "conv.conv.weight", "in_proj_a.weight", "in_proj_b.weight",
             ".b_proj.weight", "_hc.fn", "hc_head.fn", "pos_embed.weight", "patch_embed.proj.weight", "patch_embedding.weight",
             "position_embedding.weight", "pos_emb.weight")


def in_halves(transformer: torch.nn.Module, parts: tuple[str, ...] = ("language_model", "lm_head")) -> None:
    """Of these parts, as an export has them; "" is of all."""
    with torch.no_grad():
        for name, each in transformer.named_parameters():
            if each.ndim > 1 and any(part in name for part in parts) and not name.endswith(KEPT_WIDE):
                each.copy_(each.half().float())


def hold_a_picture(model: Path, family: str, transformer: torch.nn.Module) -> None:
    """Logits after an image in a prompt of the files at `model` are transformers'."""
    engine = list(open_engine(model, OPTIONS))[-1]
    try:
        engine.media = open_media(model, engine.config)
        assert engine.media.encoders, engine.media.refused
        points = PICTURES["photo"]
        picture = engine.media.add(points)
        prompts = PromptBuilder(Tokenizer.load(model, engine.config), media=engine.media)
        prompt = f"Once {media_marker(picture.digest)} was a fox in the wood."
        list(prompts.encode_media(prompt, engine, lambda: False))
        ids = prompts.tokenize(prompt)
        ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
    finally:
        engine.close()
    ready = VISION_CASES[family][-1](points, input_data_format="channels_last", return_tensors="pt")
    for counted in ("grids", "num_patches"):
        ready.pop(counted, None)
    told = torch.tensor([[FIRST if token >= 1 << 40 else token for token in ids]])
    if family == "gemma3":
        ready["token_type_ids"] = (told == FIRST).int()
    elif family.startswith(("qwen", "glm", "hunyuan", "paddle")):
        ready["mm_token_type_ids"] = (told == FIRST).int()
    with torch.inference_mode():
        wanted = transformer(input_ids=told, **ready, use_cache=False).logits[0].numpy()
    assert (told == FIRST).sum() == len(picture.encoded.rows) > 4
    assert_close(ours, wanted)


@pytest.mark.parametrize("family", [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in FAMILIES])
def test_logits_after_an_image_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    transformer = save_as_published(tmp_path / "folder", family)
    model, _ = write_pair(tmp_path / "folder", tmp_path / "files")
    if PAIRS[family][0] in EXPORTED:
        in_halves(transformer)
    hold_a_picture(model, family, transformer)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, its projector, and an image, each in another folder."""
    place = tmp_path_factory.mktemp("files")
    save_vision_model(place / "folder", "qwen3_vl", VISION_CASES["qwen3_vl"])
    model, mmproj = write_pair(place / "folder", place / "files")
    Image.fromarray(PICTURES["photo"]).save(place / "photo.png")
    for name in ("alone", "apart"):
        (place / name).mkdir()
    return model.rename(place / "alone" / "model.gguf"), mmproj.rename(place / "apart" / "mmproj-f16.gguf"), place / "photo.png"


def test_show_and_plan_say_what_sees(files: tuple[Path, Path, Path]) -> None:
    model, mmproj, _ = files
    assert json.loads(run_cli("show", model, "--json")[1])["images"] is None
    shown = json.loads(run_cli("show", model, "--mmproj", mmproj, "--json")[1])["images"]
    assert shown["placeholder"] == "<|image_pad|>" and shown["bytes"] > mmproj.stat().st_size
    plans = [json.loads(run_cli("plan", model, "--no-probe", "--json", *more)[1])["media_bytes"] for more in ((), ("-mm", mmproj))]
    assert plans == [0, shown["bytes"]]


def test_a_run_takes_an_image(files: tuple[Path, Path, Path]) -> None:
    model, mmproj, photo = files
    code, out, err = run_cli("run", model, "What is it?", "--image", photo)
    assert code == 2 and not out and "there is no mmproj file next to it" in err and "--mmproj FILE" in err and len(err.splitlines()) <= 3
    code, out, err = run_cli("run", model, "What is it?", "--mmproj", model)
    assert code != 0 and "not a projector" in err
    asked = ("run", model, "What is it?", "--image", photo, "-n", "4", "--temp", "0", "-c", "256")
    code, out, err = run_cli(*asked, "--mmproj", mmproj)
    assert code == 0 and "image of 160 × 120: " in err, err
    beside = model.with_name("mmproj-model-f16.gguf")
    beside.symlink_to(mmproj)
    try:
        assert run_cli(*asked)[:2] == (0, out)
    finally:
        beside.unlink()


def test_a_template_that_knows_no_images_has_the_words_around_one() -> None:
    """As Qwen's models ask for them: other towers put theirs there themselves."""
    plain = lambda messages: "".join(f"<|{each['role']}|>{each['content'] + ''}<|end|>" for each in messages)  # noqa: E731
    picture = media_marker("0" * 32)
    said = [{"role": "user", "content": f"{picture}\nWhat is it?"}]
    assert render_with_media(plain, said, {SEEN: ("<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>")}) \
        == f"<|user|><|vision_start|>{picture}<|vision_end|>\nWhat is it?<|end|>"
    assert render_with_media(plain, said, {SEEN: ("<image>",) * 2}) == f"<|user|>{picture}\nWhat is it?<|end|>"


# -- llama.cpp ----------------------------------------------------------------------------------------------------------------------

# What llama.cpp does otherwise with some of these files, which is undone here: windows are always of 112 points; of a tower with a first
# row before its patches the places lie one further; LLaVA's stops a layer before the file's last unless that is named; Llama 4's rows of a
# tile come column by column. Of MiniCPM-V's places there are always 70 in a row. HunyuanVL's places lie a little closer together, as if the
# image were a tenth of a patch larger (also where there is a place for each patch), and not as transformers has them.
OTHER = {**dict.fromkeys(("exaone4_5", "qwen2_5_vl"), {"window_size": 112}), "minicpmv4_6": {"image_size": 560}}
CLASS = ("internvl", "llava_next")
HUNYUAN_MARGIN = 0.1  # patches
# Whose exports test_projector_export.py holds against llama.cpp, with the text model's.
IN_PAIRS = ("gemma3", "glm4v", "glm4v_moe", "idefics3", "kimi_k25", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize(("family", "writer"), [*((family, "converter") for family in FAMILIES),
                                                *((family, "export") for family in FAMILIES if family not in IN_PAIRS)])
def test_llamacpp_sees_the_same_in_the_same_file(family: str, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a projector of 32-bit values as its converter writes it, and in our export, whose matrices have 16 bits."""
    peer = pytest.importorskip("llama_cpp")
    save_as_published(tmp_path / "folder", family, **OTHER.get(family, {}))
    # of a size that nobody has to change: the two size otherwise, see docs/architecture/multimodal.md
    as_large = "qwen" in family or family in ("exaone4_5", "mistral3")
    points = PICTURES["square"] if as_large else np.ascontiguousarray(PICTURES["square"][:32, :32])
    if family == "lighton_ocr":  # whose images are made as long as they may be
        points = np.tile(points, (3, 3, 1))
    if family.startswith("glm") and family != "glm5_next":  # which makes small ones larger
        points = np.tile(PICTURES["square"], (5, 5, 1))
    if family == "hunyuan_vl":  # as do these
        points = np.ascontiguousarray(np.tile(PICTURES["square"], (2, 2, 1))[:64, :64])
        monkeypatch.setattr(hunyuan_vl, "bilinear",
                            lambda table, places: bilinear(table, places, places.max() + 1 + np.float32(HUNYUAN_MARGIN)))
    seen = open_encoder(tmp_path / "folder").encode(points, EncodingJob())
    if family in CLASS:
        monkeypatch.setattr("mmproj_files._tensors", further(sys.modules["mmproj_files"]))
    if family == "llama4":
        monkeypatch.setattr("mmproj_files._tensors", renamed(sys.modules["mmproj_files"]))
    keys = {"vision.feature_layer": [2]} if family == "llava_next" else {}
    model, mmproj = write_pair(tmp_path / "folder", tmp_path / "files", **keys)
    bound = 2e-2 if family == "llama4" else 2e-3  # whose values are rounded to bfloat16, which llama.cpp does not do
    if writer == "export":
        if family in CLASS:
            move_places(tmp_path / "folder")
        mmproj, bound = tmp_path / "mmproj.gguf", max(bound, 1e-2)
        code, _, err = run_cli("export", tmp_path / "folder", "-o", mmproj, "--mmproj")
        assert code == 0, err
    rows, tokens = of_llamacpp(peer, model, mmproj, points)
    wanted = seen.rows
    if family == "llava_next":  # leaves the first patch out; the tiles behind the whole image are not joined there
        rows, wanted = rows[:15], wanted[1:16]
    if family == "mistral3":  # has the ends of lines among its rows
        lines = int(len(wanted) ** 0.5)
        rows = np.stack([row for number, row in enumerate(rows) if number % (lines + 1) != lines])
    if seen.deepstack_rows is not None:
        rows, *deep = np.split(rows, 1 + len(seen.deepstack_rows), axis=1)
        assert np.abs(np.stack(deep) - seen.deepstack_rows).max() < bound * np.abs(seen.deepstack_rows).max()
    if family == "llama4":
        rows = rows.reshape(2, 2, -1).swapaxes(0, 1).reshape(4, -1)
    assert rows.shape == wanted.shape and np.abs(rows - wanted).max() < bound * np.abs(wanted).max()
    if family in ("idefics3", "internvl"):
        assert tokens == list(seen.tokens)
    assert read_config(model).hidden_size == wanted.shape[1]


def further(files: ModuleType) -> object:
    """The writer of tensors, by which the place of the first row lies behind those of the patches."""
    written = files._tensors

    def moved(*args: object) -> object:
        for name, values in written(*args):
            yield name, np.roll(values, -1, axis=-2) if name == "v.position_embd.weight" else values

    return moved


def move_places(folder: Path) -> None:
    """As `further`, in the checkpoint that an export is made of."""
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.endswith(("position_embedding.weight", "position_embeddings"))]
    assert len(names) == 1
    save_file({**tensors, names[0]: torch.roll(tensors[names[0]], -1, -2)}, folder / "model.safetensors", metadata={"format": "pt"})


def renamed(files: ModuleType) -> object:
    """The writer of tensors with the name by which llama.cpp reads a norm of Llama 4: its own converter has another since Gemma 4."""
    written = files._tensors
    return lambda *args: ((name.replace("attn_post_norm", "ln2"), values) for name, values in written(*args))


def of_llamacpp(peer: ModuleType, model: Path, mmproj: Path, points: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Image rows, and the tokens around them, PLACE where a row is."""
    from llama_cpp import mtmd_cpp

    height, width = points.shape[:2]
    return rows_of_llamacpp(peer, model, mmproj, lambda: mtmd_cpp.mtmd_bitmap_init(
        width, height, (ctypes.c_uint8 * points.size).from_buffer_copy(points.tobytes())))


def rows_of_llamacpp(peer: ModuleType, model: Path, mmproj: Path, bitmap_of: Callable[[], object]) -> tuple[np.ndarray, list[int]]:
    """Of an image, or audio, which llama.cpp calls a bitmap too."""
    from llama_cpp import mtmd_cpp

    peer.llama_backend_init()
    loaded = peer.llama_model_load_from_file(str(model).encode(), peer.llama_model_default_params())
    asked = mtmd_cpp.mtmd_context_params_default()
    asked.use_gpu, asked.warmup, asked.print_timings = False, False, False
    context = mtmd_cpp.mtmd_init_from_file(str(mmproj).encode(), loaded, asked)
    assert loaded and context, "llama.cpp reads both"
    bitmap = bitmap_of()
    text = mtmd_cpp.mtmd_input_text()
    text.text, text.text_len, text.add_special, text.parse_special = b"<__media__>", 11, False, True
    chunks = mtmd_cpp.mtmd_input_chunks_init()
    assert mtmd_cpp.mtmd_tokenize(context, chunks, ctypes.byref(text), (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(bitmap), 1) == 0
    size, rows, tokens = peer.llama_model_n_embd_inp(loaded), [], []
    for number in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
        chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, number)
        if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == 0:
            count = ctypes.c_size_t()
            found = mtmd_cpp.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
            tokens += found[: count.value]
            continue
        count = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
        assert mtmd_cpp.mtmd_encode_chunk(context, chunk) == 0
        made_rows = np.ctypeslib.as_array(mtmd_cpp.mtmd_get_output_embd(context), (count * size,)).reshape(count, size)
        rows.append(made_rows.copy())
        tokens += [ROW_PLACEHOLDER] * count
    mtmd_cpp.mtmd_free(context)
    peer.llama_model_free(loaded)
    return np.concatenate(rows), tokens
