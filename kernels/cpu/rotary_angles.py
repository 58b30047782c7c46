"""Rotary position angles: cos and sin for the tokens of a pass, computed once for all layers that share a RoPE table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..workspace import address

if TYPE_CHECKING:
    from ...runtime.rope import RopeTable
    from .ops import CpuOps

MAX_TABLES = 8  # cached; a model has at most two


@dataclass(frozen=True)
class Angles:
    """cos and sin `[T, R/2]` of a step's positions under one table, and their addresses."""

    positions: np.ndarray
    table: RopeTable | None
    cos: np.ndarray
    sin: np.ndarray
    at: tuple[int, int]


def cached_angles(ops: CpuOps, cache: dict[int, Angles], positions: np.ndarray, table: RopeTable | None) -> Angles:
    """Angles computed once per step and table: layers pass the same objects in turn, and `cache` keeps alive what pending jobs read."""
    cached = cache.get(id(table))
    if cached is None or cached.positions is not positions or cached.table is not table:
        for array in () if cached is None else (cached.cos, cached.sin):
            ops.keep_alive(array)  # pending layers of a pass that narrowed it still read it
        cos, sin = np.zeros((2, len(positions), 0 if table is None else len(table.inv_freq)), np.float32)
        if table is not None:
            write_angles(table, cos, sin, positions)
            ops.refresh(AngleUpdater(table, cos, sin))
        if len(cache) >= MAX_TABLES:
            cache.clear()
        cached = cache[id(table)] = Angles(positions, table, cos, sin, (address(cos), address(sin)))
    return cached


class AngleUpdater:
    """Updates the angles of a recorded pass of few tokens, of one text or one token each of several. Angles of the next positions are
    computed in batches: between two passes the interpreter's data is cold, and a call costs more than sixty-four positions do."""

    AHEAD = 64

    def __init__(self, table: RopeTable, cos: np.ndarray, sin: np.ndarray) -> None:
        self._table, self._cos, self._sin, self._first = table, cos, sin, -self.AHEAD
        self._rows = np.zeros((2, self.AHEAD + len(cos) - 1, cos.shape[1]), np.float32)
        self._per_row: list[AngleUpdater] = []

    def __call__(self, position: int | np.ndarray) -> None:
        if isinstance(position, np.ndarray):
            self._per_row = self._per_row or [AngleUpdater(self._table, self._cos[row : row + 1], self._sin[row : row + 1])
                                              for row in range(len(self._cos))]
            for updater, at in zip(self._per_row, position, strict=True):
                updater(int(at))
            return
        if not 0 <= position - self._first < self.AHEAD:
            self._first = position
            write_angles(self._table, *self._rows, np.arange(position, position + self._rows.shape[1]))
        begin = position - self._first
        self._cos[:], self._sin[:] = self._rows[:, begin : begin + len(self._cos)]


class KeyAngles:
    """cos and sin for the positions of compressed keys (of `rate` tokens each) that a pass may complete."""

    def __init__(self, table: RopeTable | None, rate: int, position: int, tokens: int) -> None:
        self._table, self._rate, self._first = table, rate, -1
        count = 0 if table is None else (tokens + rate - 1) // rate + 1
        self.cos, self.sin = np.zeros((2, count, 0 if table is None else len(table.inv_freq)), np.float32)
        self.move(position)

    @property
    def at(self) -> tuple[int, int]:
        return address(self.cos), address(self.sin)

    def move(self, position: int) -> None:
        """Move to the start of the next pass."""
        if self._table is not None and (first := position // self._rate) != self._first:
            self._first = first
            write_angles(self._table, self.cos, self.sin, (first + np.arange(len(self.cos))) * self._rate)


def write_angles(table: RopeTable, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray) -> None:
    """Write cos and sin of positions [T], or [T, R/2] if they differ by channel, in place."""
    cos[:], sin[:] = table.cos_sin(positions)
