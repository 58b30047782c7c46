"""LFM3-VL: Qwen's preprocessing; some layers attend to all patches, others are gated convolutions over neighbours; patches are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config_reader import ConfigError
from .qwen_patches import QwenPatches
from .tower_ops import Block, Matrix, Norm, WorkerPool, matmul, silu
from .tower_weights import Weights
from .vision_tower import Rows
from .vision_transformer import layer_count

USUAL = {"hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 14, "num_attention_heads": 16, "num_key_value_heads": 8,
         "patch_size": 16, "conv_kernel_size": 3, "norm_eps": 1e-5}
THETA, PROJECTOR_EPS = 1e6, 1e-6
PATCHES, HEAD_NORMS = ("patchifier.weight", "patch_embed.weight"), ("layernorm", "norm")  # as published, and as transformers calls them
CONV, ATTENTION = "conv", "full_attention"


@dataclass(frozen=True)
class ConvLayer:
    """x += out(b · convolution(a · c)) for a, b, c of the norm of x, then x += ffn(norm(x)). `near`: float32 [side, side, D]."""

    norms: tuple[Norm, Norm]
    into: Matrix
    near: np.ndarray
    out: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix

    def run(self, x: np.ndarray, places: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [n, D], of patches at rows and columns int64 [n, 2] of one picture."""
        first, second, third = np.split(matmul(self.norms[0](x), self.into, pool), 3, axis=-1)
        x += matmul(second * self._neighbours(first * third, places, pool), self.out, pool)
        gate, up, down = self.gate.to_float32(), self.up.to_float32(), self.down.to_float32()

        def rest(rows: slice) -> None:
            normed = self.norms[1](x[rows])
            x[rows] += down(silu(gate(normed)) * up(normed))

        pool.each(rest, len(x))
        pool.job.done += 1

    def _neighbours(self, x: np.ndarray, places: np.ndarray, pool: WorkerPool) -> np.ndarray:
        (rows, columns), side = places.max(0) + 1, len(self.near)
        wide = np.zeros((rows + side - 1, columns + side - 1, x.shape[1]), np.float32)
        wide[places[:, 0] + side // 2, places[:, 1] + side // 2] = x
        made = np.empty_like(x)

        def some(which: slice) -> None:
            down, across = places[which].T
            made[which] = sum(wide[down + dy, across + dx] * self.near[dy, dx] for dy in range(side) for dx in range(side))

        pool.each(some, len(x))
        return made


class Lfm3Vl(QwenPatches):
    KINDS = {"lfm3_vl_vision": USUAL}
    HEADS, BY_PLACE = "num_attention_heads", False

    def kinds(self) -> Sequence[str]:
        count = layer_count(self)
        usual = tuple(CONV if number < 2 or number % 2 else ATTENTION for number in range(count))
        kinds = self.tower_config.strings("layer_types", count) or usual
        if not set(kinds) <= {CONV, ATTENTION}:
            raise ConfigError(f"config.json: vision_config: layer_types holds others than {CONV} and {ATTENTION}")
        return kinds

    def load(self, weights: Weights) -> Rows:
        keys, width, name = self.tower_config, self.width, "vision_tower."
        inner, eps, together = keys.integer("intermediate_size"), keys.number("norm_eps"), width * self.joined**2
        side = keys.integer("conv_kernel_size", high=31)
        if side % 2 == 0:
            raise keys.fail("conv_kernel_size", "an odd number")
        groups, depth = keys.integer("num_key_value_heads", high=1024), width // self.heads
        if self.heads % groups:
            raise keys.fail("num_key_value_heads", f"a part of {self.heads} heads")
        patches = next((each for each in PATCHES if weights.has(name + each)), PATCHES[0])
        stored = weights.numbers(name + patches, width, 3 * self.frames * self.patch**2)
        embedding = Matrix(self.once(stored), None)

        def layer(number: int, kind: str) -> Block | ConvLayer:
            own = f"{name}layers.{number}."
            norms = weights.rms_norm(f"{own}operator_norm", width, eps), weights.rms_norm(f"{own}ffn_norm", width, eps)
            gate, down, up = (weights.matrix(f"{own}feed_forward.w{which}", *shape, bias=False) for which, shape in
                              ((1, (inner, width)), (2, (width, inner)), (3, (inner, width))))
            if kind == CONV:
                near = weights.numbers(f"{own}conv.spatial_conv.weight", width, 1, side, side).reshape(width, side, side)
                return ConvLayer(norms, weights.matrix(f"{own}conv.in_proj", 3 * width, width, bias=False),
                                 np.ascontiguousarray(near.transpose(1, 2, 0)),
                                 weights.matrix(f"{own}conv.out_proj", width, width, bias=False), gate, up, down)
            norms_of = next((each for each in HEAD_NORMS if weights.has(f"{own}self_attn.q_{each}.weight")), HEAD_NORMS[0])
            pair = [weights.matrix(f"{own}self_attn.{which}_proj", groups * depth, width, bias=False).shared(groups, self.heads)
                    for which in "kv"]
            return Block(norms, weights.matrix(f"{own}self_attn.q_proj", width, width, bias=False), *pair,
                         weights.matrix(f"{own}self_attn.out_proj", width, width, bias=False), up, down, silu, self.heads, gate=gate,
                         own_norms=tuple(weights.rms_norm(f"{own}self_attn.{which}_{norms_of}", depth, eps) for which in "qk"))

        layers = [layer(number, kind) for number, kind in enumerate(self.kinds())]
        entry, norm = weights.rms_norm(f"{name}embedding_norm", width, eps), weights.layer_norm("multi_modal_projector.layer_norm", width,
                                                                                               PROJECTOR_EPS)
        between, biased = self.root_config.integer("projector_hidden_size", 4096), self.root_config.flag("projector_bias", True)
        project = self.to_text(weights, together, between, biased)

        def rows(values: tuple[np.ndarray, np.ndarray], pool: WorkerPool) -> np.ndarray:
            patches, places = values
            x, rope = entry(matmul(patches, embedding, pool)), self.rope(places, self.theta(THETA))
            pool.job.total += len(layers)
            for each in layers:
                if isinstance(each, ConvLayer):
                    each.run(x, places, pool)
                else:
                    each.run(x, [(0, len(x))], pool, rope)
            return project(norm(x).reshape(-1, together), pool)

        return rows


encoder = Lfm3Vl
