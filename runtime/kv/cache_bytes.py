"""The size of a KV cache in bytes and bits, computed from the fields of `KVCache`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...kernels.layout import PAGE
from .cache_shape import page_sizes

if TYPE_CHECKING:
    from ...kernels.cpu.compressed import CompressedKeys
    from ...kernels.cpu.indexer import LayerIndex
    from ...kernels.layout import PageLayout
    from ...quant.kv import PackedCodec, RawCodec
    from .cache_components import TokenSelection
    from .exact_slots import ExactSlots
    from .states import States


class CacheBytes:
    """Size properties of `KVCache`, a mixin with its fields."""

    codecs: Sequence[RawCodec | PackedCodec]
    upgraded_codecs: Sequence[PackedCodec]
    layouts: Sequence[PageLayout]
    states: States | None
    indexes: Sequence[LayerIndex | CompressedKeys]
    token_selections: Mapping[int, TokenSelection]
    n: int
    sealed: int
    _kinds: list[int]
    slots: ExactSlots

    @property
    def sealed_nbytes(self) -> int:
        """Bytes of a sealed page, all layers."""
        return sum(page_sizes(self.codecs, self.own_layouts))

    @property
    def kept_nbytes(self) -> int:
        """Bytes of a sealed page with its index keys, all layers: what a session saves of it."""
        return self.sealed_nbytes + PAGE * sum(self.index_sizes)

    @property
    def index_sizes(self) -> list[int]:
        """Index bytes per token, of each layer with an indexer."""
        return [index.token_nbytes for index in self.indexes]

    @property
    def _upgraded_nbytes(self) -> int:
        return sum(page_sizes(self.upgraded_codecs, self.own_layouts)) if self.upgraded_codecs else 0

    @property
    def allocated_nbytes(self) -> int:
        """Bytes in use, all layers: sealed pages, occupied parts of exact slots, index keys, recurrent states."""
        return self._pages_nbytes + self.index_nbytes + (0 if self.states is None else self.states.nbytes)

    @property
    def index_nbytes(self) -> int:
        """Bytes of index keys."""
        return sum(index.nbytes(self.n) for index in self.indexes)

    @property
    def _pages_nbytes(self) -> int:
        return self._packed_nbytes + sum(self.slots.used.values()) * sum(layout.part_nbytes for layout in self.own_layouts)

    @property
    def read_nbytes(self) -> int:
        """Bytes of keys, values and index keys that full attention over the cache reads."""
        return self.exact_tokens * sum(layout.token_nbytes for layout in self.own_layouts) + self._packed_nbytes + self.index_nbytes

    @property
    def seen_nbytes(self) -> int:
        """Bytes that attention of one more token reads; for sparse attention, only what is selected."""
        return self.read_nbytes - sum(self._hidden_nbytes(index, selection) for index, selection in self.token_selections.items())

    def _hidden_nbytes(self, index: int, selection: TokenSelection) -> int:
        """Bytes that a layer holds and one more token does not read: unselected tokens and, with compressed keys, tokens before the
        window."""
        visible = self.indexes[0].shape.dense_tokens if selection.keys is None else selection.keys.shape.window
        hidden = max(0, self.n - visible) * self.layouts[index].token_nbytes
        if selection.keys is None or selection.index is None:
            return hidden + (0 if selection.index is None else selection.index.unseen_nbytes(self.n))
        return hidden + selection.keys.nbytes(max(0, self.n - selection.index.shape.dense_tokens))

    @property
    def own_layouts(self) -> Sequence[PageLayout]:
        """Layouts of the layers that have pages."""
        return self.layouts[: len(self.codecs)]

    @property
    def _token_values(self) -> int:
        """Key and value elements per token, all layers."""
        return 2 * sum(layout.kv_heads * layout.head_dim for layout in self.own_layouts)

    @property
    def _packed_nbytes(self) -> int:
        """Bytes of sealed pages, all layers."""
        upgraded = self._kinds.count(2)
        return (self.sealed - upgraded) * self.sealed_nbytes + upgraded * self._upgraded_nbytes

    @property
    def is_packed(self) -> bool:
        """Whether sealed pages take fewer bits than exact ones."""
        return any(codec.is_packed for codec in self.codecs)

    @property
    def exact_tokens(self) -> int:
        return self.n - self.sealed * PAGE

    @property
    def bits_per_value(self) -> float:
        """Allocated bits per cached key or value element."""
        values = self._token_values * self.n
        return 8 * self._pages_nbytes / values if values else 0.0

    @property
    def packed_bits(self) -> float:
        """Bits per value of a sealed page, header and alignment included, without sinks and window; the mean over sealed pages."""
        values = PAGE * self._token_values
        return 8 * (self._packed_nbytes / self.sealed if self.sealed else self.sealed_nbytes) / values if values else 0.0
