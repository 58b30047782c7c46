"""Reference rates to compare a speed with, measured alternately: the memory roofline, and matrix products of other libraries, one pass at a
time.

A shared machine changes speed within seconds, by a factor of two, so a rate measured at another time is no reference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np

from effllm.kernels.cpu.memory_bandwidth import read_bandwidth
from effllm.kernels.threads import ThreadPool
from effllm.offload.memory import anonymous
from report import GIB

PASSES = 7  # of which the best counts: after a pause the first one also wakes threads and clocks
# Prints whether the product is there, then answers every line of its input with a rate. One that would take long (a library without an
# int8 kernel for this processor) is cut.
CHILD = f"""
import json, sys, time
import numpy as np
name, (tokens, inputs, outputs, threads) = sys.argv[1], map(int, sys.argv[2:])
def rate(rows, passes={PASSES}):
    best = float("inf")
    for _ in range(passes):
        start = time.perf_counter(); product(rows); best = min(best, time.perf_counter() - start)
    return 2 * tokens * inputs * rows / best
if name == "fp32":
    x, w = np.random.rand(tokens, inputs).astype(np.float32), np.random.rand(outputs, inputs).astype(np.float32)
    product = lambda rows: x @ w[:rows].T
else:
    try:
        import torch
    except ImportError:
        sys.exit(print("false"))
    torch.set_num_threads(threads)
    x = torch.randint(-127, 128, (tokens, inputs), dtype=torch.int8)
    w = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    product = lambda rows: torch._int_mm(x, w[:rows].t())
rows = outputs if rate(64) > tokens * inputs * outputs else 64
print("true", flush=True)
for line in sys.stdin:
    print(json.dumps(rate(rows)), flush=True)
"""


class Roof:
    """The memory read roofline in bytes per second, measured whenever it is called."""

    def __init__(self, threads: int) -> None:
        self.pool, self.buffer = ThreadPool(threads), anonymous(GIB)
        self.buffer.view(np.uint64)[:] = 0x0123456789ABCDEF

    def __call__(self) -> float:
        return read_bandwidth(self.pool, self.buffer, passes=2)

    def close(self) -> None:
        self.pool.close()


class Yardsticks:
    """Other libraries' products, each in a child of its own, whose threads stand in nobody's way: float32 by NumPy's BLAS as `fp32`, and
    int8 by `torch._int_mm` as `int_mm` where torch is installed. `shape`: tokens, inputs, outputs."""

    def __init__(self, shape: tuple[int, int, int], threads: int) -> None:
        limits = {name: str(threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._children: dict[str, subprocess.Popen] = {}
        for name in ("fp32", "int_mm"):
            child = subprocess.Popen([sys.executable, "-c", CHILD, name, *map(str, shape), str(threads)], env=os.environ | limits,
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if json.loads(child.stdout.readline()):
                self._children[name] = child
        self.names = list(self._children)

    def rate(self, name: str) -> float:
        """Operations per second, the best of PASSES passes."""
        child = self._children[name]
        child.stdin.write("\n")
        child.stdin.flush()
        return json.loads(child.stdout.readline())

    def close(self) -> None:
        for child in self._children.values():
            child.stdin.close()
            child.wait()
