"""What a block sees of the cache: one layer's pages, and what it has beside them."""

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
    """What a block sees of the cache. `states`: of a layer that has some beside its keys and values; `choosing`: of one
    whose tokens see what was chosen. `last`: so many of a pass's tokens attend, the last ones; None: all of them."""

    pages: LayerPages
    cache: KVCache
    states: LayerStates | None = None
    choosing: TokenSelection | None = None
    last: int | None = None

    def attend(self, q: object, k: object | None, v: object | None, sinks: object | None = None, out: object | None = None) -> object:
        """Append k, v `[T, KVH * D]` at the step's positions, then attend with q `[T, H * D]` -> `[T, H * D]`; None where an earlier layer
        has appended them. `sinks`: a logit per head that joins the softmax and has no value, float32 `[H]`; nothing to do with the first
        tokens, which the cache keeps exact. `out`: where the result goes, on the CPU; None for the backend's own place."""
        step, more = self.cache.step, () if out is None else (out,)
        if k is not None:
            self.pages.write(k, v, step.slots, step.rows)
        q = q if self.last is None else q[-self.last :]
        given = q, step.position + len(step.slots) - len(q), step.blocks, sinks
        if self.choosing is not None and self.choosing.keys is not None:
            chosen = None if self.choosing.index is None else self._chosen(len(q))
            return self.pages.attend_compressed(*given, self.choosing.keys, chosen, *more)
        if self.choosing is not None and (chosen := self._chosen(len(q))) is not None:
            return self.pages.attend_chosen(*given, chosen, self.choosing.latent, *more)
        if (ends := self.cache.ends) is not None and (seen := ends.get(self.pages.window)) is not None:
            return self.pages.attend(*given, out, *(each if each is None else each[-len(q) :] for each in seen))
        return self.pages.attend(*given, *more)

    def _chosen(self, tokens: int) -> object | None:
        """What the last `tokens` of the step see."""
        chosen = self.cache.chosen
        return chosen if chosen is None or len(chosen) == tokens else chosen[-tokens:]

    def compress(self, products: Sequence[object], w: object, table: object) -> None:
        """Take the step's tokens into keys of several, by products of the layer's input; they turn by `table`."""
        self.states.compress(products, w, self.cache.step.position, table, self.choosing.keys, self.choosing.index)

    def choose(self, q: object, k: object | None, weights: object | None, closing: object | None = None, out: object | None = None) -> None:
        """Choose what the step's tokens see, here and in layers behind that share the choice: index queries q `[T, heads * width]`, keys k
        `[T, width]`, None where `compress` has made them, weights `[T, heads]`. `closing`: norm and rotary table of keys that are means."""
        position, index = self.cache.step.position, self.choosing.index
        if k is not None:
            index.note(k, position, closing)
        self.cache.chosen = index.choose(q, weights, position, out)

    def convolved(self, product: object, w: object) -> tuple[object, ...]:
        """Queries, keys and values that a layer's state makes of its product; see `kernels/cpu/cca.py`."""
        return self.states.convolved(product, w)

    def mix(self, products: Sequence[object], w: object) -> object:
        """See `LayerStates`; of the last tokens, where these alone go on."""
        mixed = self.states.mix(products, w)
        return mixed if self.last is None else mixed[-self.last :]


@dataclass(frozen=True)
class LastStates:
    """A layer's states as a block sees them of which the `last` tokens of a pass alone go on."""

    states: LayerStates
    last: int

    def mix(self, products: Sequence[object], w: object) -> object:
        return self.states.mix(products, w)[-self.last :]

    def add_ngrams(self, x: object, products: Sequence[object], w: object) -> object:
        return self.states.add_ngrams(x, products, w)


def for_last_tokens(kept: LayerCache | LayerStates, last: int) -> LayerCache | LastStates:
    """What a layer keeps, for a block of which the `last` tokens of a pass alone go on."""
    return replace(kept, last=last) if isinstance(kept, LayerCache) else LastStates(kept, last)
