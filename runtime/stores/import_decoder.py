"""What the parts of a weight of another tool mean: integers in groups, or floats. Where they lie, `imported.py` knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ...quant.imports import awq, compressed_tensors, fp8, gptq, groups, mxfp4, nvfp4
from .import_config import NVFP4, PAIRS, bits_of, order_of

Array = Callable[[str], np.ndarray | None]  # a part of a weight by its name


@dataclass(frozen=True)
class Decoder:
    """Of a checkpoint: its `quantization_config`, the key of ENDINGS that says how its weights lie, and the rows and inputs of a block, 0
    where that is not said. Methods raise ValueError for parts that do not fit one another."""

    section: Mapping[str, object]
    layout: str
    block: tuple[int, int]

    def decoded(self, array: Array, shape: tuple[int, ...]) -> np.ndarray:
        """float32 [N, K]."""
        if self.layout in NVFP4:
            return nvfp4.dequantize(*self.small(array))
        if self.layout not in ("fp8", PAIRS):
            return self.integers(array, shape).values()
        if self.layout == PAIRS:
            return mxfp4.dequantize(*self.pairs(array))
        inverse = array("weight_scale_inv")
        return fp8.dequantize(array("weight"), array("weight_scale") if inverse is None else inverse, self.block)

    def pairs(self, array: Array) -> tuple[np.ndarray, np.ndarray]:
        """Of MXFP4 codes [N, K] and exponents."""
        inverse = array("weight_scale_inv")
        return mxfp4.unpack_pairs(array("weight").view(np.uint8)), array("weight_scale") if inverse is None else inverse

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
        if self.layout == "integers":
            return compressed_tensors.decode_bytes(array("weight"), array("weight_scale"), array("weight_zero_point"),
                                                   array("weight_g_idx"), bits_of(self.section), self.block)
        compressed_tensors.check_stated(array("weight_shape"), shape)
        return compressed_tensors.decode(array("weight_packed"), array("weight_scale"), array("weight_zero_point"),
                                         array("weight_g_idx"), bits_of(self.section), shape)

    def points(self, array: Array, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Zero points and scales [N, G] of codes in words, which fit a weight of this shape as they lie."""
        if self.layout == "gptq":
            return gptq.points(shape, *self._gptq_points(array, shape))
        if self.layout == "awq":
            scales = array("scales")
            return awq.points(shape, array("qzeros"), scales, shape[1] // max(1, scales.shape[0]))
        if self.layout == "integers":
            return compressed_tensors.byte_points(shape, array("weight_scale"), array("weight_zero_point"), array("weight_g_idx"),
                                                  bits_of(self.section), self.block)[:2]
        compressed_tensors.check_stated(array("weight_shape"), shape)
        return compressed_tensors.points(shape, array("weight_scale"), array("weight_zero_point"), array("weight_g_idx"),
                                            bits_of(self.section))

    def _gptq_points(self, array: Array, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, bool]:
        """What stands beside the codes of a GPTQ weight."""
        group, order = self.section.get("group_size"), array("g_idx")
        if order is None:
            order = np.arange(shape[1]) // (group if isinstance(group, int) and group > 0 else shape[1])
        return (array("qzeros"), array("scales"), order.reshape(-1), int(self.section["bits"]),
                order_of(self.section) != "gptq_v2")
