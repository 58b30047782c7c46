"""Decoding of audio files to mono samples at 16 kHz.

WAV is read here (`wav.py`); FLAC, Ogg and MP3 by the optional library soundfile; M4A and video containers by PyAV (`container_audio.py`).
Files are untrusted: at most MAX_SECONDS are decoded, whatever the header claims.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ..files.prompt_files import read_prompt_file
from ..images.modality import SAMPLE_RATE
from .container_audio import FORMAT_HINT, is_container, read_container_audio
from .resampling import resample
from .wav import CHUNK_FRAMES, MAX_CHANNELS, MAX_RATE, MIN_RATE, is_wav, read_wav

if TYPE_CHECKING:
    from soundfile import SoundFile

MAX_BYTES = 256 << 20
MAX_SECONDS = 3600
MAX_SAMPLES = MAX_SECONDS * 48_000  # per channel: compressed silence of any length is a small file
MIN_SAMPLES = 400  # one spectrogram window
INSTALL_HINT = 'WAV is read without it; for FLAC, MP3 and Ogg: pip install "effllm[sound]"'


def read_audio(path: Path) -> np.ndarray:
    """Samples of a file, float32 [n] at SAMPLE_RATE. Raises UsageError."""
    return decode_audio(read_prompt_file(path, MAX_BYTES, "an audio clip"), str(path))


def decode_audio(data: bytes, source: str) -> np.ndarray:
    """Samples of an encoded clip, float32 [n] at SAMPLE_RATE. Raises UsageError with a message that begins with `source`."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{source} has more than {MAX_BYTES >> 20} MiB, the limit for audio files", "split it into shorter files")
    decode = read_wav if is_wav(data) else read_container_audio if is_container(data) else _decode_by_library
    chunks, rate = decode(data, source)
    samples = resample(_mix_down(chunks, rate, source), rate, SAMPLE_RATE)
    if len(samples) < MIN_SAMPLES:
        raise UsageError(f"{source} lasts {len(samples) / SAMPLE_RATE:.3f} s, too short to process", "use a longer clip")
    return samples


def _mix_down(chunks: Iterable[np.ndarray], rate: int, source: str) -> np.ndarray:
    """Mix chunks [n, channels] down to mono float32 [N]. Raises UsageError as soon as they exceed the limit."""
    limit, mono, count = min(MAX_SECONDS * rate, MAX_SAMPLES), [], 0
    for chunk in chunks:
        count += len(chunk)
        if count > limit:
            longest = f"{limit / rate / 60:.0f} minutes" if limit >= 120 * rate else f"{limit / rate:.0f} seconds"
            raise UsageError(f"{source} is longer than {longest}", "cut it into shorter ones")
        mono.append(chunk[:, 0] if chunk.shape[1] == 1 else chunk.mean(1, dtype=np.float32))
    return np.concatenate(mono) if mono else np.empty(0, np.float32)


def _decode_by_library(data: bytes, source: str) -> tuple[Iterator[np.ndarray], int]:
    """Chunks float32 [n, channels] of FLAC, Ogg or MP3, and the sample rate. Raises UsageError, also while reading."""
    if not _has_known_signature(data):
        raise UsageError(f"{source} is not a readable audio file", FORMAT_HINT)
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: libsndfile is missing
        raise UsageError(f"{source} is not a WAV file, and the library for other formats is not installed", INSTALL_HINT) from error
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except Exception as error:  # broken files raise any kind of exception
        raise UsageError(f"{source} is not a readable audio file", FORMAT_HINT) from error
    if not MIN_RATE <= file.samplerate <= MAX_RATE or not 1 <= file.channels <= MAX_CHANNELS:
        raise UsageError(f"{source} claims {file.channels} channels at {file.samplerate} Hz", FORMAT_HINT)
    return _read_chunks(file, source), file.samplerate


def _read_chunks(file: SoundFile, source: str) -> Iterator[np.ndarray]:
    with file:
        while True:
            try:
                chunk = file.read(CHUNK_FRAMES, dtype="float32", always_2d=True)
            except Exception as error:
                raise UsageError(f"{source} is not a readable audio file", FORMAT_HINT) from error
            if not len(chunk):
                return
            yield np.nan_to_num(chunk, nan=0.0, posinf=1.0, neginf=-1.0)


def _has_known_signature(data: bytes) -> bool:
    """Whether data begins like FLAC, Ogg or MP3; nothing else is passed to the library."""
    return data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3" or len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0
