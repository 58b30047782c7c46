"""GOT-OCR 2: SAM's tower on a square page, and on tiles where the folder asks for them; convolutions make one row of sixteen patches."""

from __future__ import annotations

import numpy as np

from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .internvl import FittedTiles
from .sam import USUAL, convolved, load_sam
from .tower_ops import WorkerPool, matmul
from .tower_weights import Weights
from .vision_tower import Rows
from .vision_transformer import layer_count

TWICE = 2  # that a convolution makes one of two in a row and in a column


class GotOcr2(FittedTiles):
    KINDS = {"got_ocr2_vision": USUAL}
    PROCESSORS = ("GotOcr2ImageProcessor",)
    CROPS = False
    placeholder = "<imgpad>"

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.most_patches = self.across**2

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.grid(height, width)
        side = self.across
        for _ in range(TWICE):
            side = -(-side // 2)
        return (ROW_PLACEHOLDER,) * (side * side * (rows * columns + (rows * columns > 1)))

    def load(self, weights: Weights) -> Rows:
        tower, hidden, own = load_sam(weights, self, "vision_tower."), self.config.hidden_size, "multi_modal_projector."
        channels = self.tower_config.integer("output_channels")
        first = weights.matrix(f"{own}conv_upsampler1", 2 * channels, 9 * channels, bias=False)
        second = weights.matrix(f"{own}conv_upsampler2", hidden, 9 * 2 * channels, bias=False)
        project = weights.matrix(f"{own}multimodal_projector", hidden, hidden, bias=True)

        def rows(tiles: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            pool.job.total += len(tiles) * layer_count(self)
            made = [convolved(convolved(tower.seen(tile, pool), first, 2, pool), second, 2, pool).reshape(-1, hidden) for tile in tiles]
            return matmul(np.concatenate(made), project, pool)

        return rows


encoder = GotOcr2
