"""Decoders from the tensors of another tool's quantized weight to integers in groups, or floats. `imported.py` knows where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...quant.imports import awq, bitsandbytes, compressed_tensors, fp8, gptq, groups, mxfp4, mxfp8, nvfp4
from .import_config import BNB_4BIT, BNB_INT8, BNB_QUANT_STATES, MXFP4, MXFP8, NVFP4, bits_of, block_of, checkpoint_format, layouts_of
from .mixed_config import plain_sections

VARIABLE_BIT_LAYOUTS = ("gptq", "packed")  # layouts in which the number of words tells the bits of a code
BNB_PARTS = ("weight", "weight.quant_map", "weight.absmax", BLOCK := "block")
Array = Callable[[str], np.ndarray | None]  # returns a part of a weight by name


@dataclass(frozen=True)
class Decoder:
    """Decodes weights of one layout. Methods raise ValueError for parts that do not fit one another."""

    section: Mapping[str, object]  # a `quantization_config` of one kind of weights
    layout: str  # a key of LAYOUT_TENSORS
    block: tuple[int, int]  # (rows, inputs) that share a scale, 0 if not stated
    bits: int  # of integers, as returned by `bits_of`

    def dequantize(self, array: Array, shape: tuple[int, ...]) -> np.ndarray:
        """float32 [N, K]."""
        if self.layout in NVFP4:
            return nvfp4.dequantize(*self.nvfp4_parts(array))
        if self.layout == BNB_4BIT:
            return bitsandbytes.dequantize(*self.bnb_4bit_parts(array), shape)
        if self.layout in MXFP4:
            return mxfp4.dequantize(*self.mxfp4_parts(array))
        if self.layout == MXFP8:
            return mxfp8.dequantize(array("weight"), array("weight_scale"))
        if self.layout != "fp8":
            return self.decode_integers(array, shape).values()
        scale_inv = array("weight_scale_inv")
        return fp8.dequantize(array("weight"), array("weight_scale") if scale_inv is None else scale_inv, self.block)

    @staticmethod
    def bnb_4bit_parts(array: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Of bitsandbytes' 4-bit layout: (bytes of codes, levels, absmax of each block, values per block)."""
        return *(array(part) for part in BNB_PARTS[:3]), int(array(BLOCK))

    def mxfp4_parts(self, array: Array) -> tuple[np.ndarray, np.ndarray]:
        """Of MXFP4: (codes [N, K], exponents)."""
        packed, scales = self.packed_mxfp4_parts(array)
        return mxfp4.unpack_pairs(packed), scales

    def packed_mxfp4_parts(self, array: Array) -> tuple[np.ndarray, np.ndarray]:
        """`mxfp4_parts` with two codes in a byte, as stored."""
        packed, scale_inv = array("weight_packed" if self.layout == "mxfp4" else "weight"), array("weight_scale_inv")
        return packed.view(np.uint8), array("weight_scale") if scale_inv is None else scale_inv

    def nvfp4_parts(self, array: Array) -> tuple[np.ndarray, np.ndarray, np.float32]:
        """Of NVFP4: (codes, two in a byte; their scales; the scale of the matrix)."""
        packed = array("weight" if self.layout == "nvfp4 in bytes" else "weight_packed")
        return packed, array("weight_scale"), nvfp4.matrix_scale(array("weight_global_scale"), array("weight_scale_2"))

    def decode_integers(self, array: Array, shape: tuple[int, ...]) -> groups.Groups:
        if self.layout == "gptq":
            return gptq.decode(array("qweight"), *self._gptq_parts(array, shape))
        if self.layout == "awq":
            scales = array("scales")
            return awq.decode(array("qweight"), array("qzeros"), scales, shape[1] // max(1, scales.shape[0]))
        if self.layout == BNB_INT8:
            return compressed_tensors.decode_bytes(array("weight"), self._row_scales(array, shape[0]), None, None, self.bits, (0, 0))
        if self.layout == "integers":
            return compressed_tensors.decode_bytes(array("weight"), array("weight_scale"), array("weight_zero_point"),
                                                   array("weight_g_idx"), self.bits, self.block)
        compressed_tensors.check_shape(array("weight_shape"), shape)
        return compressed_tensors.decode(array("weight_packed"), array("weight_scale"), array("weight_zero_point"),
                                         array("weight_g_idx"), self.bits, shape)

    def zeros_and_scales(self, array: Array, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(zero points, scales), [N, G] each, of a weight of this shape whose codes are repacked as stored."""
        if self.layout == "gptq":
            return gptq.zeros_and_scales(shape, *self._gptq_parts(array, shape))
        if self.layout == "awq":
            scales = array("scales")
            return awq.zeros_and_scales(shape, array("qzeros"), scales, shape[1] // max(1, scales.shape[0]))
        if self.layout == BNB_INT8:
            return compressed_tensors.zeros_and_scales_int8(shape, self._row_scales(array, shape[0]), None, None, self.bits, (0, 0))[:2]
        if self.layout == "integers":
            return compressed_tensors.zeros_and_scales_int8(shape, array("weight_scale"), array("weight_zero_point"), array("weight_g_idx"),
                                                  self.bits, self.block)[:2]
        compressed_tensors.check_shape(array("weight_shape"), shape)
        return compressed_tensors.zeros_and_scales(shape, array("weight_scale"), array("weight_zero_point"), array("weight_g_idx"),
                                            self.bits)

    def with_decoded_scales(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Mapping[str, np.ndarray]:
        """Parts that can be sliced by rows; of bitsandbytes' 4-bit layout BNB_PARTS, with scales that were quantized themselves decoded."""
        if self.layout != BNB_4BIT:
            return arrays
        state = bitsandbytes.parse_quant_state(next((arrays[part] for part in BNB_QUANT_STATES if part in arrays), np.zeros(0, np.uint8)))
        if state.shape != shape:
            raise ValueError(f"it says that its shape is {list(state.shape)}, expected {list(shape)}")
        scales = bitsandbytes.magnitudes(state, arrays["weight.absmax"], arrays.get("weight.nested_quant_map"),
                                         arrays.get("weight.nested_absmax"))
        return dict(zip(BNB_PARTS, (arrays["weight"].reshape(-1), arrays["weight.quant_map"], scales, np.int64(state.block)), strict=True))

    @staticmethod
    def _row_scales(array: Array, rows: int) -> np.ndarray:
        """The scale of each row, of LLM.int8."""
        return bitsandbytes.row_scales(array("SCB"), array("weight_format"), rows)

    def _gptq_parts(self, array: Array, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, bool]:
        """(zero points, scales, group of each input, bits, whether zero points are stored less one) of a GPTQ weight."""
        group_index, scales = array("g_idx"), array("scales")
        if group_index is None:
            group_size = self.block[1]
            group_fits = group_size and -(-shape[1] // group_size) == len(scales)
            group_index = np.arange(shape[1]) // (group_size if group_fits else compressed_tensors.width(shape[1], len(scales)))
        return array("qzeros"), scales, group_index.reshape(-1), self.bits, checkpoint_format(self.section) != "gptq_v2"


def decoders_of(section: Mapping[str, object]) -> tuple[Decoder, ...]:
    """One decoder per layout that a `quantization_config` describes. Of several kinds of one layout it has the bits of the widest, and no
    block size if theirs differ; the shape of FP8 scales tells whether there are blocks."""
    by_layout: dict[object, list[Decoder]] = {}
    for plain_section in plain_sections(section):
        for layout in layouts_of(plain_section):
            decoder = Decoder(plain_section, layout, block_of(plain_section), bits_of(plain_section))
            by_layout.setdefault((layout, decoder.bits) if layout in VARIABLE_BIT_LAYOUTS else layout, []).append(decoder)
    return tuple(map(_merged, by_layout.values()))


def _merged(alike: Sequence[Decoder]) -> Decoder:
    """One decoder for several of the same layout."""
    blocks = {decoder.block for decoder in alike}
    if alike[0].layout == "fp8":
        blocks.discard((0, 0))
    return replace(alike[0], block=blocks.pop() if len(blocks) == 1 else (0, 0), bits=max(decoder.bits for decoder in alike))


def needs_input_widths(section: Mapping[str, object]) -> bool:
    """Whether the input widths of weights are needed to decode them: flat codes do not determine them, nor do words of several bit
    widths."""
    layouts = [decoder.layout for decoder in decoders_of(section)]
    return BNB_4BIT in layouts or layouts.count("packed") > 1
