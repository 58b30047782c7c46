"""The layout of a checkpoint folder to be written, from names and sizes alone: files, headers, offsets, padding.

Tensors come in groups that are used together (a layer). A group is aligned to 4096 bytes in its file, so that it can be read with O_DIRECT,
and a tensor to 64; gaps are tensors of their own (`__pad__.N`), because a safetensors file may have no holes. A single file up to a limit,
beyond it shards of at most that size with an index, split between groups where possible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GROUP_BORDER, TENSOR_BORDER = 4096, 64
SHARD_NBYTES = 4 << 30
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PAD = "__pad__."


@dataclass(frozen=True)
class Planned:
    """A tensor to be written; `dtype` as in safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class PlannedFile:
    """`head` is the file's header with its length; `places` maps names to offsets from the start of the file."""

    name: str
    head: bytes
    places: Mapping[str, int]
    size: int


def plan_files(groups: Sequence[Sequence[Planned]], metadata: Mapping[str, str], limit: int = SHARD_NBYTES) -> tuple[PlannedFile, ...]:
    """The files of a folder. A tensor larger than `limit` gets a file of its own."""
    cut = _cut(groups, limit)
    if len(cut) == 1:
        return (_plan_file(SINGLE, cut[0], metadata, 0),)
    files: list[PlannedFile] = []
    pads = 0
    for number, part in enumerate(cut, 1):
        files.append(_plan_file(f"model-{number:05}-of-{len(cut):05}.safetensors", part, metadata, pads))
        pads += sum(name.startswith(PAD) for name in files[-1].places)
    return tuple(files)


def index_json(files: Sequence[PlannedFile]) -> str:
    """The index of sharded files, without the padding."""
    weight_map = {name: file.name for file in files for name in file.places if not name.startswith(PAD)}
    total = sum(file.size - len(file.head) for file in files)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n"


def _cut(groups: Sequence[Sequence[Planned]], limit: int) -> list[list[list[Planned]]]:
    """Assign groups to files. Sizes include alignment, so a file stays below the limit whatever its padding."""
    cut: list[list[list[Planned]]] = [[]]
    used = 0
    pieces = []
    for group in groups:
        size = _reach(group)
        pieces += [(list(group), size)] if size <= limit else [([tensor], _reach([tensor])) for tensor in group]
    head = _up(sum(_entry_nbytes(tensor) for group in groups for tensor in group), GROUP_BORDER)
    for piece, size in pieces:
        if cut[-1] and head + used + size > limit:
            cut.append([])
            used = 0
        cut[-1].append(piece)
        used += size
    return cut


def _plan_file(name: str, groups: Sequence[Sequence[Planned]], metadata: Mapping[str, str], first_pad: int) -> PlannedFile:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    at, pads = 0, first_pad

    def put(name: str, dtype: str, shape: Sequence[int], nbytes: int) -> None:
        nonlocal at
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        starts[name] = at
        at += nbytes

    for group in groups:
        for place, tensor in enumerate(group):
            gap = _up(at, TENSOR_BORDER if place else GROUP_BORDER) - at
            if gap:
                put(f"{PAD}{pads}", "U8", (gap,), gap)
                pads += 1
            put(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (_up(8 + len(text), GROUP_BORDER) - 8 - len(text))  # aligns the first group too
    head = len(text).to_bytes(8, "little") + text
    return PlannedFile(name, head, {name: len(head) + start for name, start in starts.items()}, len(head) + at)


def _reach(group: Sequence[Planned]) -> int:
    return _up(sum(_up(tensor.nbytes, TENSOR_BORDER) for tensor in group), GROUP_BORDER)


def _entry_nbytes(tensor: Planned) -> int:
    """An upper bound on the header bytes of a tensor and the padding before it."""
    return 2 * (len(json.dumps(tensor.name)) + 16 * (len(tensor.shape) + 4) + 64)


def _up(value: int, to: int) -> int:
    return -(-value // to) * to
