"""Autotuning of low-bit matrix-vector products: dot products or table lookup, whichever measures faster on this machine.

Both give bit-identical results, so the choice affects speed only. It depends on the machine, bit width, group size, input width (a column's
lookup tables may outgrow the L1 cache) and thread count (many threads are memory-bound with either kernel), and hardly on the number of
rows or on how zero points are stored; a `Case` holds exactly these. One measurement takes about 0.1 s on random weights larger than the
caches, in a child process that has the memory for them. It runs, with a notice, when a model that needs it is loaded, or ahead of time by
`effllm doctor --warm`. Results are stored next to the compiled kernels they describe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from .compile import Kernel, cache_folder
from .threads import ThreadPool
from .tiles import SCHEMES, TILE, sections
from .workspace import address

FORMAT, VERSION = "effllm-choices", 1
FILE = "choices.json"
WORKING_SET = 64 << 20  # bytes of weights that a measurement reads repeatedly
# One part takes about a millisecond, so that some passes fall between the time slices of other programs.
PARTS, ROUNDS = 8, 5
# The lookup layout costs a permutation on load and a slower expansion for prompts, so it has to win by more than noise.
MARGIN = 1.05


@dataclass(frozen=True)
class Case:
    """One kind of weight and the thread pool that multiplies it; `depth`: number of inputs."""

    bits: int
    group: int
    depth: int
    threads: int

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group}, {self.depth} inputs, {self.threads} threads"


@dataclass(frozen=True)
class Timing:
    """Weights per second of both kernels, each the best of many short alternating passes (interference only ever makes a pass slower)."""

    dot: float
    lut: float

    @property
    def kernel(self) -> str:
        return "lut" if self.lut >= MARGIN * self.dot else "dot"

    @property
    def reason(self) -> str:
        ratio = self.lut / self.dot
        note = "" if self.kernel == "lut" or ratio < 1 else ", too little to switch"
        return f"lookup is {ratio:.2f} times as fast as dot products here{note}"


def common_cases(threads: int) -> list[tuple[Case, int]]:
    """(case, rows) pairs that `effllm doctor --warm` measures ahead: every bit width at a typical hidden and FFN size."""
    shapes = ((5632, 2048), (2048, 5632))
    return [(Case(bits, 64, depth, threads), rows) for bits in (2, 3, 4) for rows, depth in shapes]


def load_timings() -> dict[Case, Timing]:
    """Stored measurements of these kernels on this machine; empty if there are none or the file is damaged."""
    folder = cache_folder()
    if folder is None:
        return {}
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            return {}
        timings = {Case(**entry["case"]): Timing(**entry["timing"]) for entry in content["measured"]}
        return {case: timing for case, timing in timings.items() if min(timing.dot, timing.lut) > 0}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def save_timings(measured: dict[Case, Timing]) -> None:
    """Add measurements to the stored ones. Does nothing if no cache folder is writable."""
    folder = cache_folder()
    if folder is None:
        return
    merged = {**load_timings(), **measured}
    content = {"format": FORMAT, "version": VERSION, "measured": [{"case": asdict(c), "timing": asdict(t)} for c, t in merged.items()]}
    unfinished = folder / f"{FILE}.{os.getpid()}"
    try:
        unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
        unfinished.replace(folder / FILE)
    except OSError:
        unfinished.unlink(missing_ok=True)


class KernelBenchmark:
    """Random weights of one kind in many copies, with one job per copy and kernel. Any bytes are valid in either layout."""

    def __init__(self, pool: ThreadPool, bits: int, group: int, rows: int, depth: int, nbytes: int = WORKING_SET,
                 scheme: str = "symmetric", kernels: Sequence[str] = ("dot", "lut")) -> None:
        from .cpu import linear, lut, packed
        from .cpu.packed_formats import table_at
        from .cpu.packed_matrix import FIELDS, kind_of

        self.pool, self.shape = pool, (rows, depth)
        layout = sections(self.shape, bits, scheme, group)
        copies = max(1, -(-nbytes // layout.nbytes))
        self.weights, self.nbytes = rows * depth, layout.nbytes  # of a copy
        rng = np.random.default_rng(0)
        blob = rng.integers(0, 256, layout.nbytes, np.uint8)
        blob[layout.scales :] &= 63  # scales below 16, row scales small and positive: no infinities
        buffer = np.empty(copies * layout.nbytes + 64, np.uint8)
        start = -address(buffer) % 64
        self.blobs = buffer[start : start + copies * layout.nbytes].reshape(copies, layout.nbytes)
        self.blobs[:] = blob
        self.x = rng.standard_normal(depth, np.float32)
        self.out = np.zeros(rows, np.float32)
        stride = lut.scratch_nbytes(depth) + 64
        self.scratch = np.zeros(pool.workers * stride, np.uint8)
        header = [address(self.x), 1, depth, 0, 0, 0, 0, address(self.scratch), stride, linear.PLAIN, 0, 1]
        self.blocks = np.zeros((copies, linear.FIRST + FIELDS), np.int64)
        for block, copy in zip(self.blocks, self.blobs, strict=True):
            base = address(copy)
            block[: linear.FIRST] = header
            zeros = base + layout.zeros if layout.zeros >= 0 else 0
            block[linear.FIRST :] = [base, kind_of(bits, SCHEMES[scheme]), rows, 0, address(self.out), rows, layout.depth // TILE,
                                     (group // TILE).bit_length() - 1, base + layout.scales, zeros, base + layout.row_scales, 0, 0, 0,
                                     table_at(kind_of(bits, SCHEMES[scheme]), (group // TILE).bit_length() - 1)]
        kernels_by_name = {"dot": packed.packed_columns, "lut": lut.looked_up_columns}
        self.jobs = {name: self._jobs(kernels_by_name[name]) for name in kernels}

    def _jobs(self, kernel: Kernel) -> np.ndarray:
        return np.array([(kernel.address, address(block), 1) for block in self.blocks], np.int64)

    def rates(self, kernels: Sequence[str], rounds: int = ROUNDS, parts: int = PARTS) -> dict[str, list[float]]:
        """Weights per second of each pass of each kernel, alternating over one part of the copies at a time; the first round is warm-up."""
        rates_of: dict[str, list[float]] = {kernel: [] for kernel in kernels}
        parts = min(parts, len(self.blocks))
        for round_index in range(rounds + 1):
            for part in range(parts):
                for kernel, rates in rates_of.items():
                    jobs = np.ascontiguousarray(self.jobs[kernel][part::parts])
                    started = time.perf_counter()
                    self.pool.run_list(jobs)
                    seconds = time.perf_counter() - started
                    if round_index:
                        rates.append(len(jobs) * self.weights / seconds)
        return rates_of


def time_case(pool: ThreadPool, case: Case, rows: int) -> Timing:
    """Measure one case on a weight of `rows` rows, a multiple of 32."""
    rates = KernelBenchmark(pool, case.bits, case.group, rows, case.depth).rates(("dot", "lut"))
    return Timing(max(rates["dot"]), max(rates["lut"]))


def measure(cases: Sequence[tuple[Case, int]]) -> Iterator[tuple[int, int]]:
    """Time (case, rows) pairs in a child process and store the results; yields (cases done, cases in total). If the child fails, cases it
    had not measured stay unmeasured."""
    command = [sys.executable, "-P", "-m", f"{__package__}.autotune", json.dumps([(asdict(case), rows) for case, rows in cases])]
    measured = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        for (case, _), line in zip(cases, child.stdout):
            measured[case] = Timing(**json.loads(line))
            yield len(measured), len(cases)
    save_timings(measured)


def main(cases: str) -> None:
    for case, rows in json.loads(cases):
        pool = ThreadPool(case["threads"])
        sys.stdout.write(f"{json.dumps(asdict(time_case(pool, Case(**case), rows)))}\n")
        sys.stdout.flush()
        pool.close()


if __name__ == "__main__":
    main(sys.argv[1])
