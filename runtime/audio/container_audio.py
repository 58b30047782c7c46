"""Audio tracks of containers (M4A, MP4, MOV, WebM, MKV), decoded by the optional library PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ..images.video_file import FORMATS, library
from .wav import HIGHEST_RATE, LOWEST_RATE, MOST_CHANNELS

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer

ANOTHER = "give one as WAV, FLAC, MP3, Ogg or M4A"
EBML = b"\x1a\x45\xdf\xa3"  # of WebM and MKV


def is_container(data: bytes) -> bool:
    """Whether data begins like such a file."""
    return data[4:8] == b"ftyp" or data[:4] == EBML


def read_container_audio(data: bytes, source: str) -> tuple[Iterator[np.ndarray], int]:
    """Chunks float32 [n, channels] of the first audio track, and its sample rate. Raises UsageError, also while reading."""
    av = library(source)
    try:
        container = av.open(io.BytesIO(data), options={"format_whitelist": FORMATS, "protocol_whitelist": ""})
        streams = [*container.streams.audio]
    except Exception as error:  # its decoders raise whatever a broken file leads them to
        raise UsageError(f"{source} is not a readable audio file", ANOTHER) from error
    if not streams:
        container.close()
        raise UsageError(f"{source} has no audio track", ANOTHER)
    if streams[0].codec_context is None:  # the file names a codec that no decoder here knows
        container.close()
        raise UsageError(f"{source} is not a readable audio file", ANOTHER)
    rate, channels = streams[0].codec_context.sample_rate, streams[0].codec_context.channels
    if not LOWEST_RATE <= rate <= HIGHEST_RATE or not 1 <= channels <= MOST_CHANNELS:
        container.close()
        raise UsageError(f"{source} claims {channels} channels at {rate} Hz", ANOTHER)
    return _pieces(container, streams[0], rate, source), rate


def _pieces(container: InputContainer, stream: AudioStream, rate: int, source: str) -> Iterator[np.ndarray]:
    import av

    resampler = av.AudioResampler(format="fltp", layout=stream.codec_context.layout, rate=rate)
    with container:
        frames = container.decode(stream)
        while True:
            try:
                frame = next(frames, None)
                made = [each.to_ndarray() for each in resampler.resample(frame)]
            except Exception as error:
                raise UsageError(f"{source} is not a readable audio file", ANOTHER) from error
            yield from (np.nan_to_num(each.T, nan=0.0, posinf=1.0, neginf=-1.0) for each in made)
            if frame is None:
                return
