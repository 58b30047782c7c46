"""Causal conformer (Gulati et al. 2020, arXiv:2005.08100) of Gemma 3n and 4: two subsampling convolutions over time and mel bands, then
layers of half an FFN, attention, a convolution over time, and half an FFN.

Attention is local with relative positions (Dai et al. 2019, arXiv:1901.02860, appendix B), computed in blocks: each block sees itself and
its left context, a few hundred scores per block and head, all blocks at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..config_reader import ConfigError, Keys
from ..images.tower_ops import ACTIVATIONS, Activation, Matrix, Norm, WorkerPool, matmul
from ..images.tower_weights import Weights
from .whisper_encoder import MAX_LAYERS, MAX_WIDTH

CONFIG_DEFAULTS = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "hidden_act": "silu", "subsampling_conv_channels": [128, 32],
    "conv_kernel_size": 5, "residual_weight": 0.5, "attention_chunk_size": 12, "attention_context_left": 13, "attention_context_right": 0,
    "attention_logit_cap": 50.0, "use_clipped_linears": True, "rms_norm_eps": 1e-6, "gradient_clipping": 1e10, "output_proj_dims": 1536}
KERNEL = 3  # kernel size of the subsampling convolutions, in frames and bands
TASK_ROWS = 32  # output frames per subsampling task
NORM_EPS = 1e-6  # of norms whose epsilon no config states
MAX_WAVELENGTH = 1e4  # longest wavelength of the sinusoidal distance embeddings
LIMITS = ("input_min", "input_max", "output_min", "output_max")  # tensors that state a clipped matrix's limits


@dataclass(frozen=True)
class CausalSizes:
    """An encoder's config."""

    bands: int
    width: int
    layers: int
    heads: int
    conv_channels: tuple[int, int]  # of the subsampling convolutions
    kernel_size: int  # of a layer's convolution
    residual_weight: float  # of FFN outputs
    chunk: int  # rows per attention block
    left_context: int  # rows before and after a block that it attends to
    right_context: int
    softcap: float  # of attention logits
    clamp: float  # activations between the parts of a layer are limited to ±clamp
    eps: float
    activation: Activation
    clipped: bool  # matrices clip their inputs and outputs to stored limits
    output_width: int
    includes_edges: bool = False  # a row attends to the farthest rows of its context as well

    @staticmethod
    def read(keys: Keys, bands: int, edges: bool = False) -> CausalSizes:
        width, heads = keys.integer("hidden_size", low=2, high=MAX_WIDTH), keys.integer("num_attention_heads", high=1024)
        if width % heads or width % 2:
            raise ConfigError(f"{keys.where}: hidden_size {width} is not an even multiple of {heads} heads")
        channels = keys.raw.get("subsampling_conv_channels")
        if not isinstance(channels, list) or len(channels) != 2 or not all(type(item) is int and 0 < item <= 4096 for item in channels):
            raise keys.fail("subsampling_conv_channels", "two whole numbers from 1 to 4096")
        return CausalSizes(
            bands, width, keys.integer("num_hidden_layers", high=MAX_LAYERS), heads, tuple(channels),
            keys.integer("conv_kernel_size", high=256), keys.number("residual_weight"), keys.integer("attention_chunk_size", high=4096),
            keys.integer("attention_context_left", low=2, high=4096) - 1, keys.integer("attention_context_right", low=0, high=4096),
            keys.number("attention_logit_cap"), min(keys.number("gradient_clipping"), float(np.finfo(np.float32).max)),
            keys.number("rms_norm_eps"), keys.choice("hidden_act", ACTIVATIONS, "silu"),
            keys.flag("use_clipped_linears"), keys.integer("output_proj_dims", high=MAX_WIDTH), edges)

    @property
    def context(self) -> int:
        """Rows in the attention window of a block."""
        return self.chunk + self.left_context + self.right_context

    @property
    def distance_embeddings(self) -> np.ndarray:
        """Sinusoidal embeddings of relative distances, the farthest first, float32 [distances, D]."""
        half = self.width // 2
        if self.includes_edges:
            distances = range(self.left_context, -self.right_context - 1, -1)
        else:
            distances = range(self.context // 2, -1, -1)
        frequencies = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(MAX_WAVELENGTH) / max(half - 1, 1)))
        angles = np.array(distances, np.float32)[:, None] * frequencies
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def subsampled(frames: int) -> int:
    """Length after both subsampling convolutions."""
    return (frames + 3) // 4


@dataclass(frozen=True)
class SubsamplingConv:
    """A stride-2 convolution over frames and bands."""

    kernel: Matrix  # [C, C_in * KERNEL²]
    norm: Activation  # norm and activation of the output
    left_padding: int = 1  # frames

    def __call__(self, x: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """float32 [T, F, C_in] -> [T / 2, F / 2, C], zero-padded."""
        kernel = self.kernel.to_float32()
        padded = np.pad(x, ((self.left_padding, KERNEL - 1 - self.left_padding), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (KERNEL, KERNEL), axis=(0, 1))[::2, ::2]  # [T / 2, F / 2, C_in, 3, 3]
        out = np.empty((*windows.shape[:2], len(self.kernel.stored)), np.float32)

        def run_rows(begin: int) -> None:
            rows = slice(begin, begin + TASK_ROWS)
            out[rows] = kernel(windows[rows].reshape(-1, self.kernel.stored.shape[1])).reshape(-1, *out.shape[1:])

        pool.all([lambda begin=begin: run_rows(begin) for begin in range(0, len(out), TASK_ROWS)])
        return self.norm(out)


def relu_after(norm: Activation) -> Activation:
    """ReLU after a norm."""
    return lambda x: np.maximum(norm(x), 0)


@dataclass(frozen=True)
class Ffn:
    norms: tuple[Norm, Norm]
    up: Matrix
    down: Matrix
    activation: Activation
    residual_weight: np.float32
    clamp: np.float32

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        up, down, (before, after) = self.up.to_float32(), self.down.to_float32(), self.norms

        def run_rows(rows: slice) -> None:
            y = down(self.activation(up(before(_clamp(x[rows], self.clamp)))))
            x[rows] += after(_clamp(y, self.clamp)) * self.residual_weight

        pool.each(run_rows, len(x))


@dataclass(frozen=True)
class CausalAttention:
    """Local attention with relative positions."""

    norms: tuple[Norm, Norm]  # before and after
    queries: Matrix
    keys: Matrix
    values: Matrix
    out: Matrix
    query_scale: np.ndarray  # float32 [d]
    key_scale: np.float32
    relative_keys: np.ndarray  # projected distance embeddings, float32 [H, distances, d]
    sizes: CausalSizes

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        sizes, (before, after), bound = self.sizes, self.norms, np.float32(self.sizes.clamp)
        chunk, context, heads = sizes.chunk, sizes.context, sizes.heads
        normed = np.empty_like(x)

        def norm(rows: slice) -> None:
            normed[rows] = before(_clamp(x[rows], bound))

        pool.each(norm, len(x))
        q, k, v = (matmul(normed, matrix, pool).reshape(len(x), heads, -1) for matrix in (self.queries, self.keys, self.values))
        num_chunks = -(-len(x) // chunk)
        q = np.pad(q * self.query_scale, ((0, num_chunks * chunk - len(x)), (0, 0), (0, 0))).reshape(num_chunks, chunk, heads, -1)
        padding = ((sizes.left_context, num_chunks * chunk - len(x) + sizes.right_context), (0, 0), (0, 0))
        k, v = (np.lib.stride_tricks.sliding_window_view(np.pad(matrix, padding), context, axis=0)[::chunk]  # [chunks, H, d, context]
                for matrix in (k * self.key_scale, v))
        query_position, key_offset = np.arange(chunk)[:, None], np.arange(context) - sizes.left_context
        distance = query_position - key_offset
        key_position = np.arange(num_chunks)[:, None, None] * chunk + key_offset
        in_left = (distance >= 0) & (distance < sizes.left_context + sizes.includes_edges)
        in_right = (distance < 0) & (-distance < sizes.right_context + sizes.includes_edges)
        allowed = (in_left | in_right) & (key_position >= 0) & (key_position < len(x))
        outputs = np.empty((num_chunks, chunk, *q.shape[2:]), np.float32)

        def attend(head: int) -> None:
            queries = np.ascontiguousarray(q[:, :, head])  # [chunks, chunk, d]
            scores = queries @ k[:, head] + relative_shift(queries @ self.relative_keys[head].T, context)
            scores /= np.float32(sizes.softcap)
            np.tanh(scores, out=scores)
            scores *= np.float32(sizes.softcap)
            scores[~allowed] = -np.inf
            scores[:, :, 0][~allowed.any(-1)] = 0  # of padding rows, for which no key is allowed
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            outputs[:, :, head] = scores @ v[:, head].swapaxes(1, 2)

        pool.all([lambda head=head: attend(head) for head in range(heads)])
        projected = matmul(outputs.reshape(num_chunks * chunk, -1)[: len(x)], self.out, pool)

        def add(rows: slice) -> None:
            x[rows] += after(_clamp(projected[rows], bound))

        pool.each(add, len(x))


def relative_shift(scores: np.ndarray, context: int) -> np.ndarray:
    """Scores by distance [..., chunk, distances] -> by key position [..., chunk, context]: row i is moved by i.

    Scores beyond the last key wrap to positions that are masked.
    """
    *outer, chunk, distances = scores.shape
    padded = np.zeros((*outer, chunk, context + 1), np.float32)
    padded[..., :distances] = scores
    return padded.reshape(*outer, -1)[..., : chunk * context].reshape(*outer, chunk, context)


@dataclass(frozen=True)
class CausalConvolution:
    """A gated causal depthwise convolution over rows."""

    norms: tuple[Norm, Norm]  # before the gate and after the convolution
    up: Matrix
    kernel: np.ndarray  # float32 [taps, D], the last tap for the row itself
    down: Matrix
    activation: Activation
    clamp: np.float32

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        width, before = x.shape[1], len(self.kernel) - 1
        gated = np.zeros((len(x) + before, width), np.float32)
        up, down = self.up.to_float32(), self.down.to_float32()

        def run_gate(rows: slice) -> None:
            y = up(self.norms[0](x[rows]))
            with np.errstate(over="ignore"):
                gated[rows.start + before : rows.stop + before] = y[:, :width] / (1 + np.exp(-y[:, width:]))

        def run_convolution(rows: slice) -> None:
            y = np.zeros((rows.stop - rows.start, width), np.float32)
            for offset, weights in enumerate(self.kernel):
                y += gated[rows.start + offset : rows.stop + offset] * weights
            x[rows] += down(self.activation(self.norms[1](_clamp(y, self.clamp))))

        pool.each(run_gate, len(x))
        pool.each(run_convolution, len(x))


def _clamp(x: np.ndarray, bound: np.float32) -> np.ndarray:
    return np.clip(x, -bound, bound)


@dataclass(frozen=True)
class CausalConformer:
    """The encoder: subsampling, layers, and Gemma 4's output projection."""

    subsampling: tuple[SubsamplingConv, SubsamplingConv]
    input_projection: Matrix
    blocks: Sequence[tuple[Ffn, CausalAttention, CausalConvolution, Ffn]]
    output_norms: Sequence[Norm]  # of each block
    clamp: np.float32
    output_projection: Matrix | None
    row_stride: int = 1  # only every row_stride-th output row is kept

    def rows(self, frames: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Spectrogram float32 [frames, bands] -> [subsampled / row_stride, output_width]."""
        pool.job.total += len(self.blocks)
        x = frames[..., None]
        for convolution in self.subsampling:
            x = convolution(x, pool)
        x = matmul(x.reshape(len(x), -1), self.input_projection, pool)
        for block, norm in zip(self.blocks, self.output_norms, strict=True):
            for part in block:
                part.run(x, pool)
            x = norm(_clamp(x, self.clamp))
            pool.job.done += 1
        x = x[:: self.row_stride]
        return x if self.output_projection is None else matmul(x, self.output_projection, pool)


@dataclass(frozen=True)
class TensorNames:
    """Tensor names of the encoder's parts, which differ between Gemma 3n and 4."""

    subsampling_layer: str  # with a placeholder for the number
    layer: str  # prefix of a layer's number
    ffns: tuple[str, str]
    attention_norms: tuple[str, str]  # before and after
    attention: tuple[str, ...]  # query, key, value and output projections
    per_dim_scale: str  # query scales
    relative_keys: str  # projection of distance embeddings
    output_norm: str
    suffix: str  # of matrices within a part


GEMMA_4_NAMES = TensorNames(
    "layer{}.", "layers.", ("feed_forward1", "feed_forward2"), ("norm_pre_attn", "norm_post_attn"),
    tuple(f"self_attn.{each}" for each in ("q_proj", "k_proj", "v_proj", "post")), "self_attn.per_dim_scale", "self_attn.relative_k_proj",
    "norm_out", ".linear")
GEMMA_3N_NAMES = TensorNames(
    "conv_{}.", "conformer.", ("ffw_layer_start", "ffw_layer_end"), ("attention.pre_attn_norm", "attention.post_norm"),
    tuple(f"attention.{each}" for each in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "post")), "attention.attn.per_dim_scale",
    "attention.attn.relative_position_embedding.pos_proj", "norm", "")


def load_causal_conformer(weights: Weights, sizes: CausalSizes, name: str, names: TensorNames,
                          make_norm: Callable[[np.ndarray], Activation], row_stride: int = 1) -> CausalConformer:
    """The encoder whose tensor names begin with `name`. Gemma 4's scales keys, pads one frame on the left, and ends in a projection.

    make_norm: makes the norm of a subsampling convolution from its weights
    row_stride: only every row_stride-th output row is kept
    """
    width, clamp, activation, subsampling = sizes.width, np.float32(sizes.clamp), sizes.activation, f"{name}subsample_conv_projection."
    head_dim, is_gemma_4 = width // sizes.heads, names is GEMMA_4_NAMES

    def norm(prefix: str, eps: float = NORM_EPS) -> Norm:
        return weights.rms_norm(prefix, width, eps)

    def matrix(prefix: str, rows: int = width, across: int = width) -> Matrix:
        stored = weights.stored(f"{prefix}{names.suffix}.weight", rows, across)
        return Matrix(stored, None, tuple(weights.numbers(f"{prefix}.{part}").item() for part in LIMITS) if sizes.clipped else None)

    def subsampling_layer(number: int) -> SubsamplingConv:
        prefix = subsampling + names.subsampling_layer.format(number)
        in_channels, out_channels = (1, *sizes.conv_channels)[number : number + 2]
        return SubsamplingConv(weights.matrix(f"{prefix}conv", out_channels, in_channels * KERNEL**2, bias=False),
                               relu_after(make_norm(weights.numbers(f"{prefix}norm.weight", out_channels))), int(is_gemma_4))

    def ffn(prefix: str) -> Ffn:
        return Ffn((norm(f"{prefix}.pre_layer_norm"), norm(f"{prefix}.post_layer_norm")), matrix(f"{prefix}.ffw_layer_1", 4 * width),
                   matrix(f"{prefix}.ffw_layer_2", width, 4 * width), activation, np.float32(sizes.residual_weight), clamp)

    def attention(prefix: str) -> CausalAttention:
        per_dim_scale = np.logaddexp(0, weights.numbers(prefix + names.per_dim_scale, head_dim)).astype(np.float32)
        relative_keys = weights.matrix(prefix + names.relative_keys, width, width, bias=False).to_float32()(sizes.distance_embeddings)
        return CausalAttention(
            tuple(norm(prefix + part) for part in names.attention_norms), *(matrix(prefix + part) for part in names.attention),
            query_scale=per_dim_scale * np.float32(head_dim**-0.5 / math.log(2)),
            key_scale=np.float32(math.log(1 + math.e) / math.log(2) if is_gemma_4 else 1),
            relative_keys=np.ascontiguousarray(relative_keys.reshape(-1, sizes.heads, head_dim).swapaxes(0, 1)), sizes=sizes)

    def convolution(prefix: str) -> CausalConvolution:
        kernel = weights.numbers(f"{prefix}.depthwise_conv1d.weight", width, sizes.kernel_size).T
        return CausalConvolution((norm(f"{prefix}.pre_layer_norm", sizes.eps), norm(f"{prefix}.conv_norm", sizes.eps)),
                                 matrix(f"{prefix}.linear_start", 2 * width), kernel, matrix(f"{prefix}.linear_end"), activation, clamp)

    layers = [f"{name}{names.layer}{number}." for number in range(sizes.layers)]
    first_ffn, second_ffn = names.ffns
    return CausalConformer(
        (subsampling_layer(0), subsampling_layer(1)),
        weights.matrix(f"{subsampling}input_proj_linear", width, subsampled(sizes.bands) * sizes.conv_channels[1], bias=False),
        [(ffn(prefix + first_ffn), attention(prefix), convolution(f"{prefix}lconv1d"), ffn(prefix + second_ffn)) for prefix in layers],
        [norm(prefix + names.output_norm) for prefix in layers], clamp,
        weights.matrix(f"{name}output_proj", sizes.output_width, width, bias=True) if is_gemma_4 else None, row_stride)
