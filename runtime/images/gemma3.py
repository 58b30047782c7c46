"""Gemma 3: SigLIP on one square image; patches are average-pooled to a fixed number of rows, which attend to each other."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER
from .preprocessor import BILINEAR, HALF, resized
from .tower_ops import Matrix, Norm, WorkerPool
from .tower_weights import Weights
from .vision_tower import Rows, VisionTower
from .vision_transformer import SIGLIP, layer_count, load_transformer

BEGIN, END = "<start_of_image>", "<end_of_image>"


class Gemma3(VisionTower):
    """A picture that is far from square is not looked at in parts too ("pan and scan"): its processors do that only when told to."""

    KINDS = {"siglip_vision_model": SIGLIP}
    PROCESSORS = ("Gemma3ImageProcessor",)
    LOOK = HALF, HALF, BILINEAR
    placeholder, bidirectional = BEGIN, True

    def configure(self, keys: Keys) -> None:
        self.demand_side(keys, 224)
        self.count = self.root_config.integer("mm_tokens_per_image", 256, high=1 << 16)
        self.across, self.kept = self.side // self.patch, math.isqrt(self.count)
        if self.kept**2 != self.count or self.across % self.kept:
            raise ConfigError(f"config.json: mm_tokens_per_image {self.count} is not a square that divides {self.across} × {self.across}")
        self.most_patches = self.across**2

    @cached_property
    def _tokens(self) -> tuple[int, ...]:
        for each in (BEGIN, END):
            self.token_id(each)
        before, behind = (self.tokenizer.encode(text, add_special_tokens=False) for text in (f"\n\n{BEGIN}", f"{END}\n\n"))
        return (*before, *(ROW_PLACEHOLDER,) * self.count, *behind)

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        return self._tokens

    def values(self, picture: np.ndarray) -> np.ndarray:
        return self.scale(resized(picture, self.side, self.side, self.resample))

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_tower.", finished=True)
        width, hidden, side = self.width, self.config.hidden_size, self.across // self.kept
        turned = weights.stored("multi_modal_projector.mm_input_projection_weight", width, hidden)
        project = Matrix(np.ascontiguousarray(turned.T))
        norm = Norm(weights.numbers("multi_modal_projector.mm_soft_emb_norm.weight", width) + 1, None,
                    self.tower_config.number("layer_norm_eps"), centered=False)  # Gemma's norms are stored less one
        last = layer_count(self)

        def rows(values: np.ndarray, pool: WorkerPool) -> np.ndarray:
            x = tower.layers([values], [last], pool)[0]
            x = x.reshape(self.kept, side, self.kept, side, width).mean((1, 3), dtype=np.float32).reshape(self.count, width)
            return project.to_float32()(norm(x))

        return rows


encoder = Gemma3
