"""Media in a forward pass: which embeddings their rows replace, and how their tokens attend to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Ops(Protocol):
    """A backend that runs layers."""

    def to_host(self, x: object) -> np.ndarray: ...
    def from_host(self, x: np.ndarray) -> object: ...


@dataclass(frozen=True)
class MediaEmbeddings:
    """What a forward pass over T tokens needs of its media."""

    positions: np.ndarray  # int64 [n]: positions in the pass where `rows` replace embeddings
    rows: np.ndarray  # float32 [n, hidden]
    deepstack_rows: np.ndarray | None = None  # float32 [layers, n, hidden]: added there after each of `deepstack_layers`
    lookahead: np.ndarray | None = None  # int64 [T]: how many later tokens each token attends to; None for causal attention
    sliding_window_only: bool = False  # `lookahead` applies only in sliding-window layers
    deepstack_layers: tuple[int, ...] | None = None  # None for the first layers
    attention_groups: np.ndarray | None = None  # int64 [T]: which tokens earlier ones attend to; None for all

    def attention_ends(self, first: int) -> tuple[np.ndarray, bool] | None:
        """The last position that each token attends to and `sliding_window_only`, for a pass that begins at position `first`; None for
        causal attention. Raises RuntimeError for a pass that ends inside an image."""
        if self.lookahead is None:
            return None
        last = np.arange(len(self.lookahead)) + self.lookahead
        if last.max() >= len(last):
            raise RuntimeError("a pass ends inside an image whose tokens see each other")
        return first + last, self.sliding_window_only

    def insert_into(self, x: np.ndarray) -> None:
        """Write the rows into embeddings x [T, D], in place."""
        x[self.positions] = self.rows

    def add_deepstack(self, ops: Ops, x: object, layer: int) -> object:
        """Hidden states x [T, D] after a layer, with the DeepStack rows that are added there."""
        if self.deepstack_rows is None:
            return x
        layers = range(len(self.deepstack_rows)) if self.deepstack_layers is None else self.deepstack_layers
        if layer not in layers:
            return x
        states = ops.to_host(x)
        states[self.positions] += self.deepstack_rows[layers.index(layer)]
        return ops.from_host(states)


def stacked_deepstack(rows: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """DeepStack rows as [layers, n, hidden], zero for items that have none; None where no item has any."""
    template = next((row for row in rows if row is not None), None)
    return None if template is None else np.stack([np.zeros_like(template) if row is None else row for row in rows], axis=1)
