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
from .canonical_names import EXPERTS, PARTS
from .tensor_views import TensorView, ViewStore

FUSED_NAME = re.compile(r"(.+\.)(?:mlp|feed_forward)\.experts\.(gate_up_proj|down_proj)")


class LastExpert:
    """The slice read last: two matrices of an expert share one."""

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
        return Repack(tuple(info.nbytes for info in infos), sum(each.nbytes for each in ranges),
                       max(staging_buffer(each.nbytes) for each in ranges), max(info.nbytes for info in infos),
                       partial(self._pieces, tuple(infos)))

    def _pieces(self, infos: Sequence[TensorInfo]) -> list[RepackStep]:
        inside: dict[str, list[tuple[int, TransposedExpert, TensorInfo]]] = {}
        for index, info in enumerate(infos):
            part = self._parts[info.name]
            inside.setdefault(part.source.name, []).append((index, part, info))
        return [RepackStep((own[0][1].range,), partial(_put, tuple(own))) for own in inside.values()]


def _put(own: Sequence[tuple[int, TransposedExpert, TensorInfo]], raws: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
    """An expert's part of a tensor into the matrices that lie in it."""
    raw = np.ascontiguousarray(raws[0])
    for index, part, info in own:
        outs[index][:] = part.rows(raw, 0, info.shape[0]).reshape(-1)


def with_transposed_experts(store: TensorStore, raw: Mapping[str, object], always: bool = False) -> TensorStore:
    """The store with such experts one by one; `raw` is the config of the text part. Tensors that lie the other way round, as some writers
    have them, stay as they are, and so do those in which both ways are one, unless `always`. Raises CheckpointError, also for such experts
    in a checkpoint that another tool has quantized: scales of codes that lie so are not read."""
    if raw.get("quantization_config") is not None:
        if joint := next((name for name in store.tensors if FUSED_NAME.match(name)), None):
            raise CheckpointError(f"{store.folder} holds {shown(joint)}, the experts of a layer in one tensor, beside quantized weights",
                                  "use the original 16-bit checkpoint, a GGUF file, or an upload with separate experts")
        return store
    hidden, family = raw.get("hidden_size"), str(raw.get("model_type"))
    place, names, last = EXPERTS[family], families.get(family).NAMES, LastExpert()
    found: dict[str, tuple[tuple[int, ...], TensorView]] = {}
    for name, info in store.tensors.items():
        each = FUSED_NAME.fullmatch(name)
        if each is None:
            continue
        if len(info.shape) != 3 or 0 in info.shape or info.shape[0] > MAX_EXPERTS or info.nbytes % np.prod(info.shape, dtype=np.int64):
            damaged(info.file, f"holds {shown(name)} as {info.dtype} {list(info.shape)}")
        parts, (experts, inputs, outputs) = PARTS[each[2]], info.shape
        down = len(parts) == 1
        usual = (inputs if down else outputs) == hidden  # outputs before inputs
        if usual and not (always and inputs == outputs) or outputs % len(parts):
            continue
        rows = outputs // len(parts)
        for expert in range(experts):
            for i, part in enumerate(parts):
                own = f"{each[1]}{place}.experts.{expert}.{names[part]}.weight"
                found[own] = (rows, inputs), TransposedExpert(info, expert, i * rows, last)
    return TransposedExpertStore(store, found) if found else store
