"""Forward pass of encoders: a batch of texts without padding, layers with full attention within each text, in float32.

Texts of a batch are concatenated, shortest first, so texts of equal length form a block [texts, tokens] whose attention is one batched
matmul. Everything else works on rows, whichever text they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from ..images.tower_ops import QUERIES, ROWS, SHORT, Activation, Float32Matrix, Norm, WorkerPool, to_float32
from .experts import Experts
from .relative_bias import Disentangled, RelativeBias, disentangled_rows, leanings, sloping

Piece = Callable[[], None]
FEW = 96  # tokens, up to which a thread has its part of each matrix, not of the tokens: then weights are read once by all, not once by each


@dataclass(frozen=True)
class Batch:
    """Texts ordered by length. Per token, int64 [N]: `ids`, `places` (position in its text), `types`. `blocks`: (first row, texts, tokens
    of each)."""

    ids: np.ndarray
    places: np.ndarray
    types: np.ndarray
    blocks: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Batch:
        """`texts`: token ids of each, none empty, the shortest first."""
        lengths = [len(each) for each in texts]
        blocks, first = [], 0
        for length, alike in groupby(lengths):
            blocks.append((first, count := len([*alike]), length))
            first += count * length
        flat = np.concatenate([np.asarray(each, np.int64) for each in texts])
        kinds = np.zeros_like(flat) if types is None else np.concatenate([np.asarray(each, np.int64) for each in types])
        return cls(flat, np.concatenate([np.arange(length) for length in lengths]), kinds, tuple(blocks))

    @property
    def texts(self) -> list[slice]:
        """The rows of each text."""
        return [slice(first + at * length, first + (at + 1) * length) for first, count, length in self.blocks for at in range(count)]

    @property
    def longest(self) -> int:
        return self.blocks[-1][2]


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: `cos` and `sin` float32 [places, d]."""

    cos: np.ndarray
    sin: np.ndarray

    @classmethod
    def of(cls, theta: float, depth: int, places: int, slower: float = 1.0) -> Rotary:
        """`slower`: divisor of all angles."""
        steps = np.float32(1 / slower) / np.float32(theta) ** (np.arange(0, depth, 2, dtype=np.float32) / np.float32(depth))
        angles = np.tile(np.arange(places, dtype=np.float32)[:, None] * steps, 2)
        return cls(np.cos(angles), np.sin(angles))

    def turn(self, x: np.ndarray, places: np.ndarray) -> None:
        """Rotate x [rows, parts, heads, d] in place."""
        half = x.shape[-1] // 2
        other = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
        x *= self.cos[places][:, None, None]
        x += other * self.sin[places][:, None, None]


@dataclass(frozen=True)
class Layer:
    """One layer. `qkv`: fused query, key and value projection. `norms`: of attention and of the FFN, after the residual in post-norm
    models; the first may be None. `gate`: of a gated FFN. `theta`: RoPE base; `window`: attention window. `experts`: in place of `up` and
    `down`. `qk_norms`: over all heads. `again`: a second norm after attention, of its output and the layer's input (Jina's code model).
    `of_distances`: relative position keys and queries, float32 [heads, rows, d] each (DeBERTa)."""

    qkv: Float32Matrix
    out: Float32Matrix
    up: Float32Matrix | None
    down: Float32Matrix | None
    norms: tuple[Norm | None, Norm]
    gate: Float32Matrix | None = None
    theta: float | None = None
    window: int | None = None
    experts: Experts | None = None
    qk_norms: tuple[Norm, Norm] | None = None
    again: Norm | None = None
    of_distances: tuple[np.ndarray, np.ndarray] | None = None

    def projected(self, y: np.ndarray) -> np.ndarray:
        """Queries, keys and values of rows, QK norms applied; in place."""
        if self.qk_norms is not None:
            width = y.shape[1] // 3
            for number, norm in enumerate(self.qk_norms):
                own = slice(number * width, (number + 1) * width)
                y[:, own] = norm(y[:, own])
        return y

    def attended(self, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Rows after attention and its residual, with post-norms applied."""
        y = self.norms[0](y)
        if self.again is None:
            return y
        y += x
        return self.again(y)


@dataclass(frozen=True)
class Stack:
    """An encoder without its head. Tables are kept as stored. `distances`: float32 [heads, buckets], relative position bias (MPNet).
    `slopes`: float32 [heads] (ALiBi). `spans`: arguments of `disentangled_rows` (DeBERTa). `slower`: divisor of RoPE angles (GTE).
    `widened_by`: projection of factorized embeddings (ELECTRA). `beside`: a task's low-rank adapter of `embed`: table as stored, and
    matrix."""

    embed: np.ndarray
    positions: np.ndarray | None
    types: np.ndarray | None
    embed_norm: Norm | None
    layers: tuple[Layer, ...]
    curve: Activation
    heads: int
    norms_first: bool = False
    last_norm: Norm | None = None
    position_offset: int = 0
    pad_id: int | None = None
    distances: np.ndarray | None = None
    slopes: np.ndarray | None = None
    spans: tuple[int, int] | None = None
    slower: float = 1.0
    widened_by: Float32Matrix | None = None
    beside: tuple[np.ndarray, np.ndarray] | None = None

    def states(self, batch: Batch, pool: WorkerPool) -> np.ndarray:
        """Hidden states after the last layer, float32 [N, D]. Raises EncodingCancelled."""
        x = self._entered(batch)
        depth = x.shape[1] // self.heads
        thetas = {layer.theta for layer in self.layers} - {None}
        turns = {theta: Rotary.of(theta, depth, batch.longest, self.slower) for theta in thetas}
        same = self._distances(batch.longest)
        rows = None if self.spans is None else disentangled_rows(*self.spans, batch.longest)
        for layer in self.layers:
            apart = same if layer.of_distances is None else Disentangled(*layer.of_distances, rows)
            self._through(layer, x, batch, pool, turns.get(layer.theta), apart)
            pool.job.done += 1
        return x if self.last_norm is None else self.last_norm(x)

    def _distances(self, longest: int) -> RelativeBias | None:
        """The relative bias that all layers share."""
        if self.slopes is not None:
            return sloping(self.slopes, longest)
        return None if self.distances is None else leanings(self.distances, longest)

    def _entered(self, batch: Batch) -> np.ndarray:
        x = to_float32(self.embed[batch.ids]).copy()
        if self.beside is not None:
            narrow, wide = self.beside
            x += to_float32(narrow[batch.ids]) @ wide
        if self.types is not None:
            x += to_float32(self.types[np.minimum(batch.types, len(self.types) - 1)])
        if self.positions is not None:
            x += to_float32(self.positions[self._rows(batch)])
        x = x if self.embed_norm is None else self.embed_norm(x)
        return x if self.widened_by is None else self.widened_by(x)

    def _rows(self, batch: Batch) -> np.ndarray:
        """Rows of the position table."""
        if self.pad_id is None or not (batch.ids == self.pad_id).any():
            return batch.places + self.position_offset
        made = np.empty_like(batch.places)
        for rows in batch.texts:  # one that is written in a text has the place of what pads, and counts for no other
            real = batch.ids[rows] != self.pad_id
            made[rows] = np.cumsum(real) * real + self.position_offset - 1
        return made

    def _through(self, layer: Layer, x: np.ndarray, batch: Batch, pool: WorkerPool, rotary: Rotary | None,
                 apart: RelativeBias | None) -> None:
        """Run a layer, in place."""
        tokens, width = x.shape
        made, seen = np.empty((tokens, 3, self.heads, width // self.heads), np.float32), np.empty((tokens, width), np.float32)
        if tokens <= FEW:
            self._few_through(layer, x, made, seen, batch, pool, rotary, apart)
            return
        first, second = layer.norms

        def project(rows: slice) -> None:
            y = layer.qkv(x[rows] if first is None or not self.norms_first else first(x[rows]))
            made[rows] = layer.projected(y).reshape(-1, *made.shape[1:])
            if rotary is not None:
                rotary.turn(made[rows, :2], batch.places[rows])

        def feed(h: np.ndarray) -> np.ndarray:
            if layer.experts is not None:
                return layer.experts(h)
            inner = self.curve(layer.up(h)) if layer.gate is None else self.curve(layer.gate(h)) * layer.up(h)
            return layer.down(inner)

        def rest(rows: slice) -> None:
            y = layer.out(seen[rows])
            y += x[rows]
            if not self.norms_first:
                y = layer.attended(y, x[rows])
            fed = feed(second(y) if self.norms_first else y)
            fed += y
            x[rows] = fed if self.norms_first else second(fed)

        pool.each(project, tokens)
        pool.all(encoder_attention(made, seen, batch.blocks, layer.window, apart))
        pool.each(rest, tokens)

    def _few_through(self, layer: Layer, x: np.ndarray, made: np.ndarray, seen: np.ndarray, batch: Batch, pool: WorkerPool,
                     rotary: Rotary | None, apart: RelativeBias | None) -> None:
        """`_through` for few tokens, parallel over output columns. Fills `made` [N, 3, heads, d] and `seen` [N, D]."""
        (tokens, width), depth, (first, second) = x.shape, made.shape[-1], layer.norms

        def product(matrix: Float32Matrix, h: np.ndarray, after: Callable[[np.ndarray, slice], np.ndarray] | None = None) -> np.ndarray:
            y = np.empty((tokens, matrix.weight.shape[1]), np.float32)

            def part(which: slice) -> None:
                own = matrix.columns(which)(h)
                y[:, which] = own if after is None else after(own, which)

            pool.all([partial(part, which) for which in pool.shares(y.shape[1])])
            return y

        def heads(which: slice) -> None:
            for number in range(3 if layer.qk_norms is None else 0):
                columns = slice(number * width + which.start * depth, number * width + which.stop * depth)
                made[:, number, which] = layer.qkv.columns(columns)(entered).reshape(tokens, -1, depth)
            if rotary is not None:
                rotary.turn(made[:, :2, which], batch.places)
            for look in encoder_attention(made[:, :, which], seen[:, which.start * depth : which.stop * depth], batch.blocks, layer.window,
                              None if apart is None else apart.of(which)):
                look()

        def curved(own: np.ndarray, which: slice) -> np.ndarray:
            return self.curve(own) if layer.gate is None else self.curve(layer.gate.columns(which)(h)) * own

        entered = x if first is None or not self.norms_first else first(x)
        if layer.qk_norms is not None:  # which need all heads
            made[:] = layer.projected(product(layer.qkv, entered)).reshape(made.shape)
        pool.all([partial(heads, which) for which in pool.shares(self.heads)])
        y = product(layer.out, seen)
        y += x
        if not self.norms_first:
            y = layer.attended(y, x)
        h = second(y) if self.norms_first else y
        fed = product(layer.down, product(layer.up, h, curved)) if layer.experts is None else layer.experts(h, pool)
        fed += y
        x[:] = fed if self.norms_first else second(fed)


def encoder_attention(made: np.ndarray, out: np.ndarray, blocks: Sequence[tuple[int, int, int]], window: int | None = None,
          distances: RelativeBias | None = None) -> list[Piece]:
    """Tasks that compute attention within each text: `made` [N, 3, heads, d] -> `out` [N, heads * d]. `window`: to either side."""
    _, _, heads, depth = made.shape
    scale = np.float32((depth * (1 if distances is None else distances.terms)) ** -0.5)

    def look(which: slice, texts: np.ndarray, to: np.ndarray, rows: slice, seen: slice) -> None:
        """Of texts [texts, tokens, 3, heads, d] queries in `rows` see keys in `seen`."""
        q, k, v = (texts[:, part, number, which].swapaxes(1, 2) for number, part in enumerate((rows, seen, seen)))
        scores = q @ k.swapaxes(2, 3)
        scores *= scale
        apart = np.arange(seen.start, seen.stop) - np.arange(rows.start, rows.stop)[:, None]
        if distances is not None:
            distances.add(scores, q, k, apart, which)
        if window is not None and np.abs(apart).max() > window:
            scores[..., np.abs(apart) > window] = -np.inf
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ v
        mixed /= scores.sum(-1, keepdims=True)
        to[:, rows, which] = mixed.swapaxes(1, 2)

    def of_head(head: slice, texts: np.ndarray, to: np.ndarray) -> None:
        """A long text, some queries at a time."""
        length = texts.shape[1]
        for begin in range(0, length, QUERIES):
            end = min(begin + QUERIES, length)
            seen = slice(0, length) if window is None else slice(max(0, begin - window), min(length, end + window))
            look(head, texts, to, slice(begin, end), seen)

    work: list[Piece] = []
    for first, count, length in blocks:
        rows = slice(first, first + count * length)
        texts, to = made[rows].reshape(count, length, 3, heads, depth), out[rows].reshape(count, length, heads, depth)
        if length <= SHORT:
            step, whole = max(1, ROWS // length), slice(0, length)
            work += [partial(look, slice(None), texts[at : at + step], to[at : at + step], whole, whole) for at in range(0, count, step)]
            continue
        for number in range(count):
            for head in range(heads):
                work.append(partial(of_head, slice(head, head + 1), texts[number : number + 1], to[number : number + 1]))
    return work
