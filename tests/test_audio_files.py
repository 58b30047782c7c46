"""Audio files become mono samples at one rate; invalid files are reported in one line."""

import struct
import sys
import types

import numpy as np
import pytest
from audio_models import as_wav, sound
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import WhisperFeatureExtractor
from video_files import as_sound, as_video

from effllm import UsageError
from effllm.runtime.audio import audio_file, resampling
from effllm.runtime.audio.audio_file import MIN_SAMPLES, decode_audio, read_audio
from effllm.runtime.audio.log_mel import WHISPER_EXTRACTORS, LogMel, log_mel_of, read_extractor
from effllm.runtime.audio.resampling import resample
from effllm.runtime.audio.wav import CHUNK_FRAMES, read_wav
from effllm.runtime.images.modality import SAMPLE_RATE


def wav(body: bytes, kind: int, bits: int, channels: int = 1, rate: int = SAMPLE_RATE, before: bytes = b"",
        extended: bool = False) -> bytes:
    form = struct.pack("<HHIIHH", 0xFFFE if extended else kind, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)
    if extended:
        form += struct.pack("<HHIH", 22, bits, 0, kind) + bytes(14)
    chunks = before + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


SAMPLES = sound(0.5)
WHOLE = (SAMPLES.astype(np.float64) * (2**31 - 1)).astype("<i4")
KINDS = {"8": (wav(((SAMPLES * 127).round() + 128).astype(np.uint8).tobytes(), 1, 8), 1 / 100),
         "16": (wav((WHOLE >> 16).astype("<i2").tobytes(), 1, 16), 2**-15),
         "24": (wav(WHOLE.view(np.uint8).reshape(-1, 4)[:, 1:].tobytes(), 1, 24), 2**-22),
         "32": (wav(WHOLE.tobytes(), 1, 32), 2**-23),
         "float": (wav(SAMPLES.tobytes(), 3, 32), 0), "double": (wav(SAMPLES.astype("<f8").tobytes(), 3, 64), 0),
         "extensible": (wav((WHOLE >> 16).astype("<i2").tobytes(), 1, 16, extended=True), 2**-15),
         "beside": (wav(SAMPLES.tobytes(), 3, 32, before=b"LIST" + struct.pack("<I", 3) + b"abc\0"), 0)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_wav_file_is_read(kind):
    data, within = KINDS[kind]
    assert np.abs(decode_audio(data, "it") - SAMPLES).max() <= within


def test_channels_are_joined_and_what_a_pipe_left_open_ends_with_the_file():
    both = np.stack([SAMPLES, -SAMPLES / 2], axis=1)
    data = wav(both.tobytes(), 3, 32, channels=2)
    assert np.abs(decode_audio(data, "it") - SAMPLES / 4).max() < 1e-6
    at = data.index(b"data") + 4
    for cut in (data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :], data[:at] + b"\xff\xff\xff\xff" + data[at + 4 : -3]):
        assert np.abs(decode_audio(cut, "it")[:7000] - SAMPLES[:7000] / 4).max() < 1e-6


@settings(max_examples=200)
@given(st.binary(max_size=80), st.integers(0, 60), st.booleans())
def test_a_broken_file_is_reported_in_one_line(noise, at, overwrites):
    data = KINDS["16"][0]
    data = data[:at] + noise + data[at + overwrites * len(noise) :]
    try:
        made = decode_audio(data, "it")
    except UsageError as error:
        assert error.message.startswith("it ") and error.hint and "\n" not in error.message
    else:
        assert made.dtype == np.float32 and np.isfinite(made).all() and len(made) >= MIN_SAMPLES


def test_invalid_audio_is_reported(tmp_path, monkeypatch):
    for data, said in ((b"hello", "not a readable audio file"), (as_wav(SAMPLES[:300]), "too short"),
                       (b"", "not a readable audio file"),
                       (wav(bytes(8000), 7, 8), "unsupported WAV format"), (wav(bytes(8000), 1, 16, rate=0), "claims 1 channels at 0"),
                       (wav(bytes(8000), 1, 16, channels=0), "claims 0 channels"), (as_wav(SAMPLES)[:20], "without a format"),
                       (as_wav(SAMPLES)[:36], "without data"), (wav(bytes(3601 * 100), 1, 8, rate=100), "longer than 60 minutes")):
        with pytest.raises(UsageError, match=said) as raised:
            decode_audio(data, "it")
        assert raised.value.hint
    with pytest.raises(UsageError, match="No such file"):
        read_audio(tmp_path / "absent.wav")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    for begin in (b"fLaC", b"OggS", b"ID3\x04", b"\xff\xfb"):
        with pytest.raises(UsageError, match="not installed") as raised:
            decode_audio(begin + bytes(100), "it")
        assert 'pip install "effllm[sound]"' in raised.value.hint


TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(2 * 48_000) / 48_000)).astype(np.float32)


@pytest.mark.parametrize(("container", "codec", "layout"), [("ipod", "alac", "mono"), ("mp4", "aac", "stereo"),
                                                            ("webm", "libopus", "stereo"), ("matroska", "pcm_s16le", "mono")])
def test_audio_of_phones_and_video_files_is_decoded(container, codec, layout):
    made = decode_audio(as_sound(TONE, container, codec, 48_000, layout), "it")
    assert abs(len(made) / SAMPLE_RATE - 2) < 0.05
    heard = made[SAMPLE_RATE // 2 : SAMPLE_RATE // 2 + SAMPLE_RATE]
    assert np.abs(np.fft.rfft(heard)).argmax() == 440 and abs(np.abs(heard).max() - 0.5) < 0.03


def test_a_video_without_valid_audio_is_reported(monkeypatch):
    whole = as_sound(TONE, "mp4", "aac", 48_000)
    for data, said in ((as_video(1), "has no audio track"), (whole[:200], "not a readable audio file"),
                       (whole[4:8] * 20, "not a readable audio file"),
                       (as_sound(TONE[:400], "matroska", "pcm_s16le", 48_000), "too short")):
        with pytest.raises(UsageError, match=said) as raised:
            decode_audio(data, "it")
        assert raised.value.hint
    monkeypatch.setattr(audio_file, "MAX_SECONDS", 1)
    with pytest.raises(UsageError, match="longer than 1 seconds"):
        decode_audio(whole, "it")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UsageError, match="not installed") as raised:
        decode_audio(whole, "it")
    assert 'pip install "effllm[video]"' in raised.value.hint


@given(st.integers(0, 2000), st.binary(max_size=12))
@example(1627, bytes(7))  # names no codec
def test_audio_of_broken_videos_is_decoded_as_far_as_it_goes_or_refused_in_one_line(at, noise):
    data = FILM[:at] + noise + FILM[at + len(noise) :]
    try:
        made = decode_audio(data, "it")
    except UsageError as error:
        assert error.message.startswith("it ") and error.hint and "\n" not in error.message
    else:
        assert made.dtype == np.float32 and np.isfinite(made).all()


FILM = as_sound(TONE[:4800], "mp4", "aac", 48_000)


def test_other_formats_are_read_by_the_library_which_is_held_to_what_it_claims(monkeypatch):
    class File:
        samplerate, channels = 8000, 2

        def __init__(self, file) -> None:
            if file.getvalue()[4:5] == b"x":
                raise RuntimeError("its own")
            self.left = np.stack([SAMPLES, SAMPLES], axis=1)
            self.is_endless = file.getvalue()[4:5] == b"e"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def read(self, most, dtype, always_2d):
            assert most == CHUNK_FRAMES and dtype == "float32" and always_2d
            if self.is_endless:
                return np.zeros((most, 2), np.float32)
            piece, self.left = self.left[:1000], self.left[1000:]
            return piece

    monkeypatch.setitem(sys.modules, "soundfile", types.SimpleNamespace(SoundFile=File))
    assert len(decode_audio(b"fLaC" + bytes(10), "it")) == 2 * len(SAMPLES)
    with pytest.raises(UsageError, match="not a readable audio file"):
        decode_audio(b"fLaCx" + bytes(10), "it")
    monkeypatch.setattr(audio_file, "MAX_SECONDS", 120)
    with pytest.raises(UsageError, match="longer than 2 minutes"):
        decode_audio(b"fLaCe" + bytes(10), "it")
    monkeypatch.setattr(File, "samplerate", 655_350)
    monkeypatch.setattr(audio_file, "MAX_SAMPLES", 655_350)
    with pytest.raises(UsageError, match="longer than 1 seconds"):  # whatever the rate: two minutes of it would be gigabytes
        decode_audio(b"fLaCe" + bytes(10), "it")
    monkeypatch.setattr(File, "samplerate", 8000)
    monkeypatch.setattr(File, "channels", 0)
    with pytest.raises(UsageError, match="claims 0 channels"):
        decode_audio(b"fLaC" + bytes(10), "it")


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 48_000, 96_000, pytest.param(44_099, marks=pytest.mark.slow)])
def test_tones_are_the_same_at_another_rate(rate):
    """What both rates can hold is known at every moment, so it is the oracle; what the lower one cannot hold is gone."""
    edge = min(rate, SAMPLE_RATE) / 2
    tones = [(0.03, 0.3), (0.4, 1.1), (0.85, 2.0)]

    def at(times):
        return sum(np.sin(2 * np.pi * share * edge * times + phase) for share, phase in tones)

    for count in (rate // 2, rate // 3 + 7)[rate == 44_099 :]:
        made = resample(at(np.arange(count) / rate).astype(np.float32), rate, SAMPLE_RATE)
        assert len(made) == -(-count * SAMPLE_RATE // rate)
        inner = slice(len(made) // 5, -len(made) // 5)
        assert np.abs(made - at(np.arange(len(made)) / SAMPLE_RATE))[inner].max() < 2e-3
    if rate > SAMPLE_RATE:
        lost = resample(np.sin(2 * np.pi * 0.55 * SAMPLE_RATE * np.arange(rate // 2) / rate).astype(np.float32), rate, SAMPLE_RATE)
        assert np.abs(lost[len(lost) // 5 : -len(lost) // 5]).max() < 1e-3
    constant = resample(np.full(rate // 4, 0.5, np.float32), rate, SAMPLE_RATE)
    assert np.abs(constant[len(constant) // 3 : len(constant) // 2] - 0.5).max() < 1e-6


def test_a_filter_that_is_looked_up_is_the_one_that_is_computed(monkeypatch):
    """Of rates that have thousands of phases, each of which would be computed for a few samples."""
    samples = sound(0.1)
    for rate in (22_222, 7_778):  # 8,000 phases each
        looked_up = resample(samples, rate, SAMPLE_RATE)
        with monkeypatch.context() as patched:
            patched.setattr(resampling, "MAX_EXACT_PHASES", 8000)
            assert np.abs(looked_up - resample(samples, rate, SAMPLE_RATE)).max() < 3e-6
    with pytest.raises(UsageError, match="claims 1 channels at 99 Hz"):
        decode_audio(wav(bytes(4000), 1, 8, rate=99), "it")


@settings(max_examples=25)
@given(st.integers(400, 20_000), st.sampled_from([16, 80, 128]), st.floats(0, 1), st.integers(0, 9))
def test_a_spectrogram_is_that_of_whispers_extractor(count, bands, loud, seed):
    samples = np.float32(loud) * sound(count / SAMPLE_RATE, seed)
    wanted = WhisperFeatureExtractor(feature_size=bands)(samples, sampling_rate=SAMPLE_RATE, padding="longest", return_tensors="np")
    made = LogMel(bands, 400, 160, 480_000)(samples)
    assert made.shape == (count // 160, bands)
    assert np.abs(made.T - wanted["input_features"][0][:, : len(made)]).max() < 1e-4


def test_a_folder_states_its_audio_preprocessing(tmp_path):
    with pytest.raises(UsageError, match="has no preprocessor_config.json"):
        log_mel_of(read_extractor(tmp_path, WHISPER_EXTRACTORS))
    WhisperFeatureExtractor(feature_size=128).save_pretrained(tmp_path)
    assert log_mel_of(read_extractor(tmp_path, WHISPER_EXTRACTORS)) == LogMel(128, 400, 160, 480_000)
    for says, said in (('{"feature_extractor_type": "Other"}', "audio preprocessor 'Other'"), ('{"sampling_rate": 8000}', "sampling_rate"),
                       ('{"hop_length": 161}', "hop_length"), ('{"dither": 0.1}', "dither")):
        (tmp_path / "preprocessor_config.json").write_text(says)
        with pytest.raises(Exception, match=said) as raised:
            log_mel_of(read_extractor(tmp_path, WHISPER_EXTRACTORS))
        assert type(raised.value).__name__ in ("UsageError", "ConfigError")


def test_a_wav_file_keeps_its_rate():
    assert read_wav(as_wav(SAMPLES, 22_050), "it")[1] == 22_050
