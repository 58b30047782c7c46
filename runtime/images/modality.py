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
    """`noun`: one input, in messages to users, and `plural`; `part`: the type of a message's part that is one, and the name of the flag;
    `tower`: what encodes it. Both nouns begin with a vowel, which messages rely on ("an image")."""

    noun: str
    plural: str
    part: str
    tower: str

    @property
    def refusal(self) -> tuple[str, str]:
        """Message and hint for a model that does not take it."""
        return f"this model does not support {self.part} input", f"`effllm list` shows which models here take {self.plural}"

    def called(self, size: tuple[int, ...]) -> str:
        """An item of this size: (height, width), (frames, height, width) or (samples,)."""
        if len(size) == 3:
            return f"video of {size[2]} × {size[1]}, {size[0]} frames"
        return f"{self.noun} of {f'{size[1]} × {size[0]}' if len(size) == 2 else f'{size[0] / SAMPLE_RATE:.1f} s'}"


IMAGE_INPUT = Modality("image", "images", "image", "vision tower")
AUDIO_INPUT = Modality("audio clip", "audio", "audio", "audio tower")


def modality_of(values: np.ndarray) -> Modality:
    """By shape: an image uint8 [height, width, 3], a video [frames, height, width, 3] or audio float32 [n]."""
    return AUDIO_INPUT if values.ndim == 1 else IMAGE_INPUT
