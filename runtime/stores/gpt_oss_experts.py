"""Experts of a gpt-oss checkpoint one by one: a TensorStore over tensors that each hold all experts of a layer.

In 16 bits `gate_up_proj` is [E, D, 2F] and `down_proj` [E, F, D], inputs before outputs. In MXFP4 they are `<name>_blocks` [E, N, K/32,
16] and `<name>_scales` [E, N, K/32], outputs first, and run from those codes. Outputs of gate and up are interleaved, also in their bias
[E, 2F].
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from ...kernels.tiles import ROWS
from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.direct_io import READ_NBYTES
from ...offload.notes import Detail, Fallback
from ...offload.repack import Repack, RepackStep, staging_buffer
from ...offload.safetensors_header import AGAIN, TensorInfo, damaged, shown
from ...offload.size import format_size
from ...offload.streaming_pager import Range
from ...quant.imports import mxfp4
from ...quant.imports.repack import put_mxfp4
from ...quant.weight import from_f32
from ..families.mixtral import MAX_EXPERTS
from .container import Container, StoredTensor
from .converting_store import ARRANGED_NBYTES, ConvertingStore, scratch_nbytes, steps

JOINT = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_blocks|_scales|_bias)?")
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class ExpertSlice:
    """Outputs `first`, `first + step`, ... of expert `expert` in the fused tensor `joint`. `scales`: of MXFP4 codes; `inputs_first`:
    outputs are columns."""

    joint: TensorInfo
    expert: int
    first: int
    step: int
    scales: TensorInfo | None = None
    inputs_first: bool = False


class GptOssExpertStore(ConvertingStore):
    """`kept`, asked for every MXFP4 weight by name: does it stay codes, whose formats `container` then lists? Else it is widened to
    bfloat16, which loses nothing."""

    def __init__(self, store: TensorStore, kept: Callable[[str], bool]) -> None:
        self._parts: dict[str, ExpertSlice] = {}
        self._slabs: dict[str, tuple[tuple[str, int], np.ndarray]] = {}
        self._lock = threading.Lock()
        tensors, stored, joint = self._apart(store, kept)
        super().__init__(store.folder, tensors, store.take_files())
        self.made = self._parts
        nbytes = sum(info.nbytes for info in joint)
        self.container = _container(stored, tensors) if stored else None
        if stored:
            held = format_size(sum(each.nbytes for each in stored.values()))
            self.notices = (Detail(f"{len(stored)} MXFP4 weights are repacked for the kernels as they are read: {held} of memory "
                                   f"for {format_size(nbytes)} of file"),)
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
            if experts > MAX_EXPERTS:
                damaged(info.file, f"holds {shown(name)} of {experts} experts")
            packed += [] if scales is None else [info, scales]
            names = PARTS[joint]
            if outputs % len(names):
                damaged(info.file, f"holds {shown(name)} of {outputs} outputs for gate and up")
            for expert in range(experts):
                for i, part in enumerate(names):
                    own = f"{place}.{expert}.{part}.{'bias' if kind == '_bias' else 'weight'}"
                    shape = (outputs // len(names), *inputs)
                    self._parts[own] = ExpertSlice(info, expert, i, len(names), scales, kind is None)
                    if scales is not None and kept(own):
                        stored[own] = StoredTensor(own, mxfp4.SPEC, shape, 0)
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

    # -- one by one, again and again -------------------------------------------------------------------------------------------

    def repack_plan(self, infos: Sequence[TensorInfo]) -> Repack | None:
        parts = [self._parts.get(info.name) for info in infos]
        if any(part is None or len(part.joint.shape) == 2 for part in parts):
            return None
        joints = {part.joint.name: part for part in parts}.values()  # gate and up lie in one
        return Repack(tuple(info.nbytes for info in infos), sum(_height(part) * sum(_widths(part)) for part in joints),
                      max(staging_buffer(*(_piece(part) * width for width in _widths(part))) for part in joints),
                      max(ARRANGED_NBYTES if info.dtype == "U8" else scratch_nbytes(_height(part) // part.step, self._depth(part))
                          for info, part in zip(infos, parts, strict=True)),
                      partial(self._pieces, tuple(infos)))

    def _pieces(self, infos: Sequence[TensorInfo]) -> list[RepackStep]:
        """Runs of outputs of each tensor that holds some of these: gate and up come of the same bytes."""
        found, inside = [], {}
        for index, info in enumerate(infos):
            inside.setdefault(self._parts[info.name].joint.name, []).append((index, info))
        for own in inside.values():
            part = self._parts[own[0][1].name]
            files, height, high = [each for each in (part.joint, part.scales) if each is not None], _height(part), _piece(part)
            for begin in range(0, height, high):
                count = min(high, height - begin)
                ranges = tuple(Range(each.file, each.offset + (part.expert * height + begin) * width, count * width)
                               for each, width in zip(files, _widths(part), strict=True))
                found.append(RepackStep(ranges, partial(self._put, tuple(own), begin // part.step)))
        return found

    def _put(self, own: Sequence[tuple[int, TensorInfo]], first: int, raws: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
        """What is read of a joint tensor into the tensors that are in it, whose outputs from `first` on these are."""
        for index, info in own:
            part, out = self._parts[info.name], outs[index]
            if part.inputs_first:
                typed = raws[0].view(_typed(part.joint)).reshape(part.joint.shape[1], -1)
                out.view(typed.dtype).reshape(-1, len(typed))[:] = typed[:, part.first :: part.step].T
                continue
            blocks, scales = (raw.reshape(-1, width)[part.first :: part.step] for raw, width in zip(raws, _widths(part), strict=True))
            each = info.nbytes * part.step // _height(part)
            if info.dtype == "U8":
                self._put_codes(info, first, blocks, scales, out)
                continue
            for begin, end in steps(len(blocks), self._depth(part)):
                out[(first + begin) * each : (first + end) * each] = self._widened(part, blocks[begin:end], scales[begin:end])

    @staticmethod
    def _depth(part: ExpertSlice) -> int:
        """Inputs of an expert's matrix."""
        return part.joint.shape[1] if part.inputs_first else part.joint.shape[2] * mxfp4.GROUP

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        part = self._parts.get(info.name)
        return super().files_of(info) if part is None else frozenset(each.file for each in (part.joint, part.scales) if each is not None)

    def stored_nbytes(self, info: TensorInfo) -> int:
        if (part := self._parts.get(info.name)) is None:
            return info.nbytes
        held = part.joint.nbytes + (0 if part.scales is None else part.scales.nbytes)
        return held // (part.joint.shape[0] * part.step)

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        part = self._parts[info.name]
        if part.scales is not None:
            out[:] = self._widened(part, *self._both(part, begin, end))
        elif part.inputs_first:
            mine = self._slab(part)[:, part.first :: part.step][:, begin:end]
            out.view(mine.dtype).reshape(end - begin, -1)[:] = mine.T
        else:
            out[:] = self._outputs(part.joint, part, begin, end).reshape(-1)

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        self._put_codes(info, begin, *self._both(self._parts[info.name], begin, end), blob)

    def _put_codes(self, info: TensorInfo, begin: int, blocks: np.ndarray, scales: np.ndarray, blob: np.ndarray) -> None:
        """Outputs from `begin` on of blocks [n, K / 2] and scales [n, K / 32] into their places in a blob."""
        if not put_mxfp4(blob, self.container.tensors[info.name].shape, begin, blocks, scales):
            raise self._not_a_number(self._parts[info.name])

    def _both(self, part: ExpertSlice, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks uint8 [n, K / 2] and scales uint8 [n, K / 32] of some outputs."""
        return self._outputs(part.joint, part, begin, end), self._outputs(part.scales, part, begin, end)

    def _widened(self, part: ExpertSlice, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Bytes of blocks [n, K / 2] and scales [n, K / 32] as bfloat16."""
        try:
            return from_f32(mxfp4.dequantize(_unpacked(blocks), scales), "bf16").reshape(-1).view(np.uint8)
        except ValueError as error:
            raise self._not_a_number(part) from error

    def _outputs(self, joint: TensorInfo, part: ExpertSlice, begin: int, end: int) -> np.ndarray:
        """Bytes [n, bytes of an output] of a part's outputs [begin, end), where outputs come before inputs."""
        outputs = joint.shape[1]
        width = joint.nbytes // (joint.shape[0] * outputs)
        first = part.first + part.step * begin
        raw = np.empty((part.step * (end - begin - 1) + 1, width), np.uint8)
        self.read_at(joint.file, joint.offset + (part.expert * outputs + first) * width, memoryview(raw).cast("B"))
        return raw[:: part.step]

    def _slab(self, part: ExpertSlice) -> np.ndarray:
        """All of an expert in a tensor whose inputs come first, [K, N] in the stored type. The last of each name is kept: gate and up are
        asked for in turn, and block by block."""
        joint, kind = part.joint, part.joint.name.rpartition(".")[2]
        key = joint.name, part.expert
        with self._lock:
            if self._slabs.get(kind, (None,))[0] != key:
                experts, inputs, outputs = joint.shape
                raw = np.empty(joint.nbytes // experts, np.uint8)
                self.read_at(joint.file, joint.offset + part.expert * raw.nbytes, memoryview(raw))
                typed = raw.view(_typed(joint)).reshape(inputs, outputs)
                self._slabs[kind] = key, typed
            return self._slabs[kind][1]

    @staticmethod
    def _not_a_number(part: ExpertSlice) -> CheckpointError:
        return CheckpointError(f"{part.joint.file} has tensor {shown(part.scales.name)} with a scale of NaN", AGAIN)


def _height(part: ExpertSlice) -> int:
    """Rows of an expert in its joint tensor."""
    return part.joint.shape[1]


def _widths(part: ExpertSlice) -> tuple[int, ...]:
    """Bytes of a row of the joint tensor, and of its scales where it has some."""
    return tuple(each.nbytes // (each.shape[0] * each.shape[1]) for each in (part.joint, part.scales) if each is not None)


def _piece(part: ExpertSlice) -> int:
    """Rows of a joint tensor that are read at once; all where inputs come first."""
    unit = ROWS * part.step
    return _height(part) if part.inputs_first else min(_height(part), max(unit, READ_NBYTES // sum(_widths(part)) // unit * unit))


def _typed(joint: TensorInfo) -> type:
    return np.uint32 if joint.dtype == "F32" else np.uint16


def _unpacked(blocks: np.ndarray) -> np.ndarray:
    """Bytes [n, K / 2] of MXFP4 blocks -> codes [n, K]."""
    return mxfp4.unpack_pairs(blocks.reshape(len(blocks), -1, mxfp4.GROUP_NBYTES)).reshape(len(blocks), -1)


def _container(stored: dict[str, StoredTensor], tensors: Mapping[str, TensorInfo]) -> Container:
    """What an effllm.json would say of the tensors that run from their codes. The checkpoint has no checksums."""
    weights = sum(prod(stored.get(name, info).shape) for name, info in tensors.items())
    bits = 8 * sum(info.nbytes for info in tensors.values()) / weights
    return Container(str(mxfp4.SPEC), bits, stored, {"model": "the original"}, {"name": "gpt-oss"}, {"name": "MXFP4"}, {})
