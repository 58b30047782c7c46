"""The CPU backend: transformer block ops on NumPy arrays, run by compiled kernels on the thread pool.

Activations are float32 `[T, N]` views of a planned workspace, valid until the op that produced them runs again; the residual stream is
updated in place. Weights stay in their stored type. Up to FEW_TOKENS tokens use the memory-bound kernels, more the tiled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..layout import PAGE, PageLayout
from ..registry import Call, Registry
from ..threads import ThreadPool
from ..workspace import Dims, Workspace, address
from . import (
    attention,
    bundled_mlp,
    cca,
    indexer,
    latent,
    latent_loops,
    linear,
    linear_bf16,
    linear_fp8,
    lora,
    low_bit,
    moe,
    per_layer_inputs,
    residual_scaling,
    row_ops,
    states,
    streams,
)
from . import head_widths as widths
from .attention_decode import attend_decode_scratch, partials_floats
from .compressed import WideOps, wide_floats, wide_workspace
from .inner_loops import TILE_COLUMNS
from .kv.prefill import prefill_scratch
from .kv.scratch_layout import decode_scratch
from .kv.seal import seal_scratch
from .linear_amx import panel_floats, scratch_floats
from .rotary_angles import Angles, cached_angles
from .stages import FEW_TOKENS, MatrixStages

if TYPE_CHECKING:  # records of the layer above; kernels read their fields and never create one
    from ...quant.weight import Linear, Norm, Weight, XieluParams
    from ...runtime.rope import RopeTable
    from .pages import LayerPages


def plan_workspace(dims: Dims, workers: int) -> dict[str, int]:
    """Floats of every buffer used by the ops: exact, because the same table sizes the buffers."""
    if dims.other_kv_heads:
        plans = [plan_workspace(kind, workers) for kind in dims.by_layer_kind]
        return {name: max(plan[name] for plan in plans) for name in plans[0]}
    chunk = max(dims.chunk, dims.logit_rows)
    wide = max(dims.hidden_size, dims.intermediate_size, dims.projection_input_width, dims.mtp_input_width, dims.max_lora_rank)
    columns = -(-chunk // TILE_COLUMNS) * TILE_COLUMNS
    group = dims.num_attention_heads // dims.num_key_value_heads
    scratch = max(linear.HEADROOM + FEW_TOKENS * wide, TILE_COLUMNS * wide, linear.MANY_BLOCK * (linear.DEPTH_BLOCK + columns),
                  attention.attend_prefill_scratch(dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim),
                  attend_decode_scratch(FEW_TOKENS, dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim),
                  low_bit.scratch_floats(chunk, wide), scratch_floats(chunk, wide),
                  linear_bf16.scratch_floats(chunk, wide), linear_fp8.scratch_floats(chunk),
                  0 if dims.mla is None else latent_loops.scratch_floats(dims.mla.nope, dims.mla.rank),
                  max(prefill_scratch(dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim),
                      decode_scratch(group, dims.head_dim), seal_scratch(dims.head_dim)) if dims.packed_kv else 0,
                  streams.scratch_floats(dims), lora.scratch_floats(dims),
                  indexer.scratch_floats(dims), wide_floats(dims), cca.scratch_floats(dims))
    blocks = max(dims.ctx // attention.PAGE + 3, dims.max_image_key_pages)
    # Where attention processes pages in several calls, each of few tokens has its own partials at any depth, and prefill tiles keep their
    # state between calls.
    partials = max(partials_floats(FEW_TOKENS, dims.num_attention_heads, dims.head_dim, blocks), indexer.partials_floats(dims))
    state = 0
    if dims.spilled_kv:
        partials, state = FEW_TOKENS * blocks * dims.num_attention_heads * (dims.head_dim + 2), attention.attend_prefill_state(chunk, dims)
    # y0 holds the queries, and later in a layer a branch before it is added to the stream
    return {"x": chunk * dims.hidden_size * max(1, dims.residual_streams), "y0": chunk * max(dims.projection_width, dims.hidden_size),
            **states.plan_workspace(dims, chunk), "attend": chunk * dims.attention_width,
            "gate": chunk * dims.intermediate_size, "up": chunk * dims.intermediate_size,
            "panels": max(columns * wide, panel_floats(chunk, wide), linear_bf16.panel_floats(chunk, wide)),
            "low_panels": low_bit.panel_floats(chunk, wide),
            "scratch": workers * (scratch + 16), "logits": dims.logit_rows * dims.vocab_size,
            "partials": partials, "state": state, **moe.plan_workspace(dims, chunk), **bundled_mlp.plan_workspace(dims, chunk),
            **latent.plan_workspace(dims, chunk), **per_layer_inputs.plan_workspace(dims, chunk), **streams.plan_workspace(dims, chunk),
            **lora.plan_workspace(dims, chunk), **widths.plan_workspace(dims, chunk), **indexer.plan_workspace(dims, chunk),
            **cca.plan_workspace(dims, chunk), **wide_workspace(dims, chunk),
            # of the multi-token prediction layer: its inputs and pending states
            "joined": min(chunk, PAGE) * dims.mtp_input_width,
            "states": (chunk + FEW_TOKENS) * dims.hidden_size if dims.mtp_input_width else 0,
            "between": chunk * dims.num_draft_state_layers * dims.hidden_size}


class CpuOps(MatrixStages, lora.AdapterScales, WideOps):
    """See the module. `dims` sizes the workspace; one instance serves every CPU block of a model."""

    name = "cpu"

    def __init__(self, pool: ThreadPool, dims: Dims, registry: Registry | None = None) -> None:
        from .candidates import default_registry  # imports this module

        super().__init__(pool, registry or default_registry(), Workspace(plan_workspace(dims, pool.workers)))
        self.dims = dims
        self._angles: dict[int, Angles] = {}
        self._step_arrays: dict[int, tuple[np.ndarray, np.ndarray, tuple[int, int]]] = {}
        self.partials = address(self.workspace.take("partials", 1))
        self._rotate_with, self._add_with = (self.registry.select(Call(op)).candidate.run for op in ("rotate", "add"))
        self.mixtures = moe.MixtureCache()

    # -- the ops ---------------------------------------------------------------------------------------------------------------

    def embed(self, ids: np.ndarray, table: Weight, scale: float = 1.0, places: np.ndarray | None = None,
              learned: Weight | None = None, put: Callable[[np.ndarray], None] | None = None) -> np.ndarray:
        """Rows of the embedding table as the residual stream x[T, D], some replaced by rows of `put`, plus rows `places` of a raw table of
        `learned` positions."""
        x = self.workspace.take("x", len(ids), table.shape[1])
        if table.fetch_rows is None:
            self._embed(ids, table, scale, x)
        else:
            for begin, part_ids, fetched in table.fetch_rows(ids):  # the next rows reuse this memory
                self._embed(part_ids, fetched, scale, x[begin : begin + len(part_ids)])
                self.flush()
        if put is not None:
            self.flush()
            put(x)
        if learned is not None:
            self.flush()
            x += _raw_rows(learned, places, self.workspace.take("y0", *x.shape))
        return x

    def table_rows(self, ids: np.ndarray, table: Weight, out: np.ndarray) -> np.ndarray:
        """Rows of a table in memory as float32 [T, K], in `out`."""
        self._embed(ids, table, 1.0, out)
        self.flush()
        return out

    def _embed(self, ids: np.ndarray, table: Weight, scale: float, x: np.ndarray) -> None:
        if not table.spec.is_raw:
            low_bit.embed(self, ids, table, scale, x)
            return
        _raw_rows(table, ids, x)
        if scale != 1.0:
            x *= np.float32(scale)

    def norm_linear(self, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear]) -> list[np.ndarray]:
        """[norm(x) @ W.T + b for each], one pass over x; without a norm x as it is."""
        if (outs := self._run_cached(x, norm, linears, linear.PLAIN, "none")) is not None:
            return outs
        outs = [self.workspace.take(f"y{i}", len(x), matrix.weight.shape[0]) for i, matrix in enumerate(linears)]
        self._run_stage(x, norm, linears, outs, linear.PLAIN, "none")
        return outs

    def linear_add(self, x: np.ndarray, matrix: Linear, residual: np.ndarray, post_norm: Norm | None = None,
                   factor: float = 1.0) -> np.ndarray:
        """residual + factor * post_norm(x @ W.T + b), in place. The post-norm is optional."""
        if post_norm is not None or factor != 1.0 or matrix.has_dora and self.is_adapted:
            (branch,) = self.norm_linear(x, None, (matrix,))
            self._add_with(self, branch, post_norm, residual, factor)
        elif self._run_cached(x, None, (matrix,), linear.ADD, "none", residual) is None:
            self._run_stage(x, None, [matrix], [residual], linear.ADD, "none")
        return residual

    def gated_mlp(self, x: np.ndarray, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str,
                  observer: Callable[[np.ndarray], None] | None = None, post_norm: Norm | None = None, factor: float = 1.0,
                  sub_norm: Norm | None = None) -> np.ndarray:
        """x + down(sub_norm(act(gate(n)) * up(n))) with n = norm(x), in place; the branch is added as in `linear_add`. `observer` is
        called with the input of `down`."""
        hidden = self.gated_hidden(x, norm, gate, up, act)
        if sub_norm is not None:
            self.norm_in_place(hidden, sub_norm)
        if observer is not None:
            observer(hidden)
        return self.linear_add(hidden, down, x, post_norm, factor)

    def gated_hidden(self, x: np.ndarray, norm: Norm, gate: Linear | None, up: Linear, act: str,
                     xielu: XieluParams | None = None) -> np.ndarray:
        """act(gate(n)) * up(n) with n = norm(x), or act(up(n)): the input of `down`. In the latter, xIELU may replace `act`."""
        if gate is None:
            if (outs := self._run_cached(x, norm, (up,), linear.PLAIN, "none")) is None:
                outs = [self.workspace.take("gate", len(x), up.weight.shape[0])]
                self._run_stage(x, norm, [up], outs, linear.PLAIN, "none")
            if xielu is None:
                self.gate(outs[0], None, act)
            else:
                self.registry.select(Call("curve")).candidate.run(self, outs[0], xielu)
            return outs[0]
        outs = self._run_cached(x, norm, (gate, up), linear.GATED, act)
        if outs is None:
            outs = [self.workspace.take("gate", len(x), gate.weight.shape[0])]
            self._run_stage(x, norm, [gate, up], outs, linear.GATED, act)
        return outs[0]

    def mlp(self, x: np.ndarray, norm: Norm, up: Linear, down: Linear, act: str, observer: Callable[[np.ndarray], None] | None = None,
            post_norm: Norm | None = None, factor: float = 1.0, xielu: XieluParams | None = None) -> np.ndarray:
        """`gated_mlp` without a gate: x + down(act(up(n))), where xIELU may replace `act`."""
        hidden = self.gated_hidden(x, norm, None, up, act, xielu)
        if observer is not None:
            observer(hidden)
        return self.linear_add(hidden, down, x, post_norm, factor)

    def mlp_branch(self, y: np.ndarray, up: Linear, down: Linear, act: str, residual: np.ndarray,
                   observer: Callable[[np.ndarray], None] | None = None) -> np.ndarray:
        """residual + down(act(up(y))), in place."""
        hidden = self.gated_hidden(y, None, None, up, act)
        if observer is not None:
            observer(hidden)
        return self.linear_add(hidden, down, residual)

    mlp_and_experts, expert_branch = moe.mlp_and_experts, moe.expert_branch
    moe = moe.moe
    layer_inputs = per_layer_inputs.layer_inputs
    add_per_layer_input = per_layer_inputs.add_per_layer_input
    enter_streams, leave_streams = streams.enter_streams, streams.leave_streams
    altup_predict, altup_correct, altup_add_input = streams.altup_predict, streams.altup_correct, streams.altup_add_input
    low_rank_branch, add_scaled, cutoff_mlp = streams.low_rank_branch, streams.add_scaled, streams.cutoff_mlp
    first_stream, second_stream, put_stream = streams.first_stream, streams.second_stream, streams.put_stream
    add_to_first, add_low_rank, shared_block_mlp = streams.add_to_first, streams.add_low_rank, streams.shared_block_mlp
    kept = row_ops.copy_input_state
    copy, scale_in_place, clip, norm_in_place = row_ops.copy, row_ops.scale_in_place, row_ops.clip, row_ops.norm_rows
    split_query_gates, gate_heads = row_ops.split_query_gates, row_ops.gate_heads
    scale_queries, norm = row_ops.scale_queries, row_ops.norm
    scaled_residual, router_mlp, pair_heads = residual_scaling.scaled_residual, residual_scaling.router_mlp, widths.pair_heads
    gate_rows, norm_and_concat = residual_scaling.gate_rows, residual_scaling.norm_and_concat
    dynamic_mask_heads = widths.dynamic_mask_heads
    pad_heads, unpad_heads, norm_stream = widths.pad_heads, widths.unpad_heads, widths.norm_stream
    bundled_mlp = bundled_mlp.bundled_mlp
    latent_keys, latent_queries, latent_values = latent.latent_keys, latent.latent_queries, latent.latent_values
    state_layer, index_layer = states.state_layer, indexer.index_layer

    def logits(self, x: np.ndarray, norm: Norm, head: Linear, softcap: float | None = None, scale: float = 1.0) -> np.ndarray:
        """Next-token logits, float32 [T, V]: scale * head(norm(x)), then softcapped. T at most `dims.rows`."""
        if (outs := self._run_cached(x, norm, (head,), linear.FINE, "none")) is None:
            outs = [self.workspace.take("logits", len(x), head.weight.shape[0])]
            self._run_stage(x, norm, [head], outs, linear.FINE, "none")
        out = outs[0]
        self.flush()
        if scale != 1.0:
            out *= np.float32(scale)
        if softcap:
            np.tanh(np.divide(out, np.float32(softcap), out=out), out=out)
            out *= np.float32(softcap)
        return out

    def rope_heads(self, y: np.ndarray, heads: int, head_dim: int, positions: np.ndarray, table: RopeTable | None,
                   norm: Norm | None) -> np.ndarray:
        """Optional norm (per head, or of the whole row, depending on its weight), then rotary embedding of y[T, heads * head_dim], in
        place."""
        if table is not None or norm is not None:
            self._rotate_with(self, y, heads, head_dim, cached_angles(self, self._angles, positions, table), norm)
        return y

    # -- running kernels -------------------------------------------------------------------------------------------------------

    def addresses_of_step(self, first: np.ndarray, second: np.ndarray) -> tuple[int, int]:
        """Addresses of two arrays that every layer of a step receives in turn."""
        cached = self._step_arrays.get(id(first))
        if cached is None or cached[0] is not first or cached[1] is not second:
            if len(self._step_arrays) > 8:
                self._step_arrays.clear()
            cached = self._step_arrays[id(first)] = (first, second, (address(first), address(second)))
        return cached[2]

    def kv_layer(self, layout: PageLayout, exact: np.ndarray, sealed: np.ndarray, scale: float, window: int | None,
                 softcap: float | None, codec: object | None = None, better_pages: np.ndarray | None = None) -> LayerPages:
        """Storage of one layer's KV pages in host memory. Packed pages have a `codec`; pages of its `better` codec, if any, are in
        `better_pages`. Raises ValueError for packed pages if the workspace was not sized for them: kernels would write past its end."""
        from .kv.pages import pages_of

        if codec is not None and codec.is_packed and not self.dims.packed_kv:
            raise ValueError("packed pages require a workspace with Dims.packed_kv")
        return pages_of(self, layout, exact, sealed, scale, window, softcap, codec, better_pages)

    def close(self) -> None:
        self.pool.close()

    def put(self, data: np.ndarray, scheme: str) -> np.ndarray:
        """A parameter placed on this backend: a no-op."""
        return data

    def from_host(self, x: np.ndarray) -> np.ndarray:
        """Activations from another backend into this one's residual stream."""
        out = self.workspace.take("x", *x.shape)
        np.copyto(out, x)
        return out

    def to_host(self, x: np.ndarray) -> np.ndarray:
        """Activations for another backend, ready to be read."""
        self.flush()
        return x


def _raw_rows(table: Weight, ids: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Rows of an unquantized table as float32, into `out`."""
    rows = table.parts["data"][ids]
    if table.spec.scheme == "bf16":
        np.left_shift(rows, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[:] = rows.view(np.float16) if table.spec.scheme == "f16" else rows
    return out
