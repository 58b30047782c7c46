"""Expert offloading: the layout of experts on disk, and a layer's experts as the ops see them.

Everything else stays in memory; of the embedding, single rows are read, unless it is also the head. In a folder written by effllm an
expert's matrices are contiguous, so one read brings them; elsewhere each is a read of its own, all issued at once. Experts stored in
another layout are repacked on every read, where the store supports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.expert_pages import MAX_LOOKAHEAD_LAYERS, ExpertPages, Visit
from ...kernels.workspace import address
from ...offload.checkpoint import CheckpointError, TensorInfo, TensorStore
from ...offload.demand import Experts
from ...offload.expert_cache import PolicyChoice, choose, policy
from ...offload.expert_pager import ExpertPager
from ...offload.hardware import cpu_threads
from ...offload.memory import anonymous
from ...offload.predict import PagedExpertCost
from ...offload.repack import RepackedPart, StagingPlan, plan_staging
from ...offload.resident_pager import resident_nbytes
from ...offload.size import format_size
from ...offload.streaming_pager import FETCH_NBYTES, Part, Range
from ...quant.weight import Expert, Linear, Norm, Weight
from ..families import EXPERT_ROLES, base_role, expert_of, expert_roles
from ..ngrams import held
from . import expert_trace
from .stream_layout import TABLES, fixed_part

if TYPE_CHECKING:  # imported by the module that uses these weights
    from ..tensors import ModelTensor

RECORD_NBYTES = 4 << 10  # bookkeeping per expert, wherever it is stored


@dataclass(frozen=True)
class ExpertLayout:
    """`parts`: the experts of layer `layers[0]`, then of `layers[1]`, ... `always`, `slices` and `tables` as in
    `stream_layout.StreamLayout`."""

    parts: tuple[Part, ...]
    layers: tuple[int, ...]
    experts: int
    per_token: int
    always: Mapping[int | str, tuple[TensorInfo, ...]]
    tables: frozenset[str]
    slices: Mapping[str, tuple] = field(default_factory=dict)

    @cached_property
    def always_nbytes(self) -> int:
        """Bytes of memory besides the slots."""
        resident = sum(resident_nbytes(infos) for infos in self.always.values())
        return FETCH_NBYTES + self.staging.nbytes + RECORD_NBYTES * len(self.parts) + resident

    @cached_property
    def staging(self) -> StagingPlan:
        """Staging buffers for repacking experts."""
        return plan_staging(self.parts)

    @cached_property
    def read_nbytes(self) -> int:
        """Bytes read per expert."""
        return max(part.read_nbytes for part in self.parts)

    @cached_property
    def demand(self) -> Experts:
        """The planner's view."""
        return Experts(len(self.layers), len(self.parts), self.per_token, max(part.nbytes for part in self.parts))


@dataclass(frozen=True)
class PagedExperts:
    """Expert paging: the number of slots, the eviction policy, cancellation."""

    parts: ExpertLayout
    slots: int
    choice: PolicyChoice
    cancelled: Callable[[], bool] = lambda: False
    direct: bool = True
    trace_key: str = ""  # key under which this run's routing is saved; "" if it is not
    repack_s_per_expert: float = 0.0  # seconds to repack an expert on each read

    @property
    def work(self) -> PagedExpertCost:
        """The performance model's view."""
        parts = self.parts
        return PagedExpertCost(len(parts.layers), parts.experts, parts.per_token, parts.read_nbytes, self.slots / len(parts.parts),
                     self.choice.hit_rate, self.repack_s_per_expert)

    @property
    def held_nbytes(self) -> int:
        """Bytes of memory for weights."""
        return self.parts.always_nbytes + self.slots * self.parts.demand.slot_nbytes

    @property
    def away_nbytes(self) -> int:
        """Bytes of experts that do not fit."""
        return (len(self.parts.parts) - self.slots) * self.parts.demand.slot_nbytes

    @property
    def load_nbytes(self) -> int:
        """Bytes read before the first token."""
        return sum(info.nbytes for infos in self.parts.always.values() for info in infos)

    def to_json(self) -> dict[str, object]:
        return {"total": len(self.parts.parts), "slots": self.slots, "policy": self.choice.policy,
                "expected_hit_rate": self.choice.hit_rate, "replayed": dict(self.choice.rates)}

    @property
    def notices(self) -> tuple[str, ...]:
        """The expected hit rate, and why."""
        share = f"{100 * self.choice.hit_rate:.0f}% of the experts that a token needs"
        if self.slots == len(self.parts.parts):
            return ()
        said = f"{share} are in memory, judging by its last tokens; {self.choice.policy} decides which ones stay"
        if not self.choice.rates:
            said = f"no routing of this model has been recorded yet: {share} are in memory if it is uniform"
        if not self.parts.staging.count:
            return (said,)
        return said, (f"an expert is repacked each time it is read: {format_size(self.parts.demand.slot_nbytes)} of memory for "
                      f"{format_size(self.parts.read_nbytes)} of file, by way of {format_size(self.parts.staging.nbytes)} for all of them")

    def pager(self, store: TensorStore) -> ExpertPager:
        parts = self.parts
        chosen = policy(self.choice.policy, self.slots, len(parts.layers), parts.experts, self.choice.hot)
        return ExpertPager(store, parts.always, parts.parts, parts.experts, parts.per_token, self.slots, chosen, self.cancelled,
                           self.direct, MAX_LOOKAHEAD_LAYERS)


def expert_layout(tensors: Mapping[int | str, Mapping[str, ModelTensor]], experts: int, per_token: int,
                store: TensorStore) -> ExpertLayout | None:
    """The experts of a model as parts; None without experts, or if some can be neither read directly nor repacked one by one."""
    layers = tuple(key for key in sorted(key for key in tensors if key != "outer") if "router" in tensors[key])
    parts: list[Part] = []
    for key in layers:
        for expert in range(experts):
            part = _part([tensors[key][role] for role in expert_roles(expert) if role in tensors[key]], store)
            if part is None:
                return None
            parts.append(part)
    if not parts:
        return None
    outer = held(tensors["outer"])
    fetched = [outer[role] for role in TABLES
               if role in outer and (role != "embed" or "head" in outer) and _lies_straight(outer[role], store)]
    tables = frozenset(tensor.name for tensor in fetched)
    always = {key: tuple(tensor.info for role, tensor in roles.items() if _stays(role) and tensor.name not in tables)
              for key, roles in {**tensors, "outer": outer}.items()}
    always["outer"] += tuple(fixed_part(tensor, store) for tensor in fetched if not tensor.spec.is_raw)
    return ExpertLayout(tuple(parts), layers, experts, per_token, always, tables)


def plan_paging(parts: ExpertLayout, slots: int, tensors: Mapping[int | str, Mapping[str, ModelTensor]],
                store: TensorStore) -> PagedExperts:
    """Paging with the policy that does best on the model's recorded routing."""
    key = expert_trace.key_of(tensors, store) if isinstance(store, TensorStore) else ""
    trace = expert_trace.load_trace(key, len(parts.layers), parts.per_token, parts.experts) if key else None
    return PagedExperts(parts, slots, choose(trace, parts.experts, slots, len(parts.layers)), trace_key=key,
                        repack_s_per_expert=_repack_s(parts, store))


def _repack_s(parts: ExpertLayout, store: TensorStore) -> float:
    """Seconds to repack an expert with as many threads as staging buffers, estimated from one step; 0 if none is repacked."""
    made = next((part for part in parts.parts if isinstance(part, RepackedPart)), None)
    if made is None or not isinstance(store, TensorStore):
        return 0.0
    piece, outs = made.repack_plan.pieces()[0], [anonymous(nbytes) for nbytes in made.repack_plan.nbytes]
    raws = [anonymous(own.nbytes) for own in piece.ranges]
    try:
        for own, raw in zip(piece.ranges, raws, strict=True):
            store.read_at(own.file, own.offset, memoryview(raw))
        piece.put(raws, outs)  # untimed: it may compile or load what `put` needs
        started = perf_counter()
        piece.put(raws, outs)
    except (CheckpointError, ValueError):
        return 0.0  # reported by name when it is used
    took, share = perf_counter() - started, sum(raw.nbytes for raw in raws) / made.repack_plan.file_nbytes
    return took / share / min(parts.staging.count, cpu_threads())


def _part(matrices: Sequence[ModelTensor], store: TensorStore) -> Part | None:
    """One expert."""
    made = tuple(index for index, matrix in enumerate(matrices) if not _lies_straight(matrix, store))
    ranges = tuple(Range(matrix.info.file, store.place(matrix.info), matrix.nbytes)
                   for index, matrix in enumerate(matrices) if index not in made)
    if not made:
        return Part(ranges)
    repack_plan = store.repack_plan([matrices[index].info for index in made])
    return None if repack_plan is None else RepackedPart(ranges, repack_plan, made)


def _stays(role: str) -> bool:
    return expert_of(role) is None or base_role(role) not in EXPERT_ROLES


def _lies_straight(tensor: ModelTensor, store: TensorStore) -> bool:
    """Whether it can be used as it lies in its file."""
    place = store.place(tensor.info)
    return place is not None and place % (tensor.spec.bits // 8 if tensor.spec.is_raw else 2) == 0


@dataclass(frozen=True)
class _Following:
    """A later layer's norm and router, and the ranking that it selects by."""

    norm: Norm
    router: Linear
    ranks: Callable[[np.ndarray], np.ndarray]


class LayerExperts(ExpertPages):
    """The experts of the `index`-th layer that has some. `bias` returns that of a matrix by role; `following`: later such layers, once
    known."""

    def __init__(self, pager: ExpertPager, index: int, roles: Mapping[str, ModelTensor], bias: Callable[[str], np.ndarray | None],
                 following: Callable[[int], Sequence[_Following]]) -> None:
        self._pager, self._index, self._following = pager, index, following
        self._matrices = [tuple(roles[role] for role in expert_roles(expert) if role in roles) for expert in range(pager.experts)]
        self._without_gate = len(self._matrices[0]) < len(EXPERT_ROLES)
        self._biases = [tuple(bias(role) for role in expert_roles(expert)) for expert in range(pager.experts)]
        self.slots_begin, self.slot_nbytes = address(pager.memory), pager.slot_nbytes

    def __len__(self) -> int:
        return len(self._matrices)

    def expert(self, number: int, slot: int) -> Expert:
        views = self._pager.views(self._index * len(self) + number, slot)
        biases = self._biases[number][self._without_gate :]
        found = [Linear(_weight(tensor, view), bias) for tensor, view, bias in zip(self._matrices[number], views, biases, strict=True)]
        return Expert(*[None] * self._without_gate, *found)

    def kind(self, number: int) -> object:
        specs = tuple((tensor.spec, tensor.shape) for tensor in self._matrices[number])
        return specs, self._pager.places(self._index * len(self) + number)

    def biases(self, number: int) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        return self._biases[number]

    def visit(self, needed: Sequence[int], tokens: np.ndarray | None = None) -> Visit:
        brought = self._pager.visit(self._index, needed, tokens)
        return Visit(brought.slots, brought.ready, brought.coming, self._pager.wait)

    def next_routers(self) -> Sequence[tuple[Norm, Linear]]:
        return [(each.norm, each.router) for each in self._following(self._pager.prefetch_distance(self._index))]

    def look_ahead(self, logits: Sequence[np.ndarray]) -> None:
        top = self._pager.per_token
        for distance, (own, layer) in enumerate(zip(logits, self._following(len(logits)), strict=True), 1):
            own = layer.ranks(own)
            likely = np.argpartition(-own, top - 1)[:top] if top < len(own) else np.arange(len(own))
            likely = likely[likely < len(self)]  # layers may have fewer experts
            self._pager.look_ahead(self._index + distance, distance, likely[np.argsort(-own[likely], kind="stable")].tolist())


def _weight(tensor: ModelTensor, view: np.ndarray) -> Weight:
    return (Weight.raw(tensor.spec.scheme, tensor.shape, view) if tensor.spec.is_raw
            else Weight.low_bit(tensor.spec, tensor.shape, view))


class Paging:
    """The layers of a model whose experts are paged."""

    def __init__(self, paged: PagedExperts, pager: ExpertPager) -> None:
        self._paged, self._pager = paged, pager
        self._routers: dict[tuple[int, int], _Following] = {}  # by (layer predicted from, distance)

    def layer(self, key: int, roles: Mapping[str, ModelTensor], bias: Callable[[str], np.ndarray | None], norm: Norm,
              router: Linear | None, ranks: Callable[[np.ndarray], np.ndarray]) -> LayerExperts:
        """A layer's experts. `bias` returns that of a matrix by role, None if it has none; `ranks`: logits -> selection scores. `router`:
        None if its input is not a function of the residual stream alone, which rules out prediction."""
        index = self._paged.parts.layers.index(key)
        for distance in range(1, MAX_LOOKAHEAD_LAYERS + 1) if router is not None else ():
            # Ops identify a product by its records: on another layer's state it needs its own.
            self._routers[index - distance, distance] = _Following(norm, Linear(router.weight, router.bias), ranks)
        return LayerExperts(self._pager, index, roles, bias,
                            lambda far: [self._routers[index, i] for i in range(1, far + 1) if (index, i) in self._routers])

    def close(self) -> None:
        """Save the routing recorded in this run."""
        if self._paged.trace_key:
            expert_trace.save_trace(self._paged.trace_key, self._pager.trace())
