#!/usr/bin/env python3
"""Low-bit weights times one token: table lookup against dot products, on every instruction set available on this machine.

Random weights larger than any cache, both kernels alternating over the same bytes (any bytes are valid in either layout), so that
interference affects both. The instruction set follows from what Numba compiles for, so each runs in a child process; the first run
compiles, about half a minute each. The ratio is the median over pairs of passes, rates are medians over passes.

    python benchmarks/lut_against_dot.py [--rounds 5] [--sets native portable] [--no-keep]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from effllm.kernels.compile import cpu_features
from effllm.offload.hardware import cpu_threads
from report import Figure, publish

FORMATS = {"ternary": ("ternary", 2, 64), "2 bits": ("symmetric", 2, 64), "3 bits": ("affine", 3, 64), "4 bits": ("affine", 4, 64)}
SHAPES = ((2048, 2048), (5632, 2048), (2048, 5632))  # rows, inputs
BASE = "+64bit,+cmov,+cx8,+fxsr,+mmx,+sse,+sse2"
AVX2 = f"{BASE},+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sahf,+sse3,+sse4.1,+sse4.2,+ssse3,+xsave"
AVX512 = f"{AVX2},+avx512f,+avx512cd,+avx512dq,+avx512vl,+avx512vnni"
# Set -> processor and features that Numba is told to compile for, the features that it takes to run.
TARGETS = {"avx2vnni": ("cascadelake", f"{AVX512},-avx512bw", {"avx512vnni", "avx512vl"}), "avx2": ("haswell", AVX2, {"avx2", "fma"}),
           "portable": ("generic", BASE, set())}
PORTABLE_NBYTES = 8 << 20  # far from any limit of memory, and slow
INTRO = ("One token, random weights in groups of 64 inputs that no cache holds, both kernels in turn over the same bytes. Above 1, lookup "
         "is faster. GB/s counts what the weights take, scales included.")


@dataclass(frozen=True)
class Result:
    """Rates in weights per second."""

    instructions: str
    form: str
    rows: int
    depth: int
    threads: int
    dot: float
    lut: float
    ratio: float
    bytes_per_weight: float


def measure(rounds: int) -> None:
    """In a child: every case, printed one per line."""
    from effllm.kernels.autotune import WORKING_SET, KernelBenchmark
    from effllm.kernels.cpu.int8_ir import INSTRUCTION_SET
    from effllm.kernels.threads import ThreadPool

    for threads in sorted({1, cpu_threads()}):
        pool = ThreadPool(threads)
        for form, (scheme, bits, group) in FORMATS.items():
            for rows, depth in SHAPES:
                nbytes = PORTABLE_NBYTES if INSTRUCTION_SET == "portable" else WORKING_SET
                trial = KernelBenchmark(pool, bits, group, rows, depth, nbytes, scheme)
                rates = trial.rates(("dot", "lut"), rounds)
                ratio = median(lut / dot for dot, lut in zip(rates["dot"], rates["lut"], strict=True))
                result = Result(INSTRUCTION_SET, form, rows, depth, threads, median(rates["dot"]), median(rates["lut"]), ratio,
                                trial.nbytes / trial.weights)
                sys.stdout.write(f"{json.dumps(asdict(result))}\n")
                sys.stdout.flush()
        pool.close()


def sets_here() -> list[str]:
    """Instruction sets that can run here: the machine's own, and narrower ones."""
    from effllm.kernels.cpu.int8_ir import INSTRUCTION_SET

    if platform.machine() not in ("x86_64", "AMD64"):
        return ["native"]
    return ["native", *(name for name, (_, _, needed) in TARGETS.items() if name != INSTRUCTION_SET and needed <= cpu_features())]


def child(name: str, rounds: int) -> list[Result]:
    """The results of one set."""
    environment = dict(os.environ)
    if name != "native":
        environment |= {"NUMBA_CPU_NAME": TARGETS[name][0], "NUMBA_CPU_FEATURES": TARGETS[name][1]}
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--child", "--rounds", str(rounds)]
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Result(**json.loads(line)) for line in done.stdout.splitlines()]


def figure(result: Result) -> Figure:
    """The ratio, with both rates beside it."""
    dot, lut = (f"{rate / 1e9:.1f} Gweights/s ({rate * result.bytes_per_weight / 1e9:.1f} GB/s)" for rate in (result.dot, result.lut))
    threads = f"{result.threads} thread{'s' if result.threads > 1 else ''}"
    key = f"{result.instructions}_{result.form.replace(' ', '')}_{result.rows}x{result.depth}_{result.threads}t"
    return Figure(key, f"{result.instructions}, {result.form}, {result.rows} x {result.depth}, {threads}", f"lookup {lut}, dot {dot}",
                  result.ratio, "x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sets", nargs="*", default=sets_here())
    parser.add_argument("--no-keep", action="store_true", help="print only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure(arguments.rounds)
        return 0
    results = [result for name in arguments.sets for result in child(name, arguments.rounds)]
    publish("lut-against-dot", "Table lookup against dot products", INTRO, [figure(result) for result in results], not arguments.no_keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
