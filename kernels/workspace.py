"""Workspace buffers of the ops: sizes are planned before a model is loaded and never grow, which makes the memory plan exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .indexer_shape import IndexShape
    from .latent_shape import LatentShape
    from .ngram_shape import NgramShape
    from .state_shape import StateShape

MAX_VIEWS = 256


@dataclass(frozen=True)
class Dims:
    """The model dimensions that determine the workspace size. 0, None and False mean that the model has no such part."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int  # at least `expert_dim`
    vocab_size: int
    chunk: int  # tokens of a prefill chunk
    ctx: int
    logit_rows: int  # maximum number of rows of logits computed at once
    num_experts: int = 0
    experts_per_token: int = 0  # experts per token
    expert_dim: int = 0  # FFN width of one expert
    packed_kv: bool = False  # sealed pages of the KV cache are packed
    bundled: bool = False  # `up` and `down` are stored as neuron bundles
    spilled_kv: bool = False  # some sealed pages are on disk
    recurrent: StateShape | None = None  # of recurrent layers
    output_gate_in_q: bool = False  # the query projection also yields a gate per query
    mla: LatentShape | None = None  # latent attention (MLA)
    other_kv_heads: tuple[tuple[int, int], ...] = ()  # (KV heads, head size) of layers where these differ
    per_layer_input_width: int = 0  # values per token of all per-layer input embeddings
    parallel_to_mlp: bool = False  # experts are a branch parallel to an MLP
    mtp_input_width: int = 0  # input width of the multi-token prediction layer
    parallel_hybrid: bool = False  # layers have attention and a recurrent state in parallel
    output_gate: bool = False  # attention gates have a matrix of their own
    residual_streams: int = 0  # residual streams per token; 0 for an ordinary residual stream
    low_rank_dim: int = 0  # inner width of a low-rank branch
    max_lora_rank: int = 0  # the largest LoRA rank
    per_token_scale: bool = False  # activations of ternary products have one scale per token
    v_head_dim: int = 0  # head width of values before padding, where attention uses wider ones
    indexer: IndexShape | None = None  # the indexer of sparse attention layers
    output_group_width: int = 0  # output width of grouped output projections (hyper-connections)
    num_hash_routed_layers: int = 0  # layers whose experts are selected by a table
    max_image_key_pages: int = 0  # maximum number of pages of image keys in cross-attention
    residual_gate_rank: int = 0  # rank of the gates of gated residuals
    ngrams: NgramShape | None = None  # n-gram embeddings
    num_ngram_layers: int = 0  # layers that have them
    has_hyper_connections: bool = False  # streams are mixed (hyper-connections) without grouped output projections
    num_draft_state_layers: int = 0  # layers whose input states are kept for drafts
    differential_attention: bool = False  # differential attention
    gated_norms: bool = False  # norm outputs have gates; queries and attention gates come from a latent with and without its norm
    mla_gate_width: int = 0  # width of the gates of latent attention in layers with an indexer
    latent_experts: bool = False  # experts read a low-rank projection of the normed input

    @property
    def by_layer_kind(self) -> tuple[Dims, ...]:
        """One `Dims` per kind of layer, as if all layers were of that kind. A buffer needs the maximum over them."""
        return tuple(replace(self, num_key_value_heads=kv_heads, head_dim=head_dim, other_kv_heads=())
                     for kv_heads, head_dim in ((self.num_key_value_heads, self.head_dim), *self.other_kv_heads))

    @property
    def projection_width(self) -> int:
        """Maximum output width of a layer's first projection (queries, latent, recurrent inputs or indexer queries)."""
        state = 0 if self.recurrent is None else self.recurrent.projection_widths[0]
        if self.mla is not None:
            indexer = 0 if self.indexer is None else self.indexer.heads * self.indexer.width
            return max(self.num_attention_heads * self.mla.query, self.mla.key, indexer, state)
        indexer = 0 if self.indexer is None or not self.output_group_width else self.indexer.heads * self.indexer.width
        return max(self.num_attention_heads * self.head_dim * (2 if self.output_gate_in_q else 1), state, indexer)

    @property
    def attention_width(self) -> int:
        """Maximum output width of attention or a recurrent state."""
        return max(self.num_attention_heads * self.head_dim, 0 if self.recurrent is None else self.recurrent.values)

    @property
    def projection_input_width(self) -> int:
        """Maximum input width of a projection in attention."""
        if self.mla is None:
            wide = self.residual_streams * self.hidden_size if self.output_group_width or self.residual_gate_rank else 0
            ngrams = 0 if self.ngrams is None else self.ngrams.rows
            return max(self.attention_width, wide, self.output_group_width, self.residual_gate_rank, ngrams)
        wide = self.residual_streams * self.hidden_size if self.has_hyper_connections else 0
        queries = (self.mla.query_rank or 0) * (1 + self.gated_norms)
        return max(wide, self.num_attention_heads * self.mla.value, queries, 0 if self.recurrent is None else self.recurrent.values)


def address(array: np.ndarray | None) -> int:
    """Address of an array's first element; 0 for None."""
    return 0 if array is None else array.__array_interface__["data"][0]


class Workspace:
    """Named float32 buffers of planned sizes. `take` returns a view; asking for more than was planned is a programming error."""

    def __init__(self, floats: Mapping[str, int]) -> None:
        self.floats = dict(floats)
        self._buffers: dict[str, np.ndarray] = {}
        self._views: dict[tuple, np.ndarray] = {}
        self._addresses: dict[int, int] = {}  # by id() of a view, which `_views` keeps alive

    @property
    def nbytes(self) -> int:
        return 4 * sum(self.floats.values())

    def take(self, name: str, *shape: int) -> np.ndarray:
        """A view of buffer `name`; its contents are undefined."""
        view = self._views.get((name, shape))
        if view is None:
            view = self._cut(name, shape)
            if len(self._views) >= MAX_VIEWS:  # every prompt length adds views
                self._views.clear()
                self._addresses.clear()
            self._views[name, shape] = view
            self._addresses[id(view)] = view.ctypes.data
        return view

    def holds(self, array: np.ndarray) -> bool:
        """Whether this is a view returned by `take` and still tracked."""
        return id(array) in self._addresses

    def address(self, array: np.ndarray) -> int:
        """Address of an array; fast for views of this workspace, which is what ops mostly pass to kernels."""
        return self._addresses.get(id(array)) or array.ctypes.data

    def _cut(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self._buffers:
            # One cache line of slack so that every buffer begins on a line.
            raw = np.empty(self.floats[name] + 16, np.float32)
            skip = (-raw.ctypes.data % 64) // 4
            self._buffers[name] = raw[skip : skip + self.floats[name]]
        count = prod(shape)
        if count > self.floats[name]:
            raise RuntimeError(f"workspace {name!r}: {count} floats requested, {self.floats[name]} planned")
        return self._buffers[name][:count].reshape(shape)
