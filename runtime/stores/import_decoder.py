"""Decoders from the tensors of another tool's quantized weight to integers in groups, or floats. `imported.py` knows where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...quant.imports import awq, bitsandbytes, compressed_tensors, fp8, gptq, groups, mxfp4, mxfp8, nvfp4
from .import_config import BYTES, LEVELS, MXFP4, MXFP8, NVFP4, STATES, bits_of, block_of, layouts_of, order_of
from .mixed_config import plain_sections

OF_WIDTHS = ("gptq", "packed")  # layouts of which words tell how many bits a code has
OPENED = ("weight", "weight.quant_map", "weight.absmax", BLOCK := "block")
Array = Callable[[str], np.ndarray | None]  # a part of a weight by its name


@dataclass(frozen=True)
class Decoder:
    """Of some weights of a checkpoint: a `quantization_config` of one kind, the key of ENDINGS that says how they lie, the rows and inputs
    of a block, 0 where that is not said, and bits of integers, as `bits_of`. Methods raise ValueError for parts that do not fit one
    another."""

    section: Mapping[str, object]
    layout: str
    block: tuple[int, int]
    bits: int

    def decoded(self, array: Array, shape: tuple[int, ...]) -> np.ndarray:
        """float32 [N, K]."""
        if self.layout in NVFP4:
            return nvfp4.dequantize(*self.small(array))
        if self.layout == LEVELS:
            return bitsandbytes.dequantize(*self.leveled(array), shape)
        if self.layout in MXFP4:
            return mxfp4.dequantize(*self.pairs(array))
        if self.layout == MXFP8:
            return mxfp8.dequantize(array("weight"), array("weight_scale"))
        if self.layout != "fp8":
            return self.integers(array, shape).values()
        inverse = array("weight_scale_inv")
        return fp8.dequantize(array("weight"), array("weight_scale") if inverse is None else inverse, self.block)

    @staticmethod
    def leveled(array: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Of codes beside levels the bytes, the levels, and the magnitudes of blocks of so many values."""
        return *(array(part) for part in OPENED[:3]), int(array(BLOCK))

    def pairs(self, array: Array) -> tuple[np.ndarray, np.ndarray]:
        """Of MXFP4 codes [N, K] and exponents."""
        packed, scales = self.packed_pairs(array)
        return mxfp4.unpack_pairs(packed), scales

    def packed_pairs(self, array: Array) -> tuple[np.ndarray, np.ndarray]:
        """The same as it lies, two codes in a byte."""
        packed, inverse = array("weight_packed" if self.layout == "mxfp4" else "weight"), array("weight_scale_inv")
        return packed.view(np.uint8), array("weight_scale") if inverse is None else inverse

    def small(self, array: Array) -> tuple[np.ndarray, np.ndarray, np.float32]:
        """Of NVFP4 codes, two in a byte, their scales, and what all is multiplied by."""
        packed = array("weight" if self.layout == "nvfp4 in bytes" else "weight_packed")
        return packed, array("weight_scale"), nvfp4.matrix_scale(array("weight_global_scale"), array("weight_scale_2"))

    def integers(self, array: Array, shape: tuple[int, ...]) -> groups.Groups:
        if self.layout == "gptq":
            return gptq.decode(array("qweight"), *self._gptq_points(array, shape))
        if self.layout == "awq":
            scales = array("scales")
            return awq.decode(array("qweight"), array("qzeros"), scales, shape[1] // max(1, scales.shape[0]))
        if self.layout == BYTES:
            return compressed_tensors.decode_bytes(array("weight"), self._row_scales(array, shape[0]), None, None, self.bits, (0, 0))
        if self.layout == "integers":
            return compressed_tensors.decode_bytes(array("weight"), array("weight_scale"), array("weight_zero_point"),
                                                   array("weight_g_idx"), self.bits, self.block)
        compressed_tensors.check_shape(array("weight_shape"), shape)
        return compressed_tensors.decode(array("weight_packed"), array("weight_scale"), array("weight_zero_point"),
                                         array("weight_g_idx"), self.bits, shape)

    def points(self, array: Array, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Zero points and scales [N, G] of codes in words, which fit a weight of this shape as they lie."""
        if self.layout == "gptq":
            return gptq.zeros_and_scales(shape, *self._gptq_points(array, shape))
        if self.layout == "awq":
            scales = array("scales")
            return awq.zeros_and_scales(shape, array("qzeros"), scales, shape[1] // max(1, scales.shape[0]))
        if self.layout == BYTES:
            return compressed_tensors.zeros_and_scales_int8(shape, self._row_scales(array, shape[0]), None, None, self.bits, (0, 0))[:2]
        if self.layout == "integers":
            return compressed_tensors.zeros_and_scales_int8(shape, array("weight_scale"), array("weight_zero_point"), array("weight_g_idx"),
                                                  self.bits, self.block)[:2]
        compressed_tensors.check_shape(array("weight_shape"), shape)
        return compressed_tensors.zeros_and_scales(shape, array("weight_scale"), array("weight_zero_point"), array("weight_g_idx"),
                                            self.bits)

    def opened(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Mapping[str, np.ndarray]:
        """Parts from which some rows can be cut and decoded; of four bits beside levels (OPENED), whose scales may be codes."""
        if self.layout != LEVELS:
            return arrays
        said = bitsandbytes.parse_quant_state(next((arrays[part] for part in STATES if part in arrays), np.zeros(0, np.uint8)))
        if said.shape != shape:
            raise ValueError(f"it says that its shape is {list(said.shape)}, expected {list(shape)}")
        scales = bitsandbytes.magnitudes(said, arrays["weight.absmax"], arrays.get("weight.nested_quant_map"),
                                         arrays.get("weight.nested_absmax"))
        return dict(zip(OPENED, (arrays["weight"].reshape(-1), arrays["weight.quant_map"], scales, np.int64(said.block)), strict=True))

    @staticmethod
    def _row_scales(array: Array, rows: int) -> np.ndarray:
        """Of bytes by row."""
        return bitsandbytes.row_scales(array("SCB"), array("weight_format"), rows)

    def _gptq_points(self, array: Array, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, bool]:
        """What stands beside the codes of a GPTQ weight."""
        order, scales = array("g_idx"), array("scales")
        if order is None:
            group = self.block[1]
            covers = group and -(-shape[1] // group) == len(scales)
            order = np.arange(shape[1]) // (group if covers else compressed_tensors.width(shape[1], len(scales)))
        return array("qzeros"), scales, order.reshape(-1), self.bits, order_of(self.section) != "gptq_v2"


def decoders_of(section: Mapping[str, object]) -> tuple[Decoder, ...]:
    """Those of all kinds of weights that a `quantization_config` speaks of. Kinds that lie alike have one: of integers in bytes the bits of
    the widest, and no size of a block where they have several. Of FP8 the shape of scales says whether there are blocks."""
    found: dict[object, list[Decoder]] = {}
    for plain in plain_sections(section):
        for layout in layouts_of(plain):
            own = Decoder(plain, layout, block_of(plain), bits_of(plain))
            found.setdefault((layout, own.bits) if layout in OF_WIDTHS else layout, []).append(own)
    return tuple(map(_joined, found.values()))


def _joined(alike: Sequence[Decoder]) -> Decoder:
    """One decoder in the place of several."""
    blocks = {decoder.block for decoder in alike}
    if alike[0].layout == "fp8":
        blocks.discard((0, 0))
    return replace(alike[0], block=blocks.pop() if len(blocks) == 1 else (0, 0), bits=max(decoder.bits for decoder in alike))


def asks_for_depths(section: Mapping[str, object]) -> bool:
    """Whether a model has to say how many inputs its weights have: codes in a row without an end do not tell it, nor words of several
    widths."""
    layouts = [decoder.layout for decoder in decoders_of(section)]
    return LEVELS in layouts or layouts.count("packed") > 1
