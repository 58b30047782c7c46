"""GLM 4.1V, 4.5V, 4.6V and Glmga: Qwen's preprocessing, learned position embeddings interpolated bicubically; patches are merged by a
convolution, then a gated MLP. GLM-OCR's tower has QK norms instead of position embeddings.

Glmga is 4.6V with a processor that may round sizes more coarsely. transformers' PIL variant of it never does; its default one, which is
followed here, does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import Keys
from .position_embeddings import bicubic
from .qwen_patches import QwenPatches
from .tower_layers import run_blocks
from .tower_ops import ACTIVATIONS, Block, Matrix, Norm, WorkerPool, gelu, matmul
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, Rows, check_aspect_ratio

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

Placing = Callable[[np.ndarray, np.ndarray], np.ndarray]
NORM_EPS = 1e-5
USUAL = {"depth": 24, "hidden_size": 1536, "hidden_act": "silu", "num_heads": 12, "image_size": 336, "patch_size": 14,
         "rms_norm_eps": 1e-5, "out_hidden_size": 4096, "intermediate_size": 13_696, "attention_bias": False}
OCR = {**USUAL, "hidden_size": 1024, "num_heads": 16, "out_hidden_size": 1536, "intermediate_size": 4096, "attention_bias": True}
CHANNELS = 3  # GLM-OCR's last FFN is so many times as wide as its rows


class Glm4v(QwenPatches):
    """A picture's points are counted as often as it has frames. `biased_ffn`: attention_bias is of all matrices of a layer, not of those
    of queries, keys and values alone."""

    KINDS = {kind + end: USUAL for kind in ("glm4v", "glm4v_moe", "glm46v", "glmga") for end in ("_vision", "")}
    PROCESSORS = ("Glm4vImageProcessor", "Glm46VImageProcessor", "GlmgaImageProcessor")
    SIZE = (112 * 112, 28 * 28 * 15_000)
    placeholder = "<|image|>"
    biased_ffn = False
    expanded = 1

    def configure(self, keys: Keys) -> None:
        if self.source.config["model_type"] == "glmga":
            self.expanded = keys.integer("patch_expand_factor", 1, high=16)
        super().configure(keys)
        self.least, self.most = self.least / self.frames, self.most / self.frames

    @property
    def size_multiple(self) -> int:
        return super().size_multiple * self.expanded

    def sized(self, height: int, width: int) -> tuple[int, int]:
        check_aspect_ratio(height, width)
        unit = self.size_multiple
        if min(height, width) < unit:
            grow = max(unit / height, unit / width)
            height, width = int(height * grow), int(width * grow)
        return super().sized(height, width)

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden, unit = self.tower_config, self.width, self.config.hidden_size, self.joined**2
        eps = keys.number("rms_norm_eps")
        if keys.integer("out_hidden_size") != hidden:
            raise keys.fail("out_hidden_size", f"the {hidden} of the text part")
        inner, last = self.inner_widths()
        curve = keys.choice("hidden_act", ACTIVATIONS, "silu")
        embedding, placed = self.embedding(weights, bias=True), self.placing(weights, eps)
        biased = keys.flag("attention_bias")

        def block(number: int) -> Block:
            own = f"visual.blocks.{number}."
            queries, keys_, values = weights.matrix(f"{own}attn.qkv", 3 * width, width, biased).parts(3)
            gate, up = self.gated(weights, f"{own}mlp.", inner, width, self.biased_ffn and biased)
            return Block((weights.rms_norm(f"{own}norm1", width, eps), weights.rms_norm(f"{own}norm2", width, eps)),
                         queries, keys_, values, weights.matrix(f"{own}attn.proj", width, width, self.biased_ffn and biased), up,
                         weights.matrix(f"{own}mlp.down_proj", width, inner, self.biased_ffn and biased), curve, self.heads, gate=gate,
                         own_norms=self.head_norms(weights, own, eps))

        blocks = [block(number) for number in range(keys.integer("depth", high=MAX_LAYERS))]
        after = weights.rms_norm("visual.post_layernorm", width, eps)
        joining, project = weights.matrix("visual.downsample", hidden, width * unit), weights.matrix("visual.merger.proj", hidden, hidden)
        norm = weights.layer_norm("visual.merger.post_projection_norm", hidden, NORM_EPS)
        gate, up = self.gated(weights, "visual.merger.", last, hidden, False)
        down = weights.matrix("visual.merger.down_proj", hidden, last, bias=False)

        def rows(values: tuple[np.ndarray, np.ndarray], pool: WorkerPool) -> np.ndarray:
            patches, places = values
            pool.job.total += len(blocks)
            x = run_blocks(blocks, placed(matmul(patches, embedding, pool), places), pool, self.rope(places))
            squares = after(x).reshape(-1, unit, width).swapaxes(1, 2).reshape(-1, width * unit)
            y = gelu(norm(matmul(matmul(squares, joining, pool), project, pool)))
            return matmul(curve(matmul(y, gate, pool)) * matmul(y, up, pool), down, pool)

        return rows

    def gated(self, weights: Weights, name: str, inner: int, width: int, bias: bool) -> tuple[Matrix, Matrix]:
        """What an FFN multiplies: its gate, and beside it."""
        return tuple(weights.matrix(f"{name}{which}_proj", inner, width, bias) for which in ("gate", "up"))

    def inner_widths(self) -> tuple[int, int]:
        """Of the FFN in a layer, and of the one behind all."""
        return self.tower_config.integer("out_hidden_size"), self.tower_config.integer("intermediate_size")

    def placing(self, weights: Weights, eps: float) -> Placing:
        """What is done to embedded patches at their rows and columns."""
        side = self.side // self.patch
        norm = weights.rms_norm("visual.post_conv_layernorm", self.width, eps)
        table = weights.numbers("visual.embeddings.position_embedding.weight", side * side, self.width).reshape(side, side, self.width)
        return lambda x, places: norm(x) + bicubic(table, places)

    def head_norms(self, weights: Weights, own: str, eps: float) -> tuple[Norm, ...]:
        """`Block.own_norms` of the layer whose tensors begin so."""
        return ()


class GlmOcr(Glm4v):
    KINDS = {"glm_ocr_vision": OCR, "glm_ocr": OCR}
    biased_ffn = True

    def inner_widths(self) -> tuple[int, int]:
        return self.tower_config.integer("intermediate_size"), CHANNELS * self.tower_config.integer("out_hidden_size")

    def placing(self, weights: Weights, eps: float) -> Placing:
        return lambda x, places: x

    def head_norms(self, weights: Weights, own: str, eps: float) -> tuple[Norm, ...]:
        return tuple(weights.rms_norm(f"{own}attn.{which}_norm", self.width // self.heads, eps) for which in "qk")


def encoder(source: TowerSource, config: ModelConfig) -> Glm4v:
    return (GlmOcr if source.config["model_type"] == "glm_ocr" else Glm4v)(source, config)
