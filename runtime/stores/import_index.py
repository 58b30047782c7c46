"""Index of a quantized checkpoint of another tool: for each weight its codes, scales and zero points, found by name, and their layout.

Most checkpoints use one layout for all weights. An FP8 one may hold some, mostly experts, as MXFP4: packed codes under power-of-two
scales. Where the config describes several layouts, dtypes and shapes decide which applies, not names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.safetensors_header import TensorInfo, damaged, shown
from ...quant.imports import fp8
from ...quant.weight import RAW_NUMPY, to_f32
from .import_config import (
    BYTES,
    CODES,
    ENDINGS,
    EXPONENTS,
    FLOATS,
    IGNORED,
    IN_BLOCKS,
    LEVELS,
    MXFP4,
    MXFP8,
    NVFP4,
    ORIGINAL,
    PAIRS,
    TYPES,
)
from .import_decoder import Decoder

WHOLE = {"I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8}
MADE = 1 << 60  # where weights that are made on the way in begin: behind every file


@dataclass(frozen=True)
class ImportIndex:
    """Of a checkpoint: its tensors under their unquantized names, each weight's component tensors by suffix and its decoder, and where
    each weight begins in its file."""

    tensors: dict[str, TensorInfo]
    parts: dict[str, dict[str, TensorInfo]]
    decoders: dict[str, Decoder]
    begins: list[tuple[int, str]]


def index_weights(store: TensorStore, decoders: Sequence[Decoder], wide: str, depths: Mapping[str, int]) -> ImportIndex:
    """Index the weights of a store that one of `decoders` understands, `wide` (f16 or f32) each, and its other tensors. `depths`: inputs
    of the weights, where the layout does not tell."""
    made, used, at = ImportIndex({}, {}, {}, []), set(), MADE
    layouts = tuple(dict.fromkeys(decoder.layout for decoder in decoders))
    for layout in layouts:
        fitting = [decoder for decoder in decoders if decoder.layout == layout]
        for info, parts in _weights(store, layout, layouts):
            weight = f"{info.name.rpartition('.')[0]}.weight"
            if weight in made.parts:
                continue
            if (layout == LEVELS or len(fitting) > 1 and layout == "packed") and weight not in depths:
                continue
            decoder = _decoder(info, parts, fitting, depths.get(weight, 0))
            shape = _shape(info, decoder, depths.get(weight, 0))
            made.parts[weight], made.decoders[weight] = parts, decoder
            used |= {part.name for part in parts.values()}
            own = widened_dtype(layout, wide)
            size = prod(shape) * (4 if own == "f32" else 2)
            made.tensors[weight] = TensorInfo(weight, own.upper(), shape, info.file, at, size)
            made.begins.append((at, weight))
            at += size
    for name, info in store.tensors.items():
        if name not in used and name.rpartition(".")[2] not in IGNORED:
            made.tensors[name] = info
    return made


def _weights(store: TensorStore, layout: str, layouts: Sequence[str]) -> Iterator[tuple[TensorInfo, dict[str, TensorInfo]]]:
    """The codes of each weight in one of the `layouts` of a checkpoint, and its parts by their endings."""
    codes, others = ENDINGS[layout]
    beside = [TYPES.get(other, "I32") for other in layouts if other != layout and ENDINGS[other][0] == codes]
    own = TYPES.get(layout, "I32")
    alike, told_by_parts = {*beside} - {own}, own in beside  # of other layouts, and whether one has the same
    for name, info in store.tensors.items():
        base, _, ending = name.rpartition(".")
        if ending != codes or info.dtype != CODES.get(layout, info.dtype) or info.dtype in alike:
            continue
        if layout == LEVELS and info.dtype != "U8" and f"{base}.weight.absmax" not in store.tensors:  # codes may bear any type
            continue
        held = {other: store.tensors.get(f"{base}.{other}") for other in others}
        if told_by_parts and not all(not kind.needed if held[other] is None else kind.fits(held[other].dtype, held[other].shape)
                                     for other, kind in others.items()):
            continue
        parts = {codes: info}
        for other, kind in others.items():
            part = held[other]
            if part is None:
                if kind.needed:
                    damaged(info.file, f"holds {shown(name)} without {shown(f'{base}.{other}')}")
                continue
            if not kind.fits(part.dtype, part.shape):
                raise unfit(part, f"{base}.weight", f"{other} is {part.dtype} {list(part.shape)}")
            parts[other] = _of_blocks(part, f"{base}.weight") if len(part.shape) == 4 else part
        if layout in ("fp8", PAIRS) and len(parts) != 2:
            damaged(info.file, f"holds {shown(name)} in {4 if layout == PAIRS else 8} bits without one scale for it")
        yield info, parts


def _of_blocks(scales: TensorInfo, weight: str) -> TensorInfo:
    """Scales of blocks [n, 1, k, 1] as [n, k]."""
    high, one, wide, last = scales.shape
    if (one, last) != (1, 1):
        raise unfit(scales, weight, f"{scales.name} is {scales.dtype} {list(scales.shape)}")
    return replace(scales, shape=(high, wide))


def _decoder(info: TensorInfo, parts: Mapping[str, TensorInfo], fitting: Sequence[Decoder], depth: int) -> Decoder:
    """What decodes a weight, of those for its layout: that for as many bits as its words have for a code."""
    if len(fitting) == 1:
        return fitting[0]
    for decoder in fitting:
        if decoder.layout == "gptq":
            (_, scales), (_, words) = parts["scales"].shape, parts["qzeros"].shape
            fits = words == scales * decoder.bits // 32
        else:
            fits = info.shape[-1:] == (-(-depth // (32 // decoder.bits)),)
        if fits:
            return decoder
    raise unfit(info, f"{info.name.rpartition('.')[0]}.weight", f"{info.name} is {info.dtype} {list(info.shape)}, which is none of "
                f"{', '.join(str(decoder.bits) for decoder in fitting)} bits")


def _shape(info: TensorInfo, decoder: Decoder, depth: int) -> tuple[int, int]:
    """The weight's, from that of its codes; `depth`: its inputs, as the model says."""
    layout = decoder.layout
    if layout == LEVELS and depth and info.nbytes:
        rows = 2 * info.nbytes // depth
        if -(-rows * depth // 2) == info.nbytes and rows:
            return rows, depth
    if len(info.shape) != 2 or 0 in info.shape or info.dtype != TYPES.get(layout, "I32") or layout == LEVELS:
        raise unfit(info, f"{info.name.rpartition('.')[0]}.weight", f"{info.name} is {info.dtype} {list(info.shape)}")
    rows, columns = info.shape
    if layout in (*MXFP4, *NVFP4):
        return rows, 2 * columns
    if layout in (*IN_BLOCKS, BYTES, MXFP8):
        return rows, columns
    if layout == "gptq":
        return columns, rows * 32 // decoder.bits
    return (columns * 8, rows) if layout == "awq" else (rows, columns * 32 // decoder.bits)


def widened_dtype(layout: str, wide: str) -> str:
    """What weights in a layout are widened to where others become `wide`: bfloat16 holds what MXFP4 and MXFP8 can be, a half does not."""
    return "bf16" if layout in (*MXFP4, MXFP8) and wide == "f16" else wide


def as_typed(info: TensorInfo, raw: np.ndarray, layout: str) -> np.ndarray:
    """Bytes of a part: words as int32, scales as float32, also those that are powers of two but for MXFP4's and MXFP8's, and codes as they
    are, of four bits beside levels whatever type they bear."""
    if layout == LEVELS and info.name.endswith(".weight"):
        return raw
    if info.dtype in FLOATS:
        return to_f32(raw.view(RAW_NUMPY[info.dtype.lower()]), info.dtype.lower()).reshape(info.shape)
    if info.dtype == EXPONENTS and layout not in (*MXFP4, MXFP8):
        if (raw == fp8.NO_POWER).any():
            damaged(info.file, f"has tensor {shown(info.name)} with a scale of NaN")
        return fp8.powers_of_two(raw).reshape(info.shape)
    if info.dtype not in WHOLE:
        damaged(info.file, f"holds {shown(info.name)} as {info.dtype}")
    return raw.view(WHOLE[info.dtype]).reshape(info.shape)


def scales_of(parts: Mapping[str, TensorInfo]) -> TensorInfo:
    """Those of FP8, under either name."""
    return parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]


def unfit(info: TensorInfo, weight: str, why: str) -> CheckpointError:
    return CheckpointError(f"{info.file} holds parts of {shown(weight)} that do not fit: {why}",
                           f"if it is as published, this layout is not supported: {ORIGINAL}; else download the model again")
