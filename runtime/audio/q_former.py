"""Q-Former (Li et al. 2023, BLIP-2, arXiv:2301.12597): learned queries cross-attend to each window of an encoder's rows; their outputs
replace the window's rows. Post-norm layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config_reader import ConfigError, Keys
from ..images.tower_ops import ACTIVATIONS, Activation, Matrix, Norm, WorkerPool, matmul, mlp
from ..images.tower_weights import Weights
from .whisper_encoder import MAX_LAYERS, MAX_WIDTH

CONFIG_DEFAULTS = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "cross_attention_frequency": 2,
    "encoder_hidden_size": 1408, "layer_norm_eps": 1e-12}


@dataclass(frozen=True)
class QFormerSizes:
    """A Q-Former's config."""

    width: int
    layers: int
    heads: int
    ffn_width: int
    cross_attention_every: int  # every so many layers one has cross-attention
    encoder_width: int  # of the rows that are cross-attended to
    eps: float
    activation: Activation

    @staticmethod
    def read(keys: Keys) -> QFormerSizes:
        keys = Keys({**CONFIG_DEFAULTS, **{key: value for key, value in keys.raw.items() if value is not None}}, keys.where)
        width, heads = keys.integer("hidden_size", high=MAX_WIDTH), keys.integer("num_attention_heads", high=1024)
        if width % heads:
            raise ConfigError(f"{keys.where}: hidden_size {width} is not a multiple of {heads} heads")
        return QFormerSizes(width, keys.integer("num_hidden_layers", high=MAX_LAYERS), heads,
                            keys.integer("intermediate_size", high=1 << 20), keys.integer("cross_attention_frequency", high=MAX_LAYERS),
                            keys.integer("encoder_hidden_size", high=MAX_WIDTH), keys.number("layer_norm_eps"),
                            keys.choice("hidden_act", ACTIVATIONS, "gelu"))


@dataclass(frozen=True)
class Attention:
    """Attention with its output projection, residual and norm."""

    queries: Matrix
    keys: Matrix
    values: Matrix
    out: Matrix
    output_norm: Norm
    heads: int

    def __call__(self, x: np.ndarray, context: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """x [windows, n, D] attends to `context` [windows, m, K] of its window -> [windows, n, D]."""

        def split_heads(rows: np.ndarray, matrix: Matrix) -> np.ndarray:
            projected = matmul(rows.reshape(-1, rows.shape[-1]), matrix, pool)
            return projected.reshape(*rows.shape[:2], self.heads, -1).swapaxes(1, 2)

        q, k, v = split_heads(x, self.queries), split_heads(context, self.keys), split_heads(context, self.values)
        scores = q @ k.swapaxes(2, 3) * np.float32(q.shape[-1] ** -0.5)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        outputs = (scores @ v).swapaxes(1, 2).reshape(-1, x.shape[-1])
        return self.output_norm(x + matmul(outputs, self.out, pool).reshape(x.shape))


@dataclass(frozen=True)
class QFormerLayer:
    self_attention: Attention
    cross_attention: Attention | None
    up: Matrix
    down: Matrix
    output_norm: Norm
    activation: Activation

    def __call__(self, x: np.ndarray, context: np.ndarray, pool: WorkerPool) -> np.ndarray:
        x = self.self_attention(x, x, pool)
        if self.cross_attention is not None:
            x = self.cross_attention(x, context, pool)
        return self.output_norm(x + mlp(x, self.up, self.down, self.activation, pool))


@dataclass(frozen=True)
class QFormer:
    """Layers with the queries they were trained with."""

    learned: np.ndarray  # queries, float32 [n, D]
    input_norm: Norm
    layers: Sequence[QFormerLayer]

    def __call__(self, windows: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Windows of encoder rows float32 [windows, m, K] -> [windows, n, D]."""
        return self._run_layers(np.repeat(self.input_norm(self.learned)[None], len(windows), axis=0), windows, pool)

    def with_queries(self, queries: np.ndarray, windows: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """As `__call__`, with other queries, float32 [windows, n, D], in place of the learned ones."""
        return self._run_layers(self.input_norm(queries), windows, pool)

    def _run_layers(self, x: np.ndarray, windows: np.ndarray, pool: WorkerPool) -> np.ndarray:
        for layer in self.layers:
            x = layer(x, windows, pool)
        return x


def load_q_former(weights: Weights, sizes: QFormerSizes, name: str, num_queries: int, queries_name: str = "query") -> QFormer:
    """A Q-Former with `num_queries` learned queries, whose tensor names begin with `name`."""
    width, layers = sizes.width, []

    def attention(prefix: str, input_width: int) -> Attention:
        base, out = f"{prefix}.attention.", f"{prefix}.output."
        return Attention(weights.matrix(f"{base}query", width, width), weights.matrix(f"{base}key", width, input_width),
                         weights.matrix(f"{base}value", width, input_width), weights.matrix(f"{out}dense", width, width),
                         weights.layer_norm(f"{out}LayerNorm", width, sizes.eps), sizes.heads)

    for number in range(sizes.layers):
        prefix = f"{name}qformer.encoder.layer.{number}."
        has_cross_attention = number % sizes.cross_attention_every == 0
        layers.append(QFormerLayer(
            attention(f"{prefix}attention", width),
            attention(f"{prefix}crossattention", sizes.encoder_width) if has_cross_attention else None,
            weights.matrix(f"{prefix}intermediate_query.dense", sizes.ffn_width, width),
            weights.matrix(f"{prefix}output_query.dense", width, sizes.ffn_width),
            weights.layer_norm(f"{prefix}output_query.LayerNorm", width, sizes.eps), sizes.activation))
    input_norm = weights.layer_norm(f"{name}qformer.layernorm", width, sizes.eps)
    return QFormer(weights.numbers(f"{name}{queries_name}", num_queries, width), input_norm, layers)
