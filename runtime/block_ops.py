"""The interface between a family's `block` and a backend: the operations that `kernels/cpu/ops.py` and `kernels/cuda/torch_ops.py`
implement.

An op is a whole stage of a layer, within which a backend may fuse. `x` is the residual stream, the backend's float32 [T, D], or [T, S * D]
with S residual streams; ops that add to it change it in place and return it. A result is valid until the same op runs again. A family with
parallel attention and MLP (Cohere) runs the MLP, which adds to x, before `linear_add` with o does.
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

Observer = Callable[[object], None] | None  # receives a view that the next op may overwrite


class BlockOps(Protocol):
    """Shapes: T tokens, D the model's width, S residual streams; a matrix is W [N, D], in the format in which it is stored.

    "In place" means that the first argument is changed and returned. Other results are arrays of the backend's workspace.
    """

    def norm_linear(self, x: object, norm: Norm | None, linears: Sequence[Linear]) -> list[object]:
        """norm(x) @ W.T + bias for every matrix, [T, N] each; x itself without a norm."""

    def linear_add(self, x: object, matrix: Linear, residual: object, post_norm: Norm | None = None, factor: float = 1.0) -> object:
        """residual + factor * post_norm(x @ W.T + bias), in place of `residual`. The post-norm is optional."""

    def rope_heads(self, y: object, heads: int, head_dim: int, positions: np.ndarray, table: RopeTable | None, norm: Norm | None) -> object:
        """Norm, then rotary embedding of y [T, heads * head_dim], in place. The norm is per head or over the whole row, depending on the
        length of its weight. Without a norm or without a table that step is skipped."""

    def copy(self, y: object) -> object:
        """A copy of y [T, KVH * head_dim]."""

    def scale_in_place(self, x: object, factor: float) -> object:
        """x * factor, in place."""

    def norm_in_place(self, y: object, norm: Norm) -> object:
        """norm(y) of every row, in place."""

    def norm(self, x: object, norm: Norm) -> object:
        """norm(x) of every row, [T, D] in a separate array."""

    def scale_queries(self, y: object, heads: int, head_dim: int, positions: np.ndarray, log_positions: RopeTable,
                      slopes_and_offsets: tuple[object, object]) -> object:
        """y [T, heads * head_dim], in place: each head times slope * log(position) + offset. Slopes and offsets are [heads] each,
        `log_positions` is the table of the logarithms."""

    def clip(self, y: object, limit: float) -> object:
        """y clipped to [-limit, limit], in place."""

    def split_query_gates(self, y: object, heads: int, head_dim: int) -> object:
        """Queries [T, heads * head_dim] of y [T, heads * 2 * head_dim]: the first half of every head; the second half is its gate."""

    def gate_heads(self, x: object, y: object, heads: int, head_dim: int, use_softplus: bool = False) -> object:
        """x [T, heads * head_dim] times the sigmoid, or softplus, of gates, in place.

        The gates y are the second halves of heads [T, heads * 2 * head_dim] (see `split_query_gates`), one per channel, as wide as x, or
        one per head [T, heads]."""

    def latent_keys(self, y: object, shape: LatentShape, norm: Norm) -> object:
        """Rows to cache, [T, rope + rank], of y [T, rank + rope]: the latent is normed, the rotary channels are still to be rotated."""

    def latent_queries(self, y: object, heads: int, shape: LatentShape, kv_b: Weight) -> object:
        """Queries for latents, [T, heads * (rope + rank)], of y [T, heads * (nope + rope)]. `kv_b` [heads * (nope + value), rank] is a raw
        matrix; its key rows are absorbed into the queries."""

    def latent_values(self, x: object, heads: int, shape: LatentShape, kv_b: Weight) -> object:
        """[T, heads * value] from the attention output x [T, heads * (rope + rank)], by the value rows of `kv_b`."""

    def gated_mlp(self, x: object, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str, observer: Observer = None,
                  post_norm: Norm | None = None, factor: float = 1.0, sub_norm: Norm | None = None) -> object:
        """x + down(sub_norm(act(gate(n)) * up(n))) with n = norm(x), in place, added as by `linear_add`. The sub-norm is optional.
        `observer` receives the input of `down`."""

    def mlp(self, x: object, norm: Norm, up: Linear, down: Linear, act: str, observer: Observer = None, post_norm: Norm | None = None,
            factor: float = 1.0, xielu: XieluParams | None = None) -> object:
        """`gated_mlp` without a gate: x + down(act(up(n))) with n = norm(x). With parameters of xIELU, that is the activation."""

    def mlp_branch(self, y: object, up: Linear, down: Linear, act: str, residual: object, observer: Observer = None) -> object:
        """residual + down(act(up(y))), in place of `residual`: `mlp` of an input that is already normed."""

    def bundled_mlp(self, x: object, norm: Norm, gate: Linear, bundles: Bundles, act: str, observer: Observer = None,
                    post_norm: Norm | None = None, factor: float = 1.0) -> object:
        """`gated_mlp` or `mlp` over neurons stored one by one, skipping inactive ones. In an MLP without a gate, `gate` is its first
        matrix."""

    def moe(self, x: object, norm: Norm, router: Linear, experts: Sequence[Expert], routing: Routing, act: str, observer: Observer = None,
            correction: object | None = None, shared: SharedExpert | None = None) -> object:
        """x + the weighted sum of the experts that `router` selects for each token by `routing`, + the `shared` expert, in place.

        correction: [E], added to the router's scores for the selection only.
        observer: receives the visits (`Routed`): which tokens visit which experts."""

    def mlp_and_experts(self, x: object, norm: Norm, gate: Linear | None, up: Linear | None, down: Linear | None, router: Linear,
                        experts: Sequence[Expert], parallel: ParallelExperts, routing: Routing, act: str, observer: Observer = None,
                        visit_observer: Observer = None, post_norm: Norm | None = None, correction: object | None = None) -> object:
        """x + post_norm(m + e), in place, of an MLP and experts that run in parallel.

        m is the branch of `gated_mlp` under `parallel.mlp_post_norm`, absent if the MLP's matrices are None; e is the sum of the selected
        experts under `parallel.post_norm`. Experts read `parallel.pre_norm` of x, the router reads `parallel.router_norm` of x.
        observer: receives the input of `down`. visit_observer and correction: the observer and the correction of `moe`."""

    def expert_branch(self, x: object, norm: Norm, router: Linear, experts: Sequence[Expert], parallel: ParallelExperts, routing: Routing,
                      act: str, observer: Observer = None, correction: object | None = None, shared: SharedExpert | None = None,
                      router_input: object | None = None) -> object:
        """The sum that `moe` adds to x, [T, D] in a separate array.

        correction: [E], or [T, E] with one per token. router_input: input of the router; None: `parallel.router_norm` of x."""

    def add_per_layer_input(self, x: object, inputs: PerLayerInput, layer_input: object, act: str, observer: Observer = None) -> object:
        """x + post_norm(projection(act(gate(x)) * layer_input)), in place, where `layer_input` is [T, P] and the matrices and the norm are
        those of `inputs`. `observer` receives the input of the projection."""

    def altup_predict(self, x: object, streams: AltUp) -> object:
        """AltUp's prediction: adds to each stream of x [T, S * D] a combination of all, in place. Returns the active stream, on which the
        layer works, [T, D] in a separate array."""

    def altup_correct(self, x: object, active: object, streams: AltUp) -> object:
        """AltUp's correction: adds to each stream of x [T, S * D] a share of the difference between the layer's output `active` [T, D] and
        the first stream, in place. `active` becomes the scaled first stream and is returned."""

    def altup_add_input(self, x: object, active: object, inputs: PerLayerInput, layer_input: object, act: str,
                        observer: Observer = None) -> object:
        """What `add_per_layer_input` would add to `active` [T, D] is added to all streams of x [T, S * D] but the first, in place."""

    def low_rank_branch(self, x: object, norm: Norm, low_rank: LowRank, observer: Observer = None) -> object:
        """n + post_norm(up(down(n))) with n = norm(x), [T, D] in a separate array. `observer` receives the input of `up`."""

    def add_scaled(self, x: object, y: object, factor: float) -> object:
        """x + factor * y, in place."""

    def cutoff_mlp(self, x: object, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str, deviations: float,
                   observer: Observer = None, post_norm: Norm | None = None) -> object:
        """`gated_mlp` with sparse gates: of each gate only what exceeds mean + `deviations` * standard deviation of the token's gates."""

    def first_stream(self, x: object, count: int) -> object:
        """The first of `count` streams of x [T, S * D], [T, D] in a separate array."""

    def second_stream(self, x: object, count: int) -> object:
        """The second of `count` streams of x [T, S * D], [T, D] in a separate array."""

    def put_stream(self, x: object, y: object, index: int) -> object:
        """x [T, S * D] with the stream `index` replaced by y [T, D], in place."""

    def add_to_first(self, x: object, y: object, matrix: Linear) -> object:
        """x [T, S * D] with y @ W.T + bias added to its first stream, in place."""

    def add_low_rank(self, x: object, norm: Norm, low_rank: LowRank, out: object) -> object:
        """out + up(down(norm(x))), in place of `out`."""

    def shared_block_mlp(self, x: object, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str, branches: Sequence[LowRank],
                         observer: Observer = None) -> object:
        """down(act(gate(n)) * up(n)) with n = norm(x). `branches`: low-rank additions to gate and up, or none. `observer` receives the
        input of `down`."""

    def pad_heads(self, y: object, heads: int, padded_dim: int, prefix: object | None, operand: int) -> object:
        """[T, heads * padded_dim] of y [T, heads * head_dim]: `prefix` [heads, padded_dim - head_dim], or zeros, in front of every head.

        operand: 0 for queries, 1 for keys, 2 for values; each has a result array of its own."""

    def unpad_heads(self, y: object, heads: int, head_dim: int) -> object:
        """[T, heads * head_dim] of y [T, heads * padded_dim]: the last channels of every head, without the padding."""

    def pair_heads(self, y: object, heads: int, depth: int) -> object:
        """[T, heads * 2 * depth] of y [T, heads * depth]: heads i and i + heads / 2 concatenated, both as head i and as head i + heads / 2
        of the result."""

    def dynamic_mask_heads(self, y: object, logits: object, heads: int, head_dim: int, rates: object) -> object:
        """y [T, heads * head_dim], in place: the first channel of every head becomes exp(rate * softplus(logit)), of `logits` [T, heads]
        and `rates` [heads]."""

    def scaled_residual(self, x: object, branch: object | None, scale: ResidualScale) -> object:
        """x * scales + branch * branch_scales + offsets, channel by channel, in place of x. The branch [T, D] may be None."""

    def gate_rows(self, y: object, gates: LowRank) -> object:
        """y times the sigmoid of up(silu(down(y))), channel by channel, in place."""

    def norm_and_concat(self, y: object, norm: Norm) -> object:
        """[T, 2 * N]: norm(y) [T, N] followed by y, in a separate array; y itself becomes norm(y)."""

    def norm_stream(self, x: object, norm: Norm) -> object:
        """norm(x), in place of the residual stream x; the norm may have a bias."""

    def read_streams(self, x: object, hyper: HyperConnection | GatedResidual) -> object:
        """A branch's input from the streams x [T, S * D], or the last layer's output: [T, D] in a separate array. The coefficients of each
        token are kept for `write_streams`, until the next call."""

    def write_streams(self, x: object, branch: object, hyper: HyperConnection | GatedResidual) -> object:
        """x [T, S * D] after a branch with output [T, D], by the coefficients of the last `read_streams`, in place."""

    def ngram_products(self, rows: object, w: NgramWeights) -> list[object]:
        """Keys [T, S * D] and values [T, D] from the tokens' rows of the n-gram tables, in separate arrays."""

    def router_mlp(self, x: object, norm: Norm, path: RouterMlp, streams: object) -> object:
        """The input of a router, [T, R] in a separate array: norm(x) projected down, plus a share of the previous router's projection,
        through two matrices with activations. Projections are passed on in the second of two `streams` [T, 2 * D]."""

    def grouped_linear(self, x: object, linears: Sequence[Linear]) -> object:
        """[T, G * N] of x [T, G * K]: the product of each group's part with its own matrix, concatenated."""

    def rope_tails(self, y: object, heads: int, head_dim: int, positions: np.ndarray, table: RopeTable, inverse: bool = False) -> object:
        """y [T, heads * head_dim], in place: the last channels of each head rotated by `positions`, or back if `inverse`. Pairs are
        adjacent channels and stay in this order."""
