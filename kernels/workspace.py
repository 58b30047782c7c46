"""The working memory of the ops, planned before a model is loaded and never grown: this is what makes the planner exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Dims:
    """The widths that decide how much working memory a model needs; `rows` is the most rows of logits made at once."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    chunk: int
    ctx: int
    rows: int


class Workspace:
    """Named float32 buffers of planned sizes. `take` returns a view; asking for more than was planned is a programming error."""

    def __init__(self, floats: Mapping[str, int]) -> None:
        self.floats = dict(floats)
        self._buffers: dict[str, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        return 4 * sum(self.floats.values())

    def take(self, name: str, *shape: int) -> np.ndarray:
        """A view of buffer `name`; its contents are whatever the last user left."""
        if name not in self._buffers:
            # One cache line of slack so that every buffer begins on a line.
            raw = np.empty(self.floats[name] + 16, np.float32)
            skip = (-raw.ctypes.data % 64) // 4
            self._buffers[name] = raw[skip : skip + self.floats[name]]
        count = 1
        for extent in shape:
            count *= extent
        if count > self.floats[name]:
            raise RuntimeError(f"workspace {name!r}: {count} floats asked, {self.floats[name]} planned")
        return self._buffers[name][:count].reshape(shape)
