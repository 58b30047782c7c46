"""What all families that see have in common: their files are read, and what their configs say of towers.

A family has a class with `values` (pictures to what its tower is given), `load` (weights to a function that computes rows) and `tokens`
(what stands for a picture of a size), and a function `sight` that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ...offload.hardware import cpu_threads
from ..config_reader import ConfigError, Keys
from . import Seen, Work
from .senses import PICTURES
from .tower import Family, Rows, Tower
from .tower_parts import ROWS

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource
    from .video_file import Frame

__all__ = ["Family", "Rows", "TowerSight"]

MOST_LAYERS, MOST_WIDTH, MOST_ASPECT = 512, 1 << 16, 200


class TowerSight(Tower):
    """A `Sight`. `VISION`: kinds of towers that the family has -> what their configs say by saying nothing; the first is the one that is
    meant where none is stated. `PROCESSORS`: kinds of preprocessors."""

    VISION: Mapping[str, Mapping[str, object]]
    PROCESSORS: tuple[str, ...]
    sense = PICTURES
    placeholder = "<image>"
    both_ways = in_windows = False
    behind: tuple[int, ...] | None = None  # as of `Seen`
    framed = 0

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config, "vision_config", self.VISION)
        self.vision = self.said
        self.processor, self.around = source.processor(self.PROCESSORS)

    def see(self, picture: np.ndarray, work: Work) -> Seen:
        """Raises CheckpointError where the weights are damaged, UsageError for a picture that the model cannot take, and Left."""
        rows, tokens, deep = self.computed(picture, work)
        return Seen(rows, tokens, self.rope_grid(*picture.shape[:-1]), self.both_ways, self.in_windows, deep, behind=self.behind,
                    word=self.stands_for, framed=self.framed, together=self.together, pace=self.pace)

    def filmed(self, frames: Sequence[Frame]) -> list[tuple[str, np.ndarray, float]]:
        """As of `Sight`: each is a picture behind its second."""
        return [(f"<{each.second:.1f} seconds>", each.points, 0.0) for each in frames]

    def rope_grid(self, *size: int) -> tuple[int, int] | None:
        """`Seen.grid` of a picture of this size."""
        return None

    @property
    def pace(self) -> float | None:
        """As of `Seen`."""
        return None

    @property
    def stands_for(self) -> int | None:
        """`Seen.word`."""
        return None

    @property
    def whole_patches(self) -> int:
        """Of all parts of a picture."""
        return self.most_patches

    def bytes_needed(self) -> int:
        """Weights, the largest matrices in float32, what goes through a layer, pieces of it, and what goes in and comes out."""
        with self.source.saying(), self.source.weights() as weights:
            matrices, layer = 12 * self.width**2, 6 * self.most_patches * self.width
            pieces = 16 * self.width * ROWS * (self.threads or cpu_threads())
            return weights.nbytes + 4 * (matrices + layer + pieces + self.whole_patches * (3 * self.patch**2 + 2 * self.width))

    # -- what towers say of themselves ----------------------------------------------------------------------------------------------

    @cached_property
    def width(self) -> int:
        return self.vision.integer("hidden_size", high=MOST_WIDTH)

    @cached_property
    def heads(self) -> int:
        heads = self.vision.integer("num_attention_heads", high=1024)
        if self.width % heads:
            raise ConfigError(f"config.json: vision_config: hidden_size {self.width} is not a multiple of {heads} heads")
        return heads

    @cached_property
    def patch(self) -> int:
        return self.side_of("patch_size", 1 << 10)

    @cached_property
    def side(self) -> int:
        """Of the pictures that the tower is made for."""
        return self.side_of("image_size", 1 << 14)

    def side_of(self, name: str, high: int) -> int:
        """One number, which some write for height and width."""
        value = self.vision.raw.get(name)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            return Keys({name: value[0]}, self.vision.where).integer(name, high=high)
        return self.vision.integer(name, high=high)


def demand_shape(height: int, width: int) -> None:
    """Raises UsageError for a picture that is so long that its shorter side would be made of next to nothing."""
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise UsageError(f"a picture of {width} × {height} is too long for this model", "cut it into shorter ones")
