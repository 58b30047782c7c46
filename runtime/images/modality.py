"""What a model takes beside text: pictures or sounds. Both become rows that stand in place of embeddings, and go through prompt and cache
alike; they differ in what a person calls them and in how a template is told of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SAMPLE_RATE = 16_000  # samples of a sound in a second, at which all models here hear


@dataclass(frozen=True)
class Modality:
    """`noun`: what is taken; `part`: the type of a message's part that is one, and the name of the flag; `phase`: what is said while a
    tower works on one; `done`: of one that was worked on; `does`: what the tower does."""

    noun: str
    part: str
    phase: str
    done: str
    does: str

    @property
    def refusal(self) -> tuple[str, str]:
        """The message and the hint of a model that takes none."""
        return f"this model takes no {self.noun}s", f"`effllm list` shows which models here take {self.noun}s"

    def called(self, size: tuple[int, ...]) -> str:
        """One of this size: (height, width) of a picture, (frames, height, width) of a film, (samples,) of a sound."""
        if len(size) == 3:
            return f"video of {size[2]} × {size[1]}, {size[0]} frames"
        return f"{self.noun} of {f'{size[1]} × {size[0]}' if len(size) == 2 else f'{size[0] / SAMPLE_RATE:.1f} s'}"


IMAGE_INPUT = Modality("picture", "image", "looking at", "seen", "sees")
AUDIO_INPUT = Modality("sound", "audio", "listening to", "heard", "hears")


def modality_of(values: np.ndarray) -> Modality:
    """Of the points of a picture uint8 [height, width, 3], or a film [frames, height, width, 3], or the samples of a sound float32 [n]."""
    return AUDIO_INPUT if values.ndim == 1 else IMAGE_INPUT
