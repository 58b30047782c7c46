"""`effllm transcribe`: transformers' transcription of an audio file as text, subtitles and JSON; invalid input is reported."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from audio_models import EXTRACTOR, as_wav, sound
from command_line import CliRun
from transformers import WhisperForConditionalGeneration
from whisper_models import save_whisper

from effllm.runtime.audio.audio_file import read_audio
from effllm.runtime.config import read_config
from effllm.runtime.images.modality import SAMPLE_RATE
from effllm.runtime.tokenizer import Tokenizer

HEARD = sound(0.8, seed=3)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhisperForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, save_whisper(folder, max_target_positions=40)


def written(folder: Path, model: WhisperForConditionalGeneration, samples: np.ndarray, **how: object) -> str:
    """By transformers, up to where the context is full."""
    features = EXTRACTOR(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
    with torch.inference_mode():
        ids = model.generate(features, max_new_tokens=36, do_sample=False, force_unique_generate_call=True, **how)[0].tolist()
    return Tokenizer.load(folder, read_config(folder)).decode(ids).strip()


def test_words_are_those_of_transformers(whisper: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path) -> None:
    folder, model = whisper
    path = tmp_path / "talk.wav"
    path.write_bytes(as_wav(HEARD))
    for flags, how in (((), {"task": "transcribe"}), (("--language", "German", "--translate"), {"language": "de", "task": "translate"})):
        ran, wanted = CliRun("transcribe", str(folder), str(path), "--kv", "32bit", *flags), written(folder, model, read_audio(path), **how)
        told = ran.out.removesuffix("\n")
        assert ran.code == 0 and len(told) > 20 and wanted.startswith(told), ran.err
        assert "audio clip of" not in ran.err


def test_longer_audio_in_subtitles_and_in_json(whisper: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path) -> None:
    folder, _ = whisper
    path, other = tmp_path / "talk.wav", sound(0.9, seed=4)
    path.write_bytes(as_wav(np.concatenate([HEARD, np.zeros(SAMPLE_RATE, np.float32), other])))
    made = json.loads(CliRun("transcribe", str(folder), str(path), "--json").out)
    assert made["task"] == "transcribe" and made["language"] in ("English", "German") and made["duration"] == 2.7
    first, *_, last = made["segments"]
    assert (first["start"], first["end"]) == (0.0, pytest.approx(0.8, abs=0.03)) and last["end"] == pytest.approx(2.7, abs=0.03)
    assert made["text"] == " ".join(each["text"] for each in made["segments"])
    assert CliRun("transcribe", str(folder), str(path)).out == made["text"] + "\n"
    srt = CliRun("transcribe", str(folder), str(path), "--format", "srt").out
    assert srt.startswith(f"1\n00:00:00,000 --> 00:00:00,{1000 * first['end']:.0f}\n{first['text']}\n\n2\n")
    assert CliRun("transcribe", str(folder), str(path), "--format", "vtt").out.startswith("WEBVTT\n\n1\n00:00:00.000 --> ")


@pytest.mark.parametrize(("model", "more", "code", "told"), [
    ("fable", (), 2, "does not support audio input"), ("", ("--language", "tlh"), 2, "not trained to transcribe 'tlh'"),
    ("", ("--format", "ass"), 2, "'ass' is not one of")])
def test_bad_input_is_reported(whisper: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path, model: str, more: tuple[str, ...],
                               code: int, told: str) -> None:
    path = tmp_path / "talk.wav"
    path.write_bytes(as_wav(HEARD))
    ran = CliRun("transcribe", model or str(whisper[0]), str(path), *more)
    assert ran.code == code and told in ran.err and not ran.out
    assert CliRun("transcribe", str(whisper[0]), str(tmp_path / "none.wav")).code == 2


def test_a_chat_with_it_takes_audio_of_half_a_minute(whisper: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path) -> None:
    """Of a second, here."""
    path = tmp_path / "talk.wav"
    path.write_bytes(as_wav(sound(1.2)))
    for argv, told in ((("Hello",), "drops text without an audio clip"), (("", "--audio", str(path)), "effllm transcribe")):
        ran = CliRun("run", str(whisper[0]), *argv)
        assert ran.code == 2 and told in ran.err and not ran.out, ran.err
    path.write_bytes(as_wav(HEARD))
    heard, ran = (CliRun(*argv, "--kv", "32bit").out for argv in (("transcribe", whisper[0], path), (
        "run", whisper[0], "", "--audio", path, "--temp", "0")))
    assert heard.strip() == ran.strip() != ""
