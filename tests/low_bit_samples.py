"""Random low-bit weights of every format, and the expected products: shared by the tests of packing and of the kernels.

Run as a program it prints digests of many products, by format, to compare instruction sets (`test_instruction_sets.py`).
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from effllm.kernels import reference_low_bit as definition
from effllm.kernels.tiles import row_nbytes
from effllm.kernels.workspace import Dims
from effllm.quant.codes import Codes, Sparse, bf16, dequantize, factors, minimum_values, values
from effllm.quant.pack import pack
from effllm.quant.spec import BITS, GROUPS, QuantSpec
from effllm.quant.weight import Linear, Norm, Weight, to_f32

FORMATS = tuple(str(QuantSpec(bits, group, scheme)) for scheme in BITS for bits in BITS[scheme] for group in GROUPS[scheme])
WITH_OUTLIERS = ("codebook4:16+0.01", "codebook2:16+0.05", "symmetric8:32+0.005", "affine3:64+0.02", "ternary:128+0.05")
NO_NORM = Norm("none")


def random_codes(rng: np.random.Generator, spec: QuantSpec, shape: tuple[int, int], *, every_scale: bool = False) -> Codes:
    """Codes, tables and outliers over their whole ranges; scales and zeros too with `every_scale`, else over those that weights have."""
    rows, depth = shape
    groups = -(-depth // spec.group)
    book, wide = spec.scheme == "codebook", {"table": 64, **dict.fromkeys(("codebook", "mxfp", "nvfp"), 32)}.get(spec.scheme, 0)
    scales = rng.integers(0 if book or every_scale else 32, 16 if book else 256, (rows, groups), np.uint8)
    if spec.scheme in ("block", "minimum", "offset"):  # either sign; with `every_scale` subnormal ones and zero, too
        powers = rng.integers(-24 if every_scale else -4, 4, scales.shape)
        scales = (np.ldexp(rng.standard_normal(scales.shape, np.float32), powers)).astype(np.float16).view(np.uint16)
    if spec.scheme == "float":
        scales = np.ldexp(rng.standard_normal((-(-rows // 16), groups), np.float32), rng.integers(-30 if every_scale else -4, 4))
    if spec.scheme == "mxfp":
        scales = rng.integers(0 if every_scale else 120, 200 if every_scale else 128, scales.shape, np.uint8)
    if spec.scheme == "nvfp":  # but for NaN
        scales = rng.integers(0 if every_scale else 40, 127, scales.shape, np.uint8) | rng.integers(0, 2, scales.shape, np.uint8) << 7
        scales = scales.view(np.int8)
    with_zeros = spec.scheme in ("affine", "offset")
    zeros = rng.integers(0, 256 if every_scale else 1 << spec.bits, (rows, groups)).astype(np.uint8) if with_zeros else None
    supers = minima = None
    if spec.scheme in ("super", "nibble", "signed", "table"):
        max_code = {"super": 63, "nibble": 15}.get(spec.scheme, 0)
        halves = rng.standard_normal((rows, -(-depth // 256), 2 if max_code else 1), np.float32)
        supers = np.ldexp(halves, rng.integers(-20 if every_scale else -8, 0, halves.shape)).astype(np.float16).view(np.uint16)
        scales = (scales & max_code) if max_code else scales.view(np.int8)
        minima = rng.integers(0, max_code + 1, scales.shape, np.uint8) if max_code else None
        if spec.scheme == "table":  # what keeps products with any level exact
            scales = (scales.astype(np.int16) % 65 - 32).astype(np.int8)
    if spec.scheme == "minimum":
        minima = (rng.standard_normal(scales.shape, np.float32) * 8).astype(np.float16).view(np.uint16)
    count = round(rows * depth * spec.outliers)
    positions = np.sort(rng.choice(rows * depth, count, replace=False))
    sparse = Sparse((positions // depth).astype(np.uint32), (positions % depth).astype(np.uint32),
                    bf16(rng.standard_normal(count, np.float32)))
    codes = rng.integers(0, 3 if spec.scheme == "ternary" else 1 << spec.bits, shape).astype(np.uint8)
    row_scales = rng.standard_normal(rows, np.float32) / 256
    if spec.scheme == "float":  # but for NaN
        codes[(codes & 127) == 127] ^= 1
    return Codes(codes=codes, scales=scales, zeros=zeros, rows=row_scales if row_nbytes(spec.scheme) == 4 else bf16(row_scales),
                 levels=np.sort(rng.integers(-2 * wide, 2 * wide, 1 << spec.bits)).astype(np.int8) if wide else None,
                 steps=np.sort(rng.integers(1, 128, 16)).astype(np.uint8) if book else None, sparse=sparse if spec.outliers else None,
                 supers=supers, minima=minima)


def low_bit(codes: Codes, spec: QuantSpec, behind: int = 0) -> Weight:
    """A weight whose blob begins on a cache line, as loaders place it, or so many bytes behind one."""
    packed = pack(codes, spec)
    buffer = np.zeros(packed.size + 64 + behind, np.uint8)
    start = -buffer.ctypes.data % 64 + behind
    blob = buffer[start : start + packed.size]
    blob[:] = packed
    return Weight.low_bit(spec, codes.codes.shape, blob)


def factors_of(codes: Codes) -> np.ndarray:
    return factors(codes)


def few(x: np.ndarray, codes: Codes, spec: QuantSpec, bias: np.ndarray | None = None, one_scale: bool = False,
        fine: bool = False) -> np.ndarray:
    """The reference for up to 16 columns."""
    if spec.scheme == "float":
        return definition.float_linear(x, values(codes, spec), factors_of(codes), codes.rows, spec.group, bias=bias)
    signed = spec.scheme in ("signed", "table")  # whose scale codes are whole numbers too
    supers = to_f32(codes.supers[:, :, 0], "f16") if signed else None
    return definition.packed_linear(x, values(codes, spec), codes.scales.astype(np.float32) if signed else factors_of(codes), codes.rows,
                                    spec.group, whole=signed or spec.scheme == "codebook", outliers=_outliers(codes), bias=bias,
                                    minima=minimum_values(codes), supers=supers, one_scale=one_scale, fine=fine)


def many(x: np.ndarray, codes: Codes, spec: QuantSpec, bias: np.ndarray | None = None, one_scale: bool = False) -> np.ndarray:
    """The reference for more columns."""
    from effllm.kernels.cpu import gemm

    if spec.scheme == "float":
        return definition.exact_linear(x, dequantize(codes, spec), bias)
    if by_halves(spec):
        return definition.halves_linear(x, dequantize(codes, spec), bias)
    parts = (x, values(codes, spec), factors_of(codes), codes.rows, spec.group)
    method = gemm.method_of(spec.bits, spec.scheme)
    if method == gemm.STEPPED != gemm.SCALED:
        return definition.stepped_linear(*parts, outliers=_outliers(codes), bias=bias)
    if method != gemm.SCALED:
        return definition.grouped_linear(*parts, outliers=_outliers(codes), bias=bias, minima=minimum_values(codes), one_scale=one_scale)
    most, shift = _range(codes, spec)
    return definition.scaled_linear(*parts, most=most, shift=shift, outliers=_outliers(codes), bias=bias, one_scale=one_scale)


def by_halves(spec: QuantSpec) -> bool:
    """Does a matrix unit here multiply prefill of this format as two-byte numbers?"""
    from effllm.kernels.cpu import amx, gemm_amx

    return amx.AMX and spec.scheme != "float" and gemm_amx.method_of(spec.bits, spec.scheme, bool(spec.outliers)) == gemm_amx.HALVES


def _outliers(codes: Codes) -> definition.Outliers | None:
    return None if codes.sparse is None else definition.Outliers(codes.sparse.row, codes.sparse.col, codes.sparse.value)


def _range(codes: Codes, spec: QuantSpec) -> tuple[np.ndarray, int]:
    """The largest |f * v| of each row's groups, and how far values can be shifted up within 8 bits and a sign."""
    if spec.scheme == "codebook":
        largest = max(1, int(np.abs(codes.levels.astype(int)).max()))
        return factors_of(codes).max(1) * np.float32(largest), 8 - largest.bit_length()
    if spec.scheme == "ternary":
        return factors_of(codes).max(1), 7
    zeros = np.full(codes.scales.shape, 1 << (spec.bits - 1)) if codes.zeros is None else codes.zeros.astype(int)
    bounds = np.maximum(zeros, (1 << spec.bits) - 1 - zeros)
    return (np.abs(factors_of(codes)) * bounds.astype(np.float32)).max(1), 8 - spec.bits


def dims_for(depth: int, rows: int, chunk: int = 32) -> Dims:
    return Dims(hidden_size=depth, num_attention_heads=1, num_key_value_heads=1, head_dim=rows, intermediate_size=rows, vocab_size=rows,
                chunk=chunk, ctx=128, logit_rows=chunk)


def seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def digests() -> dict[str, str]:
    """Of every format, the bytes of products with 1 and 5 columns and of embedding rows, and of those with 19 by how they are multiplied;
    outliers and a gated pair included."""
    from effllm.kernels.cpu import gemm
    from effllm.kernels.cpu.candidates import default_registry
    from effllm.kernels.cpu.ops import CpuOps  # the other users of this file compile nothing
    from effllm.kernels.threads import ThreadPool

    digests_by_format, pool = {}, ThreadPool(1)
    ops = CpuOps(pool, dims_for(300, 50), default_registry(by_neuron=True))  # fp8 with float32 activations, as where no bf16 is multiplied
    for text in FORMATS + WITH_OUTLIERS:
        rng, spec, few, many = np.random.default_rng(seed_of(text)), QuantSpec.parse(text), hashlib.sha256(), hashlib.sha256()
        gate, up = (Linear(low_bit(random_codes(rng, spec, (50, 300)), spec), rng.standard_normal(50, np.float32)) for _ in range(2))
        for columns in (1, 5, 19):
            x = rng.standard_normal((columns, 300), np.float32)
            out = np.zeros((columns, 50), np.float32)
            ops._run_stage(x, NO_NORM, [gate, up], [out], 2, "relu")
            for y in (*ops.norm_linear(x, NO_NORM, [gate, up]), out):
                (few if columns < 19 else many).update(y.tobytes())
        few.update(ops.logits(rng.standard_normal((9, 300), np.float32), NO_NORM, gate).tobytes())
        few.update(ops.embed(np.array([0, 17, 49]), gate.weight, 0.5).tobytes())
        digests_by_format[text] = few.hexdigest()[:16]
        method_names = {gemm.STEPPED: "by steps", gemm.SCALED: "rows scaled"}  # the same number but for AVX2
        method_name = method_names.get(gemm.method_of(spec.bits, spec.scheme), "groups apart")
        if by_halves(spec):
            method_name = "halves"
        digests_by_format[f"{text}, {method_name}"] = many.hexdigest()[:16]
    pool.close()
    return digests_by_format


if __name__ == "__main__":
    print(json.dumps(digests()))
