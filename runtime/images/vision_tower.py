"""Base class of vision towers: preprocessor settings and config fields that families share.

A family is a class with `values` (image to tower input), `load` (weights to a function that computes rows) and `tokens` (what an image of a
size becomes in the prompt); its module binds it, or a function that picks one, to `encoder`.
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

MAX_LAYERS, MAX_WIDTH, MAX_ASPECT = 512, 1 << 16, 200


class VisionTower(Tower):
    """A `MediaEncoder` for images. An image is normalized by `scale` and resized by the filter `resample`.

    `PROCESSORS`: supported image processor types.
    `LOOK`: their default mean, standard deviation and resampling filter.
    """

    PROCESSORS: tuple[str, ...]
    LOOK: tuple[Sequence[float], Sequence[float], int] = (CLIP_MEAN, CLIP_STD, BICUBIC)
    SECTION = "vision_config"
    HEADS, TURNED = "num_attention_heads", 1  # config key of the head count; the head size must be a multiple of TURNED
    modality = IMAGE_INPUT
    placeholder = "<image>"
    bidirectional = sliding_window_only = False
    deepstack_layers: tuple[int, ...] | None = None  # as of `EncodedMedia`
    num_border_rows = 0
    most_patches: int  # maximum number of patches in the tower at once
    whole_patches = 0  # patches of all tiles of an image, 0 for `most_patches`

    def read_preprocessor(self) -> Keys:
        self._spelled: dict[str, tuple[int, ...]] = {}
        found, self.around = self.source.processor(self.PROCESSORS)
        self.processor = keys = self.renamed(found)
        *colours, resample = self.LOOK
        self.scale, self.resample = Scale(keys, *colours), filter_of(keys, resample)
        if not keys.flag("do_resize", True):
            raise keys.fail("do_resize", "true, as the tower takes only certain sizes")
        return keys

    def renamed(self, keys: Keys) -> Keys:
        """The preprocessor config under the key names of transformers."""
        return keys

    def encode(self, picture: np.ndarray, job: EncodingJob) -> EncodedMedia:
        """Raises CheckpointError where weights are damaged, UsageError for an image the model cannot take, and EncodingCancelled."""
        rows, tokens, deepstack_rows = self.run_tower(picture, job)
        return EncodedMedia(rows, tokens, self.rope_grid(*picture.shape[:-1]), self.bidirectional, self.sliding_window_only,
                            deepstack_rows=deepstack_rows, deepstack_layers=self.deepstack_layers, placeholder_id=self.placeholder_id,
                            num_border_rows=self.num_border_rows, joint_attention=self.joint_attention,
                            positions_per_second=self.positions_per_second)

    def video_inputs(self, frames: Sequence[Frame]) -> list[tuple[str, np.ndarray, float]]:
        """As `MediaEncoder`: each frame is an image after its timestamp."""
        return [(f"<{each.second:.1f} seconds>", each.pixels, 0.0) for each in frames]

    def spelled(self, text: str, word: str) -> tuple[int, ...]:
        """Tokens of an image's text form, in which `word` stands for a row. Cached by text, because images of one shape share it."""
        if text not in self._spelled:
            number = self.token_id(word)
            self._spelled[text] = tuple(ROW_PLACEHOLDER if token == number else token for token in
                                        self.tokenizer.encode(text, add_special_tokens=False))
        return self._spelled[text]

    def rope_grid(self, *size: int) -> tuple[int, int] | None:
        """`EncodedMedia.grid` of an image of this size."""
        return None

    @property
    def positions_per_second(self) -> float | None:
        """`EncodedMedia.positions_per_second`."""
        return None

    @property
    def placeholder_id(self) -> int | None:
        """`EncodedMedia.placeholder_id`."""
        return None

    def workspace_floats(self) -> int:
        """The largest matrices, the activations of a layer, its row blocks, and inputs and outputs."""
        matrices, layer = 12 * self.width**2, 6 * self.most_patches * self.width
        row_blocks = 16 * self.width * ROWS * self.workers
        return matrices + layer + row_blocks + (self.whole_patches or self.most_patches) * (3 * self.patch**2 + 2 * self.width)

    # -- config fields of towers ------------------------------------------------------------------------------------------------------

    @cached_property
    def width(self) -> int:
        return self.tower_config.integer("hidden_size", high=MAX_WIDTH)

    @cached_property
    def heads(self) -> int:
        heads = self.tower_config.integer(self.HEADS, high=1024)
        if self.width % heads:
            raise ConfigError(f"config.json: vision_config: hidden_size {self.width} is not a multiple of {heads} heads")
        if self.width // heads % self.TURNED:
            raise self.tower_config.fail(self.HEADS, f"a divisor of {self.width} that leaves heads room for two-dimensional positions")
        return heads

    def demand_side(self, keys: Keys, default: int, name: str = "size") -> None:
        """Raises ConfigError for a preprocessor whose output size is not the tower's."""
        if square(keys, name, {"height": default, "width": default}) != (self.side, self.side):
            raise keys.fail(name, f"the {self.side} × {self.side} that the tower takes")

    def demand_same(self, keys: Keys, **own: int) -> None:
        """Raises ConfigError where preprocessor and config.json disagree about the tower."""
        for name, value in own.items():
            if keys.integer(name, value) != value:
                raise keys.fail(name, f"{value}, as in config.json")

    def theta(self, default: float) -> float:
        """RoPE base of the tower."""
        rope_parameters = Keys(self.tower_config.section("rope_parameters") or {}, "config.json: vision_config: rope_parameters")
        return rope_parameters.number("rope_theta", None) or self.tower_config.number("rope_theta", default)

    @cached_property
    def patch(self) -> int:
        return self.side_of("patch_size", 1 << 10)

    @cached_property
    def side(self) -> int:
        """Image size of the tower."""
        return self.side_of("image_size", 1 << 14)

    def side_of(self, name: str, high: int) -> int:
        """A number, which some configs write as [height, width]."""
        value = self.tower_config.raw.get(name)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            return Keys({name: value[0]}, self.tower_config.where).integer(name, high=high)
        return self.tower_config.integer(name, high=high)


def check_aspect_ratio(height: int, width: int) -> None:
    """Raises UsageError for an image so elongated that its shorter side would vanish."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise UsageError(f"an image of {width} × {height} is too elongated for this model", "crop or split it")
