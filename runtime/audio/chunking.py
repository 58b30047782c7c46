"""Splits audio that is longer than a model takes into chunks, whose limits also serve as timestamps.

A cut is at the quietest moment that leaves a chunk of at least a third of the maximum. Silence at the ends of a chunk is excluded from its
timestamps, and chunks of silence are dropped, since models hallucinate text for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..images.modality import SAMPLE_RATE

FRAME_SAMPLES = SAMPLE_RATE // 50  # samples per RMS value: 20 ms
PAUSE_FRAMES = 15  # frames whose average RMS decides where to cut: 300 ms
SILENCE_RMS = 1e-3  # RMS above which a frame is audible: -60 dBFS
RELATIVE_THRESHOLD = 0.05  # of quiet recordings: relative to the loudest frame
MIN_RMS = 1e-6  # lowest threshold of any recording
MAX_TIMED_CHUNK_S = 10.0  # longest chunk with timestamps


@dataclass(frozen=True)
class AudioChunk:
    """A part of a clip."""

    samples: np.ndarray  # float32 [n]
    begin_s: float  # begin and end of what is audible, in seconds from the start of the clip
    end_s: float


def split_at_pauses(samples: np.ndarray, max_seconds: float) -> list[AudioChunk]:
    """Split samples float32 [n] into chunks of at most `max_seconds`; at least one, even if all is silence."""
    rms = _frame_rms(samples)
    threshold = min(SILENCE_RMS, max(MIN_RMS, RELATIVE_THRESHOLD * float(rms.max(initial=0.0))))
    cuts, max_frames = [0], max(PAUSE_FRAMES, int(max_seconds * SAMPLE_RATE) // FRAME_SAMPLES)
    while len(rms) - cuts[-1] > max_frames:
        cuts.append(_quietest(rms, cuts[-1] + max_frames // 3, cuts[-1] + max_frames))
    is_audible = rms >= threshold
    chunks = [_audible_chunk(samples, is_audible, begin, end) for begin, end in zip(cuts, [*cuts[1:], len(rms)], strict=True)]
    audible = [chunk for chunk in chunks if chunk is not None]
    return audible or [AudioChunk(samples[: int(max_seconds * SAMPLE_RATE)], 0.0, len(samples) / SAMPLE_RATE)]


def _audible_chunk(samples: np.ndarray, is_audible: np.ndarray, begin: int, end: int) -> AudioChunk | None:
    """A range of frames as a chunk; None where it is silent."""
    audible = np.flatnonzero(is_audible[begin:end])
    if not len(audible):
        return None
    last = min(len(samples), (begin + int(audible[-1]) + 1) * FRAME_SAMPLES)
    first = (begin + int(audible[0])) * FRAME_SAMPLES
    return AudioChunk(samples[begin * FRAME_SAMPLES : end * FRAME_SAMPLES], first / SAMPLE_RATE, last / SAMPLE_RATE)


def _frame_rms(samples: np.ndarray) -> np.ndarray:
    """RMS of each frame, float32 [frames]; the last frame may be shorter."""
    starts = np.arange(0, len(samples), FRAME_SAMPLES)
    sums = np.add.reduceat(np.square(samples), starts)
    return np.sqrt(sums / np.minimum(FRAME_SAMPLES, len(samples) - starts))


def _quietest(rms: np.ndarray, first: int, last: int) -> int:
    """Middle of the quietest pause between two frames; the last among equals."""
    means = np.convolve(rms[first:last], np.ones(PAUSE_FRAMES), "valid")
    return first + len(means) - 1 - int(means[::-1].argmin()) + PAUSE_FRAMES // 2
