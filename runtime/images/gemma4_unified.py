"""Gemma 4 without a tower: pixel patches become rows by one matrix, with learned position embeddings by row and column."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..config_reader import ConfigError, Keys
from .gemma4 import Gemma4
from .tower_ops import Norm, WorkerPool, matmul
from .tower_weights import Weights
from .vision_tower import MAX_WIDTH, Rows

NORM_EPS = 1e-5
USUAL = {"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120, "output_proj_dims": 3840,
         "rms_norm_eps": 1e-6}


class Gemma4Unified(Gemma4):
    KINDS = {"gemma4_unified_vision": USUAL}
    PROCESSORS = ("Gemma4UnifiedImageProcessor",)
    SEES = "vision"

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.most_patches = self.count
        self.whole_patches = self.count * self.joined**2

    @cached_property
    def width(self) -> int:
        return self.tower_config.integer("mm_embed_dim", high=MAX_WIDTH)

    def load(self, weights: Weights) -> Rows:
        keys, width, unit, name = self.tower_config, self.width, self.patch * self.joined, "vision_embedder."
        points, places, through = 3 * unit * unit, keys.integer("mm_posemb_size", high=1 << 20), keys.integer("output_proj_dims")
        if through != width:
            raise keys.fail("output_proj_dims", f"the {width} of mm_embed_dim")
        first, second = (weights.layer_norm(f"{name}patch_ln{number}", size, NORM_EPS) for number, size in ((1, points), (2, width)))
        dense = weights.matrix(f"{name}patch_dense", width, points, bias=True)
        table = weights.numbers(f"{name}pos_embedding", places, 2, width)
        last = weights.layer_norm(f"{name}pos_norm", width, NORM_EPS)
        plain = Norm(np.ones(width, np.float32), None, keys.number("rms_norm_eps"), centered=False)
        project = weights.matrix("embed_vision.embedding_projection", self.config.hidden_size, width, bias=False)

        def rows(values: np.ndarray, pool: WorkerPool) -> np.ndarray:
            lines, columns = values.shape[0] // unit, values.shape[1] // unit
            if max(lines, columns) > places:
                raise ConfigError(f"config.json: mm_posemb_size {places} is less than the {max(lines, columns)} of an image")
            row, column = np.divmod(np.arange(lines * columns), columns)
            cut = values.reshape(lines, unit, columns, unit, 3).swapaxes(1, 2).reshape(lines * columns, -1)
            x = second(matmul(first(cut), dense, pool)) + (table[column, 0] + table[row, 1])
            return matmul(plain(last(x)), project, pool)

        return rows


encoder = Gemma4Unified
