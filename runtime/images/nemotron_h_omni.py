"""Nemotron 3 Nano Omni: C-RADIO at native aspect ratio, resized in floats, with learned prefix tokens; position embeddings are the corner
of a square table. Patches are merged, between two special tokens."""

from __future__ import annotations

import math

import numpy as np

from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER
from .position_embeddings import bilinear, row_major
from .preprocessor import resized_in_floats
from .tower_layers import FUSED_QKV, LayerShape, load_blocks, run_blocks
from .tower_ops import ACTIVATIONS, WorkerPool, matmul, merge_patches, patches_of
from .tower_weights import Weights
from .vision_tower import MAX_WIDTH, Rows, VisionTower, check_aspect_ratio
from .vision_transformer import layer_count

USUAL = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "mlp_ratio": 4.0, "hidden_act": "gelu",
         "layer_norm_eps": 1e-6, "patch_size": 16, "max_img_size": 2048, "num_cls_tokens": 3, "num_registers": 7}
BEGIN, END, NAME = "<img>", "</img>", "vision_model.radio_model.model."
PROJECTOR_EPS, KEPT = 1e-5, 4  # and tokens of a context that are not counted as room for pictures


class NemotronHOmni(VisionTower):
    KINDS = {"radio": USUAL}
    PROCESSORS = ("NemotronH_Omni_Reasoning_V3ImageProcessor", "NemotronH_Nano_Omni_Reasoning_V3ImageProcessor")

    def renamed(self, keys: Keys) -> Keys:
        named = {"image_mean": keys.raw.get("norm_mean"), "image_std": keys.raw.get("norm_std")}  # as published files call them
        return keys.with_values(**{name: value for name, value in named.items() if value is not None and keys.raw.get(name) is None})

    def configure(self, keys: Keys) -> None:
        self.factor = keys.number("rescale_factor", 1 / 255) if keys.flag("do_rescale", True) else 1.0
        self.joined = round(1 / self.root_config.number("downsample_ratio", 0.5))
        self.least, most = keys.integer("min_num_patches", 1024, high=1 << 20), keys.integer("max_num_patches", 13_312, low=0, high=1 << 20)
        room = max((keys.integer("max_model_len", 16_384) - KEPT) * self.joined**2, self.least)
        self.most = max(min(room, most) if most else room, self.least)
        if keys.integer("patch_size", self.patch) != self.patch or round(1 / keys.number("downsample_ratio", 0.5)) != self.joined:
            raise keys.fail("patch_size and downsample_ratio", f"{self.patch} and 1 / {self.joined}, as config.json says")
        if self.tower_config.flag("use_swiglu_ffn", False) or self.tower_config.integer("num_channels", 3) != 3:
            raise self.tower_config.fail("use_swiglu_ffn", "false: FFNs with gates are not read")
        if self.root_config.integer("vision_hidden_size", None) not in (None, self.width):
            raise self.root_config.fail("vision_hidden_size", f"the {self.width} of vision_config")
        self.learned = self.tower_config.integer("max_img_size", high=1 << 14) // self.patch
        if not 1 <= self.learned:
            raise ConfigError(f"config.json: vision_config: max_img_size has no room for a patch of {self.patch}")
        self.most_patches = self.most

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches: nearly as many as there are points for, between the least and the most, in whole squares."""
        check_aspect_ratio(height, width)
        rows, columns = (round(side / self.patch + 0.5) for side in (height, width))
        shrink = min(math.sqrt(self.most / (rows * columns)), 1.0)
        rows, columns = (max(1, math.floor(shrink * each)) for each in (rows, columns))
        if self.most > self.least > rows * columns:
            grow = math.sqrt(self.least / (rows * columns))
            rows, columns = math.ceil(grow * rows), math.ceil(grow * columns)
        rows = self.whole(rows, columns)
        return rows, self.whole(columns, rows)

    def whole(self, side: int, other: int) -> int:
        """A side in whole squares: longer where there is room for that, else shorter."""
        missing = -side % self.joined
        if not missing or (side + missing) * other <= self.most:
            return side + missing
        return max(self.joined, side + missing - self.joined)

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.grid(height, width)
        return (self.token_id(BEGIN), *(ROW_PLACEHOLDER,) * (rows * columns // self.joined**2), self.token_id(END))

    def values(self, picture: np.ndarray) -> np.ndarray:
        """float32 [height, width, 3]."""
        rows, columns = self.grid(*picture.shape[:2])
        high, wide = rows * self.patch, columns * self.patch
        if picture.shape[:2] == (high, wide):
            return self.scale(picture)
        made = resized_in_floats(picture, high, wide, self.resample) * np.float32(self.factor)
        return (made - np.array(self.scale.mean, np.float32)) / np.array(self.scale.std, np.float32)

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden, patch, side = self.tower_config, self.width, self.config.hidden_size, self.patch, self.joined
        inner, eps = int(width * keys.number("mlp_ratio")), keys.number("layer_norm_eps")
        curve = keys.choice("hidden_act", ACTIVATIONS, "gelu")
        embedding = weights.matrix(f"{NAME}patch_generator.embedder", width, 3 * patch**2, bias=False)
        table = weights.numbers(f"{NAME}patch_generator.pos_embed", 1, self.learned**2, width)[0].reshape(self.learned, self.learned, width)
        lead = sum(keys.integer(each, low=0, high=1024) for each in ("num_cls_tokens", "num_registers"))
        front = weights.numbers(f"{NAME}patch_generator.cls_token.token", lead, width)

        def more(own: str) -> dict[str, object]:
            return {"scales": tuple(weights.numbers(f"{own}layer_scale{which}.lambda1", width) for which in (1, 2))
                    if weights.has(f"{own}layer_scale1.lambda1") else None}

        blocks = load_blocks(weights, f"{NAME}blocks.", layer_count(self), FUSED_QKV, LayerShape(width, inner, self.heads, curve, eps),
                             more=more)
        together = width * side**2
        middle = self.root_config.integer("projector_hidden_size", 4096, high=MAX_WIDTH)
        norm = weights.rms_norm("mlp1.0", together, PROJECTOR_EPS)
        project = weights.two_layers("mlp1.", (together, middle, hidden), relu_squared, False, ("1", "3"))

        def rows(values: np.ndarray, pool: WorkerPool) -> np.ndarray:
            lines, columns = values.shape[0] // patch, values.shape[1] // patch
            at = row_major(lines, columns)
            x = matmul(patches_of(values, patch), embedding, pool) + bilinear(table, at, max(lines, columns))
            pool.job.total += len(blocks)
            x = run_blocks(blocks, np.concatenate([front, x]), pool)[lead:]
            return project(norm(merge_patches(x, columns, side)), pool)

        return rows


def relu_squared(x: np.ndarray) -> np.ndarray:
    return np.square(np.maximum(x, 0))


encoder = NemotronHOmni
