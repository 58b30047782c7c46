"""Gemma 4: images keep their aspect ratio within a patch budget; learned position embeddings by row and column, and 2D rotary embeddings.
Patches are average-pooled to rows. In the large models image tokens attend to each other in sliding-window layers."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER
from .preprocessor import BICUBIC, resized
from .tower_layers import run_blocks
from .tower_ops import ACTIVATIONS, Block, Matrix, Norm, Rope, WorkerPool, inverse_frequencies, matmul
from .tower_weights import Weights
from .vision_tower import MAX_WIDTH, Rows, VisionTower, check_aspect_ratio
from .vision_transformer import layer_count

if TYPE_CHECKING:
    from ..config import ModelConfig

THETA = 100.0
BEGIN, IMAGE, END = "<|image>", "<|image|>", "<image|>"
USUAL = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12, "head_dim": 64,
         "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "pooling_kernel_size": 3, "patch_size": 16,
         "position_embedding_size": 10_240}
LIMITS = ("input_min", "input_max", "output_min", "output_max")


class Gemma4(VisionTower):
    KINDS = {"gemma4_vision": USUAL}
    PROCESSORS = ("Gemma4ImageProcessor",)
    LOOK = [0.0] * 3, [1.0] * 3, BICUBIC
    SEES: str | None = None  # which tokens see what comes behind them, where nothing is stated
    placeholder, sliding_window_only = IMAGE, True

    def renamed(self, keys: Keys) -> Keys:
        """Values are not normalized where nothing is said of that."""
        return keys.with_values(do_normalize=keys.flag("do_normalize", False))

    def configure(self, keys: Keys) -> None:
        self.joined = self.tower_config.integer("pooling_kernel_size", high=64)
        self.count = keys.integer("max_soft_tokens", 280, high=1 << 14)
        self.demand_same(keys, patch_size=self.patch, pooling_kernel_size=self.joined)
        text = self.root_config.section("text_config")
        # A GGUF file does not say it: so it is in all models but those whose layers have inputs of their own.
        usual = self.SEES if text is not None else None if self.config.per_layer_input_dim else "vision"
        self.bidirectional = (text or {}).get("use_bidirectional_attention", usual) == "vision"
        demand_padding(self.root_config, self.config)
        self.most_patches = self.count * self.joined**2

    @cached_property
    def head(self) -> int:
        """Channels of a head, which need not make up the width."""
        head = self.tower_config.integer("head_dim", high=1024)
        if head % 4 or self.tower_config.integer("num_key_value_heads", self.heads) != self.heads:
            raise self.tower_config.fail("head_dim", "a multiple of 4, of as many heads of keys as of queries")
        return head

    @cached_property
    def heads(self) -> int:
        return self.tower_config.integer("num_attention_heads", high=1024)

    def sized(self, height: int, width: int) -> tuple[int, int]:
        """The size that a picture is given: the largest of whole squares of patches that has no more of them than are allowed."""
        check_aspect_ratio(height, width)
        unit = self.patch * self.joined
        factor = math.sqrt(self.count * unit**2 / (height * width))
        high, wide = (math.floor(factor * side / unit) * unit for side in (height, width))
        if not high:
            return unit, min(width // height, self.count) * unit
        if not wide:
            return min(height // width, self.count) * unit, unit
        return high, wide

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        high, wide = self.sized(height, width)
        return (self.token_id(BEGIN), *(ROW_PLACEHOLDER,) * (high * wide // (self.patch * self.joined) ** 2), self.token_id(END))

    def values(self, picture: np.ndarray) -> np.ndarray:
        return self.scale(resized(picture, *self.sized(*picture.shape[:2]), self.resample))

    def load(self, weights: Weights) -> Rows:
        keys, width, patch = self.tower_config, self.width, self.patch
        eps, inner, channels = keys.number("rms_norm_eps"), keys.integer("intermediate_size", high=MAX_WIDTH), self.heads * self.head
        curve = keys.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
        clipped = keys.flag("use_clipped_linears", False)
        places = keys.integer("position_embedding_size", high=1 << 20)
        embedding = weights.matrix("vision_tower.patch_embedder.input_proj", width, 3 * patch * patch, bias=False)
        table = weights.numbers("vision_tower.patch_embedder.position_embedding_table", 2, places, width)
        order = halves(self.head)

        def matrix(name: str, rows: int, depth: int) -> Matrix:
            stored = weights.stored(f"{name}.linear.weight", rows, depth)
            return Matrix(stored, None, tuple(weights.numbers(f"{name}.{each}").item() for each in LIMITS) if clipped else None)

        def turned(name: str) -> Matrix:
            """Of queries or keys, whose heads have a half for columns and one for rows, each turned by its own halves."""
            own = matrix(name, channels, width)
            cut = own.stored.reshape(self.heads, self.head, width)[:, order]
            return Matrix(np.ascontiguousarray(cut).reshape(channels, width), None, own.limits)

        def norm(name: str, size: int = width) -> Norm:
            return weights.rms_norm(name, size, eps)

        def block(number: int) -> Block:
            own = f"vision_tower.encoder.layers.{number}."
            queries, keys_ = (norm(f"{own}self_attn.{each}_norm", self.head).weight[order] for each in "qk")
            # scores are not scaled here: the norm of queries makes up for what attention does
            return Block((norm(f"{own}input_layernorm"), norm(f"{own}pre_feedforward_layernorm")),
                         turned(f"{own}self_attn.q_proj"), turned(f"{own}self_attn.k_proj"),
                         matrix(f"{own}self_attn.v_proj", channels, width),
                         matrix(f"{own}self_attn.o_proj", width, channels), matrix(f"{own}mlp.up_proj", inner, width),
                         matrix(f"{own}mlp.down_proj", width, inner), curve, self.heads, gate=matrix(f"{own}mlp.gate_proj", inner, width),
                         own_norms=(Norm(queries * np.float32(self.head**0.5), None, eps, centered=False),
                                    Norm(keys_, None, eps, centered=False),
                                    Norm(np.ones(self.head, np.float32), None, eps, centered=False)),
                         after=(norm(f"{own}post_attention_layernorm"), norm(f"{own}post_feedforward_layernorm")))

        blocks = [block(number) for number in range(layer_count(self))]
        standard = [weights.numbers(f"vision_tower.std_{each}", width) for each in ("bias", "scale")] \
            if keys.flag("standardize", False) else None
        plain = Norm(np.ones(width, np.float32), None, eps, centered=False)
        project = weights.matrix("embed_vision.embedding_projection", self.config.hidden_size, width, bias=False)
        steps = inverse_frequencies(self.theta(THETA), self.head // 4)

        def rows(values: np.ndarray, pool: WorkerPool) -> np.ndarray:
            lines, columns = values.shape[0] // patch, values.shape[1] // patch
            if max(lines, columns) > places:
                raise ConfigError(f"config.json: position_embedding_size {places} is less than the {max(lines, columns)} of an image")
            row, column = np.divmod(np.arange(lines * columns), columns)
            cut = values.reshape(lines, patch, columns, patch, 3).swapaxes(1, 2).reshape(lines * columns, -1)
            x = matmul(2 * (cut - np.float32(0.5)), embedding, pool)
            x += table[0, column] + table[1, row]
            rope = Rope.of(np.concatenate([column[:, None] * steps, row[:, None] * steps], axis=1).astype(np.float32))
            pool.job.total += len(blocks)
            x = run_blocks(blocks, x, pool, rope)
            side = self.joined
            x = x.reshape(lines // side, side, columns // side, side, width).mean((1, 3), dtype=np.float32).reshape(-1, width)
            x *= np.float32(width**0.5)
            if standard is not None:
                x = (x - standard[0]) * standard[1]
            return matmul(plain(x), project, pool)

        return rows


def demand_padding(outer: Keys, config: ModelConfig) -> None:
    """Raises ConfigError for a model whose layers are told of rows in place of embeddings by another word than the one that is here."""
    text = Keys(outer.section("text_config") or {}, "config.json: text_config")
    if config.per_layer_input_dim and text.integer("pad_token_id", 0, low=0) != 0:
        raise text.fail("pad_token_id", "0, the token id that stands for images and audio")


def halves(head: int) -> np.ndarray:
    """The order of a head's channels in which two halves that are turned apart become one that is turned as a whole."""
    return np.arange(head).reshape(2, 2, head // 4).swapaxes(0, 1).reshape(-1)


encoder = Gemma4
