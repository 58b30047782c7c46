"""`QuantSpec`: the storage format of a weight (bits, group and scheme), which determines its exact size. The planner trusts `nbytes`.

Raw schemes keep the type of the checkpoint. A low-bit weight is w[n, k] = row[n] * f(scale[n, k // group]) * v(code[n, k]):

    codebook    v = levels[code], f = steps[scale], two small integer tables per tensor; groups of 16, scales of 4 bits
    affine      v = code - zero[group]; scales and zeros of 8 bits
    symmetric   v = code - 2**(bits - 1); scales of 8 bits
    ternary     v = code - 1, codes 0, 1, 2 of two bits; scales of 8 bits
    block       v = code - 2**(bits - 1); scales are float16, no row scales (1): GGUF's plain blocks, exactly
    mxfp        v = levels[code], f = 2**(scale - 127), rows are 1/2: MXFP4, exactly, its levels doubled
    offset      v = code - zero[group]; scales are float16, zeros of 8 bits, rows a power of two: GPTQ, AWQ and the like
    super       d * s * code - e * m: scale and minimum codes s and m of 6 bits per 32 inputs, float16 d and e per 256: GGUF's Q4_K, Q5_K
    nibble      d * s * code - e * m: the same with codes s and m of 4 bits per 16 inputs: GGUF's Q2_K
    signed      d * s * (code - 32): scale codes s of 8 bits and a sign per 16 inputs, float16 d per 256: GGUF's Q6_K
    minimum     d * code + m: float16 d and m per 32 or 64 inputs, no row scales (1) or a power of two: GGUF's Q4_1, Q5_1, MLX
    nvfp        v = levels[code], f = the E4M3 value of the scale, per 16 inputs, rows are float32: NVFP4, exactly, its levels doubled and
                rows half of its scale of a tensor
    float       v = the E4M3 value of the code, f a float32 per 16 rows, rows are float32, too: FP8 as published, exactly
    table       d * s * levels[code]: scales as in signed, 16 or 8 levels of 8 bits, rows 1, 1/4 or 1/8: GGUF's IQ types, Q3_K;
                rows a power of two: NF4 and FP4 with levels and scales rounded

`outliers` is the share of weights that are corrected in addition to the base. `kernels/tiles.py` defines the layout of the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import prod

from .. import UsageError
from ..kernels import tiles

RAW_BITS = {"f32": 32, "f16": 16, "bf16": 16}
GROUPS = {"codebook": (16,), "affine": (32, 64, 128), "symmetric": (16, 32, 64, 128), "ternary": (32, 64, 128),
          "block": (32,), "mxfp": (32,), "offset": (32, 64, 128), "super": (32,), "nibble": (16,), "signed": (16,), "table": (16,),
          "float": (128, 64, 32), "minimum": (32, 64), "nvfp": (16,)}
BITS = {"codebook": (4, 3, 2), "affine": (8, 6, 5, 4, 3, 2), "symmetric": (8, 6, 5, 4, 3, 2), "ternary": (2,),
        "block": (8, 5, 4), "mxfp": (4,), "offset": (8, 4), "super": (5, 4), "nibble": (2,), "signed": (6,), "table": (4, 3),
        "float": (8,), "minimum": (8, 6, 5, 4, 3, 2), "nvfp": (4,)}
# Schemes for weights that other tools quantized; nothing is quantized to them.
FOREIGN = ("block", "mxfp", "offset", "super", "nibble", "signed", "table", "float", "minimum", "nvfp")
# The formats of widths without a scheme.
DEFAULTS = {"8bit": "symmetric8:32", "6bit": "symmetric6:32", "5bit": "symmetric5:32", "4bit": "codebook4:16", "3bit": "codebook3:16",
            "2bit": "codebook2:16", "ternary": "ternary:64"}
TEXT = re.compile(rf"({'|'.join(scheme for scheme in BITS if scheme != 'ternary')})([2-8]):(\d{{2,3}})|(ternary):(\d{{2,3}})")
OUTLIERS = re.compile(r"(.+)\+(0?\.\d+|\d+(?:\.\d+)?%)")
MAX_OUTLIERS = 0.05


@dataclass(frozen=True)
class QuantSpec:
    """The storage format of a weight. Raises UsageError for an unknown combination."""

    bits: int  # per stored code
    group: int  # values that share a scale, 0 for raw schemes
    scheme: str
    outliers: float = 0.0  # share of the weights

    def __post_init__(self) -> None:
        known = RAW_BITS.get(self.scheme) == self.bits and self.group == 0 and not self.outliers
        if not known and not (self.bits in BITS.get(self.scheme, ()) and self.group in GROUPS[self.scheme]):
            raise UsageError(f"no weight format {self.scheme!r} with {self.bits} bits in groups of {self.group}",
                             f"known: {', '.join(DEFAULTS)}, such as {DEFAULTS['4bit']}, affine4:64, symmetric8:32, {', '.join(RAW_BITS)}")
        if not 0 <= self.outliers <= MAX_OUTLIERS:
            raise UsageError(f"{self.outliers:.2%} of weights as outliers is too many", f"at most {MAX_OUTLIERS:.0%}")

    @classmethod
    def raw(cls, scheme: str) -> QuantSpec:
        """The spec of unquantized values: f32, f16 or bf16."""
        return cls(RAW_BITS.get(scheme, 0), 0, scheme)

    @classmethod
    def parse(cls, text: str, short: Mapping[str, str] = DEFAULTS) -> QuantSpec:
        """`4bit`, `codebook4:16`, `affine4:64`, `ternary:64`, `bf16`, any low-bit one with `+0.5%` outliers. `short`: formats of widths
        without a scheme, before those in DEFAULTS. Raises UsageError."""
        outliers, base = 0.0, text
        if match := OUTLIERS.fullmatch(text):
            base, share = match.groups()
            outliers = float(share[:-1]) / 100 if share.endswith("%") else float(share)
        base = short.get(base, DEFAULTS.get(base, base))
        if base in RAW_BITS and not outliers:
            return cls.raw(base)
        match = TEXT.fullmatch(base)
        if match is None:
            raise UsageError(f"no weight format {text!r}", f"known: {', '.join(DEFAULTS)}, or one such as codebook4:16, affine4:64")
        scheme, bits, group, ternary, ternary_group = match.groups()
        return cls(2, int(ternary_group), ternary, outliers) if ternary else cls(int(bits), int(group), scheme, outliers)

    def __str__(self) -> str:
        if self.is_raw:
            return self.scheme
        width = "" if self.scheme == "ternary" else self.bits
        return f"{self.scheme}{width}:{self.group}" + (f"+{Decimal(str(self.outliers)):f}" if self.outliers else "")

    @property
    def is_raw(self) -> bool:
        return self.scheme in RAW_BITS

    def sections(self, shape: tuple[int, int]) -> tiles.Sections:
        """The layout of a low-bit weight `[N, K]` in its blob."""
        return tiles.sections(shape, self.bits, self.scheme, self.group, self.outliers)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Exact bytes of a tensor of this shape, with padding inside it, without padding between tensors."""
        return prod(shape) * self.bits // 8 if self.is_raw else self.sections(shape).nbytes
