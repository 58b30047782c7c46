"""What a block sees of the cache: one layer's pages, and what it has beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cache_parts import Choosing, LayerPages
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
    choosing: Choosing | None = None
    last: int | None = None

    def attend(self, q: object, k: object | None, v: object | None, sinks: object | None = None, out: object | None = None) -> object:
        """Append k, v `[T, KVH * D]` at the step's positions, then attend with q `[T, H * D]` -> `[T, H * D]`; None where an earlier layer
        has appended them. `sinks`: a logit per head that joins the softmax and has no value, float32 `[H]`; nothing to do with the first
        tokens, which the cache keeps exact. `out`: where the result goes, on the CPU; None for the backend's own place."""
        step = self.cache.step
        if k is not None:
            self.pages.write(k, v, step.slots, step.rows)
        if self.last is not None:
            return self._attend_last(q[-self.last :], sinks)
        more = () if out is None else (out,)
        if self.choosing is not None and self.choosing.keys is not None:
            chosen = None if self.choosing.index is None else self.cache.chosen
            return self.pages.attend_compressed(q, step.position, step.blocks, sinks, self.choosing.keys, chosen, *more)
        if self.choosing is not None and (chosen := self.cache.chosen) is not None:
            return self.pages.attend_chosen(q, step.position, step.blocks, sinks, chosen, self.choosing.latent, *more)
        if (ends := self.cache.ends) is not None and (seen := ends.get(self.pages.window)) is not None:
            return self.pages.attend(q, step.position, step.blocks, sinks, out, *seen)
        return self.pages.attend(q, step.position, step.blocks, sinks, *more)

    def _attend_last(self, q: object, sinks: object | None) -> object:
        """`attend` for the last tokens of the step alone."""
        step, ends = self.cache.step, self.cache.ends
        position = step.position + len(step.slots) - len(q)
        seen = None if ends is None else ends.get(self.pages.window)
        if seen is not None:
            return self.pages.attend(q, position, step.blocks, sinks, None, *(each if each is None else each[-len(q) :] for each in seen))
        return self.pages.attend(q, position, step.blocks, sinks)

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
        """See `LayerStates`."""
        return self.states.mix(products, w)
