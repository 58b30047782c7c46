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
from .converting_store import REPACK_SCRATCH_NBYTES, ConvertingStore, scratch_nbytes, steps

FUSED_NAME = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_blocks|_scales|_bias)?")
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class ExpertSlice:
    """One expert's matrix or bias within a fused tensor."""

    fused: TensorInfo
    expert: int
    first: int  # its outputs are `first`, `first + stride`, ... of the fused tensor's
    stride: int
    scales: TensorInfo | None = None  # of MXFP4 codes
    inputs_first: bool = False  # outputs are columns

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """The fused tensor, and its scales where it has some."""
        return (self.fused,) if self.scales is None else (self.fused, self.scales)


class GptOssExpertStore(ConvertingStore):
    """The store with each expert's matrices by themselves.

    `keeps_packed`: whether an MXFP4 weight of that name stays codes, whose formats `container` then lists; otherwise it is dequantized to
    bfloat16, which loses nothing.
    """

    def __init__(self, store: TensorStore, keeps_packed: Callable[[str], bool]) -> None:
        self._slices: dict[str, ExpertSlice] = {}
        self._slabs: dict[str, tuple[tuple[str, int], np.ndarray]] = {}
        self._lock = threading.Lock()
        tensors, stored, mxfp4_tensors = self._split_experts(store, keeps_packed)
        super().__init__(store.folder, tensors, store.take_files())
        self.converted = self._slices
        file_nbytes = format_size(sum(info.nbytes for info in mxfp4_tensors))
        self.container = _container(stored, tensors) if stored else None
        if stored:
            nbytes = format_size(sum(tensor.nbytes for tensor in stored.values()))
            self.notices = (Detail(f"{len(stored)} MXFP4 weights are repacked for the kernels as they are read: {nbytes} of memory "
                                   f"for {file_nbytes} of file"),)
        elif mxfp4_tensors:
            nbytes = format_size(sum(tensors[name].nbytes for name, expert_slice in self._slices.items()
                                     if expert_slice.scales is not None))
            self.notices = (Fallback(f"MXFP4 weights are widened to bf16 as they are read: {nbytes} of memory for {file_nbytes} of file"),)

    def _split_experts(self, store: TensorStore, keeps_packed: Callable[[str], bool],
                       ) -> tuple[dict[str, TensorInfo], dict[str, StoredTensor], list[TensorInfo]]:
        """(tensors by the names of single experts, formats of those that stay codes, fused tensors of MXFP4 codes and scales). Fills
        `_slices`."""
        tensors: dict[str, TensorInfo] = {}
        stored: dict[str, StoredTensor] = {}
        mxfp4_tensors: list[TensorInfo] = []
        for name, info in store.tensors.items():
            match = FUSED_NAME.fullmatch(name)
            if match is None:
                tensors[name] = info
                continue
            prefix, fused_name, kind = match.groups()
            if kind == "_scales":
                if f"{prefix}.{fused_name}_blocks" not in store.tensors:
                    damaged(info.file, f"holds {shown(name)} without {fused_name}_blocks")
                continue
            scales = store.tensors.get(f"{prefix}.{fused_name}_scales") if kind == "_blocks" else None
            experts, outputs, inputs = self._shape(info, kind, scales)
            if experts > MAX_EXPERTS:
                damaged(info.file, f"holds {shown(name)} of {experts} experts")
            mxfp4_tensors += [] if scales is None else [info, scales]
            projections = PROJECTIONS[fused_name]
            if outputs % len(projections):
                damaged(info.file, f"holds {shown(name)} of {outputs} outputs for gate and up")
            shape = (outputs // len(projections), *inputs)
            for expert in range(experts):
                for i, projection in enumerate(projections):
                    weight = f"{prefix}.{expert}.{projection}.{'bias' if kind == '_bias' else 'weight'}"
                    self._slices[weight] = ExpertSlice(info, expert, i, len(projections), scales, kind is None)
                    if scales is not None and keeps_packed(weight):
                        stored[weight] = StoredTensor(weight, mxfp4.SPEC, shape, 0)
                        nbytes = stored[weight].nbytes
                        tensors[weight] = TensorInfo(weight, "U8", (nbytes,), info.file, info.offset, nbytes)
                    else:
                        dtype = "BF16" if scales is not None else info.dtype
                        nbytes = prod(shape) * (4 if dtype == "F32" else 2)
                        tensors[weight] = TensorInfo(weight, dtype, shape, info.file, info.offset, nbytes)
        return tensors, stored, mxfp4_tensors

    def _shape(self, info: TensorInfo, kind: str | None, scales: TensorInfo | None) -> tuple[int, int, tuple[int, ...]]:
        """(experts, outputs, (inputs,) or () of a bias) of a fused tensor. Raises CheckpointError for a shape or dtype that no checkpoint
        has."""
        shape, name = info.shape, shown(info.name)
        rank = {None: 3, "_bias": 2, "_blocks": 4}[kind]
        if len(shape) != rank or 0 in shape or info.dtype not in (("U8",) if kind == "_blocks" else FLOATS):
            damaged(info.file, f"holds {name} as {info.dtype} {list(shape)}")
        if kind == "_blocks":
            if shape[3] != mxfp4.GROUP_NBYTES or scales is None or scales.dtype not in ("U8", "F8_E8M0") or scales.shape != shape[:3]:
                damaged(info.file, f"holds {name} without scales for its groups of 32")
            return shape[0], shape[1], (shape[2] * mxfp4.GROUP,)
        return (shape[0], shape[2], (shape[1],)) if kind is None else (shape[0], shape[1], ())

    # -- repacking experts that are paged in repeatedly ------------------------------------------------------------------------

    def repack_plan(self, infos: Sequence[TensorInfo]) -> Repack | None:
        slices = [self._slices.get(info.name) for info in infos]
        if any(each is None or len(each.fused.shape) == 2 for each in slices):
            return None
        by_fused = {each.fused.name: each for each in slices}.values()  # gate and up share a fused tensor
        read_nbytes = sum(_expert_rows(each) * sum(_row_nbytes(each)) for each in by_fused)
        staging_nbytes = max(staging_buffer(*(_rows_per_step(each) * nbytes for nbytes in _row_nbytes(each))) for each in by_fused)
        workspace_nbytes = max(REPACK_SCRATCH_NBYTES if info.dtype == "U8"
                               else scratch_nbytes(_expert_rows(each) // each.stride, self._input_width(each))
                               for info, each in zip(infos, slices, strict=True))
        return Repack(tuple(info.nbytes for info in infos), read_nbytes, staging_nbytes, workspace_nbytes,
                      partial(self._repack_steps, tuple(infos)))

    def _repack_steps(self, infos: Sequence[TensorInfo]) -> list[RepackStep]:
        """One step per run of rows of each fused tensor: gate and up are repacked from the same bytes."""
        repack_steps, targets_by_fused = [], {}
        for index, info in enumerate(infos):
            targets_by_fused.setdefault(self._slices[info.name].fused.name, []).append((index, info))
        for targets in targets_by_fused.values():
            expert_slice = self._slices[targets[0][1].name]
            rows, step = _expert_rows(expert_slice), _rows_per_step(expert_slice)
            for begin in range(0, rows, step):
                count = min(step, rows - begin)
                ranges = tuple(Range(info.file, info.offset + (expert_slice.expert * rows + begin) * nbytes, count * nbytes)
                               for info, nbytes in zip(expert_slice.parts, _row_nbytes(expert_slice), strict=True))
                repack_steps.append(RepackStep(ranges, partial(self._repack, tuple(targets), begin // expert_slice.stride)))
        return repack_steps

    def _repack(self, targets: Sequence[tuple[int, TensorInfo]], first: int, raws: Sequence[np.ndarray],
                outs: Sequence[np.ndarray]) -> None:
        """Convert rows read from a fused tensor into the (index into `outs`, tensor) pairs of `targets`, beginning at output `first`."""
        for index, info in targets:
            expert_slice, out = self._slices[info.name], outs[index]
            offset, stride = expert_slice.first, expert_slice.stride
            if expert_slice.inputs_first:
                typed = raws[0].view(_raw_dtype(expert_slice.fused)).reshape(expert_slice.fused.shape[1], -1)
                out.view(typed.dtype).reshape(-1, len(typed))[:] = typed[:, offset::stride].T
                continue
            blocks, scales = (raw.reshape(-1, nbytes)[offset::stride]
                              for raw, nbytes in zip(raws, _row_nbytes(expert_slice), strict=True))
            if info.dtype == "U8":
                self._put_codes(info, first, blocks, scales, out)
                continue
            output_nbytes = info.nbytes * stride // _expert_rows(expert_slice)
            for begin, end in steps(len(blocks), self._input_width(expert_slice)):
                out[(first + begin) * output_nbytes : (first + end) * output_nbytes] = self._dequantized(
                    expert_slice, blocks[begin:end], scales[begin:end])

    @staticmethod
    def _input_width(expert_slice: ExpertSlice) -> int:
        """Inputs of an expert's matrix."""
        shape = expert_slice.fused.shape
        return shape[1] if expert_slice.inputs_first else shape[2] * mxfp4.GROUP

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        expert_slice = self._slices.get(info.name)
        return super().files_of(info) if expert_slice is None else frozenset(info.file for info in expert_slice.parts)

    def stored_nbytes(self, info: TensorInfo) -> int:
        if (expert_slice := self._slices.get(info.name)) is None:
            return info.nbytes
        return sum(each.nbytes for each in expert_slice.parts) // (expert_slice.fused.shape[0] * expert_slice.stride)

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        expert_slice = self._slices[info.name]
        if expert_slice.scales is not None:
            out[:] = self._dequantized(expert_slice, *self._blocks_and_scales(expert_slice, begin, end))
        elif expert_slice.inputs_first:
            columns = self._slab(expert_slice)[:, expert_slice.first :: expert_slice.stride][:, begin:end]
            out.view(columns.dtype).reshape(end - begin, -1)[:] = columns.T
        else:
            out[:] = self._outputs(expert_slice.fused, expert_slice, begin, end).reshape(-1)

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        self._put_codes(info, begin, *self._blocks_and_scales(self._slices[info.name], begin, end), blob)

    def _put_codes(self, info: TensorInfo, begin: int, blocks: np.ndarray, scales: np.ndarray, blob: np.ndarray) -> None:
        """Outputs from `begin` on of blocks [n, K / 2] and scales [n, K / 32] into their places in a blob."""
        if not put_mxfp4(blob, self.container.tensors[info.name].shape, begin, blocks, scales):
            raise self._nan_scale(self._slices[info.name])

    def _blocks_and_scales(self, expert_slice: ExpertSlice, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks uint8 [n, K / 2] and scales uint8 [n, K / 32] of some outputs."""
        return self._outputs(expert_slice.fused, expert_slice, begin, end), self._outputs(expert_slice.scales, expert_slice, begin, end)

    def _dequantized(self, expert_slice: ExpertSlice, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Bytes of blocks [n, K / 2] and scales [n, K / 32] as bfloat16."""
        try:
            return from_f32(mxfp4.dequantize(_unpack_codes(blocks), scales), "bf16").reshape(-1).view(np.uint8)
        except ValueError as error:
            raise self._nan_scale(expert_slice) from error

    def _outputs(self, fused: TensorInfo, expert_slice: ExpertSlice, begin: int, end: int) -> np.ndarray:
        """Bytes [n, bytes of an output] of a slice's outputs [begin, end), where outputs come before inputs."""
        outputs = fused.shape[1]
        width = fused.nbytes // (fused.shape[0] * outputs)
        first = expert_slice.first + expert_slice.stride * begin
        raw = np.empty((expert_slice.stride * (end - begin - 1) + 1, width), np.uint8)
        self.read_at(fused.file, fused.offset + (expert_slice.expert * outputs + first) * width, memoryview(raw).cast("B"))
        return raw[:: expert_slice.stride]

    def _slab(self, expert_slice: ExpertSlice) -> np.ndarray:
        """All of an expert in a tensor whose inputs come first, [K, N] in the stored type. The last one of each projection is cached: gate
        and up are read alternately, a block of rows at a time."""
        fused, projection = expert_slice.fused, expert_slice.fused.name.rpartition(".")[2]
        key = fused.name, expert_slice.expert
        with self._lock:
            if self._slabs.get(projection, (None,))[0] != key:
                experts, inputs, outputs = fused.shape
                raw = np.empty(fused.nbytes // experts, np.uint8)
                self.read_at(fused.file, fused.offset + expert_slice.expert * raw.nbytes, memoryview(raw))
                typed = raw.view(_raw_dtype(fused)).reshape(inputs, outputs)
                self._slabs[projection] = key, typed
            return self._slabs[projection][1]

    @staticmethod
    def _nan_scale(expert_slice: ExpertSlice) -> CheckpointError:
        return CheckpointError(f"{expert_slice.fused.file} has tensor {shown(expert_slice.scales.name)} with a scale of NaN", AGAIN)


def _expert_rows(expert_slice: ExpertSlice) -> int:
    """Rows of one expert in its fused tensor."""
    return expert_slice.fused.shape[1]


def _row_nbytes(expert_slice: ExpertSlice) -> tuple[int, ...]:
    """Bytes of a row of the fused tensor, and of a row of its scales where it has some."""
    return tuple(info.nbytes // (info.shape[0] * info.shape[1]) for info in expert_slice.parts)


def _rows_per_step(expert_slice: ExpertSlice) -> int:
    """Rows of a fused tensor that a repack step reads; all of an expert's where inputs come first."""
    rows, unit = _expert_rows(expert_slice), ROWS * expert_slice.stride
    if expert_slice.inputs_first:
        return rows
    return min(rows, max(unit, READ_NBYTES // sum(_row_nbytes(expert_slice)) // unit * unit))


def _raw_dtype(fused: TensorInfo) -> type:
    return np.uint32 if fused.dtype == "F32" else np.uint16


def _unpack_codes(blocks: np.ndarray) -> np.ndarray:
    """Bytes [n, K / 2] of MXFP4 blocks -> codes [n, K]."""
    return mxfp4.unpack_pairs(blocks.reshape(len(blocks), -1, mxfp4.GROUP_NBYTES)).reshape(len(blocks), -1)


def _container(stored: dict[str, StoredTensor], tensors: Mapping[str, TensorInfo]) -> Container:
    """A container for the tensors that stay codes, without checksums, which the checkpoint has none of."""
    weights = sum(prod(stored.get(name, info).shape) for name, info in tensors.items())
    bits = 8 * sum(info.nbytes for info in tensors.values()) / weights
    return Container(str(mxfp4.SPEC), bits, stored, {"model": "the original"}, {"name": "gpt-oss"}, {"name": "MXFP4"}, {})
