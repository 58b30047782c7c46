"""The experts of a gpt-oss checkpoint, one by one: a TensorStore over tensors that each hold something of all experts of a layer.

In 16 bits `gate_up_proj` is [E, D, 2F] and `down_proj` [E, F, D], inputs before outputs. In MXFP4 they are `<name>_blocks`
[E, N, K/32, 16] and `<name>_scales` [E, N, K/32], outputs first, and run from those codes. The outputs of gate and up take turns, in their
bias [E, 2F] as well.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ..offload.checkpoint import CheckpointError, TensorStore
from ..offload.header import AGAIN, TensorInfo, damaged, shown
from ..offload.notes import Fallback
from ..offload.size import format_size
from ..quant.codes import Codes
from ..quant.imports import mxfp4
from ..quant.levels import MXFP
from ..quant.pack import put_rows, put_tables
from ..quant.spec import QuantSpec
from ..quant.weight import from_f32
from .container import Container, StoredTensor
from .families.mixtral import MOST_EXPERTS
from .made_store import MadeStore

FORMAT = QuantSpec(4, mxfp4.GROUP, "mxfp")
JOINT = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_blocks|_scales|_bias)?")
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Part:
    """Outputs `first`, `first + step`, ... of expert `expert` in `joint`. `scales`: of MXFP4 codes; `inputs_first`: outputs are columns."""

    joint: TensorInfo
    expert: int
    first: int
    step: int
    scales: TensorInfo | None = None
    inputs_first: bool = False


class ExpertStore(MadeStore):
    """`kept`, asked for every MXFP4 weight by name: does it stay codes, whose formats `container` then lists? Else it is widened to
    bfloat16, which loses nothing."""

    def __init__(self, store: TensorStore, kept: Callable[[str], bool]) -> None:
        self._parts: dict[str, Part] = {}
        self._slabs: dict[str, tuple[tuple[str, int], np.ndarray]] = {}
        self._lock = threading.Lock()
        tensors, stored, joint = self._apart(store, kept)
        super().__init__(store.folder, tensors, store.take_files())
        self.made = self._parts
        nbytes = sum(info.nbytes for info in joint)
        self.container = _container(stored, tensors) if stored else None
        if stored:
            self.notices = (f"{len(stored)} MXFP4 weights are put in the order of the kernels as they are read: "
                            f"{format_size(sum(each.nbytes for each in stored.values()))} of memory for {format_size(nbytes)} of file",)
        elif joint:
            wide = sum(tensors[name].nbytes for name, part in self._parts.items() if part.scales is not None)
            self.notices = (Fallback(f"MXFP4 weights are widened to bf16 as they are read: {format_size(wide)} of memory for "
                                     f"{format_size(nbytes)} of file"),)

    def _apart(self, store: TensorStore,
               kept: Callable[[str], bool]) -> tuple[dict[str, TensorInfo], dict[str, StoredTensor], list[TensorInfo]]:
        """(tensors by the names that experts have, formats of those that stay codes, what holds MXFP4)."""
        tensors: dict[str, TensorInfo] = {}
        stored: dict[str, StoredTensor] = {}
        packed: list[TensorInfo] = []
        for name, info in store.tensors.items():
            found = JOINT.fullmatch(name)
            if found is None:
                tensors[name] = info
                continue
            place, joint, kind = found.groups()
            if kind == "_scales":
                if f"{place}.{joint}_blocks" not in store.tensors:
                    damaged(info.file, f"holds {shown(name)} without {joint}_blocks")
                continue
            scales = store.tensors.get(f"{place}.{joint}_scales") if kind == "_blocks" else None
            experts, outputs, inputs = self._shape(info, kind, scales)
            if experts > MOST_EXPERTS:
                damaged(info.file, f"holds {shown(name)} of {experts} experts")
            packed += [] if scales is None else [info, scales]
            names = PARTS[joint]
            if outputs % len(names):
                damaged(info.file, f"holds {shown(name)} of {outputs} outputs for gate and up")
            for expert in range(experts):
                for i, part in enumerate(names):
                    own = f"{place}.{expert}.{part}.{'bias' if kind == '_bias' else 'weight'}"
                    shape = (outputs // len(names), *inputs)
                    self._parts[own] = Part(info, expert, i, len(names), scales, kind is None)
                    if scales is not None and kept(own):
                        stored[own] = StoredTensor(own, FORMAT, shape, 0)
                        tensors[own] = TensorInfo(own, "U8", (stored[own].nbytes,), info.file, info.offset, stored[own].nbytes)
                    else:
                        dtype = "BF16" if scales is not None else info.dtype
                        nbytes = prod(shape) * (4 if dtype == "F32" else 2)
                        tensors[own] = TensorInfo(own, dtype, shape, info.file, info.offset, nbytes)
        return tensors, stored, packed

    def _shape(self, info: TensorInfo, kind: str | None, scales: TensorInfo | None) -> tuple[int, int, tuple[int, ...]]:
        """(experts, outputs, (inputs,) or () of a bias). Raises CheckpointError for what no checkpoint holds."""
        shape, name = info.shape, shown(info.name)
        rank = {None: 3, "_bias": 2, "_blocks": 4}[kind]
        if len(shape) != rank or 0 in shape or info.dtype not in (("U8",) if kind == "_blocks" else FLOATS):
            damaged(info.file, f"holds {name} as {info.dtype} {list(shape)}")
        if kind == "_blocks":
            if shape[3] != mxfp4.GROUP_NBYTES or scales is None or scales.dtype not in ("U8", "F8_E8M0") or scales.shape != shape[:3]:
                damaged(info.file, f"holds {name} without scales for its groups of 32")
            return shape[0], shape[1], (shape[2] * mxfp4.GROUP,)
        return (shape[0], shape[2], (shape[1],)) if kind is None else (shape[0], shape[1], ())

    def place(self, info: TensorInfo) -> int | None:
        return None if info.name in self.made else super().place(info)

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        part = self._parts.get(info.name)
        return super().files_of(info) if part is None else frozenset(each.file for each in (part.joint, part.scales) if each is not None)

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        part = self._parts[info.name]
        if part.scales is not None:
            codes, scales = self._codes(part, begin, end)
            try:
                values = mxfp4.dequantize(codes, scales)
            except ValueError as error:
                raise self._not_a_number(part) from error
            out[:] = from_f32(values, "bf16").reshape(-1).view(np.uint8)
        elif part.inputs_first:
            mine = self._slab(part)[:, part.first :: part.step][:, begin:end]
            out.view(mine.dtype).reshape(end - begin, -1)[:] = mine.T
        else:
            out[:] = self._outputs(part.joint, part, begin, end).reshape(-1)

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        part = self._parts[info.name]
        codes, scales = self._codes(part, begin, end)
        if (scales == mxfp4.NOT_A_NUMBER).any():
            raise self._not_a_number(part)
        shape, made = self.container.tensors[info.name].shape, Codes(codes, scales, None, np.full(end - begin, 0.5, np.float32), MXFP)
        put_rows(blob, FORMAT, shape, begin, made)
        put_tables(blob, FORMAT, shape, made)

    def _codes(self, part: Part, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes uint8 [n, K] and scales uint8 [n, K / 32] of some outputs."""
        blocks, scales = (self._outputs(joint, part, begin, end) for joint in (part.joint, part.scales))
        return mxfp4.unpack_pairs(blocks.reshape(end - begin, -1, mxfp4.GROUP_NBYTES)).reshape(end - begin, -1), scales

    def _outputs(self, joint: TensorInfo, part: Part, begin: int, end: int) -> np.ndarray:
        """Bytes [n, bytes of an output] of a part's outputs [begin, end), where outputs come before inputs."""
        outputs = joint.shape[1]
        width = joint.nbytes // (joint.shape[0] * outputs)
        first = part.first + part.step * begin
        raw = np.empty((part.step * (end - begin - 1) + 1, width), np.uint8)
        self.read_at(joint.file, joint.offset + (part.expert * outputs + first) * width, memoryview(raw).cast("B"))
        return raw[:: part.step]

    def _slab(self, part: Part) -> np.ndarray:
        """All of an expert in a tensor whose inputs come first, [K, N] in the stored type. The last of each name is kept: gate and up are
        asked for in turn, and block by block."""
        joint, kind = part.joint, part.joint.name.rpartition(".")[2]
        key = joint.name, part.expert
        with self._lock:
            if self._slabs.get(kind, (None,))[0] != key:
                experts, inputs, outputs = joint.shape
                raw = np.empty(joint.nbytes // experts, np.uint8)
                self.read_at(joint.file, joint.offset + part.expert * raw.nbytes, memoryview(raw))
                typed = raw.view(np.uint32 if joint.dtype == "F32" else np.uint16).reshape(inputs, outputs)
                self._slabs[kind] = key, typed
            return self._slabs[kind][1]

    @staticmethod
    def _not_a_number(part: Part) -> CheckpointError:
        return CheckpointError(f"{part.joint.file} has tensor {shown(part.scales.name)} with a scale of NaN", AGAIN)


def _container(stored: dict[str, StoredTensor], tensors: Mapping[str, TensorInfo]) -> Container:
    """What an effllm.json would say of the tensors that run from their codes. The checkpoint has no checksums."""
    weights = sum(prod(stored.get(name, info).shape) for name, info in tensors.items())
    bits = 8 * sum(info.nbytes for info in tensors.values()) / weights
    return Container(str(FORMAT), bits, stored, {"model": "the original"}, {"name": "gpt-oss"}, {"name": "MXFP4"}, {})
