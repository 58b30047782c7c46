"""Videos as evenly spaced frames, each with its timestamp. The audio track is ignored.

Decoded by the optional library PyAV (FFmpeg). Files are untrusted: only containers of FORMATS are tried, nothing they reference is fetched,
and at most `frames` frames are decoded, with MOST_POINTS pixels in total.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ... import UsageError
from ..files.prompt_files import unreadable_file
from . import image_file

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

FRAMES, MOST_FRAMES = 16, 256  # pictures of a video: where nobody says how many, and at most
MOST_BYTES = 2 << 30
MOST_POINTS = 16 * 448 * 448  # of all pictures together: what models see of them is mostly a token for 200 to 1,000 points
STEP_S, NEAR_S = 1.0, 1e-3  # between two pictures, at least; times are rounded to what a container counts in
MOST_WITHOUT_LENGTH = 1 << 15  # frames that are decoded of a video that does not say how long it is
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg"
ANOTHER = "give one as MP4, MOV, WebM, MKV or AVI"
INSTALL = 'pip install "effllm[video]"'
MICROSECONDS = 1_000_000  # in which a container says how long it is


@dataclass(frozen=True)
class Frame:
    """A frame: its timestamp `second` and its pixels uint8 [height, width, 3]."""

    second: float
    pixels: np.ndarray


def read_video(path: Path, frames: int = FRAMES) -> list[Frame]:
    """At most `frames` frames of a file, in order. Raises UsageError."""
    library(str(path))
    try:
        with path.open("rb") as file:
            if path.stat().st_size > MOST_BYTES:
                raise UsageError(f"{path} has more than {MOST_BYTES >> 30} GiB, the limit for videos", "cut it")
            return _frames(file, str(path), frames)
    except OSError as error:
        raise unreadable_file(path, error, "a video") from error


def decode_video(data: bytes, source: str, frames: int = FRAMES) -> list[Frame]:
    """As `read_video`, of bytes. Raises UsageError with a message that begins with `source`."""
    library(source)
    return _frames(io.BytesIO(data), source, frames)


def demand_count(frames: int) -> None:
    """Raises UsageError for a frame count out of range."""
    if not 1 <= frames <= MOST_FRAMES:
        raise UsageError(f"--frames {frames} is out of range", f"use 1 to {MOST_FRAMES}")


def library(source: str) -> ModuleType:
    """PyAV. Raises UsageError where it is not installed."""
    try:
        import av
    except (ImportError, OSError) as error:  # OSError: its own libraries of C are missing
        raise UsageError(f"{source} cannot be read: the library for such files is not installed", INSTALL) from error
    av.logging.set_level(None)  # it writes to stderr by itself
    return av


def _frames(file: BinaryIO, source: str, most: int) -> list[Frame]:
    import av

    options: dict[str, str] = {"format_whitelist": FORMATS, "protocol_whitelist": ""}
    try:
        with av.open(file, options=options) as container:
            if not container.streams.video:
                raise UsageError(f"{source} has no video track", "attach audio with --audio")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            found = [*_chosen(container, stream, most, source)]
    except UsageError:
        raise
    except Exception as error:  # its decoders raise whatever a broken file leads them to
        raise UsageError(f"{source} is not a readable video", ANOTHER) from error
    if not found:
        raise UsageError(f"{source} has no readable frame", ANOTHER)
    return found


def _chosen(container: InputContainer, stream: VideoStream, most: int, source: str) -> Iterator[Frame]:
    """Frames without duplicates."""
    length = (container.duration or 0) / MICROSECONDS
    begin = float((stream.start_time or 0) * (stream.time_base or 0))
    if length > 0:
        chosen = _sought(container, stream, begin, length, min(most, int(length / STEP_S) + 1), source)
    else:
        chosen = _thinned(container, stream, begin, most, source)
    last = None
    for frame in chosen:
        if frame.second != last:
            yield frame
        last = frame.second


def _sought(container: InputContainer, stream: VideoStream, begin: float, length: float, count: int, source: str) -> Iterator[Frame]:
    """With a known duration: seek to each timestamp and decode from the keyframe before it."""
    for moment in (number * length / count for number in range(count)):
        if moment:
            container.seek(int((begin + moment) * MICROSECONDS))
        found = None
        for frame in container.decode(stream):
            found = frame if frame.time is not None else found
            if found is not None and found.time - begin >= moment - NEAR_S:
                break
        if found is not None:
            yield Frame(max(0.0, found.time - begin), _points(found, MOST_POINTS // count, source))


def _thinned(container: InputContainer, stream: VideoStream, begin: float, most: int, source: str) -> Iterator[Frame]:
    """Without one: decode everything, and drop every second frame whenever there are too many."""
    step, kept = STEP_S, []
    for number, frame in enumerate(container.decode(stream)):
        second = frame.time - begin if frame.time is not None else number / float(stream.average_rate or 25)
        if not kept or second >= kept[-1].second + step - NEAR_S:
            kept.append(Frame(second, _points(frame, MOST_POINTS // most, source)))
        if len(kept) > 2 * most:
            step, kept = 2 * step, kept[::2]
        if number >= MOST_WITHOUT_LENGTH:
            break
    yield from (kept[at] for at in np.linspace(0, len(kept) - 1, min(most, len(kept))).round().astype(int))


def _points(frame: VideoFrame, most: int, source: str) -> np.ndarray:
    """Pixels of a frame with its rotation applied, uint8 [height, width, 3], scaled to at most `most` pixels."""
    if frame.width * frame.height > image_file.MOST_POINTS:
        raise UsageError(f"{source} has {frame.width} × {frame.height} pixels, more than {image_file.MOST_POINTS:,}", "make it smaller")
    scale = min(1.0, (most / (frame.width * frame.height)) ** 0.5)
    size: dict[str, Any] = {"width": max(1, int(frame.width * scale)), "height": max(1, int(frame.height * scale))}
    pixels = frame.reformat(**size, format="rgb24").to_ndarray()
    return np.ascontiguousarray(np.rot90(pixels, frame.rotation // 90))
