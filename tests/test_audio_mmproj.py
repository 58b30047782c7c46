"""Audio and image input of GGUF models with a projector file (mmproj): the same rows as the folder both were converted from; files that do
not belong together are refused in one line."""

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import audio_models
import numpy as np
import pytest
from asr_models import save_asr_model
from audio_gguf_files import AUDIO_FAMILIES, write_audio_pair, write_mmproj
from audio_models import as_wav, save_audio_model, sound
from command_line import run_cli
from hypothesis import given
from hypothesis import strategies as st
from omni_models import save_gemma4, save_gemma4_unified, save_qwen2_5_omni, save_qwen3_omni
from test_projector_end_to_end import of_llamacpp as picture_rows
from test_projector_end_to_end import rows_of_llamacpp
from transformers import WhisperFeatureExtractor
from vision_models import PICTURES, change_config

from effllm import EffllmError
from effllm.runtime.audio import AUDIO_ENCODERS
from effllm.runtime.config import read_config
from effllm.runtime.gguf import audio_config, audio_names
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob, encoder_of
from effllm.runtime.images.media import MediaCache, check_modality, open_media
from effllm.runtime.images.modality import AUDIO_INPUT
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN
from effllm.runtime.images.video_file import Frame


def written_usual_gemma4(folder: Path) -> None:
    """With what files of its kind do not state as all such models have it."""
    save_gemma4(folder, attention_chunk_size=12, attention_context_left=13, use_clipped_linears=True)
    ready = json.loads((folder / "processor_config.json").read_text())
    ready["image_processor"]["max_soft_tokens"] = 280
    (folder / "processor_config.json").write_text(json.dumps(ready))


def written_usual_unified(folder: Path) -> None:
    """As of `written_usual_gemma4`."""
    save_gemma4_unified(folder)
    change_config(folder, "preprocessor_config.json", max_soft_tokens=280)


FAMILIES: dict[str, Callable[[Path], object]] = {
    **{family: lambda folder, family=family: save_audio_model(family, folder) for family in
       ("qwen2_audio", "audioflamingo3", "voxtral", "granite_speech")},
    "qwen3_asr": lambda folder: save_asr_model(folder, True, n_window_infer=800),
    "qwen2_5_omni": lambda folder: save_qwen2_5_omni(folder, WhisperFeatureExtractor(feature_size=16, chunk_length=300), n_window=100,
                                                     max_source_positions=100),
    "qwen3_omni_moe": lambda folder: save_qwen3_omni(folder, n_window_infer=800),
    "gemma4": lambda folder: written_usual_gemma4(folder), "gemma4_unified": lambda folder: written_usual_unified(folder)}
LIKE_OTHERS = ("audioflamingo3", "qwen3_omni_moe")  # that differ from others in a projector, or in a text model
ROUNDED = {"gemma4": 1e-5, "granite_speech": 1e-5}  # of which files hold values that folders have otherwise: a softplus, a folded norm


@pytest.fixture(scope="module", params=[pytest.param(family, marks=pytest.mark.slow if family in LIKE_OTHERS else ())
                                        for family in FAMILIES])
def pair_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path, Path]:
    """A folder with audio input, and the two files converted from it."""
    place = tmp_path_factory.mktemp("pair")
    FAMILIES[request.param](place / "folder")
    return request.param, place / "folder", *write_audio_pair(place / "folder", place / "files")


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    place = tmp_path_factory.mktemp("ears")
    FAMILIES["qwen3_asr"](place / "folder")
    return place / "folder", *write_audio_pair(place / "folder", place / "files")


def media(model: Path, mmproj: Path | None = None) -> MediaCache:
    return open_media(model, read_config(model), None if mmproj is None else str(mmproj))


def test_rows_and_tokens_are_those_of_the_folder(pair_of: tuple[str, Path, Path, Path]) -> None:
    family, folder, model, mmproj = pair_of
    found, config = media(model), read_config(folder)
    assert not found.refused and [*found.encoders] == [SEEN] * (AUDIO_FAMILIES[family][2] is not None) + [AUDIO_INPUT]
    for modality, sight in found.encoders.items():
        wanted = encoder_of(folder, config, modality)
        for taken in [sound(seconds) for seconds in (0.33, 0.9)] if modality is AUDIO_INPUT else [PICTURES["photo"], PICTURES["tall"]]:
            ours, theirs = sight.encode(taken, EncodingJob()), wanted.encode(taken, EncodingJob())
            size = taken.shape if modality is AUDIO_INPUT else taken.shape[:2]
            assert ours.tokens == theirs.tokens and sight.token_count(*size) == len(ours.tokens)
            assert (ours.grid, ours.bidirectional) == (theirs.grid, theirs.bidirectional)
            most = ROUNDED.get(family, 0) if modality is AUDIO_INPUT else 0
            assert np.abs(ours.rows - theirs.rows).max() <= most * np.abs(theirs.rows).max()
        assert (sight.placeholder, sight.placeholder_text) == (wanted.placeholder, wanted.placeholder_text)
        if modality is SEEN:  # videos too: the Omni models have no words for their times
            film = [Frame(float(second), PICTURES["photo"]) for second in range(4)]
            assert [(words, apart) for words, _, apart in sight.video_inputs(film)] == [
                (words, apart) for words, _, apart in wanted.video_inputs(film)]
            assert sight.positions_per_second == wanted.positions_per_second
        assert sight.max_seconds == wanted.max_seconds if modality is AUDIO_INPUT else sight.bytes_needed() > 0
    assert found.encoders[AUDIO_INPUT].bytes_needed() > mmproj.stat().st_size // 4


@pytest.mark.parametrize(("kind", "most"), [("F16", 5e-3), ("Q8_0", 8e-2)])
def test_audio_rows_of_smaller_types_are_nearly_the_same(ears: tuple[Path, Path, Path], tmp_path: Path, kind: str, most: float) -> None:
    """Of the family whose convolutions lie otherwise in the file."""
    write_mmproj(ears[0], tmp_path / "mmproj.gguf", kind)
    both = media(ears[1], tmp_path / "mmproj.gguf").encoders[AUDIO_INPUT], encoder_of(ears[0], read_config(ears[0]), AUDIO_INPUT)
    ours, wanted = (each.encode(sound(0.9), EncodingJob()).rows for each in both)
    off = np.abs(ours - wanted).max() / np.abs(wanted).max()
    assert 0 < off < most or kind == "Q8_0" and off == 0  # of whose matrices none is of whole blocks


def test_every_type_has_ears_and_what_is_known_of_its_keys() -> None:
    assert audio_names.AUDIO_PROJECTORS.keys() == audio_config.BUILDERS.keys() == {ears for _, ears, _ in AUDIO_FAMILIES.values()}
    assert AUDIO_FAMILIES.keys() <= AUDIO_ENCODERS.keys()
    for text, kind, _ in AUDIO_FAMILIES.values():
        assert text in audio_names.AUDIO_PROJECTORS[kind].text_architectures


def test_without_such_a_file_the_missing_one_is_named(ears: tuple[Path, Path, Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone.gguf"
    alone.symlink_to(ears[1])
    found = media(alone)
    assert not found.encoders and "there is no mmproj file next to it" in found.refused[AUDIO_INPUT].message
    with pytest.raises(EffllmError, match=r"alone\.gguf contains only the text model") as raised:
        check_modality(alone, read_config(alone), modality=AUDIO_INPUT)
    assert "--mmproj FILE" in raised.value.hint
    check_modality(alone, read_config(alone), str(ears[2]), AUDIO_INPUT)
    with pytest.raises(EffllmError, match="this model does not support image input"):
        check_modality(alone, read_config(alone), str(ears[2]), SEEN)


def changed(**keys: object) -> Callable[[Path, Path], None]:
    return lambda folder, out: write_mmproj(folder, out, **keys)


def with_one_tensor(folder: Path, out: Path) -> None:
    write_mmproj(folder, out)
    out.write_bytes(out.read_bytes().replace(b"a.conv2d.2.bias", b"a.conv2d.9.bias"))


BROKEN = {
    "another type": (changed(projector_type="ultravox"), r"a projector of type 'ultravox', which is not supported", "known: qwen2a"),
    "of another family": (changed(projector_type="gemma4a"), "with models of architecture gemma4, not 'qwen3vl'", "of this model"),
    "no width": (changed(**{"audio.embedding_length": None}), r"lacks key clip\.audio\.embedding_length", ""),
    "odd heads": (changed(**{"audio.attention.head_count": 5}), r"mmproj\.gguf: hidden_size 48 is not a multiple of 5 heads", ""),
    "a size of letters": (changed(**{"audio.block_count": "many"}), "num_hidden_layers is 'many', expected", ""),
    "other bands": (changed(**{"audio.num_mel_bins": 24}), r"is \[48, 12\], but the file says \[48, 18\]", "again"),
    "an unknown tensor": (with_one_tensor, r"holds tensor 'a\.conv2d\.9\.bias', which no projector of its type has", "another mmproj"),
    "nothing in it": (changed(projector_type=None), "not a projector", "mmproj-*.gguf")}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_broken_or_of_another_model_is_refused_in_one_line(ears: tuple[Path, Path, Path], tmp_path: Path, name: str) -> None:
    write, said, hint = BROKEN[name]
    write(ears[0], tmp_path / "mmproj.gguf")
    with pytest.raises(EffllmError, match=said) as raised:
        media(ears[1], tmp_path / "mmproj.gguf").encoders[AUDIO_INPUT].encode(sound(0.9), EncodingJob())
    assert hint in raised.value.hint and "\n" not in raised.value.message and raised.value.hint


def test_of_two_senses_one_that_is_not_known_is_refused_by_itself(tmp_path: Path) -> None:
    FAMILIES["gemma4"](tmp_path / "folder")
    model, mmproj = write_audio_pair(tmp_path / "folder", tmp_path / "files", **{"audio.projector_type": "gemma3na"})
    found = media(model, mmproj)
    assert [*found.encoders] == [SEEN] and "type 'gemma3na', which is not supported" in found.refused[AUDIO_INPUT].message


def test_a_run_takes_audio(ears: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, model, mmproj = ears
    wave = tmp_path / "note.wav"
    wave.write_bytes(as_wav(sound(0.9)))
    code, out, err = run_cli("run", model, "", "--audio", wave, "-n", "4", "--temp", "0", "-c", "256")
    assert code == 0 and "audio clip of 0.9 s: 12 tokens" in err, err
    assert run_cli("run", model, "", "--audio", wave, "-n", "4", "--temp", "0", "-c", "256", "--mmproj", mmproj)[:2] == (0, out)
    shown = json.loads(run_cli("show", model, "--json")[1])
    assert shown["audio"]["placeholder"] == "<|audio_pad|>" and shown["images"] is None
    alone = tmp_path / "alone.gguf"
    alone.symlink_to(model)
    code, out, err = run_cli("run", alone, "", "--audio", wave)
    assert code == 2 and not out and "there is no mmproj file next to it" in err and len(err.splitlines()) <= 3


@given(st.binary(max_size=200), st.integers(0, 2500))
def test_no_bytes_of_a_header_end_in_a_traceback(ears: tuple[Path, Path, Path], noise: bytes, at: int) -> None:
    raw = bytearray(ears[2].read_bytes())
    raw[at : at + len(noise)] = noise
    path = ears[2].parent.parent / "noise-mmproj-.gguf"
    path.write_bytes(raw)
    try:
        media(ears[1], path).encoders[AUDIO_INPUT].encode(sound(0.1), EncodingJob())
    except EffllmError as error:
        assert error.hint


# -- llama.cpp ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize(("family", "seconds", "most"), [
    ("qwen2_audio", 30.0, 2e-3), ("audioflamingo3", 30.0, 2e-3), ("qwen3_asr", 8.0, 1e-3), ("gemma4", 2.0, 1e-2),
    ("granite_speech", 2.4, 3e-3)])
def test_llamacpp_makes_the_same_rows_of_the_same_audio(family: str, seconds: float, most: float, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """It always takes whole windows, so audio here is one; behind it are rows of silence there. What asks for Granite Speech has two
    layers there, as wide as the encoder, and rows are multiplied as embeddings are later, by its text model."""
    peer = pytest.importorskip("llama_cpp")
    if family in ("qwen2_audio", "audioflamingo3"):
        monkeypatch.setattr("audio_models.TOWER", {**audio_models.TOWER, "max_source_positions": 1500})
        monkeypatch.setattr("audio_models.EXTRACTOR", WhisperFeatureExtractor(feature_size=16, chunk_length=30))
    known = {"cross_attention_frequency": 1, "hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2}
    monkeypatch.setattr("audio_models.QFORMER", {**audio_models.QFORMER, **known})
    FAMILIES[family](tmp_path / "folder")
    model, mmproj = write_audio_pair(tmp_path / "folder", tmp_path / "files")
    samples = sound(seconds)
    wanted = media(model).encoders[AUDIO_INPUT].encode(samples, EncodingJob())
    rows, tokens = of_llamacpp(peer, model, mmproj, samples)
    rows = rows * np.float32(audio_models.MULTIPLIERS["embedding_multiplier"] if family == "granite_speech" else 1)
    assert len(rows) >= len(wanted.rows) and np.abs(rows[: len(wanted.rows)] - wanted.rows).max() < most * np.abs(wanted.rows).max()
    begin = [token for token in wanted.tokens if token != ROW_PLACEHOLDER][:1]
    assert not begin or tokens[0] == begin[0]


@pytest.mark.peer
@pytest.mark.slow
def test_llamacpp_sees_the_same_without_a_tower(tmp_path: Path) -> None:
    """With an image that needs no resizing; the audio encoder, with 640 samples per row there, is left out."""
    peer = pytest.importorskip("llama_cpp")
    FAMILIES["gemma4_unified"](tmp_path / "folder")
    more = {"has_audio_encoder": None, "audio.projector_type": None, "audio.embedding_length": None, "audio.block_count": None}
    sizes = {"feed_forward_length": 0, "attention.head_count": 1, "projection_dim": 48}
    model, mmproj = write_audio_pair(tmp_path / "folder", tmp_path / "files",
                                     **more, **{f"vision.{key}": value for key, value in sizes.items()})
    points = np.tile(PICTURES["square"], (3, 3, 1))
    wanted = media(model).encoders[SEEN].encode(points, EncodingJob())
    rows, tokens = picture_rows(peer, model, mmproj, points)
    assert rows.shape == wanted.rows.shape == (256, 48) and np.abs(rows - wanted.rows).max() < 2e-3 * np.abs(wanted.rows).max()
    assert [tokens[0], tokens[-1]] == [wanted.tokens[0], wanted.tokens[-1]]


def of_llamacpp(peer: ModuleType, model: Path, mmproj: Path, samples: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Audio rows, and the tokens around them, PLACE where a row is."""
    from llama_cpp import mtmd_cpp

    wave = np.ascontiguousarray(samples, np.float32)
    return rows_of_llamacpp(peer, model, mmproj, lambda: mtmd_cpp.mtmd_bitmap_init_from_audio(
        len(wave), wave.ctypes.data_as(ctypes.POINTER(ctypes.c_float))))
