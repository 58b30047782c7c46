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
    """The widths that decide how much working memory a model needs; `rows` is the most rows of logits made at once.

    Of a mixture also how many experts there are, how many a token visits, and the width inside one; `ffn` covers that width too.
    `packed_kv`: sealed pages of the KV cache are packed. `bundled`: `up` and `down` lie neuron by neuron. `spilled_kv`: some sealed pages
    lie on a disk. `state`: of layers that remember in a fixed size. `gated_queries`: a gate beside every query. `latent`: the widths of
    latent attention. `other_heads`: (key-value heads, their size) of layers in which these are others. `given`: numbers that
    all layers together are given of a token beside the stream. `apart`: experts are a branch beside an MLP. `joined`: numbers of a token
    that the layer for multi-token prediction begins with, 0 for a run without it. `beside`: layers have attention and a state side by side.
    `gates_apart`: gates of what is attended to are made by a matrix of their own. `streams`: how many of a token lie side by side, 0 for
    one as it is; `low_rank`: the width inside a branch of what a layer reads. `lora`: the widest inside an adapter, 0 for a run without.
    `one_scale`: before a product with ternary weights all of a token's activations are rounded by one scale. `narrow`: how wide a head's
    values are made, where attention takes wider ones. `index`: of layers whose tokens choose what they see. `grouped`: what
    matrices of groups of heads give of what is attended to, where streams of a token are mixed by numbers of its own. `picked`: layers in
    which a table says which experts a token visits. `seen`: pages of keys that pictures which a token sees have at most. `mix_rank`: the
    numbers by way of which streams say what a branch reads of them, 0 where they do not; `ngrams`: what `ngram_layers` layers are given of
    the words before a token. `mixes`: streams are mixed by numbers of a token's own, where no heads are `grouped`. `between`: layers
    before which the states of a pass are kept for drafts. `differs`: attention is the difference of two halves of the heads. `gated_norms`:
    what norms give has gates, and queries and gates of what is attended to are made of a latent normed and as it is. `gate_width`: of
    the gates of what latent attention attends to, where layers that choose have them too. `narrowed`: experts read fewer numbers than a
    token has, which are made of what a norm gives.
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
    given: int = 0
    apart: bool = False
    joined: int = 0
    beside: bool = False
    gates_apart: bool = False
    streams: int = 0
    low_rank: int = 0
    lora: int = 0
    one_scale: bool = False
    narrow: int = 0
    index: IndexShape | None = None
    grouped: int = 0
    picked: int = 0
    seen: int = 0
    mix_rank: int = 0
    ngrams: NgramShape | None = None
    ngram_layers: int = 0
    mixes: bool = False
    between: int = 0
    differs: bool = False
    gated_norms: bool = False
    gate_width: int = 0
    narrowed: bool = False

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
        index = 0 if self.index is None or not self.grouped else self.index.heads * self.index.width
        return max(self.heads * self.head_dim * (2 if self.gated_queries else 1), state, index)

    @property
    def attended(self) -> int:
        """Most values per token in the output of attention or a recurrent state."""
        return max(self.heads * self.head_dim, 0 if self.state is None else self.state.values)

    @property
    def multiplied(self) -> int:
        """Most values per token read by a projection in attention."""
        if self.latent is None:
            wide = self.streams * self.hidden if self.grouped or self.mix_rank else 0
            return max(self.attended, wide, self.grouped, self.mix_rank, 0 if self.ngrams is None else self.ngrams.rows)
        wide = self.streams * self.hidden if self.mixes else 0
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
            raise RuntimeError(f"workspace {name!r}: {count} floats asked, {self.floats[name]} planned")
        return self._buffers[name][:count].reshape(shape)
