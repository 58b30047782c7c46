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
from .whisper_encoder import MOST_LAYERS, MOST_WIDTH

USUAL = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "hidden_act": "silu",
         "subsampling_conv_channels": [128, 32], "conv_kernel_size": 5, "residual_weight": 0.5, "attention_chunk_size": 12,
         "attention_context_left": 13, "attention_context_right": 0, "attention_logit_cap": 50.0, "use_clipped_linears": True,
         "rms_norm_eps": 1e-6, "gradient_clipping": 1e10, "output_proj_dims": 1536}
KERNEL = 3  # frames, and bands, that one of the first convolutions reads
HELD = 32  # frames of those at once
NORM_EPS = 1e-6  # of norms whose own number no config states
LONGEST = 1e4  # longest wavelength of the sinusoidal distance embeddings
LIMITS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True)
class CausalSizes:
    """`channels`: of the subsampling convolutions; `taps`: kernel size of a layer's convolution; `share`: weight of the FFN residual;
    `block`: rows per attention block, which sees `back` rows before it and `ahead` after it, the farthest of both only if `edges`. `cap`:
    attention logit softcap; `bound`: clamp of activations between the parts of a layer; `made`: output width."""

    bands: int
    width: int
    layers: int
    heads: int
    channels: tuple[int, int]
    taps: int
    share: float
    block: int
    back: int
    ahead: int
    cap: float
    bound: float
    eps: float
    curve: Activation
    clipped: bool
    made: int
    edges: bool = False

    @staticmethod
    def read(keys: Keys, bands: int, edges: bool = False) -> CausalSizes:
        width, heads = keys.integer("hidden_size", low=2, high=MOST_WIDTH), keys.integer("num_attention_heads", high=1024)
        if width % heads or width % 2:
            raise ConfigError(f"{keys.where}: hidden_size {width} is not an even multiple of {heads} heads")
        channels = keys.raw.get("subsampling_conv_channels")
        if not isinstance(channels, list) or len(channels) != 2 or not all(type(each) is int and 0 < each <= 4096 for each in channels):
            raise keys.fail("subsampling_conv_channels", "two whole numbers from 1 to 4096")
        return CausalSizes(
            bands, width, keys.integer("num_hidden_layers", high=MOST_LAYERS), heads, tuple(channels),
            keys.integer("conv_kernel_size", high=256), keys.number("residual_weight"), keys.integer("attention_chunk_size", high=4096),
            keys.integer("attention_context_left", low=2, high=4096) - 1, keys.integer("attention_context_right", low=0, high=4096),
            keys.number("attention_logit_cap"), min(keys.number("gradient_clipping"), float(np.finfo(np.float32).max)),
            keys.number("rms_norm_eps"), keys.choice("hidden_act", ACTIVATIONS, "silu"),
            keys.flag("use_clipped_linears"), keys.integer("output_proj_dims", high=MOST_WIDTH), edges)

    @property
    def context(self) -> int:
        """Rows in the attention window of a block."""
        return self.block + self.back + self.ahead

    @property
    def distances(self) -> np.ndarray:
        """Sinusoidal embeddings of relative distances, the farthest first, float32 [distances, D]."""
        half, places = self.width // 2, range(self.back, -self.ahead - 1, -1) if self.edges else range(self.context // 2, -1, -1)
        lengths = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(LONGEST) / max(half - 1, 1)))
        angles = np.array(places, np.float32)[:, None] * lengths
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def subsampled(frames: int) -> int:
    """Length after both subsampling convolutions."""
    return (frames + 3) // 4


@dataclass(frozen=True)
class SubsamplingConv:
    """A stride-2 convolution over frames and bands. `kernel` [C, C_in * KERNEL²]; `finish`: norm and activation; `before`: frames of left
    padding."""

    kernel: Matrix
    finish: Activation
    before: int = 1

    def __call__(self, x: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """float32 [T, F, C_in] -> [T / 2, F / 2, C], zero-padded."""
        wide, around = self.kernel.to_float32(), np.pad(x, ((self.before, KERNEL - 1 - self.before), (1, 1), (0, 0)))
        reads = np.lib.stride_tricks.sliding_window_view(around, (KERNEL, KERNEL), axis=(0, 1))[::2, ::2]  # [T / 2, F / 2, C_in, 3, 3]
        out = np.empty((*reads.shape[:2], len(self.kernel.stored)), np.float32)

        def some(begin: int) -> None:
            rows = slice(begin, begin + HELD)
            out[rows] = wide(reads[rows].reshape(-1, self.kernel.stored.shape[1])).reshape(-1, *out.shape[1:])

        pool.all([lambda begin=begin: some(begin) for begin in range(0, len(out), HELD)])
        return self.finish(out)


def rectified(norm: Activation) -> Activation:
    """ReLU after a norm."""
    return lambda x: np.maximum(norm(x), 0)


@dataclass(frozen=True)
class Ffn:
    norms: tuple[Norm, Norm]
    up: Matrix
    down: Matrix
    curve: Activation
    share: np.float32
    bound: np.float32

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        up, down, (before, after) = self.up.to_float32(), self.down.to_float32(), self.norms

        def some(rows: slice) -> None:
            y = down(self.curve(up(before(_bounded(x[rows], self.bound)))))
            x[rows] += after(_bounded(y, self.bound)) * self.share

        pool.each(some, len(x))


@dataclass(frozen=True)
class CausalAttention:
    """`by_channel` float32 [d] scales queries, `key_scale` keys; `near` float32 [H, distances, d]: relative position keys."""

    norms: tuple[Norm, Norm]
    queries: Matrix
    keys: Matrix
    values: Matrix
    out: Matrix
    by_channel: np.ndarray
    key_scale: np.float32
    near: np.ndarray
    sizes: CausalSizes

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        sizes, (before, after), bound = self.sizes, self.norms, np.float32(self.sizes.bound)
        block, context, heads = sizes.block, sizes.context, sizes.heads
        normed = np.empty_like(x)

        def norm(rows: slice) -> None:
            normed[rows] = before(_bounded(x[rows], bound))

        pool.each(norm, len(x))
        q, k, v = (matmul(normed, each, pool).reshape(len(x), heads, -1) for each in (self.queries, self.keys, self.values))
        blocks = -(-len(x) // block)
        q = np.pad(q * self.by_channel, ((0, blocks * block - len(x)), (0, 0), (0, 0))).reshape(blocks, block, heads, -1)
        around = ((sizes.back, blocks * block - len(x) + sizes.ahead), (0, 0), (0, 0))
        k, v = (np.lib.stride_tricks.sliding_window_view(np.pad(each, around), context, axis=0)[::block]  # [blocks, H, d, context]
                for each in (k * self.key_scale, v))
        at, seen = np.arange(block)[:, None], np.arange(context) - sizes.back
        apart = at - seen
        there = np.arange(blocks)[:, None, None] * block + seen
        reach = ((apart >= 0) & (apart < sizes.back + sizes.edges)) | ((apart < 0) & (-apart < sizes.ahead + sizes.edges))
        allowed = reach & (there >= 0) & (there < len(x))
        mixed = np.empty((blocks, block, *q.shape[2:]), np.float32)

        def look(head: int) -> None:
            own = np.ascontiguousarray(q[:, :, head])  # [blocks, block, d]
            scores = own @ k[:, head] + shifted(own @ self.near[head].T, context)
            scores /= np.float32(sizes.cap)
            np.tanh(scores, out=scores)
            scores *= np.float32(sizes.cap)
            scores[~allowed] = -np.inf
            scores[:, :, 0][~allowed.any(-1)] = 0  # of rows behind the last
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            mixed[:, :, head] = scores @ v[:, head].swapaxes(1, 2)

        pool.all([lambda head=head: look(head) for head in range(heads)])
        made = matmul(mixed.reshape(blocks * block, -1)[: len(x)], self.out, pool)

        def add(rows: slice) -> None:
            x[rows] += after(_bounded(made[rows], bound))

        pool.each(add, len(x))


def shifted(made: np.ndarray, context: int) -> np.ndarray:
    """Relative shift: scores by distance [..., block, distances] -> by key position [..., block, context], row i moved by i. What falls
    beyond the last key wraps to masked positions."""
    *outer, block, distances = made.shape
    wide = np.zeros((*outer, block, context + 1), np.float32)
    wide[..., :distances] = made
    return wide.reshape(*outer, -1)[..., : block * context].reshape(*outer, block, context)


@dataclass(frozen=True)
class BackConvolution:
    """Causal depthwise convolution. `taps` float32 [taps, D], the last for the row itself."""

    norms: tuple[Norm, Norm]
    up: Matrix
    taps: np.ndarray
    down: Matrix
    curve: Activation
    bound: np.float32

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        width, before = x.shape[1], len(self.taps) - 1
        gated = np.zeros((len(x) + before, width), np.float32)
        up, down = self.up.to_float32(), self.down.to_float32()

        def gate(rows: slice) -> None:
            y = up(self.norms[0](x[rows]))
            with np.errstate(over="ignore"):
                gated[rows.start + before : rows.stop + before] = y[:, :width] / (1 + np.exp(-y[:, width:]))

        def mix(rows: slice) -> None:
            y = np.zeros((rows.stop - rows.start, width), np.float32)
            for place, weights in enumerate(self.taps):
                y += gated[rows.start + place : rows.stop + place] * weights
            x[rows] += down(self.curve(self.norms[1](_bounded(y, self.bound))))

        pool.each(gate, len(x))
        pool.each(mix, len(x))


def _bounded(x: np.ndarray, bound: np.float32) -> np.ndarray:
    return np.clip(x, -bound, bound)


@dataclass(frozen=True)
class CausalConformer:
    """Keeps every `every`th output row."""

    halvings: tuple[SubsamplingConv, SubsamplingConv]
    enter: Matrix
    blocks: Sequence[tuple[Ffn, CausalAttention, BackConvolution, Ffn]]
    after: Sequence[Norm]
    bound: np.float32
    last: Matrix | None
    every: int = 1

    def rows(self, frames: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Spectrogram float32 [frames, bands] -> [subsampled / every, made]."""
        pool.job.total += len(self.blocks)
        x = frames[..., None]
        for halving in self.halvings:
            x = halving(x, pool)
        x = matmul(x.reshape(len(x), -1), self.enter, pool)
        for block, norm in zip(self.blocks, self.after, strict=True):
            for part in block:
                part.run(x, pool)
            x = norm(_bounded(x, self.bound))
            pool.job.done += 1
        kept = x[:: self.every]
        return kept if self.last is None else matmul(kept, self.last, pool)


@dataclass(frozen=True)
class Called:
    """What the parts of a tower are called, as two versions of it have them: the first convolutions by number, and of layers both FFNs and
    the norms `around` attention, its matrices, how steep queries are and what tells distances; `inside` a part is its matrix."""

    halving: str
    layer: str
    ffns: tuple[str, str]
    around: tuple[str, str]
    looked: tuple[str, ...]
    steep: str
    near: str
    after: str
    inside: str


NOW = Called("layer{}.", "layers.", ("feed_forward1", "feed_forward2"), ("norm_pre_attn", "norm_post_attn"),
             tuple(f"self_attn.{each}" for each in ("q_proj", "k_proj", "v_proj", "post")), "self_attn.per_dim_scale",
             "self_attn.relative_k_proj", "norm_out", ".linear")
BEFORE = Called("conv_{}.", "conformer.", ("ffw_layer_start", "ffw_layer_end"), ("attention.pre_attn_norm", "attention.post_norm"),
                tuple(f"attention.{each}" for each in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "post")),
                "attention.attn.per_dim_scale", "attention.attn.relative_position_embedding.pos_proj", "norm", "")


def load_causal_conformer(weights: Weights, sizes: CausalSizes, name: str, called: Called, finish: Callable[[np.ndarray], Activation],
                          every: int = 1) -> CausalConformer:
    """The tower whose tensor names begin with `name`; keeps every `every`th row. `finish`: makes the norm of the subsampling convolutions
    from its weights. Gemma 4's version scales keys, pads one frame on the left, and ends in a projection."""
    width, bound, curve, first = sizes.width, np.float32(sizes.bound), sizes.curve, f"{name}subsample_conv_projection."
    depth, is_now = width // sizes.heads, called is NOW

    def norm(own: str, eps: float = NORM_EPS) -> Norm:
        return weights.rms_norm(own, width, eps)

    def matrix(own: str, rows: int = width, across: int = width) -> Matrix:
        stored = weights.stored(f"{own}{called.inside}.weight", rows, across)
        return Matrix(stored, None, tuple(weights.numbers(f"{own}.{each}").item() for each in LIMITS) if sizes.clipped else None)

    def halving(number: int) -> SubsamplingConv:
        own, (inside, channels) = first + called.halving.format(number), ((1, *sizes.channels)[number], sizes.channels[number])
        return SubsamplingConv(weights.matrix(f"{own}conv", channels, inside * KERNEL**2, bias=False),
                       rectified(finish(weights.numbers(f"{own}norm.weight", channels))), int(is_now))

    def ffn(own: str) -> Ffn:
        return Ffn((norm(f"{own}.pre_layer_norm"), norm(f"{own}.post_layer_norm")), matrix(f"{own}.ffw_layer_1", 4 * width),
                   matrix(f"{own}.ffw_layer_2", width, 4 * width), curve, np.float32(sizes.share), bound)

    def attention(own: str) -> CausalAttention:
        steep = np.logaddexp(0, weights.numbers(own + called.steep, depth)).astype(np.float32)
        told = weights.matrix(own + called.near, width, width, bias=False).to_float32()(sizes.distances)
        return CausalAttention(
            tuple(norm(own + each) for each in called.around), *(matrix(own + each) for each in called.looked),
            by_channel=steep * np.float32(depth**-0.5 / math.log(2)),
            key_scale=np.float32(math.log(1 + math.e) / math.log(2) if is_now else 1),
            near=np.ascontiguousarray(told.reshape(-1, sizes.heads, depth).swapaxes(0, 1)), sizes=sizes)

    def convolution(own: str) -> BackConvolution:
        taps = weights.numbers(f"{own}.depthwise_conv1d.weight", width, sizes.taps).T
        return BackConvolution((norm(f"{own}.pre_layer_norm", sizes.eps), norm(f"{own}.conv_norm", sizes.eps)),
                               matrix(f"{own}.linear_start", 2 * width), taps, matrix(f"{own}.linear_end"), curve, bound)

    owns = [f"{name}{called.layer}{number}." for number in range(sizes.layers)]
    before, behind = called.ffns
    return CausalConformer(
        (halving(0), halving(1)),
        weights.matrix(f"{first}input_proj_linear", width, subsampled(sizes.bands) * sizes.channels[1], bias=False),
        [(ffn(own + before), attention(own), convolution(f"{own}lconv1d"), ffn(own + behind)) for own in owns],
        [norm(own + called.after) for own in owns], bound,
        weights.matrix(f"{name}output_proj", sizes.made, width, bias=True) if is_now else None, every)
