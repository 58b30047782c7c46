#!/usr/bin/env python3
"""Milliseconds for one thread to repack an expert from another tool's format, with NumPy's decoders and with compiled code.

An expert is three matrices of random codes, 768 x 2048 twice and 2048 x 768, as in qwen3-30b-a3b. The best of several runs; nothing is read
from disk. Also bytes of file per second, i.e. the disk speed above which repacking would be the bottleneck.

    python benchmarks/repack_experts.py [--times 20]
"""

import argparse
from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np

from effllm.quant.codebooks import MXFP
from effllm.quant.codes import Codes
from effllm.quant.imports import awq, compressed_tensors, fp8, gptq, groups, mxfp4
from effllm.quant.imports.gguf import DECODERS, NATIVE, native_codes
from effllm.quant.imports.repack import MXFP4, put_fp8_as_halves, put_gguf_blocks, put_int32_words, put_mxfp4
from effllm.quant.pack import put_factors, put_rows, put_tables
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import from_f32

SHAPES = ((768, 2048), (768, 2048), (2048, 768))
STEP, GROUP, BLOCK = 1 << 17, 128, 128  # weights that NumPy decodes at once, so that what is between stays in a cache
Candidate = Callable[[], object]
RNG = np.random.default_rng(0)


def steps(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    high = max(32, STEP // shape[1] // 32 * 32)
    for begin in range(0, shape[0], high):
        yield begin, min(shape[0], begin + high)


def words(*shape: int) -> np.ndarray:
    return RNG.integers(0, 1 << 32, shape, np.uint32).view(np.int32)


def halves(*shape: int) -> np.ndarray:
    return (RNG.random(shape, np.float32) / 100 + np.float32(0.001)).astype(np.float16).astype(np.float32)


def of_blocks(kind: str, shape: tuple[int, int]) -> tuple[Candidate, Candidate, int]:
    """(NumPy version, compiled version, bytes of file) for a matrix of GGUF blocks."""
    spec, nbytes = NATIVE[kind], DECODERS[kind][0]
    raw = RNG.integers(0, 60, (shape[0], shape[1] // (256 if spec.scheme in ("super", "signed") else 32) * nbytes), np.uint8)
    blob = np.zeros(spec.nbytes(shape), np.uint8)

    def numpy() -> None:
        for begin, end in steps(shape):
            codes = native_codes(raw[begin:end], kind)
            put_rows(blob, spec, shape, begin, codes)
            if codes.levels is not None:
                put_tables(blob, spec, shape, codes.levels)

    return numpy, lambda: put_gguf_blocks(blob, kind, shape, 0, raw), raw.nbytes


def of_pairs(shape: tuple[int, int]) -> tuple[Candidate, Candidate, int]:
    """MXFP4 as in gpt-oss; gate and up rows alternate, so every other row is used."""
    blocks, scales = (RNG.integers(0, 200, (2 * shape[0], width), np.uint8)[::2] for width in (shape[1] // 2, shape[1] // 32))
    blob = np.zeros(MXFP4.nbytes(shape), np.uint8)

    def numpy() -> None:
        for begin, end in steps(shape):
            pairs = blocks[begin:end].reshape(end - begin, -1, 16)
            codes = mxfp4.unpack_pairs(pairs).reshape(end - begin, -1)
            put_rows(blob, MXFP4, shape, begin, Codes(codes, scales[begin:end], None, np.full(end - begin, 0.5, np.float32), MXFP))
            put_tables(blob, MXFP4, shape, MXFP)

    return numpy, lambda: put_mxfp4(blob, shape, 0, blocks, scales), blocks.size + scales.size


def of_words(layout: str, bits: int, shape: tuple[int, int]) -> tuple[Candidate, Candidate, int]:
    """Packed words with half-precision scales and zero points per group."""
    (n, k), spec = shape, QuantSpec(bits, GROUP, "offset")
    count, blob = k // GROUP, np.zeros(spec.nbytes(shape), np.uint8)
    order = np.arange(k) // GROUP
    if layout == "packed":
        codes, zeros, scales = words(n, k * bits // 32), words(n * bits // 32, count), halves(n, count)
        decode = lambda a, b: compressed_tensors.decode(codes[a:b], scales[a:b], zeros[a * bits // 32 : b * bits // 32], None, bits,  # noqa: E731
                                                        (b - a, k))
        points = lambda: compressed_tensors.zeros_and_scales(shape, scales, zeros, None, bits)  # noqa: E731
    elif layout == "awq":
        codes, zeros, scales = words(k, n // 8), words(count, n // 8), halves(count, n)
        decode = lambda a, b: awq.decode(codes[:, a // 8 : b // 8], zeros[:, a // 8 : b // 8], scales[:, a:b], GROUP)  # noqa: E731
        points = lambda: awq.zeros_and_scales(shape, zeros, scales, GROUP)  # noqa: E731
    else:
        codes, zeros, scales = words(k * bits // 32, n), words(count, n * bits // 32), halves(count, n)
        decode = lambda a, b: gptq.decode(codes[:, a:b], zeros[:, a * bits // 32 : b * bits // 32], scales[:, a:b], order, bits, True)  # noqa: E731
        points = lambda: gptq.zeros_and_scales(shape, zeros, scales, order, bits, True)  # noqa: E731

    def numpy() -> None:
        for begin, end in steps(shape):
            put_rows(blob, spec, shape, begin, groups.packable(decode(begin, end), spec))

    def compiled() -> None:
        found, made, rows = groups.factors(*points(), k, spec)
        put_factors(blob, spec, shape, 0, found, made, rows)
        put_int32_words(blob, spec, shape, layout, codes)

    return numpy, compiled, codes.nbytes + zeros.nbytes + scales.nbytes // 2


def of_floats(shape: tuple[int, int]) -> tuple[Candidate, Candidate, int]:
    """FP8 in blocks of 128 x 128, widened to half precision."""
    codes, scales = RNG.integers(0, 120, shape, np.uint8), halves(shape[0] // BLOCK, shape[1] // BLOCK)
    out = np.zeros((shape[0], 2 * shape[1]), np.uint8)

    def numpy() -> None:
        for begin in range(0, shape[0], BLOCK):
            values = fp8.dequantize(codes[begin : begin + BLOCK], scales[begin // BLOCK : begin // BLOCK + 1], (BLOCK, BLOCK))
            out[begin : begin + BLOCK] = from_f32(values, "f16").view(np.uint8)

    return numpy, lambda: put_fp8_as_halves(out.reshape(-1), codes, scales, (BLOCK, BLOCK)), codes.nbytes + scales.nbytes


def best(candidate: Candidate, times: int) -> float:
    candidate()  # compiles, or loads what is compiled
    seconds = []
    for _ in range(times):
        started = perf_counter()
        candidate()
        seconds.append(perf_counter() - started)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    times = parser.parse_args().times
    cases = {**{f"GGUF {kind}": lambda shape, kind=kind: of_blocks(kind, shape) for kind in NATIVE}, "gpt-oss MXFP4": of_pairs,
             **{f"{name}, {bits} bits": lambda shape, layout=layout, bits=bits: of_words(layout, bits, shape)
                for name, layout, bits in (("GPTQ", "gptq", 4), ("GPTQ", "gptq", 8), ("AWQ", "awq", 4),
                                           ("compressed-tensors", "packed", 4), ("compressed-tensors", "packed", 8))}, "FP8": of_floats}
    print("| an expert of | MB of file | NumPy ms | compiled ms | times | GB/s of file |\n|---|---:|---:|---:|---:|---:|")
    for name, case in cases.items():
        sides = [case(shape) for shape in SHAPES]
        numpy, compiled = (sum(best(side[which], times) for side in sides) for which in (0, 1))
        nbytes = sum(side[2] for side in sides)
        print(f"| {name} | {nbytes / 1e6:.2f} | {1e3 * numpy:.1f} | {1e3 * compiled:.2f} | {numpy / compiled:.0f} | "
              f"{nbytes / compiled / 1e9:.1f} |", flush=True)


if __name__ == "__main__":
    main()
