"""InternVL 2.5 to 3.5 in their original folders, with Qianfan-OCR's tensor names; preprocessing is described in config.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config_reader import Keys
from .internvl import IMAGE, USUAL
from .modality import IMAGE_INPUT
from .preprocessor import IMAGENET_MEAN, IMAGENET_STD
from .qianfan_ocr import QianfanOcr
from .tower_source import FolderSource

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

SIDE = 448


class Published(FolderSource):
    """A folder whose preprocessor_config.json is of CLIP, which is not what its own code does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, IMAGE_INPUT)

    def processor(self, known: Sequence[str]) -> tuple[Keys, Keys]:
        keys = Keys(self.config)
        keys.choice("ps_version", {"v2": True}, "v2")
        if not keys.flag("use_thumbnail", True):
            raise keys.fail("use_thumbnail", "true")
        most, side = keys.integer("max_dynamic_patch", 12, high=256), keys.integer("force_image_size", SIDE, high=1 << 14)
        said = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD, "size": {"height": side, "width": side},
                "min_patches": keys.integer("min_dynamic_patch", 1, high=most),
                "max_patches": most if keys.flag("dynamic_image_size", True) else 1}
        return Keys(said, "config.json"), Keys({})


class InternVlChat(QianfanOcr):
    KINDS = {"intern_vit_6b": USUAL}

    def configure(self, keys: Keys) -> None:
        self.root_config = self.root_config.with_values(vision_feature_layer=self.root_config.integer("select_layer", -1, low=-512))
        super().configure(keys)
        for name, value in (("qk_normalization", False), ("qkv_bias", True)):
            if self.tower_config.flag(name, value) is not value:
                raise self.tower_config.fail(name, str(value).lower())
        template = self.tokenizer.template
        self.placeholder = IMAGE if template is not None and IMAGE in template.source else "<image>"

    @property
    def placeholder_text(self) -> str:
        return f"{self.placeholder}\n"


def encoder(source: TowerSource, config: ModelConfig) -> InternVlChat:
    return InternVlChat(Published(source.model), config)
