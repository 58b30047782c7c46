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

MOST_VIEWS = 256


@dataclass(frozen=True)
class Dims:
    """The model widths that determine the workspace size; `rows` is the most rows of logits computed at once.

    For a mixture also the number of experts, experts per token, and the FFN width of one expert; `ffn` covers that width too.

    `packed_kv`: sealed pages of the KV cache are packed. `bundled`: `up` and `down` are stored as neuron bundles. `spilled_kv`: some sealed
    pages are on disk. `state`: of recurrent layers. `gated_queries`: a gate next to every query. `latent`: the widths of latent attention.
    `other_heads`: (KV heads, head size) of layers where these differ. `per_layer_inputs`: numbers per token of all per-layer inputs.
    `parallel_experts`: experts are a branch parallel to an MLP. `mtp_inputs`: input width of the multi-token prediction layer, 0 without
    it. `parallel_state`: layers have attention and a recurrent state in parallel. `separate_gates`: attention gates have their own matrix.
    `streams`: number of streams per token, 0 for an ordinary residual stream; `low_rank`: inner width of a low-rank branch. `lora`: the
    largest LoRA rank, 0 for a run without. `one_scale`: activations of ternary products have one scale per token. `value_width`: head width
    of values before padding, where attention uses wider ones. `index`: the indexer of sparse attention layers. `grouped_width`: output of
    grouped output projections (hyper-connections). `table_routed_layers`: layers whose experts are selected by a table. `image_key_pages`:
    most pages of image keys in cross-attention. `mix_rank`: rank of the gates of gated residuals, 0 without them; `ngrams`: n-gram
    embeddings of `ngram_layers` layers. `mixes_streams`: streams are mixed (hyper-connections) without grouped output projections.
    `draft_state_layers`: layers whose input states are kept for drafts. `differential`: differential attention. `gated_norms`: norm outputs
    have gates, and queries and attention gates are computed from a latent with and without its norm. `gate_width`: width of the gates of
    latent attention in layers with an indexer. `low_rank_experts`: experts read a low-rank projection of the normed input.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    chunk: int
    ctx: int
    rows: int
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    packed_kv: bool = False
    bundled: bool = False
    spilled_kv: bool = False
    state: StateShape | None = None
    gated_queries: bool = False
    latent: LatentShape | None = None
    other_heads: tuple[tuple[int, int], ...] = ()
    per_layer_inputs: int = 0
    parallel_experts: bool = False
    mtp_inputs: int = 0
    parallel_state: bool = False
    separate_gates: bool = False
    streams: int = 0
    low_rank: int = 0
    lora: int = 0
    one_scale: bool = False
    value_width: int = 0
    index: IndexShape | None = None
    grouped_width: int = 0
    table_routed_layers: int = 0
    image_key_pages: int = 0
    mix_rank: int = 0
    ngrams: NgramShape | None = None
    ngram_layers: int = 0
    mixes_streams: bool = False
    draft_state_layers: int = 0
    differential: bool = False
    gated_norms: bool = False
    gate_width: int = 0
    low_rank_experts: bool = False

    @property
    def alike(self) -> tuple[Dims, ...]:
        """One `Dims` per kind of layer, as if all layers were of that kind; the buffer sizes needed are the maximum over them."""
        return tuple(replace(self, kv_heads=kv_heads, head_dim=head_dim, other_heads=())
                     for kv_heads, head_dim in ((self.kv_heads, self.head_dim), *self.other_heads))

    @property
    def projected(self) -> int:
        """Most values per token in the output of a layer's first projection."""
        state = 0 if self.state is None else self.state.products[0]
        if self.latent is not None:
            index = 0 if self.index is None else self.index.heads * self.index.width
            return max(self.heads * self.latent.query, self.latent.key, index, state)
        index = 0 if self.index is None or not self.grouped_width else self.index.heads * self.index.width
        return max(self.heads * self.head_dim * (2 if self.gated_queries else 1), state, index)

    @property
    def attended(self) -> int:
        """Most values per token in the output of attention or a recurrent state."""
        return max(self.heads * self.head_dim, 0 if self.state is None else self.state.values)

    @property
    def multiplied(self) -> int:
        """Most values per token read by a projection in attention."""
        if self.latent is None:
            wide = self.streams * self.hidden if self.grouped_width or self.mix_rank else 0
            return max(self.attended, wide, self.grouped_width, self.mix_rank, 0 if self.ngrams is None else self.ngrams.rows)
        wide = self.streams * self.hidden if self.mixes_streams else 0
        queries = (self.latent.query_rank or 0) * (1 + self.gated_norms)
        return max(wide, self.heads * self.latent.value, queries, 0 if self.state is None else self.state.values)


def address(array: np.ndarray | None) -> int:
    """Address of an array's first element; 0 for None."""
    return 0 if array is None else array.__array_interface__["data"][0]


class Workspace:
    """Named float32 buffers of planned sizes. `take` returns a view; asking for more than was planned is a programming error."""

    def __init__(self, floats: Mapping[str, int]) -> None:
        self.floats = dict(floats)
        self._buffers: dict[str, np.ndarray] = {}
        self._views: dict[tuple, np.ndarray] = {}
        self._addresses: dict[int, int] = {}  # of the views, by identity: they are alive as long as they are in `_views`

    @property
    def nbytes(self) -> int:
        return 4 * sum(self.floats.values())

    def take(self, name: str, *shape: int) -> np.ndarray:
        """A view of buffer `name`; its contents are undefined."""
        view = self._views.get((name, shape))
        if view is None:
            view = self._cut(name, shape)
            if len(self._views) >= MOST_VIEWS:  # prompts of every length leave views behind
                self._views.clear()
                self._addresses.clear()
            self._views[name, shape] = view
            self._addresses[id(view)] = view.ctypes.data
        return view

    def holds(self, array: np.ndarray) -> bool:
        """Is this one of the views handed out by `take` and still tracked?"""
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
