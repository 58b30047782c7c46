"""A sound that is longer than a model takes, in pieces; and times for what is said in it, which are those of its pieces.

It is cut where it is quietest for a moment, of the places that are far enough from the last cut. What is silence at the ends of a piece is
left out of its times, and a piece of silence alone is not given to a model, which would make words of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..images.modality import SAMPLE_RATE

FRAME = SAMPLE_RATE // 50  # samples whose loudness is one number
PAUSE = 15  # frames that a cut lies in the middle of
SILENCE = 1e-3  # as loud as this a frame is heard: -60 dB of what a file holds
QUIET, NOTHING = 0.05, 1e-6  # of the loudest frame, where all of a sound is quieter; what no recording is
TIMED_S = 10.0  # of a piece whose times are told


@dataclass(frozen=True)
class AudioChunk:
    """`samples` float32 [n] of a sound, and when what is heard in them begins and ends there, in seconds."""

    samples: np.ndarray
    begin_s: float
    end_s: float


def split_at_pauses(samples: np.ndarray, max_seconds: float) -> list[AudioChunk]:
    """float32 [n] in pieces of so many seconds at most, of which one at least is heard, or is all there is."""
    loud = _loudness(samples)
    least = min(SILENCE, max(NOTHING, QUIET * float(loud.max(initial=0.0))))
    cuts, most = [0], max(PAUSE, int(max_seconds * SAMPLE_RATE) // FRAME)
    while len(loud) - cuts[-1] > most:
        cuts.append(_quietest(loud, cuts[-1] + most // 3, cuts[-1] + most))
    found = [_piece(samples, loud >= least, begin, end) for begin, end in zip(cuts, [*cuts[1:], len(loud)], strict=True)]
    chunks = [each for each in found if each is not None]
    return chunks or [AudioChunk(samples[: int(max_seconds * SAMPLE_RATE)], 0.0, len(samples) / SAMPLE_RATE)]


def _piece(samples: np.ndarray, is_heard: np.ndarray, begin: int, end: int) -> AudioChunk | None:
    """The frames from one to another; None where nothing is heard in them."""
    heard = np.flatnonzero(is_heard[begin:end])
    if not len(heard):
        return None
    last = min(len(samples), (begin + int(heard[-1]) + 1) * FRAME)
    return AudioChunk(samples[begin * FRAME : end * FRAME], (begin + int(heard[0])) * FRAME / SAMPLE_RATE, last / SAMPLE_RATE)


def _loudness(samples: np.ndarray) -> np.ndarray:
    """The root of the mean square of every frame, the last of which may be short: float32 [frames]."""
    starts = np.arange(0, len(samples), FRAME)
    sums = np.add.reduceat(np.square(samples), starts)
    return np.sqrt(sums / np.minimum(FRAME, len(samples) - starts))


def _quietest(loud: np.ndarray, first: int, last: int) -> int:
    """The middle of the pause between two frames in which least is heard; of those alike the last."""
    over = np.convolve(loud[first:last], np.ones(PAUSE), "valid")
    return first + len(over) - 1 - int(over[::-1].argmin()) + PAUSE // 2
