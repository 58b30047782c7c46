"""Draft models that were trained for one model, and read what its passes leave: states, keys and values. They have no tokenizer of their
own and say nothing by themselves.

A plan counts all of such a draft beside the program: its weights, which stay in memory, the working memory of its ops, which are its own
over the threads of the model's, and what it keeps of a text. `Reads` says what the model's passes have to keep for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ... import UsageError
from ...kernels.cpu.ops import CpuOps, plan_workspace
from ...offload.checkpoint import CheckpointError
from ...offload.resident_pager import ResidentPager
from ...offload.size import format_size
from ...quant.weight import Linear, Norm, Weight
from ..events import Progress
from ..tensors import as_float32, tensors_of, typed
from ..weights.role_source import build_norm
from ..weights.weight_records import WeightRecords

if TYPE_CHECKING:
    import numpy as np

    from ...kernels.threads import ThreadPool
    from ...kernels.workspace import Dims
    from ...offload.checkpoint import TensorInfo, TensorStore
    from ...quant.spec import QuantSpec
    from ..cache import KVCache
    from ..config import ModelConfig
    from ..families import TensorRule
    from ..layer import LayerWeights
    from ..model import Model
    from ..tensors import ModelTensor
    from .drafts import ModelDrafts

OTHER = "take the draft that was published for this model"
NO_NUMBERS = "the draft model {}: its scores are not numbers: it drafts no longer"
EXACT = ("centroids",)  # roles of small matrices that choose among others, which stay as they are stored
NUMBERS = {"I64": "<i8", "I32": "<i4"}  # how numbers of tokens are stored


@dataclass(frozen=True)
class DraftInputs:
    """What of a model's passes drafts read beside the states that leave the last layer. `between`: states that come into these layers;
    `cache`: the model's keys and values, which then are in memory."""

    between: tuple[int, ...] = ()
    cache: bool = False


@dataclass(frozen=True)
class DraftRun:
    """What of a run decides how large a draft is: its context at most, its threads, and the form of the model's cache: sealed pages are
    packed, or of two kinds, through which attention goes in turns. `spec`: what its matrices are rounded to, None for as they are
    stored."""

    ctx: int
    workers: int
    packed: bool = False
    in_turns: bool = False
    spec: QuantSpec | None = None


class DraftSource(Protocol):
    """What is opened with a run."""

    @abstractmethod
    def drafts(self, model: Model, cache: KVCache, ctx: int, chunk: int) -> ModelDrafts:
        """What drafts for `model` by it in a run with this context, whose passes have `chunk` tokens at most."""


@dataclass(frozen=True)
class TrainedDraft(DraftSource):
    """One in a folder, as it is planned. `config`: of its layers; `tensors`: by layer and outside them as "outer"; `dims`: what sizes its
    working memory, for `workers` threads; `lists`: tensors of numbers of tokens; `kept_nbytes`: what it keeps of a text."""

    folder: Path
    store: TensorStore
    config: ModelConfig
    tensors: Mapping[int | str, Mapping[str, ModelTensor]]
    dims: Dims
    workers: int
    reads: DraftInputs
    lists: tuple[TensorInfo, ...] = ()
    kept_nbytes: int = 0

    @property
    def infos(self) -> list[TensorInfo]:
        """Where all that is read of it lies."""
        return [*(tensor.info for roles in self.tensors.values() for tensor in roles.values()), *self.lists]

    @property
    def bits(self) -> int:
        """Of the codes that its matrices are rounded to as they are read, 0 where they stay as they are stored."""
        return next((tensor.spec.bits for roles in self.tensors.values() for tensor in roles.values() if not tensor.spec.is_raw), 0)

    @property
    def notice(self) -> str:
        """What a person is told who did not ask for that; empty where there is nothing to say."""
        if not self.bits:
            return ""
        made, stored = sum(info.nbytes for info in self.infos), sum(map(self.store.stored_nbytes, self.infos))
        return (f"the draft model {self.folder.name} is rounded to {self.bits} bits as it is read, like the model: {format_size(made)} of "
                f"memory for {format_size(stored)} of file")

    @property
    def nbytes(self) -> int:
        """Bytes that a run with it takes beside one without."""
        return ResidentPager(self.store, {0: self.infos}).nbytes + 4 * sum(plan_workspace(self.dims, self.workers).values()) + \
            self.kept_nbytes


class TrainedDraftWeights:
    """The weights of one, on ops of its own."""

    def __init__(self, trained: TrainedDraft, pool: ThreadPool) -> None:
        self.host, self._trained = CpuOps(pool, trained.dims), trained
        self._pager = ResidentPager(trained.store, {0: trained.infos})
        self._raw: Mapping[str, np.ndarray] = {}

    def load(self) -> Iterator[Progress]:
        for done, total in self._pager.load():
            yield Progress("loading the draft model", done, total, "bytes")
        with self._pager.lease(0) as raw:  # which stays
            self._raw = raw

    def close(self) -> None:
        self._raw = {}
        self._pager.close()
        self._trained.store.close()

    def layers(self) -> list[LayerWeights]:
        """What its blocks take."""
        own = self._trained
        records = WeightRecords(own.config, own.tensors, own.store, self.host, self._pager, None, None)
        return [records.layer(key, self._raw, self.host) for key in own.tensors if key != "outer"]

    def linear(self, role: str) -> Linear:
        """A matrix outside the layers."""
        tensor = self._trained.tensors["outer"][role]
        raw = self._raw[tensor.name]
        return Linear(Weight.raw(tensor.spec.scheme, tensor.shape, typed(raw, tensor.spec)) if tensor.spec.is_raw
                      else Weight.low_bit(tensor.spec, tensor.shape, raw))

    def norm(self, role: str) -> Norm:
        """A norm outside the layers."""
        return build_norm(self._trained.config, as_float32(self._trained.tensors["outer"][role], self._raw), None)

    def list(self, info: TensorInfo) -> np.ndarray:
        """Numbers of tokens, int64."""
        return self._raw[info.name].view(NUMBERS[info.dtype]).astype("<i8", copy=False)


def require_match(fits: bool, place: Path, said: str, wanted: object, has: object) -> None:
    """Raises UsageError for a draft in `place` that is for another model: `said` of it is `wanted`, this model's is `has`."""
    if not fits:
        raise UsageError(f"the draft model {place} was trained for a model with {said} {wanted}, this one has {has}", OTHER)


def read_as(spec: QuantSpec | None, store: TensorStore,
            rules: Mapping[int | str, Mapping[str, TensorRule]]) -> tuple[TensorStore, dict[int | str, dict[str, ModelTensor]]]:
    """The tensors of rules by group and role, and the store to read them from: `store`, or where its matrices are rounded to `spec` one
    that takes its place. Raises CheckpointError for a tensor that is missing or has another shape or type."""
    stored = {key: tensors_of(own, store) for key, own in rules.items()}
    if spec is None:
        return store, stored
    from ..stores.quantizing_store import QuantizingStore

    rounded = QuantizingStore(store, [each.info for roles in stored.values() for role, each in roles.items()
                                   if each.is_matrix and role not in EXACT], spec)
    return rounded, {key: tensors_of(own, rounded, rounded.container.tensors) for key, own in rules.items()}


def numbers_info(store: TensorStore, name: str, count: int) -> TensorInfo:
    """Where a list of so many numbers lies. Raises CheckpointError where it is missing or something else."""
    info = store.tensors.get(name)
    if info is None or info.dtype not in NUMBERS or tuple(info.shape) != (count,):
        has = "is missing" if info is None else f"is {info.dtype} {list(info.shape)}, expected whole numbers [{count}]"
        raise CheckpointError(f"the draft model: tensor {name} {has}",
                              "the config and the weights are of different models, or the download is incomplete")
    return info
