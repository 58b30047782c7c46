"""Maps the weights an adapter names to the matrices of the model's roles: a whole matrix, or rows of a fused one.

An adapter of a fused weight has one A, shared by all its parts, and B's rows are split like the weight's. Where the checkpoint stores a
matrix in parts, the adapter has its own pair for each part, whose B covers that part's rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.delta_shape import DeltaShape
from .. import families
from ..stores.tensor_views import concatenated_parts, transposed_columns
from ..stores.tensor_views import gathered_rows as parted_places

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..tensors import ModelTensor

Matrices = Mapping[int | str, Mapping[str, "ModelTensor"]]


@dataclass(frozen=True)
class TargetRows:
    """Rows `rows` of a weight, as an adapter names it, are those of the matrix of (layer, role), there from `first` on of `height`.
    `columns`: which of the weight's each of the matrix is, None where those."""

    key: tuple[int | str, str]
    rows: slice | np.ndarray
    height: int
    first: int = 0
    columns: np.ndarray | None = None

    def into_role(self, a: np.ndarray) -> np.ndarray:
        """The weight's A [r, K] for the role's matrix."""
        return a if self.columns is None else np.ascontiguousarray(a[:, self.columns])

    def of_role(self, b: np.ndarray) -> np.ndarray:
        """What the weight's B [N, r] is of the role's matrix: [height, r], zeros where that has other parts."""
        own = b[self.rows]
        return own if len(own) == self.height else np.pad(own, ((self.first, self.height - self.first - len(own)), (0, 0)))

    def lengths_of_role(self, lengths: np.ndarray) -> np.ndarray:
        """Those of the role's rows [height], of the weight's [N]; NaN where that has other parts, whose rows stay as long as they are."""
        own, made = lengths[self.rows], np.full(self.height, np.nan, np.float32)
        made[self.first : self.first + len(own)] = own
        return made

    def of_weight(self, b: np.ndarray, rows: int) -> np.ndarray:
        """What the role's B [height, r] is of the weight: [rows, r], zeros where that has other parts."""
        made = np.zeros((rows, b.shape[1]), b.dtype)
        made[self.rows] = b[self.first : self.first + len(made[self.rows])]
        return made


def target_rows(config: ModelConfig, tensors: Matrices, of_file: bool = False) -> dict[str, tuple[tuple[int, int], list[TargetRows]]]:
    """The weights of the layers by name: their shapes, and what they are. One that is stored as several roles has all of them. `of_file`:
    for adapters in GGUF files, by the names of the family and in the order of the model's matrices."""
    found: dict[str, tuple[tuple[int, int], list[TargetRows]]] = {}
    inside, apart = _inside(config), concatenated_parts(config)
    heights: dict[str, int] = {}
    for whole, rows in inside.values():
        heights[whole] = heights.get(whole, 0) + _count(rows)
    family = families.get(config.family)
    for layer in range(config.num_hidden_layers):
        rules = family.layer_tensors(config, layer)
        for role, tensor in tensors[layer].items():
            if not tensor.is_matrix:
                continue
            key, (height, width) = (layer, role), tensor.shape
            rule = rules.get(role)
            name = rule.name if of_file and rule is not None else tensor.name
            rows, across = (None, None) if of_file else _tiled(role, config)
            again = found[name][1] if tensor.turn else []
            found[name] = tensor.shape, [*again, TargetRows(key, slice(0, height) if rows is None else rows, height, 0, across)]
            if rule is None:
                continue
            if rule.part_of is not None:
                whole, first, rows = rule.part_of
                found.setdefault(whole, ((rows, width), []))[1].append(TargetRows(key, slice(first, first + height), height))
            for own in {rule.name, *rule.also} & inside.keys():
                whole, rows = inside[own]
                found.setdefault(whole, ((heights[whole], width), []))[1].append(TargetRows(key, rows, height))
            first = 0
            for part, rows in apart.get(rule.name, ()):
                found[part] = (rows, width), [TargetRows(key, slice(0, rows), height, first)]
                first += rows
    return found


def transposed_weights(config: ModelConfig) -> set[str]:
    """Names of the weights that the model's folder stores transposed; adapters are never transposed."""
    return {whole for whole, _ in transposed_columns(config).values()}


def _tiled(role: str, config: ModelConfig) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Which row, and which column, of a checkpoint each of a matrix is in a model that has them in the order of a GGUF file."""
    if not isinstance(config.recurrent, DeltaShape) or not config.recurrent.tiled:
        return None, None
    from ..gguf.recurrent_layers import reordering

    return reordering(role, replace(config, recurrent=replace(config.recurrent, tiled=False)))


def _inside(config: ModelConfig) -> dict[str, tuple[str, slice | np.ndarray]]:
    """Name of a matrix -> that of the one in which it is stored, and which of the outputs there are its own."""
    family, layers, turned = families.get(config.family), range(config.num_hidden_layers), transposed_columns(config)
    heights = {rule.name: rule.shape[0] for layer in layers for rule in family.layer_tensors(config, layer).values()} if turned else {}
    found = {own: place for own, place in parted_places(config).items() if own.endswith(".weight")}
    return found | {own: (whole, slice(first, first + heights[own])) for own, (whole, first) in turned.items()}


def _count(rows: slice | np.ndarray) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)
