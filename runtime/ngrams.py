"""Config of n-gram embeddings (Qwen 4): which layers have them, their tables, and how n-grams are hashed to rows.

The tables are larger than the rest of the model, and a token reads a few rows (`weights/ngram_table.py`). For each n from 2 on there are
several tables with a prime number of rows; those of a layer are concatenated. Hash multipliers derive from a seed and the layer's number
(SplitMix64), so the config determines everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from ..kernels.ngram_shape import NgramShape
    from .tensors import ModelTensor

MASK, GAMMA, FIRST, SECOND = 2**64 - 1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
APART = 10_007  # between the seeds of two layers
ROLE = "ngrams"  # the end of the role of a layer's table, which is outside the layers


def role_of(layer: int) -> str:
    """The role of a layer's tables."""
    return f"layers.{layer}.{ROLE}"


def is_table(role: str) -> bool:
    """Is this an n-gram table, whose rows are read from disk?"""
    return role.endswith(f".{ROLE}")


def held(roles: Mapping[str, ModelTensor]) -> dict[str, ModelTensor]:
    """The tensors outside the layers without n-gram tables: those that are loaded."""
    return {role: tensor for role, tensor in roles.items() if not is_table(role)}


def away_nbytes(roles: Mapping[str, ModelTensor]) -> int:
    """Bytes of n-gram tables, which stay on disk."""
    return sum(tensor.nbytes for role, tensor in roles.items() if is_table(role))


@dataclass(frozen=True)
class NgramConfig:
    """N-gram embeddings: which layers have them, and how their tables are laid out."""

    layers: tuple[int, ...]  # ascending
    shape: NgramShape  # the state that such a layer keeps
    tables_per_order: int  # for every n from 2 on
    min_rows: int  # of a table
    row_multiple: int  # the rows of a layer's tables together are a multiple of this
    seed: int
    eos_token_id: int  # n-grams do not reach across it
    vocab_size: int
    num_shards: int  # tensors in which a layer's tables are stored

    def shape_of(self, layer: int) -> NgramShape | None:
        return self.shape if layer in self.layers else None

    @property
    def tables(self) -> int:
        """Rows that a token reads in a layer, one per table."""
        return (self.shape.size - 1) * self.tables_per_order

    @property
    def width(self) -> int:
        """Width of a row."""
        return self.shape.rows // self.tables

    def table_sizes(self, layer: int) -> tuple[int, ...]:
        """Rows of each table of a layer."""
        first = self.layers.index(layer) * self.tables
        return self._primes[first : first + self.tables]

    def num_rows(self, layer: int) -> int:
        """Rows of all tables of a layer."""
        return -(-sum(self.table_sizes(layer)) // self.row_multiple) * self.row_multiple

    def shard_rows(self, layer: int) -> tuple[int, ...]:
        """Rows in each stored tensor."""
        every = self.num_rows(layer)
        each = -(-every // self.num_shards)
        return tuple(min(each, every - first) for first in range(0, every, each))

    def multipliers(self, layer: int) -> tuple[int, ...]:
        """Hash multipliers, for the newest token first: odd, and small enough that products fit 63 bits."""
        half = max(1, (2**63 - 1) // max(self.vocab_size, 1) // 2)
        base = self.seed + APART * self.layers.index(layer)
        return tuple(2 * (split_mix(base + GAMMA * (place + 1)) % half) + 1 for place in range(self.shape.size))

    def row_ids(self, layer: int, words: np.ndarray) -> np.ndarray:
        """Row ids int64 [T, tables] for the last token of each window of tokens [T, size]."""
        from ..kernels.reference_ngrams import rows  # a list of models reads configs, and loads no NumPy

        return rows(words, self.multipliers(layer), self.table_sizes(layer), self.eos_token_id)

    @cached_property
    def _primes(self) -> tuple[int, ...]:
        return primes_from(self.min_rows, len(self.layers) * self.tables)


def split_mix(value: int) -> int:
    """A 64-bit hash (SplitMix64: Steele, Lea and Flood 2014)."""
    value = ((value & MASK) + GAMMA) & MASK
    value = ((value ^ value >> 30) * FIRST) & MASK
    value = ((value ^ value >> 27) * SECOND) & MASK
    return value ^ value >> 31


@lru_cache(maxsize=8)
def primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first `count` primes from `least` on."""
    found: list[int] = []
    while len(found) < count:
        if least > 1 and all(least % each for each in range(2, isqrt(least) + 1)):
            found.append(least)
        least += 1
    return tuple(found)
