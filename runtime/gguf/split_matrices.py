"""Matrices that are one in the model and several in a GGUF file: q, k and v of Kimi Delta Attention, and their convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ...kernels.tiles import ROWS
from ...offload.safetensors_header import CheckpointError
from ...quant.imports.gguf import NATIVE
from ..config import ModelConfig
from ..stores.tensor_views import concatenated_parts
from .tensor_sources import RAW_TYPES, Source


@dataclass(frozen=True)
class SplitMatrix:
    """Rows of `parts`, concatenated; `shape` is the model's tensor."""

    parts: tuple[Source, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(part.tensor.nbytes for part in self.parts)

    @property
    def kind(self) -> str | None:
        """The type of all parts, None where they differ."""
        first = self.parts[0].tensor.type
        return first if all(part.tensor.type == first and part.scale == self.parts[0].scale for part in self.parts) else None

    @property
    def keeps_codes(self) -> bool:
        """Whether it can be kept as codes: one type that kernels multiply, and parts that begin on a tile of rows."""
        return len(self.shape) == 2 and self.kind in NATIVE and not any(part.tensor.shape[0] % ROWS for part in self.parts)

    def dtype(self, dequant_dtype: str) -> str:
        """The raw type of its values if it is not kept as codes."""
        return self.kind if self.kind in RAW_TYPES else dequant_dtype.upper()

    @property
    def files(self) -> frozenset[Path]:
        return frozenset(part.tensor.file for part in self.parts)

    def ranges(self, begin: int, end: int) -> Iterator[tuple[Source, int, int, int]]:
        """(part, first row, end row, row of the whole at the first) for the rows [begin, end) of the whole."""
        offset = 0
        for part in self.parts:
            low, high = max(begin, offset), min(end, offset + part.tensor.shape[0])
            if low < high:
                yield part, low - offset, high - offset, low
            offset += part.tensor.shape[0]


def split_parts(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Checkpoint name of a part -> (name of the whole, index of the part)."""
    return {part: (whole, index) for whole, parts in concatenated_parts(config).items() for index, (part, _) in enumerate(parts)}


def split_matrix(path: object, name: str, sources: Mapping[int, Source], shape: tuple[int, ...], config: ModelConfig) -> SplitMatrix:
    """Concatenate the parts of a tensor of `shape`. Raises CheckpointError where one is missing or of another size."""
    parts = []
    for index, (_, rows) in enumerate(concatenated_parts(config)[name]):
        if index not in sources:
            raise CheckpointError(f"{path} holds a part of {name} without another", "the file is damaged: download it again")
        tensor, part_shape = sources[index].tensor, (rows, *shape[1:])
        if prod(tensor.shape) != prod(part_shape):
            raise CheckpointError(f"{path} has tensor {tensor.name} of shape {list(tensor.shape)}, the config says {list(part_shape)}",
                                  "the config and the weights are of different models")
        parts.append(replace(sources[index], tensor=replace(tensor, shape=part_shape), shape=shape))
    return SplitMatrix(tuple(parts), shape)
