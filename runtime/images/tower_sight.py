"""What all families that see have in common: their files are read, their weights come with the first picture, and rows are checked.

A family has a class with `values` (pictures to what its tower is given), `load` (weights to a function that computes rows) and `tokens`
(what stands for a picture of a size), and a function `sight` that makes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ... import UsageError
from ...offload.hardware import cpu_threads
from ..config_reader import ConfigError, Keys, show
from ..text import Tokenizer
from . import PLACE, Seen, Work
from .tower_parts import ROWS, Crew
from .tower_weights import Weights

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

MOST_LAYERS, MOST_WIDTH, MOST_ASPECT = 512, 1 << 16, 200
MULTIPLIED = ("granite",)  # families of text parts whose embeddings are multiplied after a picture's rows are among them
# What `values` made, and threads -> rows float32 [n, hidden]; [1 + layers, n, hidden] where there are some that early layers add.
Rows = Callable[[Any, Crew], np.ndarray]


class Family(Protocol):
    """What a family says of its pictures."""

    most_patches: int  # of those that are in the tower at once

    def values(self, picture: np.ndarray) -> Any:
        """What the tower is given of a picture uint8 [height, width, 3]."""

    def load(self, weights: Weights) -> Rows:
        """The tower."""

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        """What a picture of this size becomes in a prompt."""


class TowerSight(Family):
    """A `Sight`. `VISION`: kinds of towers that the family has -> what their configs say by saying nothing; the first is the one that is
    meant where none is stated. `PROCESSORS`: kinds of preprocessors."""

    VISION: Mapping[str, Mapping[str, object]]
    PROCESSORS: tuple[str, ...]
    placeholder = "<image>"
    both_ways = in_windows = False
    threads: int | None = None

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        self.source, self.config = source, config
        self.outer = Keys(source.config)
        stated = self.outer.section("vision_config") or {}
        self.tower = str(stated.get("model_type") or next(iter(self.VISION)))
        if self.tower not in self.VISION:
            raise UsageError(f"its pictures are seen by a tower of type {show(self.tower)}, which is not known for this model",
                             f"known: {', '.join(self.VISION)}; text alone works")
        said = {key: value for key, value in stated.items() if value is not None}
        self.vision = Keys({**self.VISION[self.tower], **said}, "config.json: vision_config")
        self.processor, self.around = source.processor(self.PROCESSORS)
        self._rows: Rows | None = None
        self._once = threading.Lock()

    def see(self, picture: np.ndarray, work: Work) -> Seen:
        """Raises CheckpointError where the weights are damaged, UsageError for a picture that the model cannot take, and Left."""
        height, width = picture.shape[:2]
        with self._once, self.source.saying():
            tokens = self.tokens(height, width)
            if self._rows is None:
                with self.source.weights() as weights:
                    self._rows = self.load(weights)
        with Crew(self.threads or cpu_threads(), work) as crew:
            rows, deep = self._rows(self.values(picture), crew), None
        if rows.ndim == 3:
            rows, deep = rows[0], rows[1:]
        if rows.shape != (tokens.count(PLACE), self.config.hidden_size):
            raise ConfigError(f"{self.source.model}: a picture became {len(rows)} rows of {rows.shape[-1]}, but "
                              f"{tokens.count(PLACE)} of {self.config.hidden_size} have a place")
        if self.config.family in MULTIPLIED:
            rows = rows * np.float32(self.config.embedding_multiplier)
        return Seen(rows, tokens, self.rope_grid(height, width), self.both_ways, self.in_windows, deep)

    @property
    def written(self) -> str:
        return self.placeholder

    def rope_grid(self, height: int, width: int) -> tuple[int, int] | None:
        """`Seen.grid` of a picture of this size."""
        return None

    def places(self, height: int, width: int) -> int:
        return len(self.tokens(height, width))

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
    def words(self) -> Tokenizer:
        """The model's vocabulary."""
        return Tokenizer.load(self.source.model, self.config)

    def word(self, text: str) -> int:
        """The number of a word of the vocabulary that is no piece of text. Raises ConfigError."""
        number = self.words.added.get(text)
        if number is None:
            raise ConfigError(f"{self.source.model}: the vocabulary has no {text}, which stands for pictures or beside them",
                              self.source.without_word)
        return number

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
