"""Q-Former (Li et al. 2023, BLIP-2, arXiv:2301.12597): learned queries cross-attend to each window of an encoder's rows; their outputs
stand for it. Post-norm layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config_reader import ConfigError, Keys
from ..images.tower_ops import ACTIVATIONS, Activation, Matrix, Norm, WorkerPool, matmul, mlp
from ..images.tower_weights import Weights
from .whisper_encoder import MOST_LAYERS, MOST_WIDTH

USUAL = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "cross_attention_frequency": 2,
         "encoder_hidden_size": 1408, "layer_norm_eps": 1e-12}


@dataclass(frozen=True)
class QFormerSizes:
    """`seen`: width of the rows attended to, in every `often`th layer."""

    width: int
    layers: int
    heads: int
    inner: int
    often: int
    seen: int
    eps: float
    curve: Activation

    @staticmethod
    def read(keys: Keys) -> QFormerSizes:
        keys = Keys({**USUAL, **{key: value for key, value in keys.raw.items() if value is not None}}, keys.where)
        width, heads = keys.integer("hidden_size", high=MOST_WIDTH), keys.integer("num_attention_heads", high=1024)
        if width % heads:
            raise ConfigError(f"{keys.where}: hidden_size {width} is not a multiple of {heads} heads")
        return QFormerSizes(width, keys.integer("num_hidden_layers", high=MOST_LAYERS), heads,
                            keys.integer("intermediate_size", high=1 << 20), keys.integer("cross_attention_frequency", high=MOST_LAYERS),
                            keys.integer("encoder_hidden_size", high=MOST_WIDTH), keys.number("layer_norm_eps"),
                            keys.choice("hidden_act", ACTIVATIONS, "gelu"))


@dataclass(frozen=True)
class Look:
    queries: Matrix
    keys: Matrix
    values: Matrix
    out: Matrix
    after: Norm
    heads: int

    def __call__(self, x: np.ndarray, seen: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Of x [windows, n, D], which look at `seen` [windows, m, K] of their window -> what they are then."""
        def parts(rows: np.ndarray, matrix: Matrix) -> np.ndarray:
            made = matmul(rows.reshape(-1, rows.shape[-1]), matrix, pool)
            return made.reshape(*rows.shape[:2], self.heads, -1).swapaxes(1, 2)

        q, k, v = parts(x, self.queries), parts(seen, self.keys), parts(seen, self.values)
        scores = q @ k.swapaxes(2, 3) * np.float32(q.shape[-1] ** -0.5)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        mixed = (scores @ v).swapaxes(1, 2).reshape(-1, x.shape[-1])
        return self.after(x + matmul(mixed, self.out, pool).reshape(x.shape))


@dataclass(frozen=True)
class QFormerLayer:
    own: Look
    across: Look | None
    up: Matrix
    down: Matrix
    after: Norm
    curve: Activation

    def __call__(self, x: np.ndarray, seen: np.ndarray, pool: WorkerPool) -> np.ndarray:
        x = self.own(x, x, pool)
        if self.across is not None:
            x = self.across(x, seen, pool)
        return self.after(x + mlp(x, self.up, self.down, self.curve, pool))


@dataclass(frozen=True)
class QFormer:
    """`learned` float32 [n, D]: the queries."""

    learned: np.ndarray
    before: Norm
    layers: Sequence[QFormerLayer]

    def __call__(self, seen: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Of windows float32 [windows, m, K] -> [windows, n, D]."""
        return self._through(np.repeat(self.before(self.learned)[None], len(seen), axis=0), seen, pool)

    def asked(self, queries: np.ndarray, seen: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """By rows float32 [windows, n, D] in place of the learned ones."""
        return self._through(self.before(queries), seen, pool)

    def _through(self, x: np.ndarray, seen: np.ndarray, pool: WorkerPool) -> np.ndarray:
        for layer in self.layers:
            x = layer(x, seen, pool)
        return x


def load_q_former(weights: Weights, sizes: QFormerSizes, name: str, count: int, learned: str = "query") -> QFormer:
    """A Q-Former with `count` learned queries, whose tensor names begin with `name`."""
    width, layers = sizes.width, []

    def look(own: str, seen: int) -> Look:
        inside, out = f"{own}.attention.", f"{own}.output."
        return Look(weights.matrix(f"{inside}query", width, width), weights.matrix(f"{inside}key", width, seen),
                    weights.matrix(f"{inside}value", width, seen), weights.matrix(f"{out}dense", width, width),
                    weights.layer_norm(f"{out}LayerNorm", width, sizes.eps), sizes.heads)

    for number in range(sizes.layers):
        own = f"{name}qformer.encoder.layer.{number}."
        layers.append(QFormerLayer(
            look(f"{own}attention", width), None if number % sizes.often else look(f"{own}crossattention", sizes.seen),
            weights.matrix(f"{own}intermediate_query.dense", sizes.inner, width),
            weights.matrix(f"{own}output_query.dense", width, sizes.inner),
            weights.layer_norm(f"{own}output_query.LayerNorm", width, sizes.eps), sizes.curve))
    before = weights.layer_norm(f"{name}qformer.layernorm", width, sizes.eps)
    return QFormer(weights.numbers(f"{name}{learned}", count, width), before, layers)
