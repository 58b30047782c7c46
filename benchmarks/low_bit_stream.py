#!/usr/bin/env python3
"""Low-bit weights times few tokens, streamed from memory: the decode kernel's share of the memory roofline, format by format.

Random weights of the shapes in TinyLlama's FFN and attention, 300 MB of copies of each, processed one after the other; the roofline (a
load-only kernel over 1 GiB with the same threads) is measured before and after every pass of a round, and the better value counts. Medians
over rounds. Two checkouts are compared by running each from its own folder, alternately.

    python benchmarks/low_bit_stream.py [--formats codebook4:16 ...] [--tokens 1] [--threads N] [--rounds 9] [--no-results]
"""

import time
from statistics import median

import numpy as np

from effllm.kernels.cpu import linear, packed
from effllm.kernels.cpu.packed_formats import table_at
from effllm.kernels.cpu.packed_matrix import FIELDS, kind_of
from effllm.kernels.threads import ThreadPool
from effllm.kernels.tiles import SCHEMES, TILE
from effllm.quant.spec import QuantSpec
from gemm_int8 import aligned, random_weight
from reference_rates import Roof
from report import Figure, parser_of, publish

FORMATS = ("codebook4:16", "codebook3:16", "codebook2:16", "symmetric8:32", "symmetric6:32", "affine4:64")
SHAPES = ((5632, 2048), (2048, 5632), (2048, 2048))  # rows, inputs
NBYTES, PAGE = 300_000_000, 4096
INTRO = ("Random weights, 300 MB of copies of each shape, every copy a job of its own; a token's activations are quantized in each. "
         "Roof: a load-only kernel over 1 GiB with the same threads, around every pass.")


class Stream:
    """Copies of one random weight, with one job each."""

    def __init__(self, pool: ThreadPool, spec: QuantSpec, shape: tuple[int, int], tokens: int) -> None:
        (rows, inputs), at, blob = shape, spec.sections(shape), random_weight(spec, shape)
        pitch, self.nbytes, self.pool = -(-len(blob) // PAGE) * PAGE, len(blob), pool
        copies = max(2, NBYTES // pitch)
        memory, scratch_nbytes = aligned(copies * pitch).reshape(copies, pitch), packed.scratch_nbytes(inputs, tokens) + 64
        memory[:, : len(blob)] = blob
        x = np.random.default_rng(0).standard_normal((tokens, inputs), np.float32)
        out, scratch = np.zeros((tokens, rows), np.float32), np.zeros(pool.workers * scratch_nbytes, np.uint8)
        blocks = np.zeros((copies, linear.FIRST + FIELDS), np.int64)
        blocks[:, : linear.FIRST] = [x.ctypes.data, tokens, inputs, 0, 0, 0, 0, scratch.ctypes.data, scratch_nbytes, linear.PLAIN, 0, 1]
        for block, copy in zip(blocks, memory, strict=True):
            codes, scales, zeros, row_scales, tables = (copy.ctypes.data + section_offset if section_offset >= 0 else 0
                                                        for section_offset in (
                at.codes, at.scales, at.zeros, at.row_scales, at.tables))
            block[linear.FIRST :] = [codes, kind_of(spec.bits, SCHEMES[spec.scheme]), rows, 0, out.ctypes.data, rows, at.depth // TILE,
                                     (spec.group // TILE).bit_length() - 1, scales, zeros, row_scales, tables, 0, 0,
                                     table_at(kind_of(spec.bits, SCHEMES[spec.scheme]), (spec.group // TILE).bit_length() - 1)]
        self._jobs = np.array([(packed.packed_columns.address, block.ctypes.data, 1) for block in blocks], np.int64)
        self._kept_alive = memory, x, out, scratch, blocks

    def rate(self) -> float:
        """Bytes of weights per second."""
        started = time.perf_counter()
        self.pool.run_list(self._jobs)
        return self.nbytes * len(self._jobs) / (time.perf_counter() - started)


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    pool, roof, figures = ThreadPool(options.threads), Roof(options.threads), []
    for text in options.formats:
        streams = [Stream(pool, QuantSpec.parse(text), shape, options.tokens) for shape in SHAPES]
        rates, roofs = [[] for _ in SHAPES], [[] for _ in SHAPES]
        for _ in range(options.rounds):
            for stream, rate, read in zip(streams, rates, roofs, strict=True):
                before = roof()
                rate.append(stream.rate())
                read.append(max(before, roof()))
        for (rows, inputs), rate, read in zip(SHAPES, rates, roofs, strict=True):
            share = median(a / b for a, b in zip(rate, read, strict=True))
            figures.append(Figure(f"{text}_{rows}x{inputs}", f"{text}, {rows} x {inputs}, of the read roof",
                                  f"{median(rate) / 1e9:.1f} of {median(read) / 1e9:.1f} GB/s, {options.threads} threads", share, "x"))
    pool.close()
    roof.close()
    publish("low-bit-stream", "Low-bit weights from memory", INTRO, figures, keep=not options.no_results)


if __name__ == "__main__":
    main()
