"""Loads transformer layers of towers under each family's tensor names, and runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .tower_ops import Activation, Block, Matrix, Norm, Rope, Span, WorkerPool
from .tower_weights import Weights


def qkv_names(name: str, which: Sequence[str] = "qkv") -> tuple[str, ...]:
    """Names that differ in one letter."""
    return tuple(name.format(each) for each in which)


@dataclass(frozen=True)
class LayerNames:
    """Tensor names within a layer: both norms; query, key and value projections, separate or fused; the output projection; and the FFN's
    matrices: up, down and, in a gated one, gate."""

    norms: tuple[str, ...]
    looked: tuple[str, ...]
    out: str
    ffn: tuple[str, ...]


FUSED_QKV = LayerNames(("norm1", "norm2"), ("attn.qkv",), "attn.proj", ("mlp.fc1", "mlp.fc2"))  # as timm has it
SEPARATE_QKV = LayerNames(("layer_norm1", "layer_norm2"), qkv_names("self_attn.{}_proj"), "self_attn.out_proj", ("mlp.fc1", "mlp.fc2"))


@dataclass(frozen=True)
class LayerShape:
    """Shape of all layers of a tower. `inner`: FFN width; `through`: total width of all heads, 0 for `width`. Norms are RMS norms unless
    `centered`. `bias`: of attention and of the FFN: with, without, or None for as stored. `interleaved`: rotary pairs are adjacent channels
    (GPT-J style) in queries and keys."""

    width: int
    inner: int
    heads: int
    curve: Activation
    eps: float
    centered: bool = True
    bias: tuple[bool | None, bool | None] = (None, None)
    through: int = 0
    interleaved: bool = False

    def norm(self, weights: Weights, name: str) -> Norm:
        return (weights.layer_norm if self.centered else weights.rms_norm)(name, self.width, self.eps)


def load_blocks(weights: Weights, name: str, count: int, stored: LayerNames, shape: LayerShape,
                looked: Callable[[str], Sequence[Matrix]] | None = None,
                more: Callable[[str], dict[str, object]] = lambda own: {}) -> list[Block]:
    """Load `count` layers, whose tensor names begin with `name` and the layer number. `looked`: overrides how query, key and value
    projections of a layer are loaded; `more`: further fields of its Block."""
    width, through, (bias, ffn_bias) = shape.width, shape.through or shape.width, shape.bias

    def seen(own: str) -> Sequence[Matrix]:
        if looked is not None:
            return looked(own)
        if len(stored.looked) == 1:
            return weights.matrix(own + stored.looked[0], 3 * through, width, bias).parts(3)
        return [weights.matrix(own + each, through, width, bias) for each in stored.looked]

    def block(own: str) -> Block:
        queries, keys, values = seen(own)
        if shape.interleaved:
            queries, keys = (each.halved(shape.heads) for each in (queries, keys))
        sides = ((shape.inner, width), (width, shape.inner), (shape.inner, width))
        up, down, *gate = (weights.matrix(own + each, *side, ffn_bias) for each, side in zip(stored.ffn, sides, strict=False))
        made = Block(tuple(shape.norm(weights, own + each) for each in stored.norms), queries, keys, values,
                     weights.matrix(own + stored.out, width, through, bias), up, down, shape.curve, shape.heads, *gate)
        return replace(made, **more(own))

    return [block(f"{name}{number}.") for number in range(count)]


def run_blocks(blocks: Sequence[Block], x: np.ndarray, pool: WorkerPool, rope: Rope | None = None,
            spans: Sequence[Span] | None = None) -> np.ndarray:
    """Run rows float32 [T, D] through all layers, in place; attention stays within each of the `spans`, by default one of all rows."""
    for block in blocks:
        block.run(x, spans or [(0, len(x))], pool, rope)
    return x
