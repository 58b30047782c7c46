"""Files of sounds as samples, at the one rate that models hear at, all channels in one.

WAV is read here (`wav.py`); FLAC, Ogg and MP3 by the optional library soundfile. A file is a stranger's: no more is made of it than
MOST_SECONDS, whatever it claims.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from ... import UsageError
from ..files.given import read_given
from ..images.senses import RATE
from .resampling import resampled
from .wav import HIGHEST_RATE, MOST_CHANNELS, is_wav, read_wav

MOST_BYTES = 256 << 20
MOST_SECONDS = 3600
LEAST_SAMPLES = 400  # of a spectrogram's window: less is nothing that can be heard
ANOTHER = "give one as WAV, FLAC, MP3 or Ogg"
INSTALL = 'WAV is read without it; for FLAC, MP3 and Ogg: pip install "effllm[sound]"'


def read_sound(path: Path) -> np.ndarray:
    """The samples of a file, float32 [n] at RATE. Raises UsageError."""
    return decode_sound(read_given(path, MOST_BYTES, "a sound"), str(path))


def decode_sound(data: bytes, source: str) -> np.ndarray:
    """The samples of a sound in the bytes of a file, float32 [n] at RATE. Raises UsageError that begins with its `source`."""
    if len(data) > MOST_BYTES:
        raise UsageError(f"{source} has more than {MOST_BYTES >> 20} MiB, too much for a sound", "cut it into shorter ones")
    samples, rate = read_wav(data, source) if is_wav(data) else _by_library(data, source)
    if len(samples) > MOST_SECONDS * rate:
        raise _too_long(source)
    mono = samples[:, 0] if samples.shape[1] == 1 else samples.mean(1, dtype=np.float32)
    made = resampled(np.ascontiguousarray(mono), rate, RATE)
    if len(made) < LEAST_SAMPLES:
        raise UsageError(f"{source} lasts {len(samples) / rate:.3f} s, too short to be heard", "give a longer sound")
    return made


def _by_library(data: bytes, source: str) -> tuple[np.ndarray, int]:
    """Of formats that are not WAV."""
    if not _is_known(data):
        raise UsageError(f"{source} is no sound that can be read", ANOTHER)
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its own library of C is missing
        raise UsageError(f"{source} is no WAV file, and the library that reads others is not installed", INSTALL) from error
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate = file.samplerate
            if not 1 <= rate <= HIGHEST_RATE or not 1 <= file.channels <= MOST_CHANNELS:
                raise UsageError(f"{source} claims {file.channels} channels at {rate} samples a second", ANOTHER)
            samples = file.read(MOST_SECONDS * rate + 1, dtype="float32", always_2d=True)
    except UsageError:
        raise
    except Exception as error:  # its decoders raise whatever a broken file leads them to
        raise UsageError(f"{source} is no sound that can be read", ANOTHER) from error
    return samples, rate


def _is_known(data: bytes) -> bool:
    """Whether it begins as FLAC, Ogg or MP3 do: nothing else is given to the library."""
    return data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3" or len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0


def _too_long(source: str) -> UsageError:
    return UsageError(f"{source} is longer than {MOST_SECONDS // 60} minutes", "cut it into shorter ones")
