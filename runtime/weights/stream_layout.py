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
LEAST_NBYTES = 16 << 10  # smaller tensors stay
LARGE_NBYTES, MOST_NBYTES = 64 << 30, 2 << 40  # larger models get larger parts; beyond the second limit a token would take an hour
CONVERTED = "its weights are converted on load, which cannot be repeated for every token"
EXPERTS = "its experts are not stored as they are used, so they cannot be read individually"
TABLES = ("embed", "layer_embed")  # of which a token needs a single row
STAGES = (("lent_out",), ("state_in", "state_gate"), ("state_r", "state_k", "state_v"), ("state_out",), ("low_in",), ("low_out",),
          ("q", "k", "v", "kv_a", "q_a", "attn_gate"), ("q_b",), ("o",), ("gate", "up"), ("down",),
          ("input_gate",), ("input_out",))  # stages of a layer, in order of use


@dataclass(frozen=True)
class Slice:
    """Rows [first, end) of a matrix in a part; its section names with the part's ranges that hold them."""

    name: str
    first: int
    end: int
    part: int
    ranges: Mapping[str, int]


@dataclass(frozen=True)
class StreamLayout:
    """`always`: resident tensors per group. `slices`: per matrix, its rows in parts. `tables`: names of tables whose rows are fetched, the
    embedding among them. `kept_for`: why large tensors stay, if any do."""

    parts: tuple[Part, ...]
    slices: Mapping[str, tuple[Slice, ...]]
    always: Mapping[int | str, tuple[TensorInfo, ...]]
    tables: frozenset[str]
    kept_for: str

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of memory of every part."""
        return tuple(part.nbytes for part in self.parts)

    @cached_property
    def same(self) -> tuple[int, ...]:
        """For every part, the first one with the same bytes; empty if all differ, as in models without layer loops."""
        found = same_parts(self.parts)
        return found if any(first != index for index, first in enumerate(found)) else ()

    @cached_property
    def always_nbytes(self) -> int:
        """Bytes of memory for what stays, and for fetched rows."""
        return FETCH_NBYTES + sum(map(resident_nbytes, unshared(self.always).values()))


def plan_layout(tensors: Mapping[int | str, Mapping[str, ModelTensor]], store: TensorStore) -> StreamLayout:
    """The parts of a model, none for one larger than MOST_NBYTES; reads only headers."""
    tensors = {**tensors, "outer": held(tensors["outer"])}
    total = sum(tensor.nbytes for roles in tensors.values() for tensor in roles.values())
    if total > MOST_NBYTES:
        always = {key: tuple(tensor.info for tensor in roles.values()) for key, roles in tensors.items()}
        return StreamLayout((), {}, always, frozenset(), "")
    maker = _Cut(store, PART_NBYTES * (2 if total > LARGE_NBYTES else 1))
    outer = tensors["outer"]
    for key in sorted(key for key in tensors if key != "outer" and not is_cross_attention(tensors[key])):
        for stage in stages_of(tensors[key]):
            present = [tensors[key][role] for role in stage if role in tensors[key]]
            maker.stage(present, together="gate" in stage and len(present) == 2)
    head, drafts = outer.get("head", outer["embed"]), any(role.startswith(MTP) for role in outer)
    if not drafts:  # which use the head between two passes
        maker.stage([head])
    tables = frozenset(outer[role].name for role in TABLES
                       if role in outer and maker.streams(outer[role]) and not (drafts and outer[role] is head))
    always = {key: tuple(info for role, tensor in roles.items() if role != BUNDLES for info in maker.staying(tensor, tensor.name in tables))
              for key, roles in tensors.items()}
    kept = [info for infos in always.values() for info in infos]
    whole = sum(tensor.nbytes for roles in tensors.values() for tensor in roles.values())
    kept_for = ""
    if 2 * sum(info.nbytes for info in kept if store.place(info) is None) > whole:
        kept_for = CONVERTED
    elif 2 * sum(tensor.nbytes for roles in tensors.values() for role, tensor in roles.items() if expert_of(role) is not None) > whole:
        kept_for = EXPERTS
    return StreamLayout(tuple(maker.parts), {name: tuple(found) for name, found in maker.slices.items()}, always, tables, kept_for)


def stages_of(roles: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """STAGES of a layer. With parallel attention and MLP, o comes last (`families/cohere.py`); with a state beside attention, the state
    reads after it and both are added then (`families/falcon_h1.py`). With gated norms, attention gates come from the same input as queries
    (`families/axk2.py`)."""
    if "state_in" in roles and "q" in roles:
        first = ("q", "k", "v"), *STAGES[:3], ("o",)
        return (*first, *(stage for stage in STAGES if "q" not in stage and stage not in first))
    if "input_norm_in" in roles:
        return tuple(("q_b", "attn_gate") if stage == ("q_b",) else tuple(role for role in stage if role != "attn_gate")
                     for stage in STAGES)
    if not is_parallel_block(roles):
        return STAGES
    return (*(stage for stage in STAGES if stage != ("o",)), ("o",))


def sections(tensor: ModelTensor, place: int, first: int, end: int) -> Iterator[tuple[str, Range]]:
    """The file ranges of a matrix's rows; its blob or values begin at `place`. Low-bit rows begin on a row block."""
    info, spec = tensor.info, tensor.spec
    if spec.is_raw:
        row = info.nbytes // tensor.shape[0]
        yield "data", Range(info.file, place + first * row, (end - first) * row)
        return
    at, begin, last = spec.sections(tensor.shape), first // ROWS, -(-end // ROWS)
    for name, each in block_nbytes(at.depth, spec.bits, spec.scheme, spec.group).items():
        yield name, Range(info.file, place + getattr(at, name) + begin * each, (last - begin) * each)


def fixed_name(name: str) -> str:
    """The name, among resident tensors, of the row scales and tables of a streamed matrix."""
    return f"{name} (row scales)"


def fixed_part(tensor: ModelTensor, store: TensorStore) -> TensorInfo:
    """The row scales and tables of a low-bit matrix, at the end of its blob."""
    at = tensor.spec.sections(tensor.shape)
    place, nbytes = store.place(tensor.info), at.nbytes - at.row_scales
    return replace(tensor.info, name=fixed_name(tensor.name), shape=(nbytes,), offset=place + at.row_scales, nbytes=nbytes)


class _Cut:
    """Collects parts of about `most` bytes."""

    def __init__(self, store: TensorStore, most: int) -> None:
        self._store, self._most = store, most
        self.parts: list[Part] = []
        self.slices: dict[str, list[Slice]] = {}

    def streams(self, tensor: ModelTensor) -> bool:
        """Whether its rows can be used as they lie in the file."""
        if len(tensor.shape) != 2 or tensor.nbytes < LEAST_NBYTES or tensor.spec.outliers:
            return False
        place = self._store.place(tensor.info)
        return place is not None and place % (tensor.spec.bits // 8 if tensor.spec.is_raw else 2) == 0

    def stage(self, tensors: Sequence[ModelTensor], together: bool = False) -> None:
        """Split matrices that read the same input; `together`: equal rows of all go into one part."""
        if together:
            if all(map(self.streams, tensors)):
                for first, end in _cuts(tensors[0].shape[0], sum(tensor.nbytes for tensor in tensors), self._most):
                    self._part([(tensor, first, end) for tensor in tensors])
            return
        room, waiting = 0, []
        for tensor in filter(self.streams, tensors):
            for first, end in _cuts(tensor.shape[0], tensor.nbytes, self._most):
                nbytes = tensor.nbytes * (end - first) // tensor.shape[0]
                if waiting and nbytes > room:
                    self._part(waiting)
                    waiting, room = [], 0
                room = (room if waiting else self._most) - nbytes
                waiting.append((tensor, first, end))
        if waiting:
            self._part(waiting)

    def _part(self, rows: Sequence[tuple[ModelTensor, int, int]]) -> None:
        ranges: list[Range] = []
        for tensor, first, end in rows:
            own = {}
            for name, found in sections(tensor, self._store.place(tensor.info), first, end):
                own[name] = len(ranges)
                ranges.append(found)
            self.slices.setdefault(tensor.used_as, []).append(Slice(tensor.name, first, end, len(self.parts), own))
        self.parts.append(Part(tuple(ranges)))

    def staying(self, tensor: ModelTensor, is_table: bool) -> Iterator[TensorInfo]:
        """What of a tensor stays resident."""
        if not is_table and tensor.used_as not in self.slices:
            yield tensor.info
        elif not tensor.spec.is_raw:
            yield fixed_part(tensor, self._store)


def _cuts(rows: int, nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Row ranges of a matrix (or of several of the same shape) of at most `most` bytes, on row blocks."""
    first = 0
    for count in split_evenly(rows, max(ROWS, most * rows // nbytes), ROWS):
        yield first, first + count
        first += count
