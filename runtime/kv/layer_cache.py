"""A block's view of the cache: one layer's pages, with its states and token selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .cache_components import LayerPages, TokenSelection
from .states import LayerStates

if TYPE_CHECKING:
    from ..cache import KVCache


@dataclass(frozen=True)
class LayerCache:
    """A block's view of the cache of one layer."""

    pages: LayerPages
    cache: KVCache
    states: LayerStates | None = None  # of a layer that has a recurrent state in addition to keys and values
    token_selection: TokenSelection | None = None  # of a layer with sparse attention
    last: int | None = None  # only this many of the pass's tokens attend, the last ones; None: all

    def attend(self, q: object, k: object | None, v: object | None, sinks: object | None = None, out: object | None = None) -> object:
        """Append k, v `[T, KVH * D]` at the step's positions, then attend with q `[T, H * D]` -> `[T, H * D]`.

        `k`, `v`: None if an earlier layer appended them. `sinks`: float32 `[H]`, a logit per head that joins the softmax without a value
        (unrelated to the sink tokens that the cache keeps exact). `out`: where the result goes, on the CPU; None: the backend's buffer."""
        step, output = self.cache.step, () if out is None else (out,)
        if k is not None:
            self.pages.write(k, v, step.slots, step.rows)
        q = q if self.last is None else q[-self.last :]
        arguments = q, step.position + len(step.slots) - len(q), step.blocks, sinks
        if self.token_selection is not None and self.token_selection.keys is not None:
            chosen = None if self.token_selection.index is None else self._chosen(len(q))
            return self.pages.attend_compressed(*arguments, self.token_selection.keys, chosen, *output)
        if self.token_selection is not None and (chosen := self._chosen(len(q))) is not None:
            return self.pages.attend_chosen(*arguments, chosen, self.token_selection.latent, *output)
        if (ends := self.cache.ends) is not None and (visible := ends.get(self.pages.window)) is not None:
            return self.pages.attend(*arguments, out, *(bound if bound is None else bound[-len(q) :] for bound in visible))
        return self.pages.attend(*arguments, *output)

    def _chosen(self, tokens: int) -> object | None:
        """What the last `tokens` of the step attend to."""
        chosen = self.cache.chosen
        return chosen if chosen is None or len(chosen) == tokens else chosen[-tokens:]

    def compress(self, products: Sequence[object], w: object, table: object) -> None:
        """Add the step's tokens to compressed keys, from products of the layer's input, rotated by `table`."""
        self.states.compress(products, w, self.cache.step.position, table, self.token_selection.keys, self.token_selection.index)

    def choose(self, q: object, k: object | None, weights: object | None, closing: object | None = None, out: object | None = None) -> None:
        """Select what the step's tokens attend to, here and in later layers that share the selection.

        Index queries q `[T, heads * width]`, keys k `[T, width]` (None if `compress` has made them), weights `[T, heads]`. `closing`: norm
        and rotary table of keys that are means of several tokens."""
        position, index = self.cache.step.position, self.token_selection.index
        if k is not None:
            index.note(k, position, closing)
        self.cache.chosen = index.choose(q, weights, position, out)

    def convolved(self, product: object, w: object) -> tuple[object, ...]:
        """Queries, keys and values from a layer's convolution state; see `kernels/cpu/cca.py`."""
        return self.states.convolved(product, w)

    def mix(self, products: Sequence[object], w: object) -> object:
        """See `LayerStates`; limited to the last tokens where only these continue."""
        mixed = self.states.mix(products, w)
        return mixed if self.last is None else mixed[-self.last :]


@dataclass(frozen=True)
class LastStates:
    """A view of a layer's states for passes where only the `last` tokens continue."""

    states: LayerStates
    last: int

    def mix(self, products: Sequence[object], w: object) -> object:
        return self.states.mix(products, w)[-self.last :]

    def add_ngrams(self, x: object, products: Sequence[object], w: object) -> object:
        return self.states.add_ngrams(x, products, w)


def for_last_tokens(view: LayerCache | LayerStates, last: int) -> LayerCache | LastStates:
    """A layer's view for a block where only the `last` tokens of a pass continue."""
    return replace(view, last=last) if isinstance(view, LayerCache) else LastStates(view, last)
