"""Layers of towers as they are stored, under each family's names, and what goes through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .tower_ops import Activation, Block, Matrix, Norm, Rope, Span, WorkerPool
from .tower_weights import Weights


def qkv_names(name: str, which: Sequence[str] = "qkv") -> tuple[str, ...]:
    """Names that differ in a letter."""
    return tuple(name.format(each) for each in which)


@dataclass(frozen=True)
class LayerNames:
    """What the parts of a layer are called: both norms; what makes queries, keys and values, each by itself or all at once; what follows
    attention; and the FFN's matrices: the first, the last, and of a gated one the gate."""

    norms: tuple[str, ...]
    looked: tuple[str, ...]
    out: str
    ffn: tuple[str, ...]


FUSED_QKV = LayerNames(("norm1", "norm2"), ("attn.qkv",), "attn.proj", ("mlp.fc1", "mlp.fc2"))  # as timm has it
SEPARATE_QKV = LayerNames(("layer_norm1", "layer_norm2"), qkv_names("self_attn.{}_proj"), "self_attn.out_proj", ("mlp.fc1", "mlp.fc2"))


@dataclass(frozen=True)
class LayerShape:
    """Of all layers of a tower: how wide it is, and its FFN; heads, which all have `through` channels together where that is not the
    width; the curve, and what norms add, which are roots of mean squares where they are not `centered`. `bias`: of what attention
    multiplies, and of the FFN: with one, without, or as it is stored. `neighbours`: channels of queries and keys that turn together are
    stored beside each other."""

    width: int
    inner: int
    heads: int
    curve: Activation
    eps: float
    centered: bool = True
    bias: tuple[bool | None, bool | None] = (None, None)
    through: int = 0
    neighbours: bool = False

    def norm(self, weights: Weights, name: str) -> Norm:
        return (weights.layer_norm if self.centered else weights.rms_norm)(name, self.width, self.eps)


def load_blocks(weights: Weights, name: str, count: int, stored: LayerNames, shape: LayerShape,
                looked: Callable[[str], Sequence[Matrix]] | None = None,
                more: Callable[[str], dict[str, object]] = lambda own: {}) -> list[Block]:
    """So many layers, whose tensors begin with `name` and their number. `looked`: what makes queries, keys and values of the layer whose
    tensors begin so, where that is unusual; `more`: what else of a Block that one has."""
    width, through, (bias, ffn_bias) = shape.width, shape.through or shape.width, shape.bias

    def seen(own: str) -> Sequence[Matrix]:
        if looked is not None:
            return looked(own)
        if len(stored.looked) == 1:
            return weights.matrix(own + stored.looked[0], 3 * through, width, bias).parts(3)
        return [weights.matrix(own + each, through, width, bias) for each in stored.looked]

    def block(own: str) -> Block:
        queries, keys, values = seen(own)
        if shape.neighbours:
            queries, keys = (each.halved(shape.heads) for each in (queries, keys))
        sides = ((shape.inner, width), (width, shape.inner), (shape.inner, width))
        up, down, *gate = (weights.matrix(own + each, *side, ffn_bias) for each, side in zip(stored.ffn, sides, strict=False))
        made = Block(tuple(shape.norm(weights, own + each) for each in stored.norms), queries, keys, values,
                     weights.matrix(own + stored.out, width, through, bias), up, down, shape.curve, shape.heads, *gate)
        return replace(made, **more(own))

    return [block(f"{name}{number}.") for number in range(count)]


def run_blocks(blocks: Sequence[Block], x: np.ndarray, pool: WorkerPool, rope: Rope | None = None,
            spans: Sequence[Span] | None = None) -> np.ndarray:
    """Rows float32 [T, D] behind all layers, in place: those of one picture, or of several `spans`."""
    for block in blocks:
        block.run(x, spans or [(0, len(x))], pool, rope)
    return x
