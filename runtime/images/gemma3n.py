"""Gemma 3n: MobileNet V5 on a square image. The tower has a vocabulary of its own, one token of which ends an image."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER
from .mobilenet import load_mobilenet
from .preprocessor import BILINEAR, HALF, resized, square
from .tower_ops import Norm, WorkerPool, matmul
from .tower_weights import Weights
from .vision_tower import Rows, VisionTower

BEGIN, PICTURE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
USUAL = {"architecture": "mobilenetv5_300m_enc", "hidden_size": 2048, "vocab_size": 128, "vocab_offset": 262_144, "rms_norm_eps": 1e-6}
FIRST_MAP, WIDEST = 4, 1024  # stride of the first feature maps, and their channels in memory at once, about


class Gemma3n(VisionTower):
    KINDS = {"gemma3n_vision": USUAL}
    PROCESSORS = ("SiglipImageProcessor",)
    LOOK = HALF, HALF, BILINEAR
    placeholder = PICTURE

    def configure(self, keys: Keys) -> None:
        said = self.tower_config
        said.choice("architecture", {USUAL["architecture"]: 1}, USUAL["architecture"])
        self.high, self.wide = square(keys, "size", {"height": 768, "width": 768})
        self.count = self.root_config.integer("vision_soft_tokens_per_image", 256, high=1 << 14)
        if math.isqrt(self.count) ** 2 != self.count:
            raise ConfigError(f"config.json: vision_soft_tokens_per_image {self.count} is not a square")
        self.vocabulary, left = said.integer("vocab_size", low=0), said.integer("words_from_end", None)  # which GGUF files tell
        self.first = said.integer("vocab_offset", low=0) if left is None else self.config.vocab_size - left

    def workspace_floats(self) -> int:
        """The largest matrices, and maps of one place in four points of the picture."""
        return 12 * self.width**2 + self.high * self.wide // FIRST_MAP**2 * WIDEST

    @cached_property
    def _tokens(self) -> tuple[int, ...]:
        """What ends a picture is a row where it is a word of the tower's."""
        end = self.token_id(END)
        self.token_id(BEGIN)
        before, behind = (self.tokenizer.encode(text, add_special_tokens=False) for text in (f"\n\n{BEGIN}", f"{END}\n\n"))
        return (*before, *(ROW_PLACEHOLDER,) * self.count, *(ROW_PLACEHOLDER if token == end >= self.first else token for token in behind))

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        return self._tokens

    def values(self, picture: np.ndarray) -> np.ndarray:
        return self.scale(resized(picture, self.high, self.wide, self.resample))

    def load(self, weights: Weights) -> Rows:
        tower, width, hidden, eps = load_mobilenet(weights, "vision_tower.timm_model."), self.width, self.config.hidden_size, \
            self.tower_config.number("rms_norm_eps")
        plain = Norm(np.ones(hidden, np.float32), None, eps, centered=False)
        hard, soft = (weights.rms_norm(f"embed_vision.{each}_embedding_norm", width, eps) for each in ("hard", "soft"))
        project = weights.matrix("embed_vision.embedding_projection", hidden, width, bias=False)
        words, end = weights.numbers("embed_vision.embedding.weight", self.vocabulary, width), self.token_id(END) - self.first
        if end >= self.vocabulary:
            raise self.tower_config.fail("vocab_offset", f"a number by which {END} is one of the tower's words, or one of the text part's")

        def rows(values: np.ndarray, pool: WorkerPool) -> np.ndarray:
            pool.job.total += tower.layers
            x = tower(values, math.isqrt(self.count), pool) * np.float32(width**0.5)
            x = np.concatenate([soft(x), hard(words[end : end + 1])]) if end >= 0 else soft(x)
            return plain(matmul(x, project, pool))

        return rows


encoder = Gemma3n
