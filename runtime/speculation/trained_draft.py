"""Draft models that were trained for one target and read its hidden states or its KV cache. They have no tokenizer and cannot run alone.

The plan counts all of such a draft: its weights, which stay in memory, the workspace of its own ops (on the target's threads), and its
caches. `DraftInputs` is what the target's passes must keep for it.
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

HINT = "use the draft model that was published for this model"
NAN_SCORES = "the draft model {}: its scores are NaN: drafting is disabled"
UNQUANTIZED_ROLES = ("centroids",)  # small matrices that select parts of others
TOKEN_ID_DTYPES = {"I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True)
class DraftInputs:
    """What a draft reads of the target's passes in addition to the last hidden states."""

    aux_layers: tuple[int, ...] = ()  # layers whose input states it reads
    kv_cache: bool = False  # whether it reads the target's keys and values, which then stay in memory


@dataclass(frozen=True)
class DraftRun:
    """The settings of a run that determine a draft's size."""

    ctx: int
    workers: int  # threads
    packed_kv: bool = False  # the target's cache has packed pages
    mixed_kv: bool = False  # the target's cache has pages of two kinds, over which attention runs one after the other
    spec: QuantSpec | None = None  # the format its matrices are quantized to, None for as stored


class DraftSource(Protocol):
    """A planned draft, opened with a run."""

    @abstractmethod
    def drafts(self, model: Model, cache: KVCache, ctx: int, chunk: int) -> ModelDrafts:
        """The drafts for `model`, in a run with `ctx` tokens of context and passes of at most `chunk` tokens."""


@dataclass(frozen=True)
class TrainedDraft(DraftSource):
    """The plan of a trained draft model in a folder."""

    folder: Path
    store: TensorStore
    config: ModelConfig  # of its layers
    tensors: Mapping[int | str, Mapping[str, ModelTensor]]  # by layer, and "outer" for those outside the layers, then by role
    dims: Dims  # of its workspace
    workers: int  # threads
    inputs: DraftInputs
    token_lists: tuple[TensorInfo, ...] = ()  # tensors of token ids
    cache_nbytes: int = 0

    @property
    def infos(self) -> list[TensorInfo]:
        """All tensors that are read."""
        return [*(tensor.info for roles in self.tensors.values() for tensor in roles.values()), *self.token_lists]

    @property
    def bits(self) -> int:
        """Bits its matrices are quantized to on load, 0 if they stay as stored."""
        return next((tensor.spec.bits for roles in self.tensors.values() for tensor in roles.values() if not tensor.spec.is_raw), 0)

    @property
    def notice(self) -> str:
        """The notice that it is quantized on load; empty if it is not."""
        if not self.bits:
            return ""
        loaded, stored = sum(info.nbytes for info in self.infos), sum(map(self.store.stored_nbytes, self.infos))
        return (f"the draft model {self.folder.name} is rounded to {self.bits} bits as it is read, like the model: "
                f"{format_size(loaded)} of "
                f"memory for {format_size(stored)} of file")

    @property
    def nbytes(self) -> int:
        """Bytes that it adds to a run."""
        return ResidentPager(self.store, {0: self.infos}).nbytes + 4 * sum(plan_workspace(self.dims, self.workers).values()) + \
            self.cache_nbytes


class TrainedDraftWeights:
    """The weights of a trained draft, with `host` ops of their own."""

    def __init__(self, plan: TrainedDraft, pool: ThreadPool) -> None:
        self.host, self._plan = CpuOps(pool, plan.dims), plan
        self._pager = ResidentPager(plan.store, {0: plan.infos})
        self._raw: Mapping[str, np.ndarray] = {}

    def load(self) -> Iterator[Progress]:
        for done, total in self._pager.load():
            yield Progress("loading the draft model", done, total, "bytes")
        with self._pager.lease(0) as raw:  # resident: valid after the lease
            self._raw = raw

    def close(self) -> None:
        self._raw = {}
        self._pager.close()
        self._plan.store.close()

    def layers(self) -> list[LayerWeights]:
        """The weights of its blocks."""
        plan = self._plan
        records = WeightRecords(plan.config, plan.tensors, plan.store, self.host, self._pager, None, None)
        return [records.layer(key, self._raw, self.host) for key in plan.tensors if key != "outer"]

    def linear(self, role: str) -> Linear:
        """A matrix outside the layers."""
        tensor = self._plan.tensors["outer"][role]
        raw = self._raw[tensor.name]
        return Linear(Weight.raw(tensor.spec.scheme, tensor.shape, typed(raw, tensor.spec)) if tensor.spec.is_raw
                      else Weight.low_bit(tensor.spec, tensor.shape, raw))

    def norm(self, role: str) -> Norm:
        """A norm outside the layers."""
        return build_norm(self._plan.config, as_float32(self._plan.tensors["outer"][role], self._raw), None)

    def token_list(self, info: TensorInfo) -> np.ndarray:
        """A list of token ids, int64."""
        return self._raw[info.name].view(TOKEN_ID_DTYPES[info.dtype]).astype("<i8", copy=False)


def require_match(matches: bool, folder: Path, what: str, expected: object, actual: object) -> None:
    """Raises UsageError unless `matches`: the draft in `folder` was trained for a target with `what` `expected`, this one has `actual`."""
    if not matches:
        raise UsageError(f"the draft model {folder} was trained for a model with {what} {expected}, this one has {actual}", HINT)


def resolve_tensors(spec: QuantSpec | None, store: TensorStore,
                    rules: Mapping[int | str, Mapping[str, TensorRule]]) -> tuple[TensorStore, dict[int | str, dict[str, ModelTensor]]]:
    """The tensors of rules by group and role, and the store to read them from: `store`, or one that quantizes matrices to `spec`. Raises
    CheckpointError for a tensor that is missing or has another shape or type."""
    stored = {key: tensors_of(group, store) for key, group in rules.items()}
    if spec is None:
        return store, stored
    from ..stores.quantizing_store import QuantizingStore

    quantizing = QuantizingStore(store, [tensor.info for roles in stored.values() for role, tensor in roles.items()
                                         if tensor.is_matrix and role not in UNQUANTIZED_ROLES], spec)
    return quantizing, {key: tensors_of(group, quantizing, quantizing.container.tensors) for key, group in rules.items()}


def token_list_info(store: TensorStore, name: str, count: int) -> TensorInfo:
    """Where a list of `count` token ids is stored. Raises CheckpointError if it is missing or something else."""
    info = store.tensors.get(name)
    if info is None or info.dtype not in TOKEN_ID_DTYPES or tuple(info.shape) != (count,):
        has = "is missing" if info is None else f"is {info.dtype} {list(info.shape)}, expected whole numbers [{count}]"
        raise CheckpointError(f"the draft model: tensor {name} {has}",
                              "the config and the weights are of different models, or the download is incomplete")
    return info
