"""`effllm export --mmproj` for models with audio input: the same file as another writer's, and reading it gives the folder's results."""

import json
from collections.abc import Callable
from pathlib import Path

import audio_models
import gguf
import numpy as np
import pytest
from asr_models import save_asr_model
from audio_gguf_files import write_mmproj, write_text
from audio_models import open_encoder, save_audio_model, sound
from command_line import run_cli
from omni_models import save_gemma4
from test_audio_mmproj import written_usual_gemma4
from transformers import WhisperFeatureExtractor
from vision_models import PICTURES as SHOWN

from effllm.runtime.audio import AUDIO_ENCODERS
from effllm.runtime.config import read_config
from effllm.runtime.gguf.audio_export import PROJECTOR_TYPES
from effllm.runtime.images import EncodingJob, encoder_of
from effllm.runtime.images.media import open_media
from effllm.runtime.images.modality import AUDIO_INPUT, IMAGE_INPUT

FAMILIES: dict[str, Callable[[Path], object]] = {
    **{family: lambda folder, family=family: save_audio_model(family, folder) for family in ("qwen2_audio", "audioflamingo3", "voxtral")},
    "qwen3_asr": lambda folder: save_asr_model(folder, n_window_infer=800)}

LIKE_OTHERS = ("audioflamingo3",)


@pytest.fixture(scope="module", params=[pytest.param(family, marks=pytest.mark.slow if family in LIKE_OTHERS else ())
                                        for family in FAMILIES])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, str]:
    """A folder with audio input, its text model and its audio encoder as we export them; and what was reported of the first."""
    place = tmp_path_factory.mktemp("written")
    folder, model, ours = place / "folder", place / "small.gguf", place / "mmproj-small.gguf"
    FAMILIES[request.param](folder)
    code, _, said = run_cli("export", folder, "-o", model)
    assert code == 0, said
    code, out, err = run_cli("export", folder, "-o", ours, "--mmproj", "--json")
    assert code == 0, err
    assert json.loads(out)["file"] == str(ours)
    return folder, model, ours, said


def test_tensors_and_keys_are_those_of_another_writer(written: tuple[Path, Path, Path, str], tmp_path: Path) -> None:
    write_mmproj(written[0], tmp_path / "theirs.gguf")
    alike(written[2], tmp_path / "theirs.gguf")


def alike(*files: Path) -> None:
    """Holds one file against another."""
    ours, theirs = (gguf.GGUFReader(path) for path in files)
    values = [{each.name: gguf.quants.dequantize(each.data, each.tensor_type).reshape(each.shape[::-1]) for each in file.tensors}
              for file in (ours, theirs)]
    assert values[0].keys() == values[1].keys()
    for name, wanted in values[1].items():
        assert values[0][name].shape == wanted.shape and np.abs(values[0][name] - wanted).max() <= 5e-4 * np.abs(wanted).max(), name
    said = [{key: field.contents() for key, field in file.fields.items() if key.startswith("clip.")} for file in (ours, theirs)]
    assert not {key: (said[0].get(key), value) for key, value in said[1].items() if said[0].get(key) != value}


def test_audio_rows_of_both_are_nearly_those_of_the_folder(written: tuple[Path, Path, Path, str]) -> None:
    """Both files are found and belong together."""
    folder, model, ours, said = written
    assert f"to export the audio tower: effllm export {folder} -o {ours} --mmproj" in said
    found = open_media(model, read_config(model)).encoders[AUDIO_INPUT].encode(sound(0.9), EncodingJob())
    wanted = open_encoder(folder).encode(sound(0.9), EncodingJob())
    assert found.tokens == wanted.tokens and np.abs(found.rows - wanted.rows).max() < 5e-3 * np.abs(wanted.rows).max()


def test_one_file_of_both_senses_is_that_of_another_writer_and_gives_both(tmp_path: Path) -> None:
    folder, out = tmp_path / "folder", tmp_path / "mmproj-small.gguf"
    written_usual_gemma4(folder)
    assert "to export the vision tower" in run_cli("export", folder, "-o", tmp_path / "small.gguf")[2]
    code, _, err = run_cli("export", folder, "-o", out, "--mmproj")
    assert code == 0, err
    write_mmproj(folder, tmp_path / "theirs.gguf")
    alike(out, tmp_path / "theirs.gguf")
    model, config = tmp_path / "small.gguf", read_config(folder)
    found = open_media(model, read_config(model), str(out)).encoders
    for modality, taken in ((IMAGE_INPUT, SHOWN["photo"]), (AUDIO_INPUT, sound(0.9))):
        ours, wanted = found[modality].encode(taken, EncodingJob()), encoder_of(folder, config, modality).encode(taken, EncodingJob())
        assert ours.tokens == wanted.tokens and np.abs(ours.rows - wanted.rows).max() < 1e-2 * np.abs(wanted.rows).max()
    save_gemma4(tmp_path / "other")
    code, _, err = run_cli("export", tmp_path / "other", "-o", tmp_path / "mmproj.gguf", "--mmproj")
    assert code == 2 and "differs from other Gemma 4 models in more than sizes" in err and len(err.splitlines()) <= 3


def test_what_such_a_file_cannot_say_is_refused_in_one_line(tmp_path: Path) -> None:
    assert PROJECTOR_TYPES.keys() == FAMILIES.keys() <= AUDIO_ENCODERS.keys()
    save_asr_model(tmp_path / "asr")
    save_audio_model("granite_speech", tmp_path / "granite")
    save_audio_model("qwen2_audio", tmp_path / "audio")
    ready = tmp_path / "audio" / "preprocessor_config.json"
    ready.write_text(json.dumps({**json.loads(ready.read_text()), "n_fft": 512}))
    for name, line in (("asr", "of which 200 attend to each other, which such a file does not say"), ("audio", "frames of 512 samples"),
                       ("granite", "granite_speech")):
        code, _, err = run_cli("export", tmp_path / name, "-o", tmp_path / "mmproj.gguf", "--mmproj")
        assert code == 2 and line in err and len(err.splitlines()) <= 3 and not (tmp_path / "mmproj.gguf").exists()


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize(("family", "seconds"), [("qwen2_audio", 30.0), ("qwen3_asr", 8.0), ("gemma4", 2.0)])
def test_llamacpp_reads_the_same_audio_rows_from_it(family: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = pytest.importorskip("llama_cpp")
    from test_audio_mmproj import of_llamacpp

    monkeypatch.setattr("audio_models.TOWER", {**audio_models.TOWER, "max_source_positions": 1500})
    monkeypatch.setattr("audio_models.EXTRACTOR", WhisperFeatureExtractor(feature_size=16, chunk_length=30))
    folder, mmproj = tmp_path / "folder", tmp_path / "mmproj.gguf"
    {**FAMILIES, "qwen3_asr": lambda folder: save_asr_model(folder, True, n_window_infer=800),
     "gemma4": written_usual_gemma4}[family](folder)
    write_text(folder, tmp_path / "model.gguf")
    assert run_cli("export", folder, "-o", mmproj, "--mmproj")[0] == 0
    rows, _ = of_llamacpp(peer, tmp_path / "model.gguf", mmproj, sound(seconds))
    wanted = open_encoder(folder).encode(sound(seconds), EncodingJob()).rows
    assert np.abs(rows[: len(wanted)] - wanted).max() < (2e-2 if family == "gemma4" else 1e-2) * np.abs(wanted).max()
