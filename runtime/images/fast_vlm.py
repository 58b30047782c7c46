"""FastVLM: FastViTHD on a large square image, an MLP projector, and a row per 64 x 64 pixels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ... import UsageError
from ..config_reader import ConfigError, Keys, show
from . import ROW_PLACEHOLDER
from .fastvit import ATTENDING, HEAD, PIECE, SCALE, WIDER, load_fastvit
from .llava import OfOneSize
from .modality import IMAGE_INPUT
from .tower_ops import ROWS
from .tower_source import FolderSource
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, MAX_WIDTH, Rows, VisionTower

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

STAGES = 5
# Towers by their names in timm: layers and width of each stage.
ARCHITECTURES = {"fastvit_mci3": ((2, 12, 24, 4, 2), (96, 192, 384, 768, 1536))}
MLP = "mlp2x_gelu"  # what a projector of two layers is called
ARGUMENTS = ("inference_mode", "layers", "embed_dims")  # supported tower arguments beside it


class FastVlm(OfOneSize):
    KINDS = {"timm_wrapper": {"architecture": "fastvit_mci3", "hidden_size": 3072}}

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        named = self.tower_config.text("architecture")
        if named not in ARCHITECTURES:
            raise UsageError(f"its vision tower {show(named)} is not supported for this model",
                             f"known: {', '.join(ARCHITECTURES)}; text-only works")
        said = Keys(self.tower_config.section("model_args") or {}, "config.json: vision_config: model_args")
        unknown = sorted(said.raw.keys() - set(ARGUMENTS))
        if unknown:
            raise ConfigError(f"{said.where}: {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not known for this tower",
                              f"known: {', '.join(ARGUMENTS)}; text-only works")
        if not said.flag("inference_mode", False):
            raise UsageError("its tower holds the separate branches of training, which are not supported",
                             "use the model as published, with its branches fused (inference_mode: true); text-only works")
        self.layers, self.widths = (_stages(said, name, usual, high) for name, usual, high in
                                    zip(("layers", "embed_dims"), ARCHITECTURES[named], (MAX_LAYERS, MAX_WIDTH), strict=True))
        if any(self.widths[stage] % HEAD for stage in ATTENDING) or any(wide % slim for slim, wide in zip(self.widths, self.widths[1:],
                                                                                                        strict=False)):
            raise said.fail("embed_dims", f"widths of which each is a multiple of the one before, the last two of {HEAD}")
        if self.width != 2 * self.widths[-1]:
            raise ConfigError(f"config.json: vision_config: hidden_size is {self.width}, but the tower makes {2 * self.widths[-1]} of "
                              "an image's points")
        if any(side % SCALE for side in self.final) or self.final[0] != self.final[1]:
            raise ConfigError(f"{self.processor.where}: images become {self.final[0]} × {self.final[1]}, but the tower takes squares of "
                              f"a multiple of {SCALE}")
        self.root_config.choice("vision_feature_select_strategy", {"full": "full"}, "full")
        if self.root_config.raw.get("vision_feature_layer", -1) != -1:
            raise self.root_config.fail("vision_feature_layer", "-1")
        self.most_patches = (self.final[0] // SCALE) ** 2

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        return (ROW_PLACEHOLDER,) * self.most_patches

    def workspace_floats(self) -> int:
        """A layer's matrices, what the first convolution reads and makes, which is more than any other map, and the
        pieces that threads have in hand."""
        matrices, points = 2 * WIDER * self.widths[-1] ** 2, self.final[0] ** 2
        maps = 3 * points + (27 + self.widths[0]) * points // 4
        pieces = (6 * PIECE + points + 8 * self.widths[-1] * ROWS) * self.workers
        return matrices + maps + pieces

    def load(self, weights: Weights) -> Rows:
        tower = load_fastvit(weights, "vision_tower.timm_model.", self.layers, self.widths)
        project = self.to_text(weights, self.width, bias=self.root_config.flag("multimodal_projector_bias", True))
        return lambda tiles, pool: project(tower.seen(tiles[0], pool), pool)


class FirstFastVlm(FastVlm):
    """Whose template knows of no pictures."""

    placeholder_text = "<image>\n"


def _stages(said: Keys, name: str, usual: tuple[int, ...], high: int) -> tuple[int, ...]:
    """A number for each stage."""
    value = said.raw.get(name)
    if value is None:
        return usual
    if not isinstance(value, list) or len(value) != STAGES or any(type(each) is not int or not 1 <= each <= high for each in value):
        raise said.fail(name, f"{STAGES} whole numbers from 1 to {high}")
    return tuple(value)


class Published(FolderSource):
    """A folder of FastVLM as Apple published it, which says of its tower a name and nothing of how pictures are made ready: what that name
    stands for, as a folder of transformers says it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, IMAGE_INPUT)
        self.published = keys = Keys(self.config)
        keys.choice("mm_projector_type", {MLP: MLP}, MLP)
        self.config = {"model_type": "fast_vlm", "vision_config": {
            "hidden_size": keys.integer("mm_hidden_size", 3072, high=MAX_WIDTH), "model_args": {"inference_mode": True}}}

    def processor(self, known: Sequence[str]) -> tuple[Keys, Keys]:
        """The side of pictures is what the tower's name says."""
        framed = self.published.choice("image_aspect_ratio", {"pad": True, "square": False}, "square")
        named = self.published.text("mm_vision_tower", "")
        if not (found := re.fullmatch(r"mobileclip_l_(\d{2,5})", named)):
            raise UsageError(f"its vision tower {show(named)} is not supported for this model",
                             "known: mobileclip_l_1024 (FastVLM); text-only works")
        side = int(found[1])
        return Keys({"do_pad": framed, "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "size": {"shortest_edge": side},
                     "crop_size": {"height": side, "width": side}}, "config.json: mm_vision_tower"), Keys({})


def encoder(source: TowerSource, config: ModelConfig) -> VisionTower:
    if source.config["model_type"] == "fast_vlm":
        return FastVlm(source, config)
    return FirstFastVlm(Published(source.model), config)
