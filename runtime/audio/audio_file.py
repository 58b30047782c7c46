"""Decoding of audio files to mono samples at 16 kHz.

WAV is read here (`wav.py`); FLAC, Ogg and MP3 by the optional library soundfile; M4A and video containers by PyAV (`container_audio.py`).
Files are untrusted: at most MOST_SECONDS are decoded, whatever the header claims.
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
from .container_audio import ANOTHER, is_container, read_container_audio
from .resampling import resample
from .wav import HIGHEST_RATE, LOWEST_RATE, MOST_CHANNELS, PIECE, is_wav, read_wav

if TYPE_CHECKING:
    from soundfile import SoundFile

MOST_BYTES = 256 << 20
MOST_SECONDS = 3600
MOST_SAMPLES = MOST_SECONDS * 48_000  # of a channel: a file of silence may be small and say more
LEAST_SAMPLES = 400  # one spectrogram window; less cannot be processed
INSTALL = 'WAV is read without it; for FLAC, MP3 and Ogg: pip install "effllm[sound]"'


def read_audio(path: Path) -> np.ndarray:
    """Samples of a file, float32 [n] at SAMPLE_RATE. Raises UsageError."""
    return decode_audio(read_prompt_file(path, MOST_BYTES, "an audio clip"), str(path))


def decode_audio(data: bytes, source: str) -> np.ndarray:
    """Samples of an encoded clip, float32 [n] at SAMPLE_RATE. Raises UsageError with a message that begins with `source`."""
    if len(data) > MOST_BYTES:
        raise UsageError(f"{source} has more than {MOST_BYTES >> 20} MiB, the limit for audio files", "split it into shorter files")
    read = read_wav if is_wav(data) else read_container_audio if is_container(data) else _by_library
    pieces, rate = read(data, source)
    made = resample(_in_one(pieces, rate, source), rate, SAMPLE_RATE)
    if len(made) < LEAST_SAMPLES:
        raise UsageError(f"{source} lasts {len(made) / SAMPLE_RATE:.3f} s, too short to process", "use a longer clip")
    return made


def _in_one(pieces: Iterable[np.ndarray], rate: int, source: str) -> np.ndarray:
    """Mix chunks [n, channels] down to mono float32 [N]. Raises UsageError as soon as there is more than the limit."""
    most, mono, count = min(MOST_SECONDS * rate, MOST_SAMPLES), [], 0
    for piece in pieces:
        count += len(piece)
        if count > most:
            longest = f"{most / rate / 60:.0f} minutes" if most >= 120 * rate else f"{most / rate:.0f} seconds"
            raise UsageError(f"{source} is longer than {longest}", "cut it into shorter ones")
        mono.append(piece[:, 0] if piece.shape[1] == 1 else piece.mean(1, dtype=np.float32))
    return np.concatenate(mono) if mono else np.empty(0, np.float32)


def _by_library(data: bytes, source: str) -> tuple[Iterator[np.ndarray], int]:
    """Formats other than WAV: chunks float32 [n, channels] and their sample rate. Raises UsageError, also while reading."""
    if not _is_known(data):
        raise UsageError(f"{source} is not a readable audio file", ANOTHER)
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its own library of C is missing
        raise UsageError(f"{source} is not a WAV file, and the library for other formats is not installed", INSTALL) from error
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except Exception as error:  # its decoders raise whatever a broken file leads them to
        raise UsageError(f"{source} is not a readable audio file", ANOTHER) from error
    if not LOWEST_RATE <= file.samplerate <= HIGHEST_RATE or not 1 <= file.channels <= MOST_CHANNELS:
        raise UsageError(f"{source} claims {file.channels} channels at {file.samplerate} Hz", ANOTHER)
    return _pieces(file, source), file.samplerate


def _pieces(file: SoundFile, source: str) -> Iterator[np.ndarray]:
    with file:
        while True:
            try:
                piece = file.read(PIECE, dtype="float32", always_2d=True)
            except Exception as error:
                raise UsageError(f"{source} is not a readable audio file", ANOTHER) from error
            if not len(piece):
                return
            yield np.nan_to_num(piece, nan=0.0, posinf=1.0, neginf=-1.0)


def _is_known(data: bytes) -> bool:
    """Whether it begins like FLAC, Ogg or MP3; nothing else reaches the library."""
    return data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3" or len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0
