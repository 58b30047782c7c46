"""The interface between a family's `block` and a backend: the operations that `kernels/cpu/ops.py` and `kernels/cuda/torch_ops.py`
implement.

An op is a whole stage of a layer, within which a backend may fuse. `x` is the residual stream, the backend's float32 [T, D], or [T, S * D]
where a token has S streams; ops that add to it change it in place and return it. A result is valid until the same op runs again. A family
with parallel attention and MLP (Cohere) runs the MLP, which adds to x, before the product with o does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from ..kernels.latent_shape import LatentShape
    from ..kernels.reference_moe import Routing
    from ..quant.compressed_attention_weights import GatedResidual, HyperConnection
    from ..quant.recurrent_weights import NgramWeights
    from ..quant.weight import (
        AltUp,
        Bundles,
        Expert,
        Linear,
        LowRank,
        Norm,
        ParallelExperts,
        PerLayerInput,
        ResidualScale,
        RouterMlp,
        SharedExpert,
        Weight,
        XieluParams,
    )
    from .rope import RopeTable

See = Callable[[object], None] | None  # receives a view that the next op may overwrite


class BlockOps(Protocol):
    """T tokens, D the model's width, S residual streams; a matrix is W [N, D], in the format in which it is stored."""

    def norm_linear(self, x: object, norm: Norm | None, linears: Sequence[Linear]) -> list[object]:
        """norm(x) @ W.T + bias for every matrix, [T, N] each; x itself without a norm."""

    def linear_add(self, x: object, each: Linear, residual: object, after: Norm | None = None, factor: float = 1.0) -> object:
        """residual + factor * after(x @ W.T + bias), in place; without `after` no norm."""

    def rope_heads(self, y: object, heads: int, head_dim: int, positions: np.ndarray, table: RopeTable | None, norm: Norm | None) -> object:
        """y [T, heads * head_dim], in place: the norm, if any (per head or over the whole row, by its weight's length), then rotation by
        `positions`; no rotation if the table is None."""

    def copy(self, y: object) -> object:
        """A copy of y [T, KVH * head_dim]."""

    def scale_in_place(self, x: object, factor: float) -> object:
        """x times a number, in place."""

    def norm_in_place(self, y: object, norm: Norm) -> object:
        """norm(y) of every row, in place."""

    def norm(self, x: object, norm: Norm) -> object:
        """norm(x) of every row, [T, D] in an array of its own."""

    def scale_queries(self, y: object, heads: int, head_dim: int, positions: np.ndarray, places: RopeTable,
                      growth: tuple[object, object]) -> object:
        """y [T, heads * head_dim], in place: each head times slope * log(position) + offset, where `growth` holds slopes and offsets
        [heads]. `places`: a table of these logarithms."""

    def clip(self, y: object, limit: float) -> object:
        """y clipped to [-limit, limit], in place."""

    def split_query_gates(self, y: object, heads: int, head_dim: int) -> object:
        """[T, heads * head_dim]: the first half of every head of y [T, heads * 2 * head_dim]; the second half is a gate."""

    def gate_heads(self, x: object, y: object, heads: int, head_dim: int, soft: bool = False) -> object:
        """x [T, heads * head_dim] times the sigmoid of gates, in place: of y as in `split_query_gates`, or y itself if it is as wide as x;
        y [T, heads] gates whole heads. `soft`: times softplus instead."""

    def latent_keys(self, y: object, shape: LatentShape, norm: Norm) -> object:
        """[T, rope + rank]: the row to cache, of y [T, rank + rope], with the latent normed; to be rotated next."""

    def latent_queries(self, y: object, heads: int, shape: LatentShape, expand: Weight) -> object:
        """[T, heads * (rope + rank)]: queries for latents from y [T, heads * (nope + rope)] and `expand`
        [heads * (nope + value), rank], a raw matrix; all heads at once."""

    def latent_values(self, x: object, heads: int, shape: LatentShape, expand: Weight) -> object:
        """[T, heads * value] from the attention output x [T, heads * (rope + rank)] and `expand`."""

    def gated_mlp(self, x: object, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str, see: See = None,
                  after: Norm | None = None, factor: float = 1.0, within: Norm | None = None) -> object:
        """x + down(within(act(gate(n)) * up(n))) with n = norm(x), in place and added as by `linear_add`; without `within` no norm there.
        `see`: the input of `down`."""

    def mlp(self, x: object, norm: Norm, up: Linear, down: Linear, act: str, see: See = None, after: Norm | None = None,
            factor: float = 1.0, curve: XieluParams | None = None) -> object:
        """x + down(act(up(n))) with n = norm(x): `gated_mlp` without a gate. `curve` takes the place of `act`."""

    def mlp_branch(self, y: object, up: Linear, down: Linear, act: str, residual: object, see: See = None) -> object:
        """residual + down(act(up(y))), in place: `mlp` of an input that is normed already."""

    def bundled_mlp(self, x: object, norm: Norm, gate: Linear, bundles: Bundles, act: str, see: See = None, after: Norm | None = None,
                    factor: float = 1.0) -> object:
        """`gated_mlp` or `mlp` over neurons stored one by one, skipping inactive ones; in an MLP without a gate, `gate` is its first
        matrix."""

    def moe(self, x: object, norm: Norm, router: Linear, experts: Sequence[Expert], routing: Routing, act: str, see: See = None,
            correction: object | None = None, shared: SharedExpert | None = None) -> object:
        """x + the sum of the experts that `router` picks for each token by `routing`, and the `shared` one. `correction` [E] is added to
        the scores for the choice only. `see`: which tokens visit which experts."""

    def mlp_and_experts(self, x: object, norm: Norm, gate: Linear | None, up: Linear | None, down: Linear | None, router: Linear,
                        experts: Sequence[Expert], apart: ParallelExperts, routing: Routing, act: str, see: See = None,
                        see_visits: See = None, after: Norm | None = None, correction: object | None = None) -> object:
        """x + after(m + e), in place: m is `gated_mlp`'s branch under `apart.mlp_post_norm`, e under `apart.post_norm` the sum of the
        experts that `router` picks. These read `apart.pre_norm` of x, the router `apart.router_norm`. `correction` as in `moe`.
        Without matrices of an MLP there is no m."""

    def expert_branch(self, x: object, norm: Norm, router: Linear, experts: Sequence[Expert], apart: ParallelExperts, routing: Routing,
                      act: str, see: See = None, correction: object | None = None, shared: SharedExpert | None = None,
                      said: object | None = None) -> object:
        """What `moe` would add to x, [T, D] in an array of its own; `correction` may be [T, E], each token's own. `said`: the router's
        input, if not x."""

    def add_per_layer_input(self, x: object, inputs: PerLayerInput, given: object, act: str, see: See = None) -> object:
        """x + after(out(act(gate(x)) * given)), in place; `given` [T, P] is the layer's input of each token. `see`: the input of `out`."""

    def altup_predict(self, x: object, streams: AltUp) -> object:
        """AltUp's prediction: adds to each stream of x [T, S * D] a combination of all, in place; returns the stream that the layer works
        on, [T, D] in an array of its own."""

    def altup_correct(self, x: object, own: object, streams: AltUp) -> object:
        """AltUp's correction: adds to each stream of x [T, S * D] a share of the difference between the layer's output `own` [T, D] and the
        first stream, in place; returns the first stream, scaled, in place of `own`."""

    def altup_add_input(self, x: object, own: object, inputs: PerLayerInput, given: object, act: str, see: See = None) -> object:
        """x [T, S * D] with what `add_per_layer_input` would add to `own` [T, D] added to all streams but the first, in place."""

    def low_rank_branch(self, x: object, norm: Norm, low: LowRank, see: See = None) -> object:
        """n + after(out(into(n))) with n = norm(x), [T, D] in an array of its own. `see`: the input of `out`."""

    def add_scaled(self, x: object, y: object, factor: float) -> object:
        """x + factor * y, in place."""

    def cutoff_mlp(self, x: object, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str, deviations: float, see: See = None,
                   after: Norm | None = None) -> object:
        """`gated_mlp` with sparse gates: only the part of a gate above the mean plus `deviations` standard deviations of the token's
        gates."""

    def first_stream(self, x: object, count: int) -> object:
        """The first of `count` streams of x [T, S * D], [T, D] in an array of its own."""

    def second_stream(self, x: object, count: int) -> object:
        """The second of `count` streams of x [T, S * D], [T, D] in an array of its own."""

    def put_stream(self, x: object, y: object, which: int) -> object:
        """x [T, S * D] with y [T, D] in the place of one of its streams, in place."""

    def add_to_first(self, x: object, y: object, each: Linear) -> object:
        """x [T, S * D] with y @ W.T + bias added to its first stream, in place."""

    def add_low_rank(self, x: object, norm: Norm, low: LowRank, out: object) -> object:
        """out + low.out(low.into(norm(x))), in place."""

    def shared_block_mlp(self, x: object, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str, own: Sequence[LowRank],
                         see: See = None) -> object:
        """down(act(gate(n)) * up(n)) with n = norm(x); the low-rank branches `own`, if any, are added to gate and up. `see`: the input of
        `down`."""

    def pad_heads(self, y: object, heads: int, wide: int, front: object | None, which: int) -> object:
        """[T, heads * wide] of y [T, heads * depth]: every head preceded by its `front` [heads, wide - depth], or by zeros. `which`: 0 for
        queries, 1 for keys, 2 for values, each in an array of its own."""

    def unpad_heads(self, y: object, heads: int, narrow: int) -> object:
        """[T, heads * narrow] of y [T, heads * wide]: the last channels of every head, without the padding."""

    def pair_heads(self, y: object, heads: int, depth: int) -> object:
        """[T, heads * 2 * depth] of y [T, heads * depth]: heads i and i + heads / 2 concatenated, both as head i and as head i + heads / 2
        of the result."""

    def dynamic_mask_heads(self, y: object, says: object, heads: int, wide: int, rates: object) -> object:
        """y [T, heads * wide], in place: the first channel of every head becomes exp(rate * softplus(says)), `says` [T, heads] and a rate a
        head."""

    def scaled_residual(self, x: object, branch: object | None, own: ResidualScale) -> object:
        """x * scales + branch * branch_scales + offsets, channel by channel, in place of x; the branch [T, D] may be None."""

    def gate_rows(self, y: object, gates: LowRank) -> object:
        """y times the sigmoid of gates.out(silu(gates.into(y))), channel by channel, in place."""

    def norm_and_concat(self, y: object, norm: Norm) -> object:
        """[T, 2 * N]: norm(y) [T, N] followed by y, in an array of its own; y itself becomes norm(y)."""

    def norm_stream(self, x: object, norm: Norm) -> object:
        """norm(x), in place of the residual stream x; the norm may have a bias."""

    def read_streams(self, x: object, hyper: HyperConnection | GatedResidual) -> object:
        """A branch's input from the streams x [T, S * D], or the last layer's output: [T, D] in an array of its own. The coefficients of
        each token are kept for `write_streams`, until the next call."""

    def write_streams(self, x: object, branch: object, hyper: HyperConnection | GatedResidual) -> object:
        """x [T, S * D] after a branch with output [T, D], by the coefficients of the last `read_streams`, in place."""

    def ngram_products(self, rows: object, w: NgramWeights) -> list[object]:
        """Keys [T, S * D] and values [T, D] from the tokens' rows of the n-gram tables, in arrays of their own."""

    def router_mlp(self, x: object, norm: Norm, path: RouterMlp, streams: object) -> object:
        """The input of a router, [T, R] in an array of its own: norm(x) projected down, plus a share of the previous router's projection,
        through two matrices with activations. Projections are passed on in the second of two `streams` [T, 2 * D]."""

    def grouped_linear(self, x: object, linears: Sequence[Linear]) -> object:
        """[T, G * N] of x [T, G * K]: each group's part @ its W.T, side by side."""

    def rope_tails(self, y: object, heads: int, head_dim: int, positions: np.ndarray, table: RopeTable, back: bool = False) -> object:
        """y [T, heads * head_dim], in place: the last channels of each head rotated by `positions`, or `back`, in adjacent pairs that stay
        where they are."""
