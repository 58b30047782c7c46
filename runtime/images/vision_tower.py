"""What all families that see have in common: their files are read, and what their configs say of towers.

A family has a class with `values` (pictures to what its tower is given), `load` (weights to a function that computes rows) and `tokens`
(what stands for a picture of a size), and a function `sight` that makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER, EncodedMedia, EncodingJob
from .modality import IMAGE_INPUT
from .preprocessor import BICUBIC, CLIP_MEAN, CLIP_STD, Scale, filter_of, square
from .tower import Family, Rows, Tower
from .tower_ops import ROWS

if TYPE_CHECKING:
    from .video_file import Frame

__all__ = ["Family", "Rows", "VisionTower"]

MOST_LAYERS, MOST_WIDTH, MOST_ASPECT = 512, 1 << 16, 200


class VisionTower(Tower):
    """A `MediaEncoder`. `PROCESSORS`: kinds of preprocessors that the family has, and the `LOOK` of those that say nothing: mean, deviation
    and filter. A picture becomes values by its `scale` and `resample`."""

    PROCESSORS: tuple[str, ...]
    LOOK: tuple[Sequence[float], Sequence[float], int] = (CLIP_MEAN, CLIP_STD, BICUBIC)
    SECTION = "vision_config"
    HEADS, TURNED = "num_attention_heads", 1  # what says how many there are, and of what number of channels each has a multiple
    modality = IMAGE_INPUT
    placeholder = "<image>"
    bidirectional = in_windows = False
    behind: tuple[int, ...] | None = None  # as of `EncodedMedia`
    framed = 0
    most_patches: int  # of those that are in the tower at once
    whole_patches = 0  # of all parts of a picture that has several

    def read_preprocessor(self) -> Keys:
        self._spelled: dict[str, tuple[int, ...]] = {}
        found, self.around = self.source.processor(self.PROCESSORS)
        self.processor = keys = self.renamed(found)
        *colours, resample = self.LOOK
        self.scale, self.resample = Scale(keys, *colours), filter_of(keys, resample)
        if not keys.flag("do_resize", True):
            raise keys.fail("do_resize", "true, as the tower takes pictures of certain sizes alone")
        return keys

    def renamed(self, keys: Keys) -> Keys:
        """What a preprocessor's file says, by the names of transformers."""
        return keys

    def encode(self, picture: np.ndarray, work: EncodingJob) -> EncodedMedia:
        """Raises CheckpointError where the weights are damaged, UsageError for a picture that the model cannot take, and Left."""
        rows, tokens, deep = self.run_tower(picture, work)
        return EncodedMedia(rows, tokens, self.rope_grid(*picture.shape[:-1]), self.bidirectional, self.in_windows, deep,
                            behind=self.behind,
                    placeholder_id=self.placeholder_id, framed=self.framed, together=self.together, pace=self.pace)

    def video_inputs(self, frames: Sequence[Frame]) -> list[tuple[str, np.ndarray, float]]:
        """As of `MediaEncoder`: each is a picture behind its second."""
        return [(f"<{each.second:.1f} seconds>", each.points, 0.0) for each in frames]

    def spelled(self, text: str, word: str) -> tuple[int, ...]:
        """Tokens of what a picture is in words, of which `word` stands for a row. Texts are kept: pictures of a shape have the same."""
        if text not in self._spelled:
            number = self.token_id(word)
            self._spelled[text] = tuple(ROW_PLACEHOLDER if token == number else token for token in
                                        self.tokenizer.encode(text, add_special_tokens=False))
        return self._spelled[text]

    def rope_grid(self, *size: int) -> tuple[int, int] | None:
        """`EncodedMedia.grid` of a picture of this size."""
        return None

    @property
    def pace(self) -> float | None:
        """As of `EncodedMedia`."""
        return None

    @property
    def placeholder_id(self) -> int | None:
        """`EncodedMedia.word`."""
        return None

    def workspace_floats(self) -> int:
        """The largest matrices, what goes through a layer, pieces of it, and what goes in and comes out."""
        matrices, layer = 12 * self.width**2, 6 * self.most_patches * self.width
        pieces = 16 * self.width * ROWS * self.workers
        return matrices + layer + pieces + (self.whole_patches or self.most_patches) * (3 * self.patch**2 + 2 * self.width)

    # -- what towers say of themselves ----------------------------------------------------------------------------------------------

    @cached_property
    def width(self) -> int:
        return self.tower_config.integer("hidden_size", high=MOST_WIDTH)

    @cached_property
    def heads(self) -> int:
        heads = self.tower_config.integer(self.HEADS, high=1024)
        if self.width % heads:
            raise ConfigError(f"config.json: vision_config: hidden_size {self.width} is not a multiple of {heads} heads")
        if self.width // heads % self.TURNED:
            raise self.tower_config.fail(self.HEADS, f"a part of {self.width} in which rows and columns have a place")
        return heads

    def demand_side(self, keys: Keys, usual: int, name: str = "size") -> None:
        """Raises ConfigError for a preprocessor that makes pictures, or tiles, other squares than the tower takes."""
        if square(keys, name, {"height": usual, "width": usual}) != (self.side, self.side):
            raise keys.fail(name, f"the {self.side} × {self.side} that the tower takes")

    def demand_same(self, keys: Keys, **own: int) -> None:
        """Raises ConfigError for a preprocessor that says otherwise of the tower than config.json does."""
        for name, value in own.items():
            if keys.integer(name, value) != value:
                raise keys.fail(name, f"{value}, as config.json says of the tower")

    def theta(self, usual: float) -> float:
        """Of the angles by which patches are turned."""
        stated = Keys(self.tower_config.section("rope_parameters") or {}, "config.json: vision_config: rope_parameters")
        return stated.number("rope_theta", None) or self.tower_config.number("rope_theta", usual)

    @cached_property
    def patch(self) -> int:
        return self.side_of("patch_size", 1 << 10)

    @cached_property
    def side(self) -> int:
        """Of the pictures that the tower is made for."""
        return self.side_of("image_size", 1 << 14)

    def side_of(self, name: str, high: int) -> int:
        """One number, which some write for height and width."""
        value = self.tower_config.raw.get(name)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            return Keys({name: value[0]}, self.tower_config.where).integer(name, high=high)
        return self.tower_config.integer(name, high=high)


def check_aspect_ratio(height: int, width: int) -> None:
    """Raises UsageError for a picture that is so long that its shorter side would be made of next to nothing."""
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise UsageError(f"a picture of {width} × {height} is too long for this model", "cut it into shorter ones")
