"""Draft models that were trained for one target and read its hidden states or its KV cache. They have no tokenizer and cannot run alone.

The plan counts all of such a draft: its weights, which stay in memory, the workspace of its own ops (on the target's threads), and its
caches. `DraftInputs` says what the target's passes must keep for it.
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

OTHER = "use the draft model that was published for this model"
NO_NUMBERS = "the draft model {}: its scores are NaN: drafting is disabled"
EXACT = ("centroids",)  # roles of small matrices that choose among others, which stay as they are stored
NUMBERS = {"I64": "<i8", "I32": "<i4"}  # how numbers of tokens are stored


@dataclass(frozen=True)
class DraftInputs:
    """What a draft reads of the target's passes beside the last hidden states. `between`: inputs of these layers; `cache`: the target's
    keys and values, which then stay in memory."""

    between: tuple[int, ...] = ()
    cache: bool = False


@dataclass(frozen=True)
class DraftRun:
    """What determines a draft's size: context, threads, and the target's cache: packed pages, or two kinds of pages, which attention
    processes in turns. `spec`: the format its matrices are quantized to, None for as stored."""

    ctx: int
    workers: int
    packed: bool = False
    in_turns: bool = False
    spec: QuantSpec | None = None


class DraftSource(Protocol):
    """A planned draft, opened with a run."""

    @abstractmethod
    def drafts(self, model: Model, cache: KVCache, ctx: int, chunk: int) -> ModelDrafts:
        """The drafts for `model`, in a run with this context and passes of at most `chunk` tokens."""


@dataclass(frozen=True)
class TrainedDraft(DraftSource):
    """The plan of one in a folder. `config`: of its layers; `tensors`: by layer, outside them as "outer"; `dims`: of its workspace, for
    `workers` threads; `lists`: tensors of token ids; `kept_nbytes`: its caches."""

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
        """All tensors that are read."""
        return [*(tensor.info for roles in self.tensors.values() for tensor in roles.values()), *self.lists]

    @property
    def bits(self) -> int:
        """Bits its matrices are quantized to on load, 0 if as stored."""
        return next((tensor.spec.bits for roles in self.tensors.values() for tensor in roles.values() if not tensor.spec.is_raw), 0)

    @property
    def notice(self) -> str:
        """The notice for runs that did not request that; empty if there is nothing to say."""
        if not self.bits:
            return ""
        made, stored = sum(info.nbytes for info in self.infos), sum(map(self.store.stored_nbytes, self.infos))
        return (f"the draft model {self.folder.name} is rounded to {self.bits} bits as it is read, like the model: {format_size(made)} of "
                f"memory for {format_size(stored)} of file")

    @property
    def nbytes(self) -> int:
        """Bytes that it adds to a run."""
        return ResidentPager(self.store, {0: self.infos}).nbytes + 4 * sum(plan_workspace(self.dims, self.workers).values()) + \
            self.kept_nbytes


class TrainedDraftWeights:
    """Its weights, on ops of its own."""

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
        """The weights of its blocks."""
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
        """A list of token ids, int64."""
        return self._raw[info.name].view(NUMBERS[info.dtype]).astype("<i8", copy=False)


def require_match(fits: bool, place: Path, said: str, wanted: object, has: object) -> None:
    """Raises UsageError for a draft in `place` that is for another target: its `said` is `wanted`, the target's is `has`."""
    if not fits:
        raise UsageError(f"the draft model {place} was trained for a model with {said} {wanted}, this one has {has}", OTHER)


def read_as(spec: QuantSpec | None, store: TensorStore,
            rules: Mapping[int | str, Mapping[str, TensorRule]]) -> tuple[TensorStore, dict[int | str, dict[str, ModelTensor]]]:
    """The tensors of rules by group and role, and the store to read them from: `store`, or one that quantizes matrices to `spec`. Raises
    CheckpointError for a tensor that is missing or has another shape or type."""
    stored = {key: tensors_of(own, store) for key, own in rules.items()}
    if spec is None:
        return store, stored
    from ..stores.quantizing_store import QuantizingStore

    rounded = QuantizingStore(store, [each.info for roles in stored.values() for role, each in roles.items()
                                   if each.is_matrix and role not in EXACT], spec)
    return rounded, {key: tensors_of(own, rounded, rounded.container.tensors) for key, own in rules.items()}


def numbers_info(store: TensorStore, name: str, count: int) -> TensorInfo:
    """Where a list of `count` token ids is stored. Raises CheckpointError if it is missing or something else."""
    info = store.tensors.get(name)
    if info is None or info.dtype not in NUMBERS or tuple(info.shape) != (count,):
        has = "is missing" if info is None else f"is {info.dtype} {list(info.shape)}, expected whole numbers [{count}]"
        raise CheckpointError(f"the draft model: tensor {name} {has}",
                              "the config and the weights are of different models, or the download is incomplete")
    return info
