"""Fused experts stored transposed, [E, D, 2F] and [E, F, D] (Qwen 3 VL's mixtures): each matrix by itself.

No row of a matrix is contiguous in the file: an expert's slice of a tensor is read whole and transposed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ...offload.checkpoint import TensorStore
from ...offload.repack import Repack, RepackStep, staging_buffer
from ...offload.safetensors_header import CheckpointError, TensorInfo, damaged, shown
from ...offload.streaming_pager import Range
from .. import families
from ..families.mixtral import MAX_EXPERTS
from .canonical_names import EXPERT_PREFIXES, FUSED_PROJECTIONS
from .tensor_views import TensorView, ViewStore

FUSED_NAME = re.compile(r"(.+\.)(?:mlp|feed_forward)\.experts\.(gate_up_proj|down_proj)")


class LastExpert:
    """Cache of the expert slice read last: gate and up of an expert share one."""

    def __init__(self) -> None:
        self._lock, self._held = threading.Lock(), (None, np.empty(0, np.uint8))

    def read(self, store: TensorStore, whole: TensorInfo, expert: int) -> np.ndarray:
        with self._lock:
            key, held = self._held
        if key != (whole.name, expert):
            key, held = (whole.name, expert), store.read(whole, expert, expert + 1)
            with self._lock:
                self._held = key, held
        return held


@dataclass(frozen=True)
class TransposedExpert:
    """Columns from `first` on of an expert's slice [K, N] of a tensor, as rows."""

    source: TensorInfo
    expert: int
    first: int
    last: LastExpert = field(compare=False)
    at_once: bool = True

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        return (self.source,)

    @property
    def range(self) -> Range:
        """The expert's part of the file."""
        nbytes = self.source.nbytes // self.source.shape[0]
        return Range(self.source.file, self.source.offset + self.expert * nbytes, nbytes)

    def read(self, store: TensorStore, begin: int, end: int) -> np.ndarray:
        return self.rows(self.last.read(store, self.source, self.expert), begin, end).reshape(-1)

    def rows(self, raw: np.ndarray, begin: int, end: int) -> np.ndarray:
        """Bytes [end - begin, K, of a value] of the expert's part of the file."""
        _, inputs, outputs = self.source.shape
        typed = raw.view(f"u{len(raw) // (inputs * outputs)}").reshape(inputs, outputs)
        return np.ascontiguousarray(typed[:, self.first + begin : self.first + end].T).view(np.uint8)


class TransposedExpertStore(ViewStore):
    """Store of such experts, which a pager loads one by one."""

    def repack_plan(self, infos: Sequence[TensorInfo]) -> Repack | None:
        parts = [self._parts.get(info.name) for info in infos]
        if not all(isinstance(part, TransposedExpert) for part in parts):
            return super().repack_plan(infos)
        ranges = {part.source.name: part.range for part in parts}.values()  # gate and up lie in one
        return Repack(tuple(info.nbytes for info in infos), sum(file_range.nbytes for file_range in ranges),
                       max(staging_buffer(file_range.nbytes) for file_range in ranges), max(info.nbytes for info in infos),
                       partial(self._repack_steps, tuple(infos)))

    def _repack_steps(self, infos: Sequence[TensorInfo]) -> list[RepackStep]:
        by_source: dict[str, list[tuple[int, TransposedExpert, TensorInfo]]] = {}
        for index, info in enumerate(infos):
            part = self._parts[info.name]
            by_source.setdefault(part.source.name, []).append((index, part, info))
        return [RepackStep((slices[0][1].range,), partial(_repack, tuple(slices))) for slices in by_source.values()]


def _repack(slices: Sequence[tuple[int, TransposedExpert, TensorInfo]], raws: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
    """Transpose an expert's slice into the matrices that it holds."""
    raw = np.ascontiguousarray(raws[0])
    for index, part, info in slices:
        outs[index][:] = part.rows(raw, 0, info.shape[0]).reshape(-1)


def with_transposed_experts(store: TensorStore, raw: Mapping[str, object], always: bool = False) -> TensorStore:
    """The store with each transposed expert by itself. `raw`: config of the text part. Tensors in the usual orientation, as some writers
    have them, stay as they are; square ones count as transposed only if `always`.

    Raises CheckpointError for a damaged tensor, and for transposed experts in a checkpoint that another tool quantized.
    """
    if raw.get("quantization_config") is not None:
        if fused_name := next((name for name in store.tensors if FUSED_NAME.match(name)), None):
            raise CheckpointError(f"{store.folder} holds {shown(fused_name)}, the experts of a layer in one tensor, "
                                  "beside quantized weights",
                                  "use the original 16-bit checkpoint, a GGUF file, or an upload with separate experts")
        return store
    hidden, family = raw.get("hidden_size"), str(raw.get("model_type"))
    module, projection_names, last_slice = EXPERT_PREFIXES[family], families.get(family).NAMES, LastExpert()
    views: dict[str, tuple[tuple[int, ...], TensorView]] = {}
    for name, info in store.tensors.items():
        match = FUSED_NAME.fullmatch(name)
        if match is None:
            continue
        if len(info.shape) != 3 or 0 in info.shape or info.shape[0] > MAX_EXPERTS or info.nbytes % np.prod(info.shape, dtype=np.int64):
            damaged(info.file, f"holds {shown(name)} as {info.dtype} {list(info.shape)}")
        parts, (experts, inputs, outputs) = FUSED_PROJECTIONS[match[2]], info.shape
        is_down = len(parts) == 1
        is_standard = (inputs if is_down else outputs) == hidden  # outputs before inputs
        if is_standard and not (always and inputs == outputs) or outputs % len(parts):
            continue
        rows = outputs // len(parts)
        for expert in range(experts):
            for i, part in enumerate(parts):
                weight = f"{match[1]}{module}.experts.{expert}.{projection_names[part]}.weight"
                views[weight] = (rows, inputs), TransposedExpert(info, expert, i * rows, last_slice)
    return TransposedExpertStore(store, views) if views else store
