"""DeepSeek-OCR: Unlimited OCR's preprocessing and tower, with at most nine tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .deepseek_ocr2 import of_folder
from .unlimited_ocr import UnlimitedOcr

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource


class DeepseekOcr(UnlimitedOcr):
    KINDS = {"vision": {}}
    PROCESSORS = ("DeepseekOcrImageProcessor",)
    MOST = 9


def encoder(source: TowerSource, config: ModelConfig) -> DeepseekOcr:
    return DeepseekOcr(of_folder(source), config)
