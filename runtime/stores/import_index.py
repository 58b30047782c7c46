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
    BLOCK_SCALED,
    BNB_4BIT,
    BNB_INT8,
    CODE_DTYPES,
    EXPONENTS,
    FLOATS,
    IGNORED_ENDINGS,
    LAYOUT_TENSORS,
    MXFP4,
    MXFP4_IN_FP8,
    MXFP8,
    NVFP4,
    ORIGINAL,
    WEIGHT_CODE_DTYPES,
)
from .import_decoder import Decoder

NUMPY_DTYPES = {"I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8}
CONVERTED_OFFSET = 1 << 60  # virtual offsets of converted weights begin here, beyond the end of any file


@dataclass(frozen=True)
class ImportIndex:
    """The tensors of a checkpoint, and the decoder of each quantized weight."""

    tensors: dict[str, TensorInfo]  # under their unquantized names
    parts: dict[str, dict[str, TensorInfo]]  # weight -> its component tensors by suffix
    decoders: dict[str, Decoder]  # weight -> its decoder
    offsets: list[tuple[int, str]]  # (virtual offset, weight), ascending


def index_weights(store: TensorStore, decoders: Sequence[Decoder], dequant_dtype: str, input_widths: Mapping[str, int]) -> ImportIndex:
    """Index the weights of a store that one of `decoders` understands, as tensors of `dequant_dtype` (f16 or f32), and all other tensors.
    `input_widths`: of weights, needed where their layout does not determine it."""
    index, used_names, offset = ImportIndex({}, {}, {}, []), set(), CONVERTED_OFFSET
    layouts = tuple(dict.fromkeys(decoder.layout for decoder in decoders))
    for layout in layouts:
        candidates = [decoder for decoder in decoders if decoder.layout == layout]
        for info, parts in _weights(store, layout, layouts):
            weight = f"{info.name.rpartition('.')[0]}.weight"
            if weight in index.parts:
                continue
            if (layout == BNB_4BIT or len(candidates) > 1 and layout == "packed") and weight not in input_widths:
                continue
            decoder = _decoder_of(info, parts, candidates, input_widths.get(weight, 0))
            shape = _shape(info, decoder, input_widths.get(weight, 0))
            index.parts[weight], index.decoders[weight] = parts, decoder
            used_names |= {part.name for part in parts.values()}
            dtype = widened_dtype(layout, dequant_dtype)
            nbytes = prod(shape) * (4 if dtype == "f32" else 2)
            index.tensors[weight] = TensorInfo(weight, dtype.upper(), shape, info.file, offset, nbytes)
            index.offsets.append((offset, weight))
            offset += nbytes
    for name, info in store.tensors.items():
        if name not in used_names and name.rpartition(".")[2] not in IGNORED_ENDINGS:
            index.tensors[name] = info
    return index


def _weights(store: TensorStore, layout: str, layouts: Sequence[str]) -> Iterator[tuple[TensorInfo, dict[str, TensorInfo]]]:
    """(codes, component tensors by suffix) of each weight that is stored in `layout`, one of the `layouts` of a checkpoint."""
    codes_suffix, component_kinds = LAYOUT_TENSORS[layout]
    other_dtypes = [CODE_DTYPES.get(suffix, "I32") for suffix in layouts if suffix != layout and LAYOUT_TENSORS[suffix][0] == codes_suffix]
    dtype = CODE_DTYPES.get(layout, "I32")
    distinct_dtypes, is_ambiguous = {*other_dtypes} - {dtype}, dtype in other_dtypes
    for name, info in store.tensors.items():
        base, _, suffix = name.rpartition(".")
        if suffix != codes_suffix or info.dtype != WEIGHT_CODE_DTYPES.get(layout, info.dtype) or info.dtype in distinct_dtypes:
            continue
        if layout == BNB_4BIT and info.dtype != "U8" and f"{base}.weight.absmax" not in store.tensors:  # codes may bear any type
            continue
        components = {suffix: store.tensors.get(f"{base}.{suffix}") for suffix in component_kinds}
        if is_ambiguous and not all(kind.accepts(components[suffix]) for suffix, kind in component_kinds.items()):
            continue
        parts = {codes_suffix: info}
        for suffix, kind in component_kinds.items():
            part = components[suffix]
            if part is None:
                if kind.needed:
                    damaged(info.file, f"holds {shown(name)} without {shown(f'{base}.{suffix}')}")
                continue
            if not kind.accepts(part):
                raise mismatch_error(part, f"{base}.weight", f"{suffix} is {part.dtype} {list(part.shape)}")
            parts[suffix] = _block_scales(part, f"{base}.weight") if len(part.shape) == 4 else part
        if layout in ("fp8", MXFP4_IN_FP8) and len(parts) != 2:
            damaged(info.file, f"holds {shown(name)} in {4 if layout == MXFP4_IN_FP8 else 8} bits without one scale for it")
        yield info, parts


def _block_scales(scales: TensorInfo, weight: str) -> TensorInfo:
    """Scales of blocks [n, 1, k, 1] as [n, k]."""
    rows, one, columns, last = scales.shape
    if (one, last) != (1, 1):
        raise mismatch_error(scales, weight, f"{scales.name} is {scales.dtype} {list(scales.shape)}")
    return replace(scales, shape=(rows, columns))


def _decoder_of(info: TensorInfo, parts: Mapping[str, TensorInfo], candidates: Sequence[Decoder], input_width: int) -> Decoder:
    """The decoder of a weight among those of its layout: the one whose bits per code fit the number of words."""
    if len(candidates) == 1:
        return candidates[0]
    for decoder in candidates:
        if decoder.layout == "gptq":
            (_, scales), (_, words) = parts["scales"].shape, parts["qzeros"].shape
            fits = words == scales * decoder.bits // 32
        else:
            fits = info.shape[-1:] == (-(-input_width // (32 // decoder.bits)),)
        if fits:
            return decoder
    bits = ", ".join(str(decoder.bits) for decoder in candidates)
    raise mismatch_error(info, f"{info.name.rpartition('.')[0]}.weight",
                         f"{info.name} is {info.dtype} {list(info.shape)}, which is none of {bits} bits")


def _shape(info: TensorInfo, decoder: Decoder, input_width: int) -> tuple[int, int]:
    """The shape of a weight, from that of its codes; `input_width` is the model's, 0 if unknown."""
    layout = decoder.layout
    if layout == BNB_4BIT and input_width and info.nbytes:
        rows = 2 * info.nbytes // input_width
        if -(-rows * input_width // 2) == info.nbytes and rows:
            return rows, input_width
    if len(info.shape) != 2 or 0 in info.shape or info.dtype != CODE_DTYPES.get(layout, "I32") or layout == BNB_4BIT:
        raise mismatch_error(info, f"{info.name.rpartition('.')[0]}.weight", f"{info.name} is {info.dtype} {list(info.shape)}")
    rows, columns = info.shape
    if layout in (*MXFP4, *NVFP4):
        return rows, 2 * columns
    if layout in (*BLOCK_SCALED, BNB_INT8, MXFP8):
        return rows, columns
    if layout == "gptq":
        return columns, rows * 32 // decoder.bits
    return (columns * 8, rows) if layout == "awq" else (rows, columns * 32 // decoder.bits)


def widened_dtype(layout: str, dequant_dtype: str) -> str:
    """The dtype to which weights in a layout are dequantized: bf16 instead of f16 for MXFP4 and MXFP8, whose range exceeds that of f16."""
    return "bf16" if layout in (*MXFP4, MXFP8) and dequant_dtype == "f16" else dequant_dtype


def as_typed(info: TensorInfo, raw: np.ndarray, layout: str) -> np.ndarray:
    """The bytes of a component tensor as an array: words int32, scales float32, codes as stored. Power-of-two scales become float32 too,
    except those of MXFP4 and MXFP8. Codes of bitsandbytes' 4-bit layout may be stored as any dtype."""
    if layout == BNB_4BIT and info.name.endswith(".weight"):
        return raw
    if info.dtype in FLOATS:
        return to_f32(raw.view(RAW_NUMPY[info.dtype.lower()]), info.dtype.lower()).reshape(info.shape)
    if info.dtype == EXPONENTS and layout not in (*MXFP4, MXFP8):
        if (raw == fp8.NO_POWER).any():
            damaged(info.file, f"has tensor {shown(info.name)} with a scale of NaN")
        return fp8.powers_of_two(raw).reshape(info.shape)
    if info.dtype not in NUMPY_DTYPES:
        damaged(info.file, f"holds {shown(info.name)} as {info.dtype}")
    return raw.view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)


def scales_of(parts: Mapping[str, TensorInfo]) -> TensorInfo:
    """The scales of an FP8 weight, under either name."""
    return parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]


def mismatch_error(info: TensorInfo, weight: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{info.file} holds parts of {shown(weight)} that do not fit: {reason}",
                           f"if it is as published, this layout is not supported: {ORIGINAL}; else download the model again")
