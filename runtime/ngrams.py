"""Layers that are given rows of n-grams (Qwen 4): which, what their tables are like, and how words are numbered there.

A table of n-grams is larger than all else of its model, and a token reads a few rows of it (`weights/ngram_table.py`). Of every length of
n-gram from 2 words on there are several tables, each with a prime number of rows; all of a layer lie one behind the other. What words are
multiplied by follows from a seed and the layer's place (SplitMix64), so a config says all of it.
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
    """The role of a layer's table."""
    return f"layers.{layer}.{ROLE}"


def is_table(role: str) -> bool:
    """Is this a table of n-grams, of which rows are read where they lie?"""
    return role.endswith(f".{ROLE}")


def held(roles: Mapping[str, ModelTensor]) -> dict[str, ModelTensor]:
    """What lies outside the layers without these: what is read before a run, or in parts."""
    return {role: tensor for role, tensor in roles.items() if not is_table(role)}


def away_nbytes(roles: Mapping[str, ModelTensor]) -> int:
    """Bytes of tables, which stay where they lie."""
    return sum(tensor.nbytes for role, tensor in roles.items() if is_table(role))


@dataclass(frozen=True)
class Ngrams:
    """`layers`: those that are given rows, rising; `shape`: what they remember. `each`: tables of every length of n-gram; `least`: rows
    that a table has at least; a layer's rows together are a multiple of `multiple`. `end`: the word that ends a text; `words`: how many
    there are; `parts`: tensors in which a layer's tables are stored."""

    layers: tuple[int, ...]
    shape: NgramShape
    each: int
    least: int
    multiple: int
    seed: int
    end: int
    words: int
    parts: int

    def shape_of(self, layer: int) -> NgramShape | None:
        return self.shape if layer in self.layers else None

    @property
    def tables(self) -> int:
        """Rows that a token has in a layer, one in each of so many tables."""
        return (self.shape.size - 1) * self.each

    @property
    def width(self) -> int:
        """Of a row."""
        return self.shape.rows // self.tables

    def sizes(self, layer: int) -> tuple[int, ...]:
        """Rows of each of a layer's tables."""
        first = self.layers.index(layer) * self.tables
        return self._primes[first : first + self.tables]

    def rows_of(self, layer: int) -> int:
        """Rows of a layer's tables together."""
        return -(-sum(self.sizes(layer)) // self.multiple) * self.multiple

    def part_rows(self, layer: int) -> tuple[int, ...]:
        """How many of these are in each tensor."""
        every = self.rows_of(layer)
        each = -(-every // self.parts)
        return tuple(min(each, every - first) for first in range(0, every, each))

    def multipliers(self, layer: int) -> tuple[int, ...]:
        """Of the latest word, the one before, and so on: odd, and so small that no product leaves 63 bits."""
        half = max(1, (2**63 - 1) // max(self.words, 1) // 2)
        base = self.seed + APART * self.layers.index(layer)
        return tuple(2 * (split_mix(base + GAMMA * (place + 1)) % half) + 1 for place in range(self.shape.size))

    def numbers(self, layer: int, words: np.ndarray) -> np.ndarray:
        """Which rows the last of windows of words [T, size] have, int64 [T, tables]."""
        from ..kernels.reference_ngrams import rows  # a list of models reads configs, and loads no NumPy

        return rows(words, self.multipliers(layer), self.sizes(layer), self.end)

    @cached_property
    def _primes(self) -> tuple[int, ...]:
        return primes_from(self.least, len(self.layers) * self.tables)


def split_mix(value: int) -> int:
    """A number of 64 bits that looks drawn by chance (Steele, Lea and Flood 2014)."""
    value = ((value & MASK) + GAMMA) & MASK
    value = ((value ^ value >> 30) * FIRST) & MASK
    value = ((value ^ value >> 27) * SECOND) & MASK
    return value ^ value >> 31


@lru_cache(maxsize=8)
def primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first primes that are `least` or more."""
    found: list[int] = []
    while len(found) < count:
        if least > 1 and all(least % each for each in range(2, isqrt(least) + 1)):
            found.append(least)
        least += 1
    return tuple(found)
