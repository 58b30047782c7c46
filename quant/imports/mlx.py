"""MLX-quantized weights (mlx.core.quantize): codes in a bit stream along each row, lowest bits first, in groups of inputs.

In `affine` mode w = scale * code + bias, both of the weights' original type. The other modes have a power of two per 32 inputs (`mxfp4`,
`mxfp8`) or an FP8 scale per 16 (`nvfp4`), and no biases.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..codes import Codes
from ..spec import GROUPS as HELD
from ..spec import QuantSpec
from ..weight import from_f32
from . import mxfp4, mxfp8, nvfp4

BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # of affine ones
FLOATS = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}  # (bits, group) -> mode
TOP = 15  # binary exponent of the largest scale or bias of a row, in half precision


@dataclass(frozen=True)
class MlxFormat:
    """Layout of a weight: `bits` per code, inputs per `group`, and MLX's `mode`."""

    bits: int
    group: int
    mode: str

    @property
    def spec(self) -> QuantSpec | None:
        """The format in which kernels multiply it, nothing rounded but scales of 32 bits, to halves; None where there is none."""
        if self.mode == "affine":
            return QuantSpec(self.bits, min(self.group, max(HELD["minimum"])), "minimum")
        return {"mxfp4": mxfp4.SPEC, "nvfp4": nvfp4.SPEC}.get(self.mode)


def infer_format(depth: int, packed: int, groups: int, affine: bool) -> MlxFormat | None:
    """The format of a weight of `depth` inputs whose row has `packed` 32-bit words and `groups` scales; None where MLX has none such."""
    if depth < 1 or groups < 1 or depth % groups or packed * 32 % depth:
        return None
    bits, group = packed * 32 // depth, depth // groups
    if affine:
        return MlxFormat(bits, group, "affine") if bits in BITS and group in GROUPS else None
    mode = FLOATS.get((bits, group))
    return MlxFormat(bits, group, mode) if mode else None


def unpack_codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [n, K * bits / 8], the bytes of rows -> codes uint8 [n, K]. Eight of them fill as many bytes as one has bits."""
    eights = packed.reshape(len(packed), -1, bits)
    words = np.zeros(eights.shape[:2], np.uint64)
    for place in range(bits):
        words |= eights[:, :, place].astype(np.uint64) << np.uint64(8 * place)
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(bits)
    return (words[:, :, None] >> shifts & np.uint64((1 << bits) - 1)).astype(np.uint8).reshape(len(packed), -1)


def dequantize(form: MlxFormat, packed: np.ndarray, scales: np.ndarray, biases: np.ndarray | None) -> np.ndarray:
    """Rows of bytes uint8 [n, ...], scales [n, G], float32 of affine weights and else uint8, biases float32 [n, G] -> float32 [n, K].
    Raises ValueError for a scale that is no number."""
    if form.mode == "nvfp4":
        return nvfp4.dequantize(packed, scales, np.float32(1))
    codes = unpack_codes(packed, form.bits)
    if form.mode == "affine":
        _check_finite(scales, biases)
        return np.repeat(scales, form.group, axis=1) * codes + np.repeat(biases, form.group, axis=1)
    return (mxfp4 if form.mode == "mxfp4" else mxfp8).dequantize(codes, scales)


def factors(form: MlxFormat, scales: np.ndarray, biases: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales and biases float32 [n, G] -> scales and minima uint16, halves of every group of `form.spec`, and rows float32 [n], as in
    `Codes`. Raises ValueError for what is no number.

    Rows take a power of two, so that what bfloat16 or a half held is held exactly, unless it is 2**-30 of the largest of its row.
    """
    _check_finite(scales, biases)
    most = np.maximum(np.abs(scales), np.abs(biases)).max(axis=1)
    powers = np.where(most > 0, np.frexp(most)[1] - TOP, 0)
    times = form.group // form.spec.group
    halves = (np.repeat(from_f32(np.ldexp(part, -powers[:, None]), "f16"), times, axis=1) for part in (scales, biases))
    return (*halves, np.ldexp(np.float32(1), powers).astype(np.float32))


def packable(form: MlxFormat, packed: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> Codes:
    """Affine rows as codes of `form.spec`. Raises ValueError for what is no number."""
    halves, minima, rows = factors(form, scales, biases)
    return Codes(unpack_codes(packed, form.bits), halves, None, rows, minima=minima)


def _check_finite(scales: np.ndarray, biases: np.ndarray) -> None:
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise ValueError("a scale or bias is NaN or infinity")
