"""Models whose tokens choose what they see: which layers choose, and by what (`kernels/indexer_shape.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..kernels.indexer_shape import IndexShape

if TYPE_CHECKING:
    from .config import ModelConfig
    from .rope import RopeTable


@dataclass(frozen=True)
class IndexerConfig:
    """`sources`: by layer the one whose choice its tokens see, which may be itself, None for all tokens. `neighbours`: which channels of
    what chooses turn together (`RopeConfig`). `norm`: the kind of norm and the epsilon of keys, and of queries where they have one."""

    shape: IndexShape
    source_layers: tuple[int | None, ...]
    interleaved_rope: bool
    norm: tuple[str, float]

    def shape_of(self, layer: int) -> IndexShape | None:
        """What chooses in a layer, None where nothing does."""
        return self.shape if self.source_layers[layer] == layer else None

    def rope_table(self, table: RopeTable) -> RopeTable:
        """The rotary table of what chooses, from that of its layer."""
        return replace(table, neighbours=self.interleaved_rope, queries=None)


def without_index(config: ModelConfig) -> ModelConfig:
    """The model as far as every token sees all before it, where that is what its indexers choose."""
    return replace(config, indexer=None, max_supported_tokens=config.indexer.shape.dense_tokens)


def sources_of(chooses: Sequence[bool]) -> tuple[int | None, ...]:
    """By layer the one whose choice it shares, of those that choose for themselves."""
    found, last = [], None
    for layer, own in enumerate(chooses):
        last = layer if own else last
        found.append(last)
    return tuple(found)
