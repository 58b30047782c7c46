"""How a model is split for streaming: what always stays in memory, and parts in the order in which a pass uses them.

A part is a range of rows of one matrix, or of several that read the same input: about PART_NBYTES, so that a ring of a few parts keeps the
disk busy while the CPU computes, however large a layer is. Gate rows and the rows they gate are in the same part. Rows of a low-bit matrix
consist of two or three sections of its blob, read separately; its row scales and tables stay.

What stays: vectors, small matrices, position tables, cross-attention layers (which a text without images skips), mixtures of experts,
matrices with outliers (one list for all rows), whatever is converted on load, and, when drafting with the model's own MTP layer, that layer
and the head. The embedding and per-layer embeddings do not stay: a token needs one row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ...kernels.tiles import ROWS, block_nbytes
from ...offload.checkpoint import TensorInfo, TensorStore
from ...offload.placement import split_evenly
from ...offload.resident_pager import resident_nbytes, unshared
from ...offload.streaming_pager import FETCH_NBYTES, Part, Range, same_parts
from ..families import expert_of, is_cross_attention, is_parallel_block
from ..ngrams import held
from ..sparse.neuron_bundles import ROLE as BUNDLES
from ..speculation.mtp_tensors import MTP

if TYPE_CHECKING:  # imported by the module that makes models from parts
    from ..tensors import ModelTensor

PART_NBYTES = 8 << 20
MIN_STREAMED_NBYTES = 16 << 10  # smaller tensors stay in memory
LARGE_MODEL_NBYTES = 64 << 30  # larger models get larger parts
MAX_MODEL_NBYTES = 2 << 40  # beyond this, a token would take an hour
CONVERTED_REASON = "its weights are converted on load, which cannot be repeated for every token"
EXPERTS_REASON = "its experts are not stored as they are used, so they cannot be read individually"
TABLES = ("embed", "layer_embed")  # roles of which a token needs a single row
# Stages of a layer, in order of use: the matrices of a stage read the same input.
STAGES = (("lent_out",), ("state_in", "state_gate"), ("state_r", "state_k", "state_v"), ("state_out",), ("low_in",), ("low_out",),
          ("q", "k", "v", "kv_a", "q_a", "attn_gate"), ("q_b",), ("o",), ("gate", "up"), ("down",),
          ("input_gate",), ("input_out",))


@dataclass(frozen=True)
class Slice:
    """Rows [first, end) of a matrix, in a part."""

    name: str  # of the tensor
    first: int
    end: int
    part: int  # index of the part
    ranges: Mapping[str, int]  # section name -> index of the part's range that holds these rows of it


@dataclass(frozen=True)
class StreamLayout:
    """What of a model is streamed, and what stays in memory."""

    parts: tuple[Part, ...]  # in the order in which a pass uses them
    slices: Mapping[str, tuple[Slice, ...]]  # by matrix (`ModelTensor.used_as`): its rows, in order
    always: Mapping[int | str, tuple[TensorInfo, ...]]  # by layer or "outer": tensors that stay in memory
    tables: frozenset[str]  # names of tensors whose rows are fetched one by one, such as the embedding
    kept_for: str  # why large tensors stay in memory, empty if none do

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of memory of every part."""
        return tuple(part.nbytes for part in self.parts)

    @cached_property
    def same(self) -> tuple[int, ...]:
        """For every part, the first one with the same bytes; empty if all differ, as in models without layer loops."""
        same = same_parts(self.parts)
        return same if any(first != index for index, first in enumerate(same)) else ()

    @cached_property
    def always_nbytes(self) -> int:
        """Bytes of memory for what stays, and for fetched rows."""
        return FETCH_NBYTES + sum(map(resident_nbytes, unshared(self.always).values()))


def plan_layout(tensors: Mapping[int | str, Mapping[str, ModelTensor]], store: TensorStore) -> StreamLayout:
    """The layout of a model, without parts for one larger than MAX_MODEL_NBYTES. Reads only headers."""
    tensors = {**tensors, "outer": held(tensors["outer"])}
    total = sum(tensor.nbytes for roles in tensors.values() for tensor in roles.values())
    if total > MAX_MODEL_NBYTES:
        always = {key: tuple(tensor.info for tensor in roles.values()) for key, roles in tensors.items()}
        return StreamLayout((), {}, always, frozenset(), "")
    splitter = _Splitter(store, PART_NBYTES * (2 if total > LARGE_MODEL_NBYTES else 1))
    outer = tensors["outer"]
    for key in sorted(key for key in tensors if key != "outer" and not is_cross_attention(tensors[key])):
        for stage in stages_of(tensors[key]):
            present = [tensors[key][role] for role in stage if role in tensors[key]]
            splitter.add_stage(present, together="gate" in stage and len(present) == 2)
    head, drafts = outer.get("head", outer["embed"]), any(role.startswith(MTP) for role in outer)
    if not drafts:  # a draft uses the head between two passes
        splitter.add_stage([head])
    tables = frozenset(outer[role].name for role in TABLES
                       if role in outer and splitter.streams(outer[role]) and not (drafts and outer[role] is head))
    always = {key: tuple(info for role, tensor in roles.items() if role != BUNDLES
                         for info in splitter.resident(tensor, tensor.name in tables))
              for key, roles in tensors.items()}
    converted_nbytes = sum(info.nbytes for infos in always.values() for info in infos if store.place(info) is None)
    expert_nbytes = sum(tensor.nbytes for roles in tensors.values() for role, tensor in roles.items() if expert_of(role) is not None)
    kept_for = ""
    if 2 * converted_nbytes > total:
        kept_for = CONVERTED_REASON
    elif 2 * expert_nbytes > total:
        kept_for = EXPERTS_REASON
    return StreamLayout(tuple(splitter.parts), {name: tuple(rows) for name, rows in splitter.slices.items()}, always, tables, kept_for)


def stages_of(roles: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """The stages of a layer with these roles: STAGES, but for blocks that use their matrices in another order."""
    if "state_in" in roles and "q" in roles:  # a state beside attention reads the input after it (`families/falcon_h1.py`)
        first = ("q", "k", "v"), *STAGES[:3], ("o",)
        return (*first, *(stage for stage in STAGES if "q" not in stage and stage not in first))
    if "input_norm_in" in roles:  # with gated norms, attention gates and queries have the same input (`families/axk2.py`)
        return tuple(("q_b", "attn_gate") if stage == ("q_b",) else tuple(role for role in stage if role != "attn_gate")
                     for stage in STAGES)
    if not is_parallel_block(roles):
        return STAGES
    # Parallel attention and MLP (`families/cohere.py`): o comes last.
    return (*(stage for stage in STAGES if stage != ("o",)), ("o",))


def sections(tensor: ModelTensor, offset: int, first: int, end: int) -> Iterator[tuple[str, Range]]:
    """(section name, file range) for rows [first, end) of a matrix that begins at `offset` of its file. Low-bit rows begin on a block."""
    info, spec = tensor.info, tensor.spec
    if spec.is_raw:
        row = info.nbytes // tensor.shape[0]
        yield "data", Range(info.file, offset + first * row, (end - first) * row)
        return
    layout, first_block, end_block = spec.sections(tensor.shape), first // ROWS, -(-end // ROWS)
    for name, nbytes in block_nbytes(layout.depth, spec.bits, spec.scheme, spec.group).items():
        yield name, Range(info.file, offset + getattr(layout, name) + first_block * nbytes, (end_block - first_block) * nbytes)


def fixed_name(name: str) -> str:
    """The name, among resident tensors, of the row scales and tables of a streamed matrix."""
    return f"{name} (row scales)"


def fixed_part(tensor: ModelTensor, store: TensorStore) -> TensorInfo:
    """The row scales and tables of a low-bit matrix, at the end of its blob."""
    layout = tensor.spec.sections(tensor.shape)
    nbytes = layout.nbytes - layout.row_scales
    return replace(tensor.info, name=fixed_name(tensor.name), shape=(nbytes,), offset=store.place(tensor.info) + layout.row_scales,
                   nbytes=nbytes)


class _Splitter:
    """Splits matrices into parts of about `part_nbytes`, and collects them."""

    def __init__(self, store: TensorStore, part_nbytes: int) -> None:
        self._store, self._part_nbytes = store, part_nbytes
        self.parts: list[Part] = []
        self.slices: dict[str, list[Slice]] = {}

    def streams(self, tensor: ModelTensor) -> bool:
        """Whether rows of a tensor can be used as they are in the file."""
        if len(tensor.shape) != 2 or tensor.nbytes < MIN_STREAMED_NBYTES or tensor.spec.outliers:
            return False
        offset = self._store.place(tensor.info)
        return offset is not None and offset % (tensor.spec.bits // 8 if tensor.spec.is_raw else 2) == 0

    def add_stage(self, tensors: Sequence[ModelTensor], together: bool = False) -> None:
        """Split matrices that read the same input. `together`: each part has the same rows of all of them."""
        if together:
            if all(map(self.streams, tensors)):
                for first, end in _row_ranges(tensors[0].shape[0], sum(tensor.nbytes for tensor in tensors), self._part_nbytes):
                    self._add_part([(tensor, first, end) for tensor in tensors])
            return
        free_nbytes, pending = 0, []
        for tensor in filter(self.streams, tensors):
            for first, end in _row_ranges(tensor.shape[0], tensor.nbytes, self._part_nbytes):
                nbytes = tensor.nbytes * (end - first) // tensor.shape[0]
                if pending and nbytes > free_nbytes:
                    self._add_part(pending)
                    pending = []
                free_nbytes = (free_nbytes if pending else self._part_nbytes) - nbytes
                pending.append((tensor, first, end))
        if pending:
            self._add_part(pending)

    def _add_part(self, rows: Sequence[tuple[ModelTensor, int, int]]) -> None:
        """A part of rows [first, end) of each of these tensors."""
        ranges: list[Range] = []
        for tensor, first, end in rows:
            range_of = {}
            for name, section in sections(tensor, self._store.place(tensor.info), first, end):
                range_of[name] = len(ranges)
                ranges.append(section)
            self.slices.setdefault(tensor.used_as, []).append(Slice(tensor.name, first, end, len(self.parts), range_of))
        self.parts.append(Part(tuple(ranges)))

    def resident(self, tensor: ModelTensor, is_table: bool) -> Iterator[TensorInfo]:
        """What of a tensor stays in memory."""
        if not is_table and tensor.used_as not in self.slices:
            yield tensor.info
        elif not tensor.spec.is_raw:
            yield fixed_part(tensor, self._store)


def _row_ranges(rows: int, nbytes: int, max_nbytes: int) -> Iterator[tuple[int, int]]:
    """Row ranges of a matrix (or of several of the same shape) of at most `max_nbytes`, on row blocks."""
    first = 0
    for count in split_evenly(rows, max(ROWS, max_nbytes * rows // nbytes), ROWS):
        yield first, first + count
        first += count
