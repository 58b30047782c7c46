"""Memory read roofline: vector loads over a buffer as large as a model's weights, and nothing else.

Every loaded <16 x i32> is XORed into one of a few accumulators, which costs no time next to the load and keeps the compiler from dropping
it. A decode step reads each weight once, in order, so this is the roofline of decode speed. The hardware prefetcher follows a few streams
at a time; the best number differs between CPUs, so several are tried and the best counts.
"""

import mmap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from report import GIB, Figure

I32, I64 = ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(I32, 16)
VECTOR_BYTES = 64
UNROLLED = 16
ACCUMULATORS = 4
PASSES = 8
STREAMS = (1, 2, 4)


def _reader(streams: int) -> Callable[[int, int], int]:
    """A compiled function (address, nbytes) -> XOR of everything; the bytes are read as `streams` parallel equal runs."""

    @intrinsic
    def fold(typingctx, address, nbytes):
        def codegen(context, builder, signature, args):
            run = builder.udiv(args[1], I64(streams))
            starts = [builder.add(args[0], builder.mul(run, I64(stream))) for stream in range(streams)]
            zero = ir.Constant(VECTOR, [0] * 16)
            entry = builder.basic_block
            loop, done = builder.append_basic_block("read"), builder.append_basic_block("read.done")
            builder.branch(loop)
            builder.position_at_end(loop)
            offset = builder.phi(I64)
            offset.add_incoming(I64(0), entry)
            phis = [builder.phi(VECTOR) for _ in range(ACCUMULATORS)]
            sums = list(phis)
            for index in range(UNROLLED):
                step, stream = divmod(index, streams)
                address = builder.add(starts[stream], builder.add(offset, I64(step * VECTOR_BYTES)))
                loaded = builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=VECTOR_BYTES)
                sums[index % ACCUMULATORS] = builder.xor(sums[index % ACCUMULATORS], loaded)
            following = builder.add(offset, I64(UNROLLED // streams * VECTOR_BYTES))
            offset.add_incoming(following, loop)
            for phi, value in zip(phis, sums, strict=True):
                phi.add_incoming(zero, entry)
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_unsigned("<", following, run), loop, done)
            builder.position_at_end(done)
            total = sums[0]
            for value in sums[1:]:
                total = builder.xor(total, value)
            reduce = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, [VECTOR]), "llvm.vector.reduce.xor.v16i32")
            return builder.zext(builder.call(reduce, [total]), I64)

        return types.int64(types.int64, types.int64), codegen

    return njit("int64(int64, int64)", nogil=True)(lambda address, nbytes: fold(address, nbytes))


def huge_page_buffer(nbytes: int) -> tuple[mmap.mmap, np.ndarray]:
    """Anonymous memory with huge pages advised, filled with a pattern (untouched pages would all be the one zero page)."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(memory, np.uint64)
    view[:] = np.arange(view.size, dtype=np.uint64)
    return memory, view


def measure(thread_counts: list[int], nbytes: int = GIB) -> Iterator[Figure]:
    """Read bandwidth for each number of threads, each thread over its own part of the buffer; the best pass counts."""
    _, view = huge_page_buffer(nbytes)
    expected = int(np.bitwise_xor.reduce(view.view(np.uint32)))
    readers = {streams: _reader(streams) for streams in STREAMS}
    for threads in thread_counts:
        # Whole pages for each thread, so that every stream stays aligned to a vector.
        part = nbytes // threads // 4096 * 4096
        begins = [view.ctypes.data + index * part for index in range(threads)]
        best = {streams: _best_pass(reader, begins, part) for streams, reader in readers.items()}
        if threads == 1 and readers[1](begins[0], part) != expected:
            raise RuntimeError("the reading kernel did not read every byte")
        streams = max(best, key=best.__getitem__)
        conditions = f"{threads} thread{'s' * (threads > 1)}, {nbytes >> 20} MiB in huge pages, {streams} stream{'s' * (streams > 1)} each"
        yield Figure(f"read_gbps_{threads}t", "memory read", conditions, best[streams] / 1e9, "GB/s")


def _best_pass(reader: Callable[[int, int], int], begins: list[int], part: int) -> float:
    """Bytes per second of the fastest of several passes."""
    fastest = float("inf")
    with ThreadPoolExecutor(len(begins)) as pool:
        for _ in range(PASSES):
            start = time.perf_counter()
            list(pool.map(reader, begins, [part] * len(begins)))
            fastest = min(fastest, time.perf_counter() - start)
    return part * len(begins) / fastest
