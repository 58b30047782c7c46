"""Config of sparse attention by an indexer (`kernels/indexer_shape.py`)."""

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
    """Which layers have an indexer, which selects the tokens that attention sees, and what it is made of."""

    shape: IndexShape
    source_layers: tuple[int | None, ...]  # by layer: the layer whose selection it uses, which may be itself; None: it sees all tokens
    interleaved_rope: bool  # which channels of index queries and keys are rotated together (`RopeConfig`)
    norm: tuple[str, float]  # kind and epsilon of the norm of index keys, and of index queries where they have one

    def shape_of(self, layer: int) -> IndexShape | None:
        """The indexer of a layer; None if it has none of its own."""
        return self.shape if self.source_layers[layer] == layer else None

    def rope_table(self, table: RopeTable) -> RopeTable:
        """The indexer's rotary table, from that of its layer."""
        return replace(table, interleaved=self.interleaved_rope, queries=None)


def without_index(config: ModelConfig) -> ModelConfig:
    """The same model limited to the context length up to which its indexers select every token."""
    return replace(config, indexer=None, max_supported_tokens=config.indexer.shape.dense_tokens)


def sources_of(chooses: Sequence[bool]) -> tuple[int | None, ...]:
    """`source_layers`, from whether each layer has an indexer of its own."""
    found, last = [], None
    for layer, own in enumerate(chooses):
        last = layer if own else last
        found.append(last)
    return tuple(found)
