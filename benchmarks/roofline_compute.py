"""Compute rooflines of this machine, and the cost of handing work to another thread.

- int8 dot products from the L1 cache, by the widest instruction of Numba's target (VNNI, else what LLVM makes of a plain loop): the
roofline of prefill, and of low-bit decode where memory is not the limit. - fp32 GEMM by NumPy's BLAS and int8 GEMM by `torch._int_mm`
(where torch is installed: for comparison, effllm's CPU path never imports it). - one empty job handed to all threads: Numba's parallel
regions, and effllm's own pool. Libraries with their own thread pools run in a child process, so that none disturbs another's figures.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from effllm.kernels.compile import cpu_features, kernel
from effllm.kernels.threads import ThreadPool
from report import Figure

I32, I64 = ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(I32, 16)
# Rows and columns of the register tile: 16 sums and 8 operands of 32 registers, two products a load.
ROWS, COLUMNS = 4, 4
ROW_BYTES = 2048
# A prefill chunk through TinyLlama's FFN: M tokens, K inputs, N outputs.
GEMM = (512, 2048, 5632)
REPEATS = 7

GEMM_FP32 = f"""
import json, time
import numpy as np
m, k, n = {GEMM}
a, b = np.random.rand(m, k).astype(np.float32), np.random.rand(n, k).astype(np.float32)
times = []
for _ in range({REPEATS}):
    start = time.perf_counter(); a @ b.T; times.append(time.perf_counter() - start)
print(json.dumps(2 * m * k * n / min(times)))
"""
GEMM_INT8 = f"""
import json, sys, time
import torch
torch.set_num_threads(int(sys.argv[1]))
m, k, n = {GEMM}
a, b = torch.randint(-127, 128, (m, k), dtype=torch.int8), torch.randint(-127, 128, (n, k), dtype=torch.int8)
times = []
for _ in range({REPEATS}):
    start = time.perf_counter(); torch._int_mm(a, b.t()); times.append(time.perf_counter() - start)
print(json.dumps(2 * m * k * n / min(times)))
"""
PARALLEL_REGION = f"""
import json, sys, time
import numba
import numpy as np
numba.config.THREADING_LAYER, threads = sys.argv[1], int(sys.argv[2])
numba.set_num_threads(threads)
@numba.njit(parallel=True)
def region(out):
    for index in numba.prange(out.size):
        out[index] += 1
out, times = np.zeros(threads, np.int64), []
region(out)
for _ in range({REPEATS}):
    start = time.perf_counter()
    for _ in range(2000): region(out)
    times.append((time.perf_counter() - start) / 2000)
print(json.dumps(min(times)))
"""


@intrinsic
def vnni_dots(typingctx, weights, activations, steps):
    """`steps` times: COLUMNS activation vectors against ROWS weight vectors, all read from buffers of ROW_BYTES a row, round and round."""

    def codegen(context, builder, signature, args):
        weights, activations, steps = args
        kind = ir.FunctionType(VECTOR, [VECTOR, VECTOR, VECTOR])
        dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        entry = builder.basic_block
        loop, done = builder.append_basic_block("dots"), builder.append_basic_block("dots.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(I64)
        step.add_incoming(I64(0), entry)
        phis = [builder.phi(VECTOR) for _ in range(ROWS * COLUMNS)]
        offset = builder.and_(builder.mul(step, I64(64)), I64(ROW_BYTES - 1))

        def load(base: ir.Value, row: int) -> ir.Value:
            address = builder.add(builder.add(base, offset), I64(row * ROW_BYTES))
            return builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=64)

        columns = [load(activations, column) for column in range(COLUMNS)]
        rows = [load(weights, row) for row in range(ROWS)]
        sums = [builder.call(dot, [phi, columns[i % COLUMNS], rows[i // COLUMNS]]) for i, phi in enumerate(phis)]
        following = builder.add(step, I64(1))
        step.add_incoming(following, loop)
        for phi, value in zip(phis, sums, strict=True):
            phi.add_incoming(ir.Constant(VECTOR, [0] * 16), entry)
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_unsigned("<", following, steps), loop, done)
        builder.position_at_end(done)
        total = sums[0]
        for value in sums[1:]:
            total = builder.add(total, value)
        reduce = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, [VECTOR]), "llvm.vector.reduce.add.v16i32")
        return builder.sext(builder.call(reduce, [total]), I64)

    return types.int64(types.int64, types.int64, types.int64), codegen


def portable_dots(weights: np.ndarray, activations: np.ndarray, rounds: int) -> int:
    """The same products as a plain loop over weights [ROWS, ROW_BYTES] and activations [COLUMNS, ROW_BYTES], for LLVM to vectorize."""
    total = 0
    for _ in range(rounds):
        for row in range(weights.shape[0]):
            for column in range(activations.shape[0]):
                part = np.int32(0)
                for index in range(weights.shape[1]):
                    part += np.int32(weights[row, index]) * np.int32(activations[column, index])
                # Feeding the result back keeps the rounds from being computed once.
                total += part
                activations[column, 0] = np.uint8(total & 127)
    return total


def dot_product(thread_counts: list[int]) -> Iterator[Figure]:
    rounds = 20_000
    weights, activations = _aligned((ROWS, ROW_BYTES), np.int8), _aligned((COLUMNS, ROW_BYTES), np.uint8)
    weights[:], activations[:] = 3, 5
    if "avx512vnni" in cpu_features():
        name = "vpdpbusd, 512 bits"
        vnni = njit("int64(int64, int64, int64)", nogil=True)(lambda w, x, steps: vnni_dots(w, x, steps))
        addresses = weights.ctypes.data, activations.ctypes.data
        if vnni(*addresses, ROW_BYTES // 64) != 3 * 5 * ROWS * COLUMNS * ROW_BYTES:
            raise RuntimeError("the dot kernel does not compute a dot product")
        job = partial(vnni, *addresses, rounds * (ROW_BYTES // 64))
    else:
        name = "portable loop"
        portable = njit("int64(int8[:, ::1], uint8[:, ::1], int64)", nogil=True)(portable_dots)
        job = lambda: portable(weights, activations.copy(), rounds)  # noqa: E731
    for threads in thread_counts:
        seconds = _best_together(job, threads)
        rate = 2 * ROWS * COLUMNS * ROW_BYTES * rounds * threads / seconds / 1e9
        yield Figure(f"int8_dot_gops_{threads}t", "int8 dot product", f"{_threads(threads)}, {name}, from L1", rate, "GOP/s")


def matrix_product(thread_counts: list[int]) -> Iterator[Figure]:
    shape = "×".join(map(str, GEMM))
    for threads in thread_counts:
        limits = {name: str(threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        rate = _child(GEMM_FP32, [], limits) / 1e9
        yield Figure(f"fp32_gemm_gflops_{threads}t", "fp32 GEMM", f"{_threads(threads)}, NumPy, {shape}", rate, "GFLOP/s")
    if importlib.util.find_spec("torch") is not None:
        for threads in thread_counts:
            rate = _child(GEMM_INT8, [str(threads)], {}) / 1e9
            yield Figure(f"int8_gemm_gops_{threads}t", "int8 GEMM", f"{_threads(threads)}, torch._int_mm, {shape}", rate, "GOP/s")


@kernel()
def nothing(args, worker, counter):
    return


def hand_off(threads: int) -> Iterator[Figure]:
    """Time from the caller's request to every thread's answer, with nothing to do in between."""
    for layer in ("omp", "workqueue"):
        seconds = _child(PARALLEL_REGION, [layer, str(threads)], {"NUMBA_NUM_THREADS": str(threads)}, optional=True)
        if seconds is not None:
            yield Figure(f"hand_off_us_{layer}", "thread hand-off", f"{_threads(threads)}, Numba region, {layer}", seconds * 1e6, "µs")
    pool = ThreadPool(threads)
    args = np.zeros(8, np.int64)
    batch = 2000

    def jobs() -> None:
        for _ in range(batch):
            pool.run(nothing, args.ctypes.data)

    jobs()
    seconds = _best_together(jobs, 1) / batch
    pool.close()
    yield Figure("hand_off_us_effllm", "thread hand-off", f"{_threads(threads)}, effllm ThreadPool, waiting workers", seconds * 1e6, "µs")


def _aligned(shape: tuple[int, int], kind: type) -> np.ndarray:
    """A matrix of one-byte numbers aligned to vectors."""
    nbytes = shape[0] * shape[1]
    memory = np.zeros(nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + nbytes].view(kind).reshape(shape)


def _best_together(job: Callable[[], object], threads: int) -> float:
    """Seconds of the fastest repeat, the job running once on each of `threads` threads."""
    fastest = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            start = time.perf_counter()
            for running in [pool.submit(job) for _ in range(threads)]:
                running.result()
            fastest = min(fastest, time.perf_counter() - start)
    return fastest


def _child(code: str, arguments: list[str], environment: dict[str, str], optional: bool = False) -> float | None:
    """The number that `code` prints in a fresh interpreter; None if an optional one fails (e.g. a threading layer that is not installed).
    """
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        if optional:
            return None
        raise RuntimeError(f"a measuring process failed:\n{ran.stderr}")
    return json.loads(ran.stdout)


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"
