"""Building blocks of towers: matmuls, norms, activations, rotary embeddings and bidirectional attention, in float32 with NumPy.

Work is split into blocks of a few hundred rows, each done by one thread with single-threaded BLAS. So elementwise steps (norms,
activations, softmax) run in parallel too, and neither a full attention matrix nor the FFN activations of all patches exist in memory.
Weights stay as stored, bfloat16 included, and are converted when a layer runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from types import TracebackType

import numpy as np

from ...kernels.blas import one_thread
from . import EncodingJob

ROWS = 384  # rows per task, about
SHORT = 256  # span length up to which all heads are one task
QUERIES = 128  # query rows per score matrix
BATCH_PATCHES = 4096  # patches per batch, unless a single tile has more

Activation = Callable[[np.ndarray], np.ndarray]
Span = tuple[int, int]  # [begin, end) of patches that attend to each other


class WorkerPool:
    """Threads that share rows among them until `job` is cancelled. A context manager; only one is active at a time, because the BLAS
    thread count is global to the process."""

    _entered = Lock()

    def __init__(self, threads: int, job: EncodingJob) -> None:
        self._threads, self._pool, self._blas, self.job = threads, ThreadPoolExecutor(threads, "tower"), one_thread(), job

    def each(self, do: Callable[[slice], None], count: int) -> None:
        """Call `do` on slices of `count` rows, evenly spread over the threads."""
        turns = max(1, round(count / (self._threads * ROWS)))
        step = max(1, -(-count // (self._threads * turns)))
        self.all([lambda begin=begin: do(slice(begin, min(begin + step, count))) for begin in range(0, count, step)])

    def shares(self, count: int) -> list[slice]:
        """One slice of `count` columns, or heads, per thread."""
        step = -(-count // self._threads)
        return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def groups(self, parts: Sequence[np.ndarray], few: int, layers: int) -> list[Sequence[np.ndarray]]:
        """Split the tiles of an image into batches of `few`, each of which runs through `layers`; adds them to the total work."""
        found = [parts[at : at + max(1, few)] for at in range(0, len(parts), max(1, few))]
        self.job.total += len(found) * layers
        return found

    def all(self, pieces: Sequence[Callable[[], None]]) -> None:
        """Run tasks in parallel. Raises EncodingCancelled, also midway."""
        def one(piece: Callable[[], None]) -> None:
            self.job.raise_if_cancelled()
            with np.errstate(over="ignore", invalid="ignore"):  # damaged weights are detected by the caller
                piece()

        here = pieces[-1:] if len(pieces) <= self._threads else ()  # waking a thread takes as long as a small task
        begun = [self._pool.submit(one, each) for each in pieces[: len(pieces) - len(here)]]
        for each in here:
            one(each)
        for done in begun:
            done.result()

    def __enter__(self) -> WorkerPool:
        self._entered.acquire()
        self._blas.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._blas.__exit__(kind, error, trace)
        self._entered.release()


def to_float32(stored: np.ndarray) -> np.ndarray:
    """Weights as float32; bfloat16 is stored as uint16."""
    if stored.dtype != np.uint16:
        return stored.astype(np.float32, copy=False)
    wide = stored.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


@dataclass(frozen=True)
class Matrix:
    """`stored` [N, K] float32, float16, or bfloat16 as uint16; `bias` float32 [N] or None. `limits`: (min, max) of inputs and (min, max) of
    outputs, which are clipped."""

    stored: np.ndarray
    bias: np.ndarray | None = None
    limits: tuple[float, float, float, float] | None = None

    def to_float32(self) -> Float32Matrix:
        return Float32Matrix(to_float32(self.stored).T, self.bias, self.limits)

    def parts(self, count: int) -> list[Matrix]:
        """Split along the output dimension, e.g. a fused QKV matrix."""
        biases = [None] * count if self.bias is None else np.split(self.bias, count)
        return [Matrix(stored, bias) for stored, bias in zip(np.split(self.stored, count), biases, strict=True)]

    def halved(self, heads: int) -> Matrix:
        """De-interleave rotary pairs of queries or keys: adjacent channels become half a head apart."""
        order = np.arange(len(self.stored)).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return Matrix(np.ascontiguousarray(self.stored[order]), None if self.bias is None else self.bias[order])

    def shared(self, groups: int, heads: int) -> Matrix:
        """Repeat keys or values of grouped-query attention for each head."""
        def spread(rows: np.ndarray) -> np.ndarray:
            return np.repeat(rows.reshape(groups, -1, *rows.shape[1:]), heads // groups, axis=0).reshape(-1, *rows.shape[1:])

        return Matrix(spread(self.stored), None if self.bias is None else spread(self.bias))


@dataclass(frozen=True)
class Float32Matrix:
    """A matrix [K, N], converted to float32."""

    weight: np.ndarray
    bias: np.ndarray | None
    limits: tuple[float, float, float, float] | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = (x if self.limits is None else np.clip(x, *self.limits[:2])) @ self.weight
        if self.bias is not None:
            y += self.bias
        return y if self.limits is None else np.clip(y, *self.limits[2:], out=y)

    def columns(self, which: slice) -> Float32Matrix:
        """The part that computes these outputs."""
        return Float32Matrix(self.weight[:, which], None if self.bias is None else self.bias[which], self.limits)


@dataclass(frozen=True)
class Norm:
    """Layer norm where `centered`, else RMS norm."""

    weight: np.ndarray
    bias: np.ndarray | None
    eps: float
    centered: bool = True

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = x - x.mean(-1, keepdims=True, dtype=np.float32) if self.centered else x.copy()
        y /= np.sqrt(np.einsum("...d,...d->...", y, y)[..., None] / np.float32(x.shape[-1]) + np.float32(self.eps))
        y *= self.weight
        if self.bias is not None:
            y += self.bias
        return y

    def over(self, x: np.ndarray, pool: WorkerPool) -> None:
        """Normalize rows x float32 [T, D] in place."""
        def norm(rows: slice) -> None:
            x[rows] = self(x[rows])

        pool.each(norm, len(x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    y = x * x
    y *= 0.044715 * 0.7978845608028654
    y += 0.7978845608028654
    y *= x
    np.tanh(y, out=y)
    y += 1
    y *= x
    y *= 0.5
    return y


def gelu(x: np.ndarray) -> np.ndarray:
    """Exact GELU, with a rational approximation of erf (Abramowitz and Stegun 7.1.26) within 1.5e-7."""
    z = np.abs(x)
    z *= 0.7071067811865476
    t = 1 / (1 + np.float32(0.3275911) * z)
    tail = t * np.float32(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail += np.float32(factor)
        tail *= t
    np.multiply(z, z, out=z)
    np.negative(z, out=z)
    tail *= np.exp(z, out=z)
    return np.float32(0.5) * x * (1 + np.copysign(1 - tail, x))


def sigmoid_times(x: np.ndarray, steepness: float) -> np.ndarray:
    y = x * np.float32(-steepness)
    with np.errstate(over="ignore"):
        np.exp(y, out=y)
    y += 1
    return np.divide(x, y, out=y)


def silu(x: np.ndarray) -> np.ndarray:
    return sigmoid_times(x, 1.0)


def quick_gelu(x: np.ndarray) -> np.ndarray:
    return sigmoid_times(x, 1.702)


ACTIVATIONS: dict[str, Activation] = {"gelu": gelu, "gelu_pytorch_tanh": gelu_tanh, "gelu_new": gelu_tanh, "quick_gelu": quick_gelu,
                                      "silu": silu,
                            "relu": lambda x: np.maximum(x, 0)}


def inverse_frequencies(theta: float, pairs: int) -> np.ndarray:
    """Rotation angle per position of each channel pair, float32 [pairs]."""
    return (1 / theta ** (np.arange(pairs, dtype=np.float32) / np.float32(pairs))).astype(np.float32)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of patches: `cos` and `sin` float32 [T, d] rotate halves of a head, or of its first d channels."""

    cos: np.ndarray
    sin: np.ndarray

    @classmethod
    def of(cls, half: np.ndarray) -> Rope:
        """From angles of half a head, float32 [T, d / 2]."""
        angles = np.concatenate([half, half], axis=1)
        return cls(np.cos(angles), np.sin(angles))

    def times(self, count: int) -> Rope:
        """Repeated for `count` tiles in sequence."""
        return Rope(np.tile(self.cos, (count, 1)), np.tile(self.sin, (count, 1)))

    def turn(self, x: np.ndarray, rows: slice) -> np.ndarray:
        """Rotate x [rows, H, d]."""
        turned = self.cos.shape[1]
        rest, x = x[..., turned:], x[..., :turned]
        half = turned // 2
        other = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
        made = x * self.cos[rows, None] + other * self.sin[rows, None]
        return np.concatenate([made, rest], axis=-1) if rest.shape[-1] else made


@dataclass(frozen=True)
class Block:
    """A transformer layer of a tower: x += attention(norm(x)), then x += ffn(norm(x)). `gate`: for a gated FFN, beside `up`. `scales`:
    per-channel factors of both residual branches (LayerScale). `head_norms`: QK norms over all heads; `own_norms`: per-head norms of
    queries, keys and, if three, values. `after`: post-norms of both branches."""

    norms: tuple[Norm, Norm]
    queries: Matrix
    keys: Matrix
    values: Matrix
    out: Matrix
    up: Matrix
    down: Matrix
    curve: Activation
    heads: int
    gate: Matrix | None = None
    scales: tuple[np.ndarray, np.ndarray] | None = None
    head_norms: tuple[Norm, Norm] | None = None
    own_norms: tuple[Norm, ...] = ()
    after: tuple[Norm, Norm] | None = None

    def run(self, x: np.ndarray, spans: Sequence[Span], pool: WorkerPool, rope: Rope | None = None, seen: Sequence[Span] = (),
            causal: Sequence[bool] = ()) -> None:
        """In place on x float32 [T, D]. Patches attend within their span, or to the `seen` span in its place; causally where a span is
        `causal`."""
        tokens, width = len(x), self.queries.stored.shape[0]
        made = [np.empty((self.heads, tokens, width // self.heads), np.float32) for _ in range(3)]
        products = [each.to_float32() for each in (self.queries, self.keys, self.values)]

        def project(rows: slice) -> None:
            normed = self.norms[0](x[rows])
            for which, (product, to) in enumerate(zip(products, made, strict=True)):
                y = product(normed)
                if which < 2 and self.head_norms is not None:
                    y = self.head_norms[which](y)
                y = y.reshape(-1, self.heads, width // self.heads)
                if which < len(self.own_norms):
                    y = self.own_norms[which](y)
                to[:, rows] = (y if which == 2 or rope is None else rope.turn(y, rows)).swapaxes(0, 1)

        pool.each(project, tokens)
        found = np.empty((tokens, width), np.float32)
        attend(*made, found, spans, pool, seen, causal)
        out, up, down, gate = self.out.to_float32(), self.up.to_float32(), self.down.to_float32(), self.gate and self.gate.to_float32()

        def rest(rows: slice) -> None:
            x[rows] += self.added(0, out(found[rows]))
            normed = self.norms[1](x[rows])
            inner = self.curve(up(normed)) if gate is None else self.curve(gate(normed)) * up(normed)
            x[rows] += self.added(1, down(inner))

        pool.each(rest, tokens)
        pool.job.done += 1

    def added(self, which: int, y: np.ndarray) -> np.ndarray:
        """A residual branch with its post-norm and scale: 0 attention, 1 FFN."""
        y = y if self.after is None else self.after[which](y)
        return y if self.scales is None else y * self.scales[which]


def attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, out: np.ndarray, spans: Sequence[Span], pool: WorkerPool,
           seen: Sequence[Span] = (), causal: Sequence[bool] = ()) -> None:
    """Bidirectional attention within each span, or to its `seen` span, causal where `causal`: queries, keys, values [H, T, d] -> `out` [T,
    H * d]."""
    heads, _, depth = queries.shape
    scale = np.float32(depth**-0.5)

    def look(which: slice, rows: slice, seen: slice, ahead: bool) -> None:
        scores = queries[which, rows] @ keys[which, seen].swapaxes(1, 2)
        scores *= scale
        if not ahead:
            scores[:, np.arange(seen.start, seen.stop) > np.arange(rows.start, rows.stop)[:, None]] = -np.inf
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ values[which, seen]
        mixed /= scores.sum(-1, keepdims=True)
        out[rows].reshape(-1, heads, depth)[:, which] = mixed.swapaxes(0, 1)

    job: list[Callable[[], None]] = []
    for (begin, end), others, hidden in zip(spans, seen or spans, causal or [False] * len(spans), strict=True):
        if max(end - begin, others[1] - others[0]) <= SHORT:
            job.append(lambda span=slice(begin, end), others=slice(*others), ahead=not hidden: look(slice(None), span, others, ahead))
            continue
        for head in range(heads):
            def of_head(head: int = head, begin: int = begin, end: int = end, others: slice = slice(*others),
                        ahead: bool = not hidden) -> None:
                for first in range(begin, end, QUERIES):
                    look(slice(head, head + 1), slice(first, min(first + QUERIES, end)), others, ahead)

            job.append(of_head)
    pool.all(job)


def matmul(x: np.ndarray, matrix: Matrix, pool: WorkerPool) -> np.ndarray:
    """Rows float32 [n, K] -> [n, N]."""
    wide, out = matrix.to_float32(), np.empty((len(x), matrix.stored.shape[0]), np.float32)

    def some(rows: slice) -> None:
        out[rows] = wide(x[rows])

    pool.each(some, len(x))
    return out


def mlp(x: np.ndarray, first: Matrix, second: Matrix, curve: Activation, pool: WorkerPool) -> np.ndarray:
    """Two-layer MLP of rows float32 [..., K] -> [..., N]."""
    flat, one, two = x.reshape(-1, x.shape[-1]), first.to_float32(), second.to_float32()
    out = np.empty((len(flat), second.stored.shape[0]), np.float32)

    def some(rows: slice) -> None:
        out[rows] = two(curve(one(flat[rows])))

    pool.each(some, len(flat))
    return out.reshape(*x.shape[:-1], out.shape[1])


def patches_of(values: np.ndarray, size: int) -> np.ndarray:
    """Cut values [height, width, 3] into patches -> [rows * columns, 3 * size * size], channels outermost as in convolution weights."""
    rows, columns = values.shape[0] // size, values.shape[1] // size
    cut = values[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3)).reshape(rows * columns, 3 * size * size)


def merge_patches(x: np.ndarray, columns: int, factor: int) -> np.ndarray:
    """Space-to-depth: patches [n, D] in so many columns -> [n / factor², D * factor²], each `factor` x `factor` square joined."""
    cut = x.reshape(len(x) // columns // factor, factor, columns // factor, factor, -1).swapaxes(1, 2)
    return np.ascontiguousarray(cut).reshape(len(x) // factor**2, -1)


def merge_tile_patches(x: np.ndarray, factor: int) -> np.ndarray:
    """As `merge_patches`, of square tiles: [tiles, n, D] -> [tiles, n / factor², D * factor²]."""
    tiles, count, width = x.shape
    return merge_patches(x.reshape(-1, width), math.isqrt(count), factor).reshape(tiles, count // factor**2, -1)
