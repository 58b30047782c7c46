"""Forward pass of encoders: a batch of texts without padding, layers with full attention within each text, in float32.

Texts of a batch are concatenated, shortest first, so texts of equal length form a block [texts, tokens] whose attention is one batched
matmul. Everything else works on rows, regardless of their text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from ..images.tower_ops import QUERIES, ROWS, SHORT, Activation, Float32Matrix, Norm, WorkerPool, to_float32
from .experts import Experts
from .relative_bias import Disentangled, RelativeBias, alibi_bias, bucketed_bias, disentangled_rows

Task = Callable[[], None]
# Up to this number of tokens, threads divide the columns of matrices instead of the tokens, so that weights are read once, not per thread.
COLUMN_SPLIT_TOKENS = 96


@dataclass(frozen=True)
class Batch:
    """Concatenated texts, ordered by length."""

    ids: np.ndarray  # token ids, int64 [N]
    positions: np.ndarray  # of tokens in their texts, int64 [N]
    types: np.ndarray  # token types, int64 [N]
    blocks: tuple[tuple[int, int, int], ...]  # texts of equal length: (first row, number of texts, tokens of each)

    @classmethod
    def from_texts(cls, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Batch:
        """From the token ids of each text, none empty, the shortest first."""
        lengths = [len(text) for text in texts]
        blocks, first = [], 0
        for length, group in groupby(lengths):
            blocks.append((first, count := len([*group]), length))
            first += count * length
        flat = np.concatenate([np.asarray(text, np.int64) for text in texts])
        token_types = np.zeros_like(flat) if types is None else np.concatenate([np.asarray(text, np.int64) for text in types])
        return cls(flat, np.concatenate([np.arange(length) for length in lengths]), token_types, tuple(blocks))

    @property
    def texts(self) -> list[slice]:
        """The rows of each text."""
        return [slice(begin, begin + length) for first, count, length in self.blocks
                for begin in range(first, first + count * length, length)]

    @property
    def max_length(self) -> int:
        return self.blocks[-1][2]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings."""

    cos: np.ndarray  # float32 [positions, d]
    sin: np.ndarray

    @classmethod
    def from_theta(cls, theta: float, head_dim: int, num_positions: int, divisor: float = 1.0) -> Rotary:
        """Tables of `num_positions`; all angles are divided by `divisor`."""
        frequencies = np.float32(1 / divisor) / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
        angles = np.tile(np.arange(num_positions, dtype=np.float32)[:, None] * frequencies, 2)
        return cls(np.cos(angles), np.sin(angles))

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> None:
        """Rotate x [rows, parts, heads, d] in place."""
        half = x.shape[-1] // 2
        rotated = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
        x *= self.cos[positions][:, None, None]
        x += rotated * self.sin[positions][:, None, None]


@dataclass(frozen=True)
class Layer:
    """Weights of a layer."""

    qkv: Float32Matrix  # fused query, key and value projections
    out: Float32Matrix
    up: Float32Matrix | None  # None with experts, as is `down`
    down: Float32Matrix | None
    norms: tuple[Norm | None, Norm]  # of attention and of the FFN; in post-norm models after the residual
    gate: Float32Matrix | None = None  # of a gated FFN
    theta: float | None = None  # RoPE base
    window: int | None = None  # attention window to either side
    experts: Experts | None = None
    qk_norms: tuple[Norm, Norm] | None = None  # of queries and keys, over all heads
    second_attention_norm: Norm | None = None  # of attention's normed output plus the layer's input (Jina's code model)
    relative_positions: tuple[np.ndarray, np.ndarray] | None = None  # keys and queries, float32 [heads, rows, d] each (DeBERTa)

    def normalize_qk(self, y: np.ndarray) -> np.ndarray:
        """Apply QK norms, in place, to rows of concatenated queries, keys and values."""
        if self.qk_norms is not None:
            width = y.shape[1] // 3
            for number, norm in enumerate(self.qk_norms):
                columns = slice(number * width, (number + 1) * width)
                y[:, columns] = norm(y[:, columns])
        return y

    def finish_attention(self, attended: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Post-norms of attention's output plus residual. `x`: the layer's input."""
        attended = self.norms[0](attended)
        if self.second_attention_norm is None:
            return attended
        attended += x
        return self.second_attention_norm(attended)


@dataclass(frozen=True)
class Stack:
    """An encoder without its head. Embedding tables are kept as stored."""

    embed: np.ndarray  # token embeddings
    positions: np.ndarray | None  # position embeddings
    types: np.ndarray | None  # token type embeddings
    embed_norm: Norm | None
    layers: tuple[Layer, ...]
    activation: Activation
    heads: int
    pre_norm: bool = False
    output_norm: Norm | None = None
    position_offset: int = 0
    pad_id: int | None = None
    relative_bias: np.ndarray | None = None  # relative position bias, float32 [heads, buckets] (MPNet)
    alibi_slopes: np.ndarray | None = None  # float32 [heads]
    disentangled_span: tuple[int, int] | None = None  # first arguments of `disentangled_rows` (DeBERTa)
    rope_divisor: float = 1.0  # of RoPE angles (GTE)
    embedding_projection: Float32Matrix | None = None  # of factorized embeddings (ELECTRA)
    embedding_adapter: tuple[np.ndarray, np.ndarray] | None = None  # a task's LoRA of `embed`: table as stored, and matrix

    def states(self, batch: Batch, pool: WorkerPool) -> np.ndarray:
        """Hidden states after the last layer, float32 [N, D]. Raises EncodingCancelled."""
        x = self._embed(batch)
        head_dim = x.shape[1] // self.heads
        thetas = {layer.theta for layer in self.layers} - {None}
        rotaries = {theta: Rotary.from_theta(theta, head_dim, batch.max_length, self.rope_divisor) for theta in thetas}
        shared_bias = self._shared_bias(batch.max_length)
        rows = None if self.disentangled_span is None else disentangled_rows(*self.disentangled_span, batch.max_length)
        for layer in self.layers:
            bias = shared_bias if layer.relative_positions is None else Disentangled(*layer.relative_positions, rows)
            self._run_layer(layer, x, batch, pool, rotaries.get(layer.theta), bias)
            pool.job.done += 1
        return x if self.output_norm is None else self.output_norm(x)

    def _shared_bias(self, max_length: int) -> RelativeBias | None:
        """The relative position bias that all layers share, None if there is none."""
        if self.alibi_slopes is not None:
            return alibi_bias(self.alibi_slopes, max_length)
        return None if self.relative_bias is None else bucketed_bias(self.relative_bias, max_length)

    def _embed(self, batch: Batch) -> np.ndarray:
        x = to_float32(self.embed[batch.ids]).copy()
        if self.embedding_adapter is not None:
            down, up = self.embedding_adapter
            x += to_float32(down[batch.ids]) @ up
        if self.types is not None:
            x += to_float32(self.types[np.minimum(batch.types, len(self.types) - 1)])
        if self.positions is not None:
            x += to_float32(self.positions[self._position_rows(batch)])
        x = x if self.embed_norm is None else self.embed_norm(x)
        return x if self.embedding_projection is None else self.embedding_projection(x)

    def _position_rows(self, batch: Batch) -> np.ndarray:
        """Row of the position table for each token."""
        if self.pad_id is None or not (batch.ids == self.pad_id).any():
            return batch.positions + self.position_offset
        positions = np.empty_like(batch.positions)
        for rows in batch.texts:  # padding tokens within a text have the padding row, and do not count for others
            is_text = batch.ids[rows] != self.pad_id
            positions[rows] = np.cumsum(is_text) * is_text + self.position_offset - 1
        return positions

    def _run_layer(self, layer: Layer, x: np.ndarray, batch: Batch, pool: WorkerPool, rotary: Rotary | None,
                   bias: RelativeBias | None) -> None:
        """Run a layer in place on x float32 [N, D]."""
        tokens, width = x.shape
        qkv, attended = np.empty((tokens, 3, self.heads, width // self.heads), np.float32), np.empty((tokens, width), np.float32)
        if tokens <= COLUMN_SPLIT_TOKENS:
            self._run_layer_by_columns(layer, x, qkv, attended, batch, pool, rotary, bias)
            return
        attention_norm, ffn_norm = layer.norms

        def project(rows: slice) -> None:
            y = layer.qkv(x[rows] if attention_norm is None or not self.pre_norm else attention_norm(x[rows]))
            qkv[rows] = layer.normalize_qk(y).reshape(-1, *qkv.shape[1:])
            if rotary is not None:
                rotary.rotate(qkv[rows, :2], batch.positions[rows])

        def ffn(h: np.ndarray) -> np.ndarray:
            if layer.experts is not None:
                return layer.experts(h)
            hidden = self.activation(layer.up(h)) if layer.gate is None else self.activation(layer.gate(h)) * layer.up(h)
            return layer.down(hidden)

        def finish(rows: slice) -> None:
            y = layer.out(attended[rows])
            y += x[rows]
            if not self.pre_norm:
                y = layer.finish_attention(y, x[rows])
            output = ffn(ffn_norm(y) if self.pre_norm else y)
            output += y
            x[rows] = output if self.pre_norm else ffn_norm(output)

        pool.each(project, tokens)
        pool.all(encoder_attention(qkv, attended, batch.blocks, layer.window, bias))
        pool.each(finish, tokens)

    def _run_layer_by_columns(self, layer: Layer, x: np.ndarray, qkv: np.ndarray, attended: np.ndarray, batch: Batch, pool: WorkerPool,
                              rotary: Rotary | None, bias: RelativeBias | None) -> None:
        """`_run_layer` for few tokens, parallel over output columns. Fills `qkv` [N, 3, heads, d] and `attended` [N, D]."""
        (tokens, width), head_dim, (attention_norm, ffn_norm) = x.shape, qkv.shape[-1], layer.norms

        def product(matrix: Float32Matrix, h: np.ndarray, after: Callable[[np.ndarray, slice], np.ndarray] | None = None) -> np.ndarray:
            y = np.empty((tokens, matrix.weight.shape[1]), np.float32)

            def run_columns(which: slice) -> None:
                y_part = matrix.columns(which)(h)
                y[:, which] = y_part if after is None else after(y_part, which)

            pool.all([partial(run_columns, which) for which in pool.shares(y.shape[1])])
            return y

        def attend_heads(which: slice) -> None:
            for number in range(3 if layer.qk_norms is None else 0):
                columns = slice(number * width + which.start * head_dim, number * width + which.stop * head_dim)
                qkv[:, number, which] = layer.qkv.columns(columns)(normed).reshape(tokens, -1, head_dim)
            if rotary is not None:
                rotary.rotate(qkv[:, :2, which], batch.positions)
            out = attended[:, which.start * head_dim : which.stop * head_dim]
            heads_bias = None if bias is None else bias.for_heads(which)
            for task in encoder_attention(qkv[:, :, which], out, batch.blocks, layer.window, heads_bias):
                task()

        def activate(y_part: np.ndarray, which: slice) -> np.ndarray:
            return self.activation(y_part) if layer.gate is None else self.activation(layer.gate.columns(which)(h)) * y_part

        normed = x if attention_norm is None or not self.pre_norm else attention_norm(x)
        if layer.qk_norms is not None:  # they need all heads
            qkv[:] = layer.normalize_qk(product(layer.qkv, normed)).reshape(qkv.shape)
        pool.all([partial(attend_heads, which) for which in pool.shares(self.heads)])
        y = product(layer.out, attended)
        y += x
        if not self.pre_norm:
            y = layer.finish_attention(y, x)
        h = ffn_norm(y) if self.pre_norm else y
        output = product(layer.down, product(layer.up, h, activate)) if layer.experts is None else layer.experts(h, pool)
        output += y
        x[:] = output if self.pre_norm else ffn_norm(output)


def encoder_attention(qkv: np.ndarray, out: np.ndarray, blocks: Sequence[tuple[int, int, int]], window: int | None = None,
                      bias: RelativeBias | None = None) -> list[Task]:
    """Tasks that compute attention within each text: `qkv` [N, 3, heads, d] -> `out` [N, heads * d].

    blocks: as of `Batch`
    window: attention window to either side, None for full attention
    """
    _, _, heads, head_dim = qkv.shape
    scale = np.float32((head_dim * (1 if bias is None else bias.num_terms)) ** -0.5)

    def attend(heads_slice: slice, texts: np.ndarray, outputs: np.ndarray, rows: slice, keys: slice) -> None:
        """Queries `rows` attend to keys `keys`, in each of texts [texts, tokens, 3, heads, d]."""
        q, k, v = (texts[:, part, number, heads_slice].swapaxes(1, 2) for number, part in enumerate((rows, keys, keys)))
        scores = q @ k.swapaxes(2, 3)
        scores *= scale
        distance = np.arange(keys.start, keys.stop) - np.arange(rows.start, rows.stop)[:, None]
        if bias is not None:
            bias.add(scores, q, k, distance, heads_slice)
        if window is not None and np.abs(distance).max() > window:
            scores[..., np.abs(distance) > window] = -np.inf
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        y = scores @ v
        y /= scores.sum(-1, keepdims=True)
        outputs[:, rows, heads_slice] = y.swapaxes(1, 2)

    def attend_long(head: slice, texts: np.ndarray, outputs: np.ndarray) -> None:
        """Attention of one head in a long text, some queries at a time."""
        length = texts.shape[1]
        for begin in range(0, length, QUERIES):
            end = min(begin + QUERIES, length)
            keys = slice(0, length) if window is None else slice(max(0, begin - window), min(length, end + window))
            attend(head, texts, outputs, slice(begin, end), keys)

    tasks: list[Task] = []
    for first, count, length in blocks:
        rows = slice(first, first + count * length)
        texts, outputs = qkv[rows].reshape(count, length, 3, heads, head_dim), out[rows].reshape(count, length, heads, head_dim)
        if length <= SHORT:
            step, all_rows = max(1, ROWS // length), slice(0, length)
            for index in range(0, count, step):
                group = slice(index, index + step)
                tasks.append(partial(attend, slice(None), texts[group], outputs[group], all_rows, all_rows))
            continue
        for number in range(count):
            for head in range(heads):
                tasks.append(partial(attend_long, slice(head, head + 1), texts[number : number + 1], outputs[number : number + 1]))
    return tasks
