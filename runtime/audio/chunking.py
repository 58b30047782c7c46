"""Splits audio that is longer than a model takes into chunks, which also serve as timestamps of what is said in them.

Cuts are made at the quietest moment among those far enough from the last cut. Silence at the ends of a chunk is excluded from its
timestamps, and chunks of silence are dropped, since a model would hallucinate text for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..images.modality import SAMPLE_RATE

FRAME = SAMPLE_RATE // 50  # samples per loudness value
PAUSE = 15  # frames around a cut that are averaged
SILENCE = 1e-3  # RMS above which a frame is audible: -60 dBFS
QUIET, NOTHING = 0.05, 1e-6  # threshold relative to the loudest frame of quiet recordings; floor of any recording
TIMED_S = 10.0  # longest chunk with timestamps


@dataclass(frozen=True)
class AudioChunk:
    """`samples` float32 [n], and the begin and end in seconds of what is audible in them."""

    samples: np.ndarray
    begin_s: float
    end_s: float


def split_at_pauses(samples: np.ndarray, max_seconds: float) -> list[AudioChunk]:
    """Split float32 [n] into chunks of at most `most_s` seconds; at least one, even if all is silence."""
    loud = _loudness(samples)
    least = min(SILENCE, max(NOTHING, QUIET * float(loud.max(initial=0.0))))
    cuts, most = [0], max(PAUSE, int(max_seconds * SAMPLE_RATE) // FRAME)
    while len(loud) - cuts[-1] > most:
        cuts.append(_quietest(loud, cuts[-1] + most // 3, cuts[-1] + most))
    found = [_piece(samples, loud >= least, begin, end) for begin, end in zip(cuts, [*cuts[1:], len(loud)], strict=True)]
    chunks = [each for each in found if each is not None]
    return chunks or [AudioChunk(samples[: int(max_seconds * SAMPLE_RATE)], 0.0, len(samples) / SAMPLE_RATE)]


def _piece(samples: np.ndarray, is_heard: np.ndarray, begin: int, end: int) -> AudioChunk | None:
    """A range of frames as a chunk; None where it is silent."""
    heard = np.flatnonzero(is_heard[begin:end])
    if not len(heard):
        return None
    last = min(len(samples), (begin + int(heard[-1]) + 1) * FRAME)
    return AudioChunk(samples[begin * FRAME : end * FRAME], (begin + int(heard[0])) * FRAME / SAMPLE_RATE, last / SAMPLE_RATE)


def _loudness(samples: np.ndarray) -> np.ndarray:
    """RMS of every frame, the last of which may be short: float32 [frames]."""
    starts = np.arange(0, len(samples), FRAME)
    sums = np.add.reduceat(np.square(samples), starts)
    return np.sqrt(sums / np.minimum(FRAME, len(samples) - starts))


def _quietest(loud: np.ndarray, first: int, last: int) -> int:
    """Middle of the quietest pause between two frames; the last among equals."""
    over = np.convolve(loud[first:last], np.ones(PAUSE), "valid")
    return first + len(over) - 1 - int(over[::-1].argmin()) + PAUSE // 2
