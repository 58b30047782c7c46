"""Input modalities beside text: images and audio. Both become embedding rows and share the path through prompt and cache; they differ in
what they are called and in how a chat template is told about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SAMPLE_RATE = 16_000  # samples of a sound in a second, at which all models here hear


@dataclass(frozen=True)
class Modality:
    """`noun`: for messages; `part`: the content type in a chat message, and the name of the flag; `phase`: progress message while a tower
    encodes one; `done` and `does`: its verb, for messages."""

    noun: str
    part: str
    phase: str
    done: str
    does: str

    @property
    def refusal(self) -> tuple[str, str]:
        """Message and hint for a model that does not take it."""
        return f"this model takes no {self.noun}s", f"`effllm list` shows which models here take {self.noun}s"

    def called(self, size: tuple[int, ...]) -> str:
        """An item of this size: (height, width), (frames, height, width) or (samples,)."""
        if len(size) == 3:
            return f"video of {size[2]} × {size[1]}, {size[0]} frames"
        return f"{self.noun} of {f'{size[1]} × {size[0]}' if len(size) == 2 else f'{size[0] / SAMPLE_RATE:.1f} s'}"


IMAGE_INPUT = Modality("picture", "image", "looking at", "seen", "sees")
AUDIO_INPUT = Modality("sound", "audio", "listening to", "heard", "hears")


def modality_of(values: np.ndarray) -> Modality:
    """By shape: an image uint8 [height, width, 3], a video [frames, height, width, 3] or audio float32 [n]."""
    return AUDIO_INPUT if values.ndim == 1 else IMAGE_INPUT
