"""Matrix products of other libraries, one pass at a time: what an int8 product of ours is held against, by turns.

A shared machine changes its speed within seconds, by a factor of two, so a rate that was measured at another time is no yardstick.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

# Answers every line of its input with the rate of one pass. Products that would take long (no int8 kernel in that library) are cut.
YARDSTICKS = """
import json, sys, time
import numpy as np
tokens, inputs, outputs, threads = map(int, sys.argv[1:])
def rate(product, rows):
    start = time.perf_counter(); product(rows); seconds = time.perf_counter() - start
    return 2 * tokens * inputs * rows / seconds
x, w = np.random.rand(tokens, inputs).astype(np.float32), np.random.rand(outputs, inputs).astype(np.float32)
products = {"fp32": lambda rows: x @ w[:rows].T}
try:
    import torch
    torch.set_num_threads(threads)
    a, b = torch.randint(-127, 128, (tokens, inputs), dtype=torch.int8), torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    products["int_mm"] = lambda rows: torch._int_mm(a, b[:rows].t())
except ImportError:
    pass
rows = {}
for name, product in products.items():
    rate(product, 64)  # starts the threads
    rows[name] = outputs if rate(product, 64) > tokens * inputs * outputs else 64
print(json.dumps(sorted(products)), flush=True)
for line in sys.stdin:
    print(json.dumps(rate(products[line.strip()], rows[line.strip()])), flush=True)
"""


class Yardsticks:
    """A child with the other libraries (their threads would stand in the way of ours): float32 by NumPy's BLAS as `fp32`, and int8 by
    `torch._int_mm` as `int_mm` where torch is installed. `shape`: tokens, inputs, outputs."""

    def __init__(self, shape: tuple[int, int, int], threads: int) -> None:
        limits = {name: str(threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        command = [sys.executable, "-c", YARDSTICKS, *map(str, shape), str(threads)]
        self._child = subprocess.Popen(command, env=os.environ | limits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.names = json.loads(self._child.stdout.readline())

    def rate(self, name: str) -> float:
        """Operations per second of one pass."""
        self._child.stdin.write(name + "\n")
        self._child.stdin.flush()
        return json.loads(self._child.stdout.readline())

    def close(self) -> None:
        self._child.stdin.close()
        self._child.wait()
