#!/usr/bin/env python3
"""The product of many columns with low-bit weights against what the machine can do: the int8 kernel of `kernels/cpu/gemm.py`.

Each round measures, one after the other: the register tile alone, its operands in the first-level cache (the roof of the instructions that
this processor has), `torch._int_mm` where torch is installed, fp32 GEMM of NumPy's BLAS, and every format: activations packed, weights
expanded, multiplied. Figures are medians over rounds, ratios are taken within a round. Libraries that keep threads of their own run
in a child process. Wants the machine to itself.

    python benchmarks/gemm_int8.py [--shape 512x2048x5632] [--formats codebook4:16 symmetric8:32] [--both-ways] [--rounds 15]
"""

import argparse
import sys
import time
from statistics import median

import numpy as np

from effllm.kernels.compile import kernel
from effllm.kernels.cpu import gemm
from effllm.kernels.cpu.gemm_tiles import HEADER, INPUTS, ITEM, STEP, STRIPE, TOKENS, block_product
from effllm.kernels.cpu.int8_ir import INSTRUCTION_SET
from effllm.kernels.cpu.intrinsics import fetch_add, i64_at
from effllm.kernels.threads import ThreadPool
from effllm.kernels.tiles import SCHEMES
from effllm.offload.hardware import cpu_threads
from effllm.quant.codes import Codes, bf16
from effllm.quant.pack import pack
from effllm.quant.spec import QuantSpec
from reference_rates import PASSES, Yardsticks
from report import Figure, publish

FORMATS = ("codebook4:16", "codebook3:16", "codebook2:16", "affine4:64", "symmetric8:32", "symmetric6:32")
METHODS = {gemm.SCALED: "row's int8", gemm.GROUPED: "exact groups"}
# Two more of codes of up to four bits on AVX2; elsewhere they are those above, whose names stay.
NAMES = {gemm.STEPPED: "levels as bytes times steps", gemm.NARROW_CODES: "exact groups as bytes", **METHODS}
# Inputs and turns of the tile that is measured alone.
ALONE, TURNS = 256, 4000
INTRO = ("Random weights and activations. A product counts as 2 x tokens x inputs x outputs operations; packing the activations and "
         "expanding the weights are in its time.")


@kernel()
def tile_alone(args, worker, counter):
    """The register tile over a stripe and a panel of each worker, TURNS times a block; blocks as many as workers."""
    a = i64_at(args)
    base = a[0] + worker * a[1]
    while fetch_add(counter, 1) < a[2]:
        for _ in range(TURNS):
            block_product(base, base + STEP * ALONE // INPUTS, base + a[3], ALONE, 128, 0)


def aligned(nbytes: int) -> np.ndarray:
    """Zeros that begin on a cache line."""
    memory = np.zeros(nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + nbytes]


def random_weight(spec: QuantSpec, shape: tuple[int, int]) -> np.ndarray:
    """A blob."""
    rng = np.random.default_rng(0)
    groups, book = -(-shape[1] // spec.group), spec.scheme == "codebook"
    top = 3 if spec.scheme == "ternary" else 1 << spec.bits
    codes = Codes(rng.integers(0, top, shape, np.uint8), rng.integers(1, 16 if book else 256, (shape[0], groups)).astype(np.uint8),
                  rng.integers(0, top, (shape[0], groups)).astype(np.uint8) if spec.scheme == "affine" else None,
                  bf16(rng.random(shape[0], np.float32)), np.linspace(-64, 63, top).astype(np.int8) if book else None,
                  np.linspace(14, 127, 16).astype(np.uint8) if book else None)
    blob = aligned(spec.nbytes(shape))
    blob[:] = pack(codes, spec)
    return blob


class Product:
    """One format in one way, ready to run."""

    def __init__(self, spec: QuantSpec, blob: np.ndarray, x: np.ndarray, outputs: int, method: int, pool: ThreadPool) -> None:
        self.spec, self.method, self.pool = spec, method, pool
        tokens, inputs = x.shape
        nbytes, at, base = gemm.gemm_scratch(tokens, inputs), spec.sections((outputs, inputs)), blob.ctypes.data
        panels, scratch = aligned(gemm.panel_nbytes(tokens, inputs, method)), aligned(nbytes * pool.workers)
        out = aligned(4*tokens*outputs).view(np.float32).reshape(tokens, outputs)
        at_once = gemm.stripes_at_once(outputs, 0, pool.workers)
        head = [tokens, inputs, 0, 0, 0, 0, scratch.ctypes.data, nbytes, 0, 0, method, at_once, 1]
        fields = [base + max(0, at_) for at_ in (at.codes, at.scales, at.zeros, at.row_scales, at.tables)]
        fields += [0, spec.bits, SCHEMES[spec.scheme], spec.group, 0, outputs, 0, out.ctypes.data, outputs]
        self._pack = np.array([x.ctypes.data, *head, *fields], np.int64)
        self._pack[gemm.FIRST + gemm.OUT] = panels.ctypes.data
        self._multiply = np.array([panels.ctypes.data, *head, *fields], np.int64)
        self._kept_alive = blob, x, panels, scratch, out

    def seconds(self) -> tuple[float, float]:
        """Of packing the activations, and of the product."""
        start = time.perf_counter()
        self.pool.run(gemm.pack_tokens, self._pack.ctypes.data)
        packed = time.perf_counter()
        self.pool.run(gemm.multiply, self._multiply.ctypes.data)
        return packed - start, time.perf_counter() - packed


def tile_rate(pool: ThreadPool) -> float:
    """Operations per second of the register tile alone."""
    panel = STEP * ALONE // INPUTS
    sums = -(-(panel + 2 * HEADER + ALONE * TOKENS * ITEM) // 64) * 64
    stride = sums + 4 * TOKENS * STRIPE + 4096
    memory = aligned(stride * pool.workers)
    args = np.array([memory.ctypes.data, stride, pool.workers, sums], np.int64)
    start = time.perf_counter()
    pool.run(tile_alone, args.ctypes.data)
    return 2 * STRIPE * TOKENS * ALONE * TURNS * pool.workers / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="512x2048x5632", help="tokens x inputs x outputs (default: the FFN of TinyLlama)")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--both-ways", action="store_true", help="every format in every way, not only in its own")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=cpu_threads())
    parser.add_argument("--print-only", action="store_true", help="leave the kept results alone")
    arguments = parser.parse_args()
    tokens, inputs, outputs = shape = tuple(int(part) for part in arguments.shape.split("x"))
    pool, yardsticks = ThreadPool(arguments.threads), Yardsticks(shape, arguments.threads)
    x = np.random.default_rng(1).standard_normal((tokens, inputs), np.float32)
    products = []
    for text in arguments.formats:
        spec = QuantSpec.parse(text)
        blob = random_weight(spec, (outputs, inputs))
        usual_method = gemm.method_of(spec.bits, spec.scheme)
        methods = (*METHODS, *([] if usual_method in METHODS else [usual_method])) if arguments.both_ways else (usual_method,)
        products += [Product(spec, blob, x, outputs, method, pool) for method in methods]
    rates: dict[str, list[float]] = {name: [] for name in ("tile", *yardsticks.names, *map(name_of, products), "packing")}
    for round_ in range(arguments.rounds + 1):
        peak_rates = {"tile": max(tile_rate(pool) for _ in range(PASSES)), **{name: yardsticks.rate(name) for name in yardsticks.names}}
        for product in products:
            packing, seconds = min((product.seconds() for _ in range(PASSES)), key=sum)
            peak_rates[name_of(product)] = 2 * tokens * inputs * outputs / (packing + seconds)
            peak_rates["packing"] = packing
        if round_:  # the first one compiles and warms up
            for name, value in peak_rates.items():
                rates[name].append(value)
    yardsticks.close()
    pool.close()
    publish("gemm-int8", "Many columns of low-bit weights", INTRO, figures(arguments, rates, products), keep=not arguments.print_only)
    return 0


def name_of(product: Product) -> str:
    return f"{product.spec} {NAMES[product.method]}"


def figures(arguments: argparse.Namespace, rates: dict[str, list[float]], products: list[Product]) -> list[Figure]:
    conditions = f"{arguments.shape.replace('x', '×')}, {arguments.threads} threads"
    middle = {name: median(values) for name, values in rates.items()}
    alone = f"{INSTRUCTION_SET}, {arguments.threads} threads, from L1"
    results = [Figure("tile_gops", "register tile alone", alone, middle["tile"] / 1e9, "GOP/s"),
               Figure("fp32_gflops", "fp32 GEMM", f"{conditions}, NumPy", middle["fp32"] / 1e9, "GFLOP/s")]
    if "int_mm" in rates:
        results.append(Figure("int_mm_gops", "int8 GEMM", f"{conditions}, torch._int_mm", middle["int_mm"] / 1e9, "GOP/s"))
    else:
        sys.stderr.write("torch is not installed: no comparison with torch._int_mm\n")
    for product in products:
        name = name_of(product)
        key = name.replace(" ", "_").replace("'", "")
        results.append(Figure(f"{key}_gops", name, conditions, middle[name] / 1e9, "GOP/s"))
        for yardstick, description in (("tile", "the tile alone"), ("int_mm", "torch._int_mm")):
            if yardstick in rates:
                ratio = median(ours / other for ours, other in zip(rates[name], rates[yardstick]))
                results.append(Figure(f"{key}_by_{yardstick}", f"{name} / {description}", conditions, ratio, "×"))
    results.append(Figure("packing_ms", "packing the activations", conditions, 1e3 * middle["packing"], "ms"))
    return results


if __name__ == "__main__":
    sys.exit(main())
