"""Image input of GGUF models with a projector file (mmproj): the same rows as the folder both were converted from; files that do not belong
together are refused in one line."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from audio_gguf_files import AUDIO_FAMILIES
from gguf_bytes import file, pair, text
from hypothesis import given
from hypothesis import strategies as st
from mmproj_files import PAIRS, VISION_CASES, save_as_published, write_pair, write_projector
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from vision_cases import SQUARE
from vision_models import FIRST, PICTURES, TOWER, open_encoder, save_random_model, save_vision_model

from effllm import EffllmError
from effllm.runtime.config import read_config
from effllm.runtime.gguf import file_names
from effllm.runtime.gguf.projector_names import PROJECTORS
from effllm.runtime.gguf.vision_config import BUILDERS, MODEL_TYPES
from effllm.runtime.images import VISION_ENCODERS, EncodingJob
from effllm.runtime.images.media import MediaCache, check_modality, open_media
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN
from effllm.runtime.images.mrope import mrope_axes

LLAVA = ({"model_type": "llama"}, {**TOWER, "model_type": "clip_vision_model", "hidden_act": "gelu"}, ["<image>"],
         {"image_token_index": FIRST}, LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE, do_pad=True))
FAMILIES = {**{family: VISION_CASES[family] for family in VISION_CASES if family in PAIRS}, "llava": LLAVA}
SHOWN = ("photo", "tall", "tiny")


@pytest.fixture(scope="module", params=FAMILIES)
def pair_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A vision model's folder, and the two files converted from it."""
    place = tmp_path_factory.mktemp("pair")
    if request.param in PAIRS and request.param != "llava":
        save_as_published(place / "folder", request.param)
    else:
        save_vision_model(place / "folder", request.param, FAMILIES[request.param])
    return place / "folder", *write_pair(place / "folder", place / "files")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    place = tmp_path_factory.mktemp("gemma")
    save_vision_model(place / "folder", "gemma3", FAMILIES["gemma3"])
    return place / "folder", *write_pair(place / "folder", place / "files")


def media(model: Path, mmproj: Path | None = None) -> MediaCache:
    return open_media(model, read_config(model), None if mmproj is None else str(mmproj))


def test_rows_tokens_and_places_are_those_of_the_folder(pair_of: tuple[Path, Path, Path]) -> None:
    folder, model, mmproj = pair_of
    config = read_config(model, strict=True)
    found, wanted = open_media(model, config), open_encoder(folder)
    assert not found.refused
    for name in SHOWN:
        if name == "tiny" and wanted.source.config["model_type"] == "lighton_ocr":  # which refuses what is less than a square
            continue
        ours, theirs = found.encoders[SEEN].encode(PICTURES[name], EncodingJob()), wanted.encode(PICTURES[name], EncodingJob())
        assert np.array_equal(ours.rows, theirs.rows) and ours.tokens == theirs.tokens
        assert (ours.grid, ours.bidirectional) == (theirs.grid, theirs.bidirectional)
        assert (ours.deepstack_rows is None) == (theirs.deepstack_rows is None)
        assert ours.deepstack_rows is None or np.array_equal(ours.deepstack_rows, theirs.deepstack_rows)
        before = ours.prefix_tokens(0) if ours.prefix_tokens else ()
        assert found.encoders[SEEN].token_count(*PICTURES[name].shape[:2]) == len(before) + len(ours.tokens)
    turned = mrope_axes(folder, read_config(folder))
    assert (found.axes is None) == (turned is None) and (turned is None or np.array_equal(found.axes, turned))
    assert found.encoders[SEEN].placeholder == wanted.placeholder and found.encoders[SEEN].bytes_needed() > mmproj.stat().st_size // 2


@pytest.mark.parametrize(("kind", "most"), [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 3e-2)])
def test_smaller_types_see_nearly_the_same(tmp_path: Path, kind: str, most: float) -> None:
    """Of the family whose rows of q and k lie otherwise in the file; its widths are whole blocks."""
    folder = tmp_path / "folder"
    save_vision_model(folder, "mistral3", VISION_CASES["mistral3"], hidden_size=64, intermediate_size=96, num_attention_heads=2)
    model, mmproj = write_pair(folder, tmp_path / "files", kind)
    assert {each.tensor_type.name for each in gguf.GGUFReader(mmproj).tensors} >= {kind, "F32"}
    ours, wanted = (each.encode(PICTURES["photo"], EncodingJob()).rows for each in (media(model).encoders[SEEN], open_encoder(folder)))
    off = np.abs(ours - wanted).max() / np.abs(wanted).max()
    assert 0 < off < most


def test_every_type_has_a_tower_and_what_is_known_of_its_keys() -> None:
    written = {kind for _, kind in PAIRS.values()} | {eyes for _, _, eyes in AUDIO_FAMILIES.values() if eyes is not None}
    written |= {"gemma3nv", "hunyuanocr", "kimivl"}  # in tests of those families; and what files of hunyuanvl were called first
    assert PROJECTORS["hunyuanocr"] == PROJECTORS["hunyuanvl"] and BUILDERS["hunyuanocr"] is BUILDERS["hunyuanvl"]
    assert PROJECTORS.keys() == BUILDERS.keys() and written == PROJECTORS.keys()
    assert set(MODEL_TYPES.values()) <= VISION_ENCODERS.keys()
    assert {text for each in PROJECTORS.values() for text in each.text_architectures} >= MODEL_TYPES.keys()


def test_without_such_a_file_the_missing_one_is_named(gemma: tuple[Path, Path, Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone.gguf"
    alone.symlink_to(gemma[1])
    with pytest.raises(EffllmError, match=r"alone\.gguf contains only the text model, and there is no mmproj file next to it") as raised:
        check_modality(alone, read_config(alone))
    assert "mmproj-*.gguf" in raised.value.hint and "--mmproj FILE" in raised.value.hint
    found = media(alone)
    assert not found.encoders and found.refused[SEEN].message == raised.value.message
    assert media(alone, gemma[2]).encoders
    for name in ("mmproj-one.gguf", "mmproj-two.gguf"):
        (tmp_path / name).symlink_to(gemma[2])
    assert "there are 2 mmproj files beside alone.gguf: mmproj-one.gguf, mmproj-two.gguf" in media(alone).refused[SEEN].message


def test_of_several_precisions_that_of_sixteen_bits_is_taken_also_from_above(gemma: tuple[Path, Path, Path], tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / ("1" * 40)
    (snapshot / "Q8_0").mkdir(parents=True)
    model = snapshot / "Q8_0" / "model-Q8_0.gguf"
    model.symlink_to(gemma[1])
    (snapshot / "mmproj-model-F32.gguf").write_bytes(b"GGUF")
    (snapshot / "mmproj-model-F16.gguf").symlink_to(gemma[2])
    assert media(model).encoders
    (tmp_path / "mmproj-model-F32.gguf").write_bytes(b"")  # beyond the repository
    (snapshot / "mmproj-model-F16.gguf").unlink()
    assert "cut short" in media(model).refused[SEEN].message


def changed(**keys: object) -> Callable[[Path, Path], None]:
    def write(folder: Path, out: Path) -> None:
        import json

        write_projector(folder, out, "gemma3", json.loads((folder / "config.json").read_text()), keys=keys)

    return write


def cut(folder: Path, out: Path) -> None:
    changed()(folder, out)
    out.write_bytes(out.read_bytes()[:-1000])


def a_stranger(folder: Path, out: Path) -> None:
    out.write_bytes(file([pair("general.architecture", 8, text("llama"))], []))


def with_one_tensor(folder: Path, out: Path) -> None:
    changed()(folder, out)
    raw = out.read_bytes().replace(b"v.blk.2.ffn_up.bias", b"v.blk.2.ffn_uq.bias")
    out.write_bytes(raw)


BROKEN = {
    "another type": (changed(projector_type="ldpv2"), r"a projector of type 'ldpv2', which is not supported", "known: mlp, idefics3"),
    "no type": (changed(projector_type=None), "not a projector", "mmproj-*.gguf"),
    "another kind of file": (a_stranger, "is of architecture 'llama', not a projector", "mmproj-*.gguf"),
    "of another family": (changed(projector_type="qwen3vl_merger"), "with models of architecture qwen3vl or .*, not 'gemma3'", "mmproj"),
    "no width": (changed(**{"vision.embedding_length": None}), r"lacks key clip\.vision\.embedding_length", ""),
    "odd heads": (changed(**{"vision.attention.head_count": 5}), r"mmproj\.gguf: hidden_size 48 is not a multiple of 5 heads", ""),
    "a size of letters": (changed(**{"vision.image_size": "large"}), "image_size is 'large', expected", ""),
    "another size": (changed(**{"vision.image_size": 64}), r"is \[16, 48\], but the file says \[64, 48\]", "again"),
    "cut short": (cut, "is cut short", "again"),
    "an unknown tensor": (with_one_tensor, r"holds tensor 'v\.blk\.2\.ffn_uq\.bias', which no projector of its type has", "another mmproj"),
    "empty": (lambda folder, out: out.write_bytes(b""), "is cut short", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_or_one_of_another_model_is_refused_in_one_line(gemma: tuple[Path, Path, Path], tmp_path: Path, name: str) -> None:
    write, said, hint = BROKEN[name]
    path = tmp_path / "mmproj.gguf"
    write(gemma[0], path)
    with pytest.raises(EffllmError, match=said) as raised:
        media(gemma[1], path).encoders[SEEN].encode(PICTURES["square"], EncodingJob())
    assert hint in raised.value.hint and "\n" not in raised.value.message and raised.value.hint


def test_a_projector_onto_another_width(gemma: tuple[Path, Path, Path], tmp_path: Path) -> None:
    words, vision, added, more, processor = VISION_CASES["gemma3"]
    save_random_model("gemma3", tmp_path / "wide", {**words, "hidden_size": 64}, vision, added, **more)
    processor.save_pretrained(tmp_path / "wide")
    _, wide = write_pair(tmp_path / "wide", tmp_path / "files")
    with pytest.raises(EffllmError, match="projects to width 64, but the model's hidden size is 48") as raised:
        media(gemma[1], wide)
    assert "another model or size" in raised.value.hint
    with pytest.raises(EffllmError, match="--mmproj is for GGUF files"):
        media(gemma[0], wide)
    with pytest.raises(EffllmError, match="is a vision projector .mmproj., not a model"):
        read_config(wide)


@given(st.binary(max_size=200), st.integers(0, 3000))
def test_no_bytes_of_a_header_end_in_a_traceback(gemma: tuple[Path, Path, Path], noise: bytes, at: int) -> None:
    raw = bytearray(gemma[2].read_bytes())
    raw[at : at + len(noise)] = noise
    path = gemma[2].parent.parent / "noise-mmproj-.gguf"
    path.write_bytes(raw)
    try:
        media(gemma[1], path).encoders[SEEN].encode(PICTURES["tiny"], EncodingJob())
    except EffllmError as error:
        assert error.hint


@pytest.mark.parametrize(("listed", "found"), [
    (["mmproj-model-f16.gguf", "model-Q4_K_M.gguf"], ["mmproj-model-f16.gguf"]),
    (["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], ["mmproj-F16.gguf"]),
    (["mmproj-x-Q8_0.gguf", "mmproj-x-BF16.gguf"], ["mmproj-x-BF16.gguf"]),
    (["Qwen2.5-VL-7B-mmproj-f16.gguf", "a.gguf"], ["Qwen2.5-VL-7B-mmproj-f16.gguf"]),
    (["mmproj-a-f16.gguf", "mmproj-b-f16.gguf"], ["mmproj-a-f16.gguf", "mmproj-b-f16.gguf"]),
    (["model.mmproj-Q8_0.gguf", "nommproj.gguf", "mmprojector.gguf", "mmproj-f16.bin"], ["model.mmproj-Q8_0.gguf"]), ([], [])])
def test_names_of_projectors(listed: list[str], found: list[str]) -> None:
    assert file_names.projectors(listed) == found
    assert not set(file_names.model_files(listed)) & set(filter(file_names.is_projector, listed))


def test_texts_where_numbers_are_due(gemma: tuple[Path, Path, Path], tmp_path: Path) -> None:
    changed(**{"vision.image_mean": ["a", "b", "c"]})(gemma[0], tmp_path / "mmproj.gguf")
    with pytest.raises(EffllmError, match="image_mean is"):
        media(gemma[1], tmp_path / "mmproj.gguf")
