"""Audio tracks of containers (M4A, MP4, MOV, WebM, MKV), decoded by the optional library PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ..images.video_file import FORMATS, library
from .wav import MAX_CHANNELS, MAX_RATE, MIN_RATE

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer

FORMAT_HINT = "give one as WAV, FLAC, MP3, Ogg or M4A"
EBML_SIGNATURE = b"\x1a\x45\xdf\xa3"  # WebM and MKV


def is_container(data: bytes) -> bool:
    """Whether data begins like MP4, M4A, MOV, WebM or MKV."""
    return data[4:8] == b"ftyp" or data[:4] == EBML_SIGNATURE


def read_container_audio(data: bytes, source: str) -> tuple[Iterator[np.ndarray], int]:
    """Chunks float32 [n, channels] of the first audio track, and its sample rate. Raises UsageError, also while reading."""
    av = library(source)
    try:
        container = av.open(io.BytesIO(data), options={"format_whitelist": FORMATS, "protocol_whitelist": ""})
        streams = [*container.streams.audio]
    except Exception as error:  # broken files raise any kind of exception
        raise UsageError(f"{source} is not a readable audio file", FORMAT_HINT) from error
    if not streams:
        container.close()
        raise UsageError(f"{source} has no audio track", FORMAT_HINT)
    if streams[0].codec_context is None:  # a codec unknown to PyAV
        container.close()
        raise UsageError(f"{source} is not a readable audio file", FORMAT_HINT)
    rate, channels = streams[0].codec_context.sample_rate, streams[0].codec_context.channels
    if not MIN_RATE <= rate <= MAX_RATE or not 1 <= channels <= MAX_CHANNELS:
        container.close()
        raise UsageError(f"{source} claims {channels} channels at {rate} Hz", FORMAT_HINT)
    return _decode_chunks(container, streams[0], rate, source), rate


def _decode_chunks(container: InputContainer, stream: AudioStream, rate: int, source: str) -> Iterator[np.ndarray]:
    import av

    resampler = av.AudioResampler(format="fltp", layout=stream.codec_context.layout, rate=rate)
    with container:
        frames = container.decode(stream)
        while True:
            try:
                frame = next(frames, None)
                chunks = [chunk.to_ndarray() for chunk in resampler.resample(frame)]
            except Exception as error:
                raise UsageError(f"{source} is not a readable audio file", FORMAT_HINT) from error
            yield from (np.nan_to_num(chunk.T, nan=0.0, posinf=1.0, neginf=-1.0) for chunk in chunks)
            if frame is None:
                return
